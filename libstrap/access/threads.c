/*
 * threads.c - the buffers of threads: a thread gets a buffer, fills it and passes it to the
 * output. It loses the buffer when it ends, and in a child of fork().
 */
#define _GNU_SOURCE 1
#include "runtime.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* access_quiesce waits PATIENCE_NS for other threads to finish recording, and up to LONGEST_NS
 * for a runnable thread that gets no CPU. Each look at a thread counts as at most LOOK_NS, so the
 * time in which the whole machine stands still does not count. */
static const int64_t PATIENCE_NS = 10000000000, LONGEST_NS = 60000000000, LOOK_NS = 1000000;

struct settings access_settings;
_Thread_local struct thread *access_self __attribute__((tls_model("initial-exec")));
struct thread access_attaching = {.busy = IN_CALL}, access_starved = {.busy = IN_CALL};

static pthread_key_t exiting;  /* its destructor runs when a thread ends */
static int forked_inside;      /* the thread that forks was recording, or in a call */

static void nap(void) { nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL); }

/* ---- buffers ---- */

static void open_block(struct thread *t, uint64_t ticks, int64_t ns) {
  t->next = first_record(t);
  t->reported = t->seen;
  t->start_ticks = ticks;
  t->start_ns = ns;
  t->last_ticks = ticks;
  t->until_clock = access_settings.clock_every;
}

void access_close_block(struct thread *t) {
  struct recorder *g = &access_recorder;
  uint64_t ticks;
  int64_t ns;
  access_read_pair(&ticks, &ns);
  struct block *b = t->block;
  uint64_t records = (uint64_t)(t->next - first_record(t));
  b->thread = t->id;
  b->start_ns = t->start_ns;
  b->end_ns = ns;
  b->ticks = ticks - t->start_ticks;
  b->seen = t->seen - t->reported;
  b->lost = atomic_exchange_explicit(&t->lost, 0, memory_order_relaxed);
  pthread_mutex_lock(&g->output);
  /* strap_access_stop may have given up on this thread. Then there is no output for it. */
  if (b->seen + b->lost > 0 && g->open && t->session == g->session) {
    g->seen += b->seen;
    g->lost += b->lost;
    g->recorded += records;
    if (!access_emit_records(t, records * sizeof(struct record))) g->unwritten += records;
  }
  pthread_mutex_unlock(&g->output);
  open_block(t, ticks, ns);
}

void access_next_block(struct thread *t) {
  int saved = errno;
  access_close_block(t);
  errno = saved;
}

static void *map(size_t size) {
  void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  return p == MAP_FAILED ? NULL : p;
}

/* Prepares the thread's buffer for this recording. Returns 0 if there is no memory for it. */
static int prepare_buffer(struct thread *t, uint32_t session) {
  size_t size = access_recorder.buffer_bytes;
  if (t->mapped != size) {
    if (t->block != NULL) munmap(t->block, t->mapped);
    t->mapped = 0;
    t->block = map(size);
    if (t->block == NULL) return 0;
    t->mapped = size;
  }
  t->end = first_record(t) + (size - sizeof(struct block)) / sizeof(struct record);
  t->seen = 0;
  t->until_sample = access_settings.sample_every;
  t->ranges[0].size = t->ranges[1].size = 0;
  uint64_t ticks;
  int64_t ns;
  access_read_pair(&ticks, &ns);
  open_block(t, ticks, ns);
  t->session = session;
  return 1;
}

/* ---- recording ---- */

static void count_starved(void) {
  atomic_fetch_add_explicit(&access_starved.lost, 1, memory_order_relaxed);
}

/* Adds this thread to the registry. Returns NULL if there is no memory; the thread is then never
 * recorded. */
static struct thread *attach(void) {
  struct recorder *g = &access_recorder;
  access_self = &access_attaching;
  struct thread *t = map(sizeof *t);
  if (t == NULL) {
    access_self = &access_starved;
    count_starved();
    return NULL;
  }
  t->id = (uint32_t)syscall(SYS_gettid);
  pthread_mutex_lock(&g->registry);
  t->after = g->threads;
  if (t->after != NULL) t->after->before = t;
  g->threads = t;
  pthread_mutex_unlock(&g->registry);
  pthread_setspecific(exiting, t);
  access_self = t;
  return t;
}

