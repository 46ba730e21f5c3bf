/*
 * output.c - reads the clocks, and writes the blocks of a trace to the file or sink.
 */
#define _GNU_SOURCE 1
#include "runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <link.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

int64_t access_now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

uint64_t access_read_clock(void) { return (uint64_t)access_now(); }

/* Reports whether the CPU's counter runs at one speed in all states of the CPU and on all cores.
 * On x86-64 that is the invariant TSC flag of CPUID. */
int access_counter_is_steady(void) {
#if defined(__x86_64__)
  unsigned a, b, c, d;
  return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d & 1u << 8) != 0;
#elif defined(__aarch64__)
  return 1;
#else
  return 0;
#endif
}

static const char *clock_name(void) {
  if (access_settings.clock_every != 0) return "system";
#if defined(__x86_64__)
  return "tsc";
#else
  return "cntvct";
#endif
}

void access_read_pair(uint64_t *ticks, int64_t *ns) {
  if (access_settings.clock_every != 0) {
    *ns = access_now();
    *ticks = (uint64_t)*ns;
    return;
  }
  uint64_t best = UINT64_MAX;
  for (int i = 0; i < 3; i++) { /* an interrupt may widen a pair: take the narrowest */
    uint64_t before = read_counter();
    int64_t between = access_now();
    uint64_t width = read_counter() - before;
    if (width < best) {
      best = width;
      *ticks = before + width / 2;
      *ns = between;
    }
  }
}

/* State of the output, under the output lock. */
static uint64_t written;          /* bytes in the file, or passed to the sink */
static uint32_t maps;             /* number of the newest module map */
static unsigned long long loaded; /* loads plus unloads of modules when that map was taken */

static int write_all(const void *data, size_t size) {
  const char *p = data;
  for (size_t left = size; left > 0;) {
    ssize_t n = write(access_recorder.fd, p, left);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return n < 0 ? errno : EIO;
    p += n;
    left -= (size_t)n;
  }
  return 0;
}

/* Passes SIZE bytes of whole blocks to the file or sink. Returns 0 if the output has failed, or in
 * a child of fork(). */
static int emit(const void *data, size_t size) {
  struct recorder *g = &access_recorder;
  if (g->failure != 0 || getpid() != g->owner) return 0;
  if (g->sink != NULL) {
    g->failure = g->sink(g->context, data, size);
  } else {
    g->failure = write_all(data, size);
    /* Cut the file back to whole blocks. If that fails too, the reader finds the torn block. */
    if (g->failure != 0 && ftruncate(g->fd, (off_t)written) != 0) return 0;
  }
  if (g->failure != 0) return 0;
  written += size;
  g->bytes += size;
  return 1;
}

static void fill(struct block *b, int kind, uint64_t bytes) {
  b->magic = BLOCK_MAGIC;
  b->version = BLOCK_VERSION;
  b->kind = (uint16_t)kind;
  b->bytes = bytes;
  b->maps = maps;
}

static void fill_event(struct block *b, int kind, uint64_t bytes, int64_t ns) {
  fill(b, kind, bytes);
  b->thread = 0;
  b->start_ns = ns;
  b->end_ns = ns;
  b->ticks = 0;
  b->seen = 0;
  b->lost = 0;
}

/* The block of text under way. */
static struct {
  struct block header;
  char text[64 << 10];
} page;
static size_t page_length;

__attribute__((format(printf, 1, 2))) static void add_line(const char *format, ...) {
  va_list args;
  va_start(args, format);
  size_t room = sizeof page.text - page_length;
  int n = vsnprintf(page.text + page_length, room, format, args);
  va_end(args);
  if (n > 0 && (size_t)n < room) page_length += (size_t)n;
}

static void emit_page(int kind) {
  fill_event(&page.header, kind, page_length, access_now());
  emit(&page, sizeof page.header + page_length);
  page_length = 0;
}

static int count_modules(struct dl_phdr_info *info, size_t size, void *out) {
  if (size >= offsetof(struct dl_phdr_info, dlpi_subs) + sizeof info->dlpi_subs)
    *(unsigned long long *)out = info->dlpi_adds + info->dlpi_subs;
  return 1; /* the counts are the same in every entry */
}

