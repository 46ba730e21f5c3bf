/*
 * interface.c - the functions of strap_access.h.
 */
#define _GNU_SOURCE 1
#include "runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { DEFAULT_BUFFER = 1 << 20, MIN_BUFFER = 4 << 10, MAX_BUFFER = 1 << 30 };
enum { DEFAULT_CLOCK_EVERY = 64 };

struct recorder access_recorder = {
    .registry = PTHREAD_MUTEX_INITIALIZER,
    .output = PTHREAD_MUTEX_INITIALIZER,
    .fd = -1,
};
static struct recorder *const g = &access_recorder;

static void clear_error(strap_error *error) {
  if (error == NULL) return;
  error->code = STRAP_OK;
  error->sys_errno = 0;
  volatile char *message = error->message;
  for (size_t i = 0; i < sizeof error->message; i++) message[i] = 0;
}

__attribute__((format(printf, 4, 5))) static strap_status refuse(strap_error *error,
                                                                 strap_status code, int number,
                                                                 const char *format, ...) {
  if (error != NULL) {
    va_list args;
    va_start(args, format);
    error->code = code;
    error->sys_errno = number;
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
  }
  return code;
}

static strap_status status_of(int number) {
  switch (number) {
    case ENOENT: return STRAP_ERR_NOT_FOUND;
    case EACCES: case EPERM: case EROFS: return STRAP_ERR_PERMISSION;
    case ENOSPC: case EDQUOT: return STRAP_ERR_NO_SPACE;
    case ENOMEM: return STRAP_ERR_NO_MEMORY;
    case EISDIR: case ENOTDIR: case ENAMETOOLONG: case ENXIO: return STRAP_ERR_INVALID_ARGUMENT;
    default: return STRAP_ERR_IO;
  }
}

static strap_status called_within(strap_error *error) {
  return refuse(error, STRAP_ERR_INVALID_STATE, 0,
                "called from a sink, or from a signal handler that came in between");
}

#define CALL(error)                                        \
  do {                                                     \
    clear_error(error);                                    \
    if (!access_enter_call()) return called_within(error); \
  } while (0)

/* Returns the accesses lost by threads that have no buffer in this recording. Their losses are in
 * no block. */
static uint64_t lost_without_buffer(void) {
  uint64_t lost = atomic_load(&access_starved.lost) + atomic_load(&access_attaching.lost);
  for (struct thread *t = g->threads; t != NULL; t = t->after)
    if (t->session != g->session) lost += atomic_load(&t->lost);
  return lost;
}

static void close_blocks(void) {
  for (struct thread *t = g->threads; t != NULL; t = t->after)
    if (t->session == g->session && atomic_load(&t->busy) != RECORDING) access_close_block(t);
}

static strap_status wrong_size(strap_error *error, const char *what, uint32_t size) {
  return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0,
                "%s.struct_size = %u: set it to sizeof the struct", what, (unsigned)size);
}

/* Copies options of an older or newer header. Missing fields become zero. */
static strap_status take_options(strap_access_options *own, const strap_access_options *theirs,
                                 strap_error *error) {
  uint32_t size = theirs->struct_size;
  if (size < sizeof size || size > 1 << 16) return wrong_size(error, "strap_access_options", size);
  const volatile unsigned char *from = (const volatile unsigned char *)theirs;
  volatile unsigned char *to = (volatile unsigned char *)own;
  for (size_t i = 0; i < size || i < sizeof *own; i++) {
    if (i < sizeof *own)
      to[i] = i < size ? from[i] : 0;
    else if (from[i] != 0)
      return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0,
                    "strap_access_options has a value in byte %zu, which this library (%zu "
                    "bytes) does not know",
                    i, sizeof *own);
  }
  return STRAP_OK;
}