struct thread *access_enter(void) {
  int saved = errno;
  struct thread *t = access_self;
  if (t == NULL) t = attach();
  while (t != NULL) {
    atomic_store(&t->busy, RECORDING);
    atomic_thread_fence(memory_order_seq_cst);
    unsigned state = atomic_load(&access_settings.state);
    if (state == t->session) break;
    if (state >= STATE_FIRST) {
      if (prepare_buffer(t, state)) break;
      count_starved();
      state = STATE_OFF;
    }
    atomic_store(&t->busy, IDLE);
    if (state == STATE_OFF)
      t = NULL;
    else
      nap();
  }
  errno = saved;
  return t;
}

int access_filtered(uint64_t address, uint64_t size) {
  const strap_access_filter *f = access_recorder.filters;
  for (uint32_t i = 0; i < access_settings.filter_count; i++)
    if (address < f[i].end && address + (size - 1) >= f[i].start) return 0;
  return 1;
}

static void put_range(struct thread *t, const void *p, uint64_t size, unsigned op,
                      uintptr_t pc) {
  uint64_t address = (uint64_t)(uintptr_t)p;
  for (; size > UINT32_MAX; size -= 1u << 31, address += 1u << 31)
    put(t, address, 1u << 31, op, pc);
  if (size > 0) put(t, address, (uint32_t)size, op, pc);
}

void access_record_range(const void *p, uint64_t size, unsigned op, uintptr_t pc) {
  struct thread *t = enter();
  if (t == NULL) return;
  put_range(t, p, size, op, pc);
  struct announced *a = &t->ranges[t->turn ^= 1];
  a->address = (uint64_t)(uintptr_t)p;
  a->size = size;
  a->seen = t->seen;
  a->pc = pc;
  a->op = op;
  leave(t);
}

/* Reports whether access_record_range has just recorded this access. gcc announces both sides of
 * a large assignment as ranges. It may then call memcpy or memset for it, a few instructions
 * later. That is one copy and must not be recorded twice. */
static int announced(const struct thread *t, const void *p, uint64_t size, unsigned op,
                     uintptr_t pc) {
  for (int i = 0; i < 2; i++) {
    const struct announced *a = &t->ranges[i];
    if (a->address == (uint64_t)(uintptr_t)p && a->size == size && a->op == op &&
        t->seen - a->seen <= 1 && pc - a->pc < 256)
      return 1;
  }
  return 0;
}

void access_record_copy(const void *to, const void *from, uint64_t size, uintptr_t pc) {
  struct thread *t = enter();
  if (t == NULL) return;
  if (!announced(t, to, size, OP_STORE, pc) ||
      (from != NULL && !announced(t, from, size, OP_LOAD, pc))) {
    if (from != NULL) put_range(t, from, size, OP_LOAD, pc);
    put_range(t, to, size, OP_STORE, pc);
  }
  leave(t);
}

/* ---- calls of the interface ---- */

int access_enter_call(void) {
  struct thread *t = access_self;
  if (t == NULL) {
    access_self = &access_attaching;
  } else if (t != &access_starved) {
    if (atomic_load(&t->busy) != IDLE) return 0;
    atomic_store(&t->busy, IN_CALL);
  }
  return 1;
}

void access_leave_call(void) {
  if (access_self == &access_attaching)
    access_self = NULL;
  else if (access_self != &access_starved)
    atomic_store(&access_self->busy, IDLE);
}

/* Returns the CPU time of a thread in ns, or 0 if the thread has ended. The id of its clock is
 * computed as in glibc's pthread_getcpuclockid, which needs a pthread_t. */