static size_t move_text(size_t to, size_t from, size_t end) {
  for (volatile char *text = page.text; from < end;) text[to++] = text[from++];
  return to;
}

/* Writes the executable mappings if modules came or went since the last map, or if ALWAYS is set.
 * It may run in a signal handler, so it uses no stdio and no heap. */
static void emit_maps(int always) {
  unsigned long long count = 0;
  dl_iterate_phdr(count_modules, &count);
  if (!always && count == loaded) return;
  int fd = open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return; /* the trace then lacks the modules */
  loaded = count;
  maps++;
  /* page.text holds the lines to write up to `kept`, then an incomplete line up to `have`. */
  size_t kept = 0, have = 0;
  for (;;) {
    ssize_t n = read(fd, page.text + have, sizeof page.text - have);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) break;
    size_t line = kept, end = have + (size_t)n;
    for (size_t i = have; i < end; i++) {
      if (page.text[i] != '\n') continue;
      size_t perms = line; /* START-END rwxp OFFSET DEVICE INODE PATH */
      while (perms < i && page.text[perms] != ' ') perms++;
      if (perms + 3 < i && page.text[perms + 3] == 'x') kept = move_text(kept, line, i + 1);
      line = i + 1;
    }
    have = move_text(kept, line, end);
    if (sizeof page.text - have < PATH_MAX + 256) {
      page_length = kept;
      emit_page(BLOCK_MAPS);
      have = move_text(0, kept, have);
      kept = 0;
    }
  }
  close(fd);
  page_length = kept;
  emit_page(BLOCK_MAPS);
}

void access_emit_range(const struct range *r, int added, int64_t ns) {
  struct {
    struct block header;
    struct range_event event;
    char name[STRAP_RANGE_MAX_NAME];
  } out;
  fill_event(&out.header, BLOCK_RANGE, sizeof out.event + r->name_length, ns);
  out.event.id = r->id;
  out.event.start = r->start;
  out.event.length = r->length;
  out.event.type = r->type;
  out.event.added = (uint32_t)added;
  volatile char *name = out.name;
  for (uint32_t i = 0; i < r->name_length; i++) name[i] = r->name[i];
  emit(&out, sizeof out.header + sizeof out.event + r->name_length);
}

void access_emit_start(void) {
  struct recorder *g = &access_recorder;
  written = 0;
  maps = 0;
  struct timespec real;
  clock_gettime(CLOCK_REALTIME, &real);
  add_line("pid %d\n", (int)g->owner);
  add_line("clock %s\n", clock_name());
  add_line("clock_every %u\n", access_settings.clock_every);
  add_line("sample_every %llu\n", (unsigned long long)access_settings.sample_every);
  add_line("buffer_bytes %zu\n", g->buffer_bytes);
  add_line("realtime_ns %lld\n", (long long)real.tv_sec * 1000000000 + real.tv_nsec);
  for (uint32_t i = 0; i < access_settings.filter_count; i++)
    add_line("filter %#llx %#llx\n", (unsigned long long)g->filters[i].start,
             (unsigned long long)g->filters[i].end);
  char exe[PATH_MAX];
  ssize_t n = readlink("/proc/self/exe", exe, sizeof exe - 1);
  if (n > 0) {
    exe[n] = 0;
    add_line("exe %s\n", exe);
  }
  emit_page(BLOCK_START);
  emit_maps(1);
  for (const struct range *r = g->ranges; r != NULL; r = r->next)
    access_emit_range(r, 1, r->ns);
}

void access_emit_end(void) {
  const struct recorder *g = &access_recorder;
  add_line("seen %llu\n", (unsigned long long)g->seen);
  add_line("recorded %llu\n", (unsigned long long)g->recorded);
  add_line("lost %llu\n", (unsigned long long)g->lost);
  emit_page(BLOCK_END);
}

int access_emit_records(struct thread *t, uint64_t bytes) {
  emit_maps(0);
  fill(t->block, BLOCK_ACCESSES, bytes);
  return emit(t->block, sizeof *t->block + bytes);
}