static strap_status check(const strap_access_options *o, strap_error *error) {
  if ((o->path == NULL) == (o->sink == NULL))
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0, "give either path or sink");
  if (o->filter_count > STRAP_ACCESS_MAX_FILTERS || (o->filter_count > 0 && o->filters == NULL))
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0,
                  "filter_count = %u: at most %d filters, and filters must point to them",
                  (unsigned)o->filter_count, STRAP_ACCESS_MAX_FILTERS);
  for (uint32_t i = 0; i < o->filter_count; i++)
    if (o->filters[i].start >= o->filters[i].end)
      return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0, "filters[%u] is empty: [%#llx, %#llx)",
                    (unsigned)i, (unsigned long long)o->filters[i].start,
                    (unsigned long long)o->filters[i].end);
  if (o->buffer_bytes != 0 && (o->buffer_bytes < MIN_BUFFER || o->buffer_bytes > MAX_BUFFER))
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0,
                  "buffer_bytes = %llu: give %d to %d, or 0 for %d",
                  (unsigned long long)o->buffer_bytes, MIN_BUFFER, MAX_BUFFER, DEFAULT_BUFFER);
  if ((o->paused != 0 && o->paused != 1) || o->reserved != 0)
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0,
                  "paused = %d, reserved = %d: give 0 or 1, and 0", (int)o->paused,
                  (int)o->reserved);
  return STRAP_OK;
}

static strap_status open_file(const char *path, strap_error *error) {
  /* O_NONBLOCK: opening a pipe without a reader fails at once instead of waiting for one. */
  int fd = open(path, O_WRONLY | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0666);
  if (fd < 0) {
    int number = errno;
    return refuse(error, status_of(number), number, "cannot write %s: %s", path,
                  strerror(number));
  }
  struct stat st;
  if (fstat(fd, &st) != 0 || !S_ISREG(st.st_mode)) {
    close(fd);
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0, "%s is no regular file", path);
  }
  /* If the file system has no locks, record without one. */
  if (flock(fd, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    close(fd);
    return refuse(error, STRAP_ERR_BUSY, EWOULDBLOCK,
                  "another process records to %s: give each its own file", path);
  }
  if (ftruncate(fd, 0) != 0) {
    int number = errno;
    close(fd);
    return refuse(error, status_of(number), number, "cannot empty %s: %s", path,
                  strerror(number));
  }
  g->fd = fd;
  return STRAP_OK;
}

static strap_status start(const strap_access_options *o, strap_error *error) {
  if (g->open)
    return refuse(error, STRAP_ERR_INVALID_STATE, 0, "the program is recording already");
  int number = access_watch_threads();
  if (number != 0)
    return refuse(error, STRAP_ERR_NO_MEMORY, number, "cannot watch for ends of threads: %s",
                  strerror(number));
  if (o->path != NULL) {
    strap_status status = open_file(o->path, error);
    if (status != STRAP_OK) return status;
  }
  access_settings.fences =
      syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) != 0;
  access_settings.clock_every = o->clock_every;
  if (o->clock_every == 0 && !access_counter_is_steady())
    access_settings.clock_every = DEFAULT_CLOCK_EVERY;
  access_settings.sample_every = o->sample_every > 1 ? o->sample_every : 1;
  access_settings.filter_count = o->filter_count;
  for (uint32_t i = 0; i < o->filter_count; i++) {
    g->filters[i].start = o->filters[i].start;
    g->filters[i].end = o->filters[i].end;
  }
  g->buffer_bytes = o->buffer_bytes != 0 ? o->buffer_bytes : DEFAULT_BUFFER;
  g->sink = o->sink;
  g->context = o->context;
  g->owner = getpid();
  g->failure = 0;
  g->seen = g->recorded = g->unwritten = g->lost = g->bytes = 0;
  atomic_store(&access_starved.lost, 0);
  atomic_store(&access_attaching.lost, 0);
  /* Reset here and not in prepare_buffer: there a signal handler may have counted a loss of this
   * recording already. */
  for (struct thread *t = g->threads; t != NULL; t = t->after) atomic_store(&t->lost, 0);
  access_emit_start();
  if (g->failure != 0) {
    if (g->fd >= 0) close(g->fd);
    g->fd = -1;
    return refuse(error, status_of(g->failure), g->failure, "the trace cannot be written: %s",
                  strerror(g->failure));
  }
  g->session = g->session < STATE_FIRST || g->session == UINT32_MAX ? STATE_FIRST : g->session + 1;
  g->open = 1;
  g->paused = o->paused;
  if (!o->paused) atomic_store(&access_settings.state, g->session);
  return STRAP_OK;
}