static int64_t cpu_time(const struct thread *t) {
  struct timespec now;
  if (clock_gettime((clockid_t)(~t->id << 3 | 6), &now) != 0) return 0;
  return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Reports whether a thread waits for a CPU: it is runnable, and has used less than a second of CPU
 * time since CPU_BEFORE. The state follows the thread's name in its stat file, see proc(5). Linux
 * 6.18 before its fixes of zero_vruntime leaves a thread without a CPU for many seconds beside
 * processes of low priority. */
static int starves(const struct thread *t, int64_t cpu_before) {
  char line[128];
  snprintf(line, sizeof line, "/proc/self/task/%u/stat", t->id);
  int fd = open(line, O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ssize_t n = read(fd, line, sizeof line - 1);
  close(fd);
  line[n > 0 ? n : 0] = 0;
  const char *name_end = strrchr(line, ')');
  return name_end != NULL && strncmp(name_end, ") R", 3) == 0 &&
         cpu_time(t) - cpu_before < PATIENCE_NS / 10;
}

int access_quiesce(unsigned state) {
  atomic_store(&access_settings.state, state);
  if (!access_settings.fences)
    syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
  atomic_thread_fence(memory_order_seq_cst);
  int stuck = 0;
  int64_t waited = 0, patience = PATIENCE_NS, before = access_now();
  for (struct thread *t = access_recorder.threads; t != NULL; t = t->after) {
    int64_t cpu_before = cpu_time(t);
    while (atomic_load(&t->busy) == RECORDING) {
      if (waited >= patience) {
        if (waited >= LONGEST_NS || !starves(t, cpu_before)) break;
        patience = waited + PATIENCE_NS / 10;
      }
      nap();
      int64_t now = access_now();
      waited += now - before < LOOK_NS ? now - before : LOOK_NS;
      before = now;
    }
    stuck += atomic_load(&t->busy) == RECORDING;
  }
  return stuck;
}

/* ---- ends and forks ---- */

static void unmap_thread(struct thread *t) {
  if (t->block != NULL) munmap(t->block, t->mapped);
  munmap(t, sizeof *t);
}

static void thread_exits(void *p) {
  struct recorder *g = &access_recorder;
  struct thread *t = p;
  atomic_store(&t->busy, IN_CALL);
  pthread_mutex_lock(&g->registry);
  if (g->open && t->session == g->session) access_close_block(t);
  if (t->before != NULL)
    t->before->after = t->after;
  else
    g->threads = t->after;
  if (t->after != NULL) t->after->before = t->before;
  pthread_mutex_unlock(&g->registry);
  /* If another destructor still accesses memory, the thread gets a new buffer. */
  access_self = NULL;
  atomic_fetch_add(&access_attaching.lost, atomic_load(&t->lost));
  unmap_thread(t);
}

static void before_fork(void) {
  forked_inside = !access_enter_call();
  if (forked_inside) return;
  pthread_mutex_lock(&access_recorder.registry);
  pthread_mutex_lock(&access_recorder.output);
}

static void after_fork_in_parent(void) {
  if (forked_inside) return;
  pthread_mutex_unlock(&access_recorder.output);
  pthread_mutex_unlock(&access_recorder.registry);
  access_leave_call();
}

/* The child is not traced. Its one thread keeps its buffer, for a recording that the child may
 * start. The other threads do not exist in the child, so their buffers are freed; not if the thread
 * forked while it was recording, because the list of threads may then be inconsistent. */
static void after_fork_in_child(void) {
  struct recorder *g = &access_recorder;
  atomic_store(&access_settings.state, STATE_OFF);
  pthread_mutex_init(&g->registry, NULL);
  pthread_mutex_init(&g->output, NULL);
  g->open = 0;
  if (g->fd >= 0) close(g->fd);
  g->fd = -1;
  g->sink = NULL;
  struct thread *own = access_self;
  if (own == &access_attaching || own == &access_starved) own = NULL;
  for (struct thread *t = g->threads, *next; !forked_inside && t != NULL; t = next) {
    next = t->after;
    if (t != own) unmap_thread(t);
  }
  g->threads = own;
  if (own != NULL) {
    own->before = own->after = NULL;
    own->session = 0;
    own->id = (uint32_t)syscall(SYS_gettid);
  }
  if (!forked_inside) access_leave_call();
}

int access_watch_threads(void) {
  static int watching;
  if (watching) return 0;
  int number = pthread_key_create(&exiting, thread_exits);
  if (number != 0) return number;
  number = pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  if (number != 0) {
    pthread_key_delete(exiting);
    return number;
  }
  watching = 1;
  return 0;
}