strap_status strap_access_start(const strap_access_options *options, strap_error *error) {
  clear_error(error);
  if (options == NULL) return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0, "options is NULL");
  strap_access_options own;
  strap_status status = take_options(&own, options, error);
  if (status == STRAP_OK) status = check(&own, error);
  if (status != STRAP_OK) return status;
  CALL(error);
  pthread_mutex_lock(&g->registry);
  pthread_mutex_lock(&g->output);
  status = start(&own, error);
  pthread_mutex_unlock(&g->output);
  pthread_mutex_unlock(&g->registry);
  access_leave_call();
  return status;
}

static strap_status not_open(strap_error *error) {
  return refuse(error, STRAP_ERR_INVALID_STATE, 0, "the program is not recording");
}

static strap_status stuck_threads(int stuck, strap_error *error) {
  return refuse(error, STRAP_ERR_TIMEOUT, 0,
                "%d threads do not come out of recording one access: their last buffers are "
                "missing",
                stuck);
}

static strap_status switch_to(int paused, strap_error *error) {
  CALL(error);
  strap_status status = STRAP_OK;
  pthread_mutex_lock(&g->registry);
  if (!g->open) {
    status = not_open(error);
  } else if (paused) {
    int stuck = access_quiesce(STATE_OFF);
    if (stuck > 0) status = stuck_threads(stuck, error);
  } else {
    atomic_store(&access_settings.state, g->session);
  }
  if (g->open) g->paused = paused;
  pthread_mutex_unlock(&g->registry);
  access_leave_call();
  return status;
}

strap_status strap_access_pause(strap_error *error) { return switch_to(1, error); }

strap_status strap_access_resume(strap_error *error) { return switch_to(0, error); }

static strap_status writing_failed(strap_error *error) {
  return refuse(error, status_of(g->failure), g->failure,
                "the trace could not be written to its end: %s; %llu accesses are missing",
                strerror(g->failure), (unsigned long long)g->unwritten);
}

strap_status strap_access_flush(strap_error *error) {
  CALL(error);
  strap_status status = STRAP_OK;
  pthread_mutex_lock(&g->registry);
  if (!g->open) {
    status = not_open(error);
  } else {
    int stuck = access_quiesce(g->paused ? STATE_OFF : STATE_WAIT);
    close_blocks();
    if (!g->paused) atomic_store(&access_settings.state, g->session);
    if (stuck > 0) status = stuck_threads(stuck, error);
    if (g->failure != 0) status = writing_failed(error);
  }
  pthread_mutex_unlock(&g->registry);
  access_leave_call();
  return status;
}

strap_status strap_access_stop(strap_error *error) {
  CALL(error);
  strap_status status = STRAP_OK;
  pthread_mutex_lock(&g->registry);
  if (!g->open) {
    status = not_open(error);
  } else {
    int stuck = access_quiesce(STATE_OFF);
    close_blocks();
    pthread_mutex_lock(&g->output);
    g->lost += lost_without_buffer();
    access_emit_end();
    if (g->fd >= 0 && close(g->fd) != 0 && g->failure == 0) g->failure = errno;
    g->fd = -1;
    g->sink = NULL;
    g->open = 0;
    if (stuck > 0) status = stuck_threads(stuck, error);
    if (g->failure != 0) status = writing_failed(error);
    pthread_mutex_unlock(&g->output);
  }
  pthread_mutex_unlock(&g->registry);
  access_leave_call();
  return status;
}

strap_status strap_access_stats(strap_access_stats_t *stats, strap_error *error) {
  clear_error(error);
  if (stats == NULL) return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0, "stats is NULL");
  if (stats->struct_size < sizeof *stats)
    return wrong_size(error, "strap_access_stats_t", stats->struct_size);
  CALL(error);
  pthread_mutex_lock(&g->registry);
  pthread_mutex_lock(&g->output);
  stats->recording = !g->open ? 0 : g->paused ? 2 : 1;
  stats->threads = 0;
  stats->seen = g->seen;
  stats->recorded = g->recorded;
  stats->lost = g->lost;
  if (g->open) stats->lost += lost_without_buffer();
  stats->unwritten = g->unwritten;
  stats->bytes = g->bytes;
  for (struct thread *t = g->threads; t != NULL; t = t->after) {
    if (!g->open || t->session != g->session) continue;
    stats->threads++;
    struct record *next = __atomic_load_n(&t->next, __ATOMIC_RELAXED);
    stats->recorded += (uint64_t)(next - first_record(t));
    stats->seen += __atomic_load_n(&t->seen, __ATOMIC_RELAXED) -
                   __atomic_load_n(&t->reported, __ATOMIC_RELAXED);
    stats->lost += atomic_load(&t->lost);
  }
  pthread_mutex_unlock(&g->output);
  pthread_mutex_unlock(&g->registry);
  access_leave_call();
  return STRAP_OK;
}

strap_status strap_range_add(const void *start, size_t length, strap_region type,
                             const char *name, uint64_t *id, strap_error *error) {
  clear_error(error);
  uint64_t from = (uint64_t)(uintptr_t)start;
  size_t name_length = name != NULL ? strlen(name) : 0;
  if (id == NULL) return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0, "id is NULL");
  *id = 0;
  if (length == 0 || length > UINT64_MAX - from)
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0, "%zu bytes at %p are no range", length,
                  start);
  if (type < STRAP_REGION_WEIGHT || type > STRAP_REGION_RUNTIME)
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0,
                  "type = %d: give a STRAP_REGION_ value", (int)type);
  if (name_length > STRAP_RANGE_MAX_NAME)
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT, 0, "a name of %zu bytes: at most %d",
                  name_length, STRAP_RANGE_MAX_NAME);
  struct range *r = malloc(sizeof *r + name_length);
  if (r == NULL) return refuse(error, STRAP_ERR_NO_MEMORY, ENOMEM, "no memory for a range");
  r->start = from;
  r->length = length;
  r->type = (uint32_t)type;
  r->name_length = (uint32_t)name_length;
  volatile char *own_name = r->name;
  for (size_t i = 0; i < name_length; i++) own_name[i] = name[i];
  static uint64_t last_id;
  if (!access_enter_call()) {
    free(r);
    return called_within(error);
  }
  pthread_mutex_lock(&g->output);
  r->id = *id = ++last_id;
  r->ns = access_now();
  r->next = g->ranges;
  g->ranges = r;
  if (g->open) access_emit_range(r, 1, r->ns);
  pthread_mutex_unlock(&g->output);
  access_leave_call();
  return STRAP_OK;
}

strap_status strap_range_remove(uint64_t id, strap_error *error) {
  CALL(error);
  pthread_mutex_lock(&g->output);
  struct range **at = &g->ranges, *r;
  while ((r = *at) != NULL && r->id != id) at = &r->next;
  if (r != NULL) {
    *at = r->next;
    if (g->open) access_emit_range(r, 0, access_now());
  }
  pthread_mutex_unlock(&g->output);
  access_leave_call();
  if (r == NULL)
    return refuse(error, STRAP_ERR_NOT_FOUND, 0, "there is no range %llu",
                  (unsigned long long)id);
  free(r);
  return STRAP_OK;
}
