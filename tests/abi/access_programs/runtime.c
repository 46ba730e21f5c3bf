/*
 * Tests the runtime of libstrap-access hook by hook: records, sampling, filters, threads, pauses,
 * flushes, ends and failures. It is compiled together with the runtime under the address and
 * undefined-behaviour sanitizers, or linked with the library.
 */
#define _GNU_SOURCE 1
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "blocks.h"
#include "hooks.h"

static void start(const strap_access_options *o) { EXPECT(STRAP_OK, strap_access_start(o, &error)); }
static void stop(void) { EXPECT(STRAP_OK, strap_access_stop(&error)); }

static strap_access_stats_t stats(void) {
  strap_access_stats_t s;
  memset(&s, 0x5a, sizeof s);
  s.struct_size = sizeof s;
  EXPECT(STRAP_OK, strap_access_stats(&s, &error));
  return s;
}

static void expect(const struct list *l, size_t i, const void *p, uint32_t size, unsigned op) {
  CHECK(i < l->count, "%zu accesses, no %zu", l->count, i);
  CHECK(l->items[i].address == (uintptr_t)p && l->items[i].size == size && op_of(&l->items[i]) == op,
        "access %zu is %#llx, %u bytes, op %u; want %p, %u, %u", i,
        (unsigned long long)l->items[i].address, l->items[i].size, op_of(&l->items[i]), p, size, op);
}

static void hooks(void) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  _Alignas(16) char x[64];
  void *p = x;
  __tsan_read8(x); /* before the start: not recorded */
  start(&o);
  __tsan_read1(x);
  __tsan_write2(x);
  __tsan_read4(x);
  __tsan_write8(x);
  __tsan_read16(x);
  __tsan_unaligned_read2(x + 1);
  __tsan_unaligned_write16(x + 1);
  __tsan_volatile_read1(x);
  __tsan_volatile_write16(x);
  __tsan_unaligned_volatile_write8(x + 3);
  __tsan_read_write4(x);
  __tsan_unaligned_read_write8(x + 1);
  __tsan_read_range(x, 32);
  __tsan_write_range(x, 64);
  __tsan_read_range(x, 0); /* not recorded */
  __tsan_vptr_read(&p);
  __tsan_vptr_update(&p, x);
  __tsan_write_range(x, 5000000000); /* too long for one record: becomes two */
  stop();
  __tsan_read8(x); /* after the end: not recorded */
  struct list l = all_accesses(m);
  size_t i = 0;
  expect(&l, i++, x, 1, LOAD);
  expect(&l, i++, x, 2, STORE);
  expect(&l, i++, x, 4, LOAD);
  expect(&l, i++, x, 8, STORE);
  expect(&l, i++, x, 16, LOAD);
  expect(&l, i++, x + 1, 2, LOAD);
  expect(&l, i++, x + 1, 16, STORE);
  expect(&l, i++, x, 1, LOAD);
  expect(&l, i++, x, 16, STORE);
  expect(&l, i++, x + 3, 8, STORE);
  expect(&l, i++, x, 4, BOTH);
  expect(&l, i++, x + 1, 8, BOTH);
  expect(&l, i++, x, 32, LOAD);
  expect(&l, i++, x, 64, STORE);
  expect(&l, i++, &p, 8, LOAD);
  expect(&l, i++, &p, 8, STORE);
  expect(&l, i++, x, 1u << 31, STORE);
  expect(&l, i++, (char *)((uintptr_t)x + (1u << 31)), 5000000000 - (1u << 31), STORE);
  CHECK(l.count == i && l.seen == i && l.lost == 0 && l.ended, "%zu accesses, seen %llu", l.count,
        (unsigned long long)l.seen);
  for (size_t k = 0; k < l.count; k++) {
    uintptr_t pc = l.items[k].pc_op & 0xffffffffffff, here = (uintptr_t)hooks;
    CHECK(pc > here && pc < here + 16384, "pc %#zx is not in %#zx", pc, here);
  }
  free(l.items);
  free_memory(m);
}

static void copies(void) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  char a[300], b[300];
  memset(a, 1, sizeof a);
  start(&o);
  CHECK(__tsan_memcpy(b, a, 300) == b, "memcpy gives its target");
  CHECK(__tsan_memmove(b + 1, b, 299) == b + 1, "memmove gives its target");
  CHECK(__tsan_memset(b, 7, 10) == b, "memset gives its target");
  __tsan_memcpy(b, a, 0);
  /* gcc compiles a large assignment to a hook for each side and then a copy. The copy must not be
   * recorded a second time. */
  __tsan_write_range(b, 200);
  __tsan_read_range(a, 200);
  __tsan_memcpy(b, a, 200);
  __tsan_write_range(b, 100);
  __tsan_memset(b, 0, 100);
  /* If other accesses come between the hook and the copy, the copy is recorded. */
  __tsan_write_range(b, 50);
  __tsan_read1(a);
  __tsan_read1(a);
  __tsan_memset(b, 0, 50);
  stop();
  struct list l = all_accesses(m);
  size_t i = 0;
  expect(&l, i++, a, 300, LOAD);
  expect(&l, i++, b, 300, STORE);
  expect(&l, i++, b, 299, LOAD);
  expect(&l, i++, b + 1, 299, STORE);
  expect(&l, i++, b, 10, STORE);
  expect(&l, i++, b, 200, STORE);
  expect(&l, i++, a, 200, LOAD);
  expect(&l, i++, b, 100, STORE);
  expect(&l, i++, b, 50, STORE);
  i += 2;
  expect(&l, i++, b, 50, STORE);
  CHECK(l.count == i, "%zu accesses", l.count);
  CHECK(b[0] == 0 && b[99] == 0 && b[100] == 1 && b[199] == 1 && b[299] == 1, "the copies are wrong");
  free(l.items);
  free_memory(m);
}

/* Every atomic operation of every width has its effect, returns the old value and is recorded. */
#define TEST_ATOMIC(bits, type)                                                               \
  static void atomic##bits(void) {                                                            \
    struct memory *m = new_memory();                                                          \
    strap_access_options o = to_memory(m);                                                    \
    const type big = (type)((type)0xa5 << (bits - 8)) | 0x3c;                                 \
    const int order = __ATOMIC_SEQ_CST;                                                       \
    _Alignas(16) volatile type x = 0;                                                         \
    type e;                                                                                   \
    start(&o);                                                                                \
    __tsan_atomic##bits##_store(&x, big, order);                                              \
    CHECK(__tsan_atomic##bits##_load(&x, order) == big, "load");                              \
    CHECK(__tsan_atomic##bits##_exchange(&x, 5, order) == big && x == 5, "exchange");         \
    CHECK(__tsan_atomic##bits##_fetch_add(&x, big, order) == 5 && x == (type)(big + 5), "add"); \
    CHECK(__tsan_atomic##bits##_fetch_sub(&x, big, order) == (type)(big + 5) && x == 5, "sub"); \
    CHECK(__tsan_atomic##bits##_fetch_or(&x, big, order) == 5 && x == (type)(big | 5), "or"); \
    CHECK(__tsan_atomic##bits##_fetch_and(&x, big, order) == (type)(big | 5) && x == big, "and"); \
    CHECK(__tsan_atomic##bits##_fetch_xor(&x, 3, order) == big && x == (type)(big ^ 3), "xor"); \
    CHECK(__tsan_atomic##bits##_fetch_nand(&x, 7, order) == (type)(big ^ 3) &&                \
              x == (type)~((big ^ 3) & 7), "nand");                                           \
    x = 9;                                                                                    \
    e = 8;                                                                                    \
    CHECK(!__tsan_atomic##bits##_compare_exchange_strong(&x, &e, big, order, order) &&        \
              e == 9 && x == 9, "a failed compare-exchange");                                 \
    CHECK(__tsan_atomic##bits##_compare_exchange_strong(&x, &e, big, order, order) &&         \
              x == big && e == 9, "a compare-exchange");                                      \
    e = big;                                                                                  \
    CHECK(__tsan_atomic##bits##_compare_exchange_weak(&x, &e, 1, order, order) && x == 1, "weak"); \
    CHECK(__tsan_atomic##bits##_compare_exchange_val(&x, 1, 2, order, order) == 1 && x == 2, "val"); \
    CHECK(__tsan_atomic##bits##_compare_exchange_val(&x, 1, 3, order, order) == 2 && x == 2,  \
          "a failed val");                                                                    \
    __tsan_atomic_thread_fence(order);                                                        \
    stop();                                                                                   \
    static const unsigned ops[] = {STORE, LOAD, BOTH, BOTH, BOTH, BOTH, BOTH,                 \
                                   BOTH,  BOTH, LOAD, BOTH, BOTH, BOTH, LOAD};                \
    struct list l = all_accesses(m);                                                          \
    CHECK(l.count == sizeof ops / sizeof *ops, "%zu accesses", l.count);                      \
    for (size_t i = 0; i < l.count; i++)                                                      \
      expect(&l, i, (const void *)&x, bits / 8, ops[i] | ATOMIC);                             \
    free(l.items);                                                                            \
    free_memory(m);                                                                           \
  }
TEST_ATOMIC(8, uint8_t)
TEST_ATOMIC(16, uint16_t)
TEST_ATOMIC(32, uint32_t)
TEST_ATOMIC(64, uint64_t)
TEST_ATOMIC(128, u128)

/* No addition is lost while four threads count up. */
static volatile uint64_t counter64;
static _Alignas(16) volatile u128 counter128;
static void *count_up(void *unused) {
  (void)unused;
  for (int i = 0; i < 20000; i++) {
    __tsan_atomic64_fetch_add(&counter64, 1, __ATOMIC_RELAXED);
    __tsan_atomic128_fetch_add(&counter128, ((u128)1 << 64) + 1, __ATOMIC_RELAXED);
  }
  return NULL;
}

static void atomics_are_atomic(void) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  start(&o);
  pthread_t threads[4];
  for (int i = 0; i < 4; i++) pthread_create(&threads[i], NULL, count_up, NULL);
  for (int i = 0; i < 4; i++) pthread_join(threads[i], NULL);
  stop();
  CHECK(counter64 == 80000 && counter128 == ((u128)80000 << 64) + 80000, "additions were lost");
  struct list l = all_accesses(m);
  CHECK(l.count == 160000, "%zu accesses", l.count);
  free(l.items);
  free_memory(m);
}

static void sampling_and_filters(void) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  static char x[1000];
  o.sample_every = 7;
  start(&o);
  for (int i = 0; i < 1000; i++) __tsan_read1(x + i);
  strap_access_stats_t s = stats();
  CHECK(s.recording == 1 && s.threads == 1 && s.seen == 1000 && s.recorded == 142 && s.lost == 0,
        "seen %llu, recorded %llu", (unsigned long long)s.seen, (unsigned long long)s.recorded);
  stop();
  struct list l = all_accesses(m);
  CHECK(l.count == 142 && l.seen == 1000, "%zu of %llu", l.count, (unsigned long long)l.seen);
  for (size_t i = 0; i < l.count; i++) expect(&l, i, x + 7 * i + 6, 1, LOAD);
  free(l.items);
  free_memory(m);

  m = new_memory();
  o = to_memory(m);
  strap_access_filter filters[] = {
      {(uintptr_t)x + 100, (uintptr_t)x + 200},
      {(uintptr_t)x + 500, (uintptr_t)x + 501},
  };
  o.filters = filters;
  o.filter_count = 2;
  start(&o);
  filters[0].end = 0; /* no effect: strap_access_start copied the filters */
  for (int i = 0; i < 1000; i++) __tsan_read1(x + i);
  __tsan_read8(x + 93);  /* [93, 101) touches the first filter */
  __tsan_read8(x + 92);  /* [92, 100) does not touch it */
  __tsan_write8(x + 199);
  __tsan_write8(x + 200);
  stop();
  l = all_accesses(m);
  CHECK(l.count == 103 && l.seen == 103, "%zu of %llu", l.count, (unsigned long long)l.seen);
  expect(&l, 100, x + 500, 1, LOAD);
  expect(&l, 101, x + 93, 8, LOAD);
  expect(&l, 102, x + 199, 8, STORE);
  free(l.items);
  free_memory(m);
}

enum { WORKERS = 8, ROUNDS = 50000 };
static char shared_data[WORKERS][64];
static pthread_barrier_t barrier;

static void *work(void *p) {
  for (int i = 0; i < ROUNDS; i++) __tsan_write4((char *)p + i % 16 * 4);
  pthread_barrier_wait(&barrier); /* threads end with partly filled or flushed buffers */
  return NULL;
}

static void threads(uint64_t buffer_bytes, uint32_t clock_every) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  o.buffer_bytes = buffer_bytes;
  o.clock_every = clock_every;
  start(&o);
  pthread_barrier_init(&barrier, NULL, WORKERS + 1);
  pthread_t ids[WORKERS];
  for (int i = 0; i < WORKERS; i++) pthread_create(&ids[i], NULL, work, shared_data[i]);
  for (int i = 0; i < 20; i++) EXPECT(STRAP_OK, strap_access_flush(&error));
  pthread_barrier_wait(&barrier);
  for (int i = 0; i < WORKERS; i++) pthread_join(ids[i], NULL);
  CHECK(stats().threads == 0, "buffers of ended threads remain");
  stop();
  strap_access_stats_t s = stats();
  CHECK(s.recording == 0 && s.seen == WORKERS * ROUNDS && s.recorded == s.seen && s.lost == 0 &&
            s.unwritten == 0 && s.bytes == m->size,
        "seen %llu, recorded %llu, %llu of %zu bytes", (unsigned long long)s.seen,
        (unsigned long long)s.recorded, (unsigned long long)s.bytes, m->size);
  struct list l = all_accesses(m);
  CHECK(l.count == WORKERS * ROUNDS && l.lost == 0, "%zu accesses", l.count);
  size_t each[WORKERS] = {0};
  for (size_t i = 0; i < l.count; i++)
    each[(l.items[i].address - (uintptr_t)shared_data) / sizeof *shared_data]++;
  for (int i = 0; i < WORKERS; i++) CHECK(each[i] == ROUNDS, "%zu of thread %d", each[i], i);
  free(l.items);
  free_memory(m);
  pthread_barrier_destroy(&barrier);
}

/* Recordings start, pause and stop while threads record. No record is torn, and the accesses in the
 * trace are as many as the statistics count. */
static atomic_int quit;
static void *record_on(void *p) {
  while (!atomic_load(&quit)) __tsan_write4(p);
  return NULL;
}

static void start_and_stop(void) {
  atomic_store(&quit, 0);
  pthread_t ids[4];
  for (int i = 0; i < 4; i++) pthread_create(&ids[i], NULL, record_on, shared_data[i]);
  for (int round = 0; round < 60; round++) {
    struct memory *m = new_memory();
    strap_access_options o = to_memory(m);
    o.buffer_bytes = round % 2 ? 4096 : 65536; /* buffers change size */
    o.paused = round % 3 == 0;
    start(&o);
    if (o.paused) {
      __tsan_read1(m);
      CHECK(stats().seen == 0 && stats().recording == 2, "recorded while paused");
      EXPECT(STRAP_OK, strap_access_resume(&error));
    }
    usleep(500);
    EXPECT(STRAP_OK, strap_access_pause(&error));
    uint64_t seen = stats().seen;
    usleep(300);
    CHECK(stats().seen == seen, "recorded while paused");
    EXPECT(STRAP_OK, strap_access_flush(&error));
    EXPECT(STRAP_OK, strap_access_resume(&error));
    usleep(300);
    stop();
    strap_access_stats_t s = stats();
    struct list l = all_accesses(m);
    CHECK(l.count == s.recorded && l.count == l.seen && l.seen == s.seen && s.lost == 0 && l.ended,
          "%zu accesses, seen %llu, counted %llu", l.count, (unsigned long long)l.seen,
          (unsigned long long)s.seen);
    for (size_t i = 0; i < l.count; i++)
      CHECK(l.items[i].size == 4 && op_of(&l.items[i]) == STORE &&
                (l.items[i].address - (uintptr_t)shared_data) % 64 == 0,
            "a torn record");
    free(l.items);
    free_memory(m);
  }
  atomic_store(&quit, 1);
  for (int i = 0; i < 4; i++) pthread_join(ids[i], NULL);
}

/* If a signal handler interrupts the recording of an access, its own accesses are lost and counted
 * as lost. */
static volatile sig_atomic_t handled;
static char in_handler[16];
static void handler(int number) {
  (void)number;
  int saved = errno;
  errno = 77;
  for (int i = 0; i < 10; i++) __tsan_write1(in_handler);
  CHECK(errno == 77, "the recording changes errno");
  errno = saved;
  handled++;
}

static void signals_within(size_t buffer_bytes, int times, long after_us) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  o.buffer_bytes = buffer_bytes;
  handled = 0;
  struct sigaction action = {.sa_handler = handler, .sa_flags = SA_RESTART}, before;
  sigaction(SIGALRM, &action, &before);
  struct itimerval often = {{0, times > 1 ? after_us : 0}, {0, after_us}}, never = {{0, 0}, {0, 0}};
  start(&o);
  setitimer(ITIMER_REAL, &often, NULL);
  uint64_t own = 0;
  while (handled < times) {
    __tsan_read8(in_handler);
    own++;
  }
  setitimer(ITIMER_REAL, &never, NULL);
  sigaction(SIGALRM, &before, NULL);
  stop();
  struct list l = all_accesses(m);
  strap_access_stats_t s = stats();
  CHECK(l.count == l.seen && l.seen + s.lost == own + 10u * (unsigned)handled,
        "%zu recorded and %llu lost of %llu", l.count, (unsigned long long)s.lost,
        (unsigned long long)(own + 10u * (unsigned)handled));
  CHECK(s.seen == l.seen, "counted %llu, seen %llu", (unsigned long long)s.seen,
        (unsigned long long)l.seen);
  CHECK(times == 1 || s.lost < 10u * (unsigned)handled, "every handler lost its accesses");
  free(l.items);
  free_memory(m);
}

static void signals(void) {
  signals_within(4096, 300, 200);
  /* The first access of a recording allocates the buffer. Repeat this often, with changing sizes,
   * so that signals arrive there. */
  for (int round = 0; round < 2000; round++)
    signals_within(round % 2 ? 4096 : 65536, 1, 1 + round % 30);
}

/* Accesses that a sink makes are not recorded. They are counted as lost, also in a thread that
 * records nothing itself. */
static atomic_int in_sink;
static int access_and_keep(void *m, const void *blocks, size_t size) {
  __tsan_read8(in_handler);
  atomic_fetch_add(&in_sink, 1);
  return keep(m, blocks, size);
}

static void sinks(void) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  o.sink = access_and_keep;
  start(&o);
  atomic_store(&in_sink, 0);
  atomic_store(&quit, 0);
  pthread_t id;
  pthread_create(&id, NULL, record_on, shared_data[0]);
  while (stats().recorded == 0) usleep(1000);
  EXPECT(STRAP_OK, strap_access_flush(&error));
  CHECK(stats().lost >= 1, "the sink's accesses are not counted");
  EXPECT(STRAP_OK, strap_access_pause(&error));
  uint64_t lost = (uint64_t)atomic_load(&in_sink);
  atomic_store(&quit, 1);
  pthread_join(id, NULL);
  stop(); /* while paused, the sink's accesses are not counted */
  CHECK(stats().lost >= 1 && stats().lost <= lost, "%llu lost of %llu",
        (unsigned long long)stats().lost, (unsigned long long)lost);
  free_memory(m);
}

/* After fork() the child is not traced but may start its own trace. The parent's trace goes on. */
static void forks(void) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  static char x[8];
  start(&o);
  pthread_t busy;
  atomic_store(&quit, 0);
  pthread_create(&busy, NULL, record_on, shared_data[0]);
  for (int i = 0; i < 5; i++) {
    __tsan_read1(x);
    pid_t child = fork();
    if (child == 0) {
      size_t before = m->size;
      for (int k = 0; k < 100000; k++) __tsan_read1(x);
      CHECK(m->size == before, "the child writes to the parent's sink");
      strap_access_stats_t s = stats();
      CHECK(s.recording == 0 && s.threads == 0, "the child records");
      EXPECT(STRAP_ERR_INVALID_STATE, strap_access_stop(&error));
      struct memory *own = new_memory();
      strap_access_options mine = to_memory(own);
      start(&mine);
      __tsan_write2(x);
      stop();
      struct list l = all_accesses(own);
      CHECK(l.count == 1 && l.seen == 1 && l.ended, "%zu accesses of the child", l.count);
      expect(&l, 0, x, 2, STORE);
      _exit(0);
    }
    int status;
    waitpid(child, &status, 0);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %#x", status);
  }
  atomic_store(&quit, 1);
  pthread_join(busy, NULL);
  stop();
  struct list l = all_accesses(m);
  size_t reads = 0;
  for (size_t i = 0; i < l.count; i++) reads += l.items[i].address == (uintptr_t)x;
  CHECK(reads == 5 && l.ended, "%zu reads of the parent", reads);
  free(l.items);
  free_memory(m);
}

struct inside {
  strap_status flush, add;
  uint64_t id;
};

static int call_back(void *context, const void *blocks, size_t size) {
  struct inside *in = context;
  in->flush = strap_access_flush(NULL);
  in->add = strap_range_add(shared_data, 1, STRAP_REGION_WEIGHT, "w", &in->id, NULL);
  (void)blocks, (void)size;
  return 0;
}

static void arguments(const char *folder) {
  struct memory *m = new_memory();
  char path[4096], link[4100];
  snprintf(path, sizeof path, "%s/a.access", folder);
  strap_access_options o = to_memory(m), bad;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_start(NULL, &error));
#define REFUSED(change)                                                \
  do {                                                                 \
    bad = o;                                                           \
    change;                                                            \
    EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_start(&bad, &error)); \
  } while (0)
  REFUSED(bad.struct_size = 3);
  REFUSED(bad.struct_size = 1 << 20);
  REFUSED(bad.sink = NULL);
  REFUSED(bad.path = path);
  REFUSED(bad.filter_count = 1);
  REFUSED(bad.filter_count = STRAP_ACCESS_MAX_FILTERS + 1);
  strap_access_filter empty = {5, 5};
  REFUSED((bad.filter_count = 1, bad.filters = &empty));
  REFUSED(bad.buffer_bytes = 100);
  REFUSED(bad.buffer_bytes = (uint64_t)2 << 30);
  REFUSED(bad.paused = 2);
  REFUSED(bad.reserved = 1);
  struct { strap_access_options o; uint64_t more; } newer = {o, 1};
  newer.o.struct_size = sizeof newer;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_start(&newer.o, &error));
  newer.more = 0;
  start(&newer.o);
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_start(&o, &error));
  stop();
  bad = o;
  bad.struct_size = offsetof(strap_access_options, paused); /* an older header */
  start(&bad);
  stop();
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_stop(&error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_flush(&error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_pause(&error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_resume(&error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_stats(NULL, &error));
  strap_access_stats_t s = {.struct_size = 8};
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_stats(&s, &error));

  bad = o;
  bad.sink = NULL;
  bad.path = "/no/such/folder/x";
  EXPECT(STRAP_ERR_NOT_FOUND, strap_access_start(&bad, &error));
  bad.path = folder;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_start(&bad, &error));
  snprintf(link, sizeof link, "%s/fifo", folder);
  CHECK(mkfifo(link, 0600) == 0, "no pipe");
  bad.path = link;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_start(&bad, &error));

  /* A trace file that another process is writing is busy. */
  int ready[2], done[2];
  CHECK(pipe(ready) == 0 && pipe(done) == 0, "no pipe");
  pid_t child = fork();
  char byte = 0;
  bad.path = path;
  if (child == 0) {
    start(&bad);
    CHECK(write(ready[1], &byte, 1) == 1 && read(done[0], &byte, 1) == 1, "no pipe");
    _exit(0);
  }
  CHECK(read(ready[0], &byte, 1) == 1, "no pipe");
  EXPECT(STRAP_ERR_BUSY, strap_access_start(&bad, &error));
  CHECK(write(done[1], &byte, 1) == 1, "no pipe");
  waitpid(child, NULL, 0);
  start(&bad);
  stop();

  /* A call from a sink is refused. The leak check at the exit sees a range that is not freed. */
  struct inside inside = {0};
  bad = o;
  bad.sink = call_back;
  bad.context = &inside;
  start(&bad);
  CHECK(inside.flush == STRAP_ERR_INVALID_STATE, "a sink may flush: %d", inside.flush);
  CHECK(inside.add == STRAP_ERR_INVALID_STATE && inside.id == 0, "a sink may add a range: %d",
        inside.add);
  stop();
  free_memory(m);
}

/* If the sink or the disk fails, the trace ends after its last complete block and the program goes
 * on. */
static void failures(const char *folder) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  m->fail_after = 0;
  EXPECT(STRAP_ERR_NO_SPACE, strap_access_start(&o, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_stop(&error));
  m->fail_after = 4;
  o.buffer_bytes = 4096;
  start(&o);
  static char x[8];
  for (int i = 0; i < 10000; i++) __tsan_read1(x);
  EXPECT(STRAP_ERR_NO_SPACE, strap_access_flush(&error));
  EXPECT(STRAP_ERR_NO_SPACE, strap_access_stop(&error));
  CHECK(error.sys_errno == ENOSPC, "errno %d", error.sys_errno);
  strap_access_stats_t s = stats();
  struct list l = all_accesses(m);
  CHECK(s.recorded == 10000 && s.unwritten == 10000 - l.count && l.count > 0 && !l.ended,
        "%zu written, %llu not", l.count, (unsigned long long)s.unwritten);
  free(l.items);
  free_memory(m);

  char path[4096];
  snprintf(path, sizeof path, "%s/full.access", folder);
  o = (strap_access_options){.struct_size = sizeof o, .path = path, .buffer_bytes = 4096};
  struct rlimit old, small;
  getrlimit(RLIMIT_FSIZE, &old);
  small = old;
  small.rlim_cur = 50000;
  signal(SIGXFSZ, SIG_IGN);
  start(&o);
  setrlimit(RLIMIT_FSIZE, &small);
  for (int i = 0; i < 10000; i++) __tsan_read1(x);
  EXPECT(STRAP_ERR_IO, strap_access_stop(&error));
  CHECK(error.sys_errno == EFBIG, "errno %d", error.sys_errno);
  setrlimit(RLIMIT_FSIZE, &old);
  struct stat st;
  CHECK(stat(path, &st) == 0 && st.st_size <= 50000, "%lld bytes", (long long)st.st_size);
  CHECK((uint64_t)st.st_size == stats().bytes, "the file has a part of a block");
}

/* Makes system call CALL of this process fail with errno NUMBER if its second argument is at least
 * LEAST. */
static void forbid(unsigned call, uint32_t least, unsigned number) {
  struct sock_filter code[] = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
      BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, call, 0, 3),
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[1])),
      BPF_JUMP(BPF_JMP | BPF_JGE | BPF_K, least, 0, 1),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | number),
      BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
  };
  struct sock_fprog program = {sizeof code / sizeof *code, code};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
            prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
        "no seccomp: %s", strerror(errno));
}

static void in_child(void (*f)(void)) {
  pid_t child = fork();
  if (child == 0) {
    f();
    _exit(0);
  }
  int status;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with %#x", status);
}

/* The recording works without membarrier, which old kernels and strict containers lack. */
static void without_membarrier(void) {
  forbid(SYS_membarrier, 0, ENOSYS);
  start_and_stop();
}

/* A thread that gets no memory for its buffer counts its accesses as lost. */
static void without_memory(void) {
  forbid(SYS_mmap, 512 << 20, ENOMEM);
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  static char x[8];
  o.buffer_bytes = 512 << 20;
  start(&o);
  for (int i = 0; i < 100; i++) __tsan_read1(x);
  strap_access_stats_t s = stats();
  CHECK(s.seen == 0 && s.lost == 100 && s.recorded == 0, "lost %llu", (unsigned long long)s.lost);
  stop();
  CHECK(stats().lost == 100, "lost %llu", (unsigned long long)stats().lost);
  o.buffer_bytes = 4096; /* the thread can record again */
  start(&o);
  __tsan_read1(x);
  stop();
  CHECK(stats().seen == 1 && stats().lost == 0, "seen %llu", (unsigned long long)stats().seen);
  free_memory(m);
}

struct found {
  size_t added, removed;
  uint64_t last_id, start, length;
  uint32_t type;
  char name[300];
  int64_t ns;
};

static void find_range(const struct head *h, const char *payload, void *context) {
  struct found *f = context;
  if (h->kind != KIND_RANGE) return;
  CHECK(h->bytes >= 32 && h->bytes < 32 + sizeof f->name, "%llu bytes", (unsigned long long)h->bytes);
  uint32_t added;
  memcpy(&f->last_id, payload, 8);
  memcpy(&f->start, payload + 8, 8);
  memcpy(&f->length, payload + 16, 8);
  memcpy(&f->type, payload + 24, 4);
  memcpy(&added, payload + 28, 4);
  memcpy(f->name, payload + 32, h->bytes - 32);
  f->name[h->bytes - 32] = 0;
  f->ns = h->start_ns;
  if (added)
    f->added++;
  else
    f->removed++;
}

static void ranges(void) {
  static char weights[64], cache[64];
  uint64_t a = 0, b = 0, c = 0;
  char long_name[300];
  memset(long_name, 'x', sizeof long_name);
  long_name[256] = 0;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_range_add(weights, 0, STRAP_REGION_WEIGHT, "w", &a, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_range_add(weights, 64, 0, "w", &a, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_range_add(weights, 64, 5, "w", &a, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_range_add(weights, 64, STRAP_REGION_WEIGHT, "w", NULL, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_range_add(weights, 64, STRAP_REGION_WEIGHT, long_name, &a, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_range_add((void *)UINTPTR_MAX, 2, STRAP_REGION_WEIGHT, "w", &a, &error));
  EXPECT(STRAP_ERR_NOT_FOUND, strap_range_remove(1, &error));
  EXPECT(STRAP_OK, strap_range_add(weights, 64, STRAP_REGION_WEIGHT, "blk.0.attn_q", &a, &error));
  EXPECT(STRAP_OK, strap_range_add(weights, 64, STRAP_REGION_WEIGHT, NULL, &b, &error));
  CHECK(a != 0 && b > a, "ids %llu, %llu", (unsigned long long)a, (unsigned long long)b);
  EXPECT(STRAP_OK, strap_range_remove(b, &error)); /* removed before the start: not in the trace */
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  start(&o);
  struct found f = {0};
  each_block(m, find_range, &f);
  CHECK(f.added == 1 && f.removed == 0 && f.last_id == a && f.start == (uintptr_t)weights &&
            f.length == 64 && f.type == STRAP_REGION_WEIGHT && strcmp(f.name, "blk.0.attn_q") == 0,
        "the live range is not at the start");
  int64_t before = f.ns;
  long_name[255] = 0;
  EXPECT(STRAP_OK, strap_range_add(cache, 32, STRAP_REGION_KV_CACHE, long_name, &c, &error));
  EXPECT(STRAP_OK, strap_range_remove(a, &error));
  EXPECT(STRAP_ERR_NOT_FOUND, strap_range_remove(a, &error));
  stop();
  f = (struct found){0};
  each_block(m, find_range, &f);
  CHECK(f.added == 2 && f.removed == 1 && f.last_id == a && f.ns > before, "%zu, %zu", f.added, f.removed);
  EXPECT(STRAP_OK, strap_range_remove(c, &error));
  free_memory(m);
}

/* Checks that the time of each access lies between the readings of CLOCK_MONOTONIC before and after
 * it. The time is interpolated by ticks between the start and the end of the block. */
static void check_times(const struct head *h, const char *payload, void *context) {
  int64_t *limits = context;
  if (h->kind != KIND_ACCESSES) return;
  for (size_t i = 0; i < h->bytes / sizeof(struct access); i++) {
    struct access a;
    memcpy(&a, payload + i * sizeof a, sizeof a);
    double ns = (double)h->start_ns;
    if (h->ticks > 0) ns += (double)(h->end_ns - h->start_ns) * a.ticks / (double)h->ticks;
    /* The program read the clock before and after the access. */
    int64_t low = limits[1 + limits[0]], high = limits[2 + limits[0]];
    CHECK(ns >= (double)low - 2000 && ns <= (double)high + 2000, "access %lld at %.0f, not in %lld to %lld",
          (long long)limits[0], ns, (long long)low, (long long)high);
    limits[0]++;
  }
}

static int64_t monotonic(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void times(uint32_t clock_every) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  o.clock_every = clock_every;
  o.buffer_bytes = 4096; /* about 168 records in a block */
  static char x[8];
  enum { COUNT = 1000 };
  int64_t limits[COUNT + 2] = {0};
  start(&o);
  for (int i = 0; i < COUNT; i++) {
    limits[1 + i] = monotonic();
    __tsan_read1(x);
    if (i % 100 == 0) usleep(1000);
  }
  limits[1 + COUNT] = monotonic();
  stop();
  each_block(m, check_times, limits);
  CHECK(limits[0] == COUNT, "%lld accesses", (long long)limits[0]);
  free_memory(m);
}

/* A record holds 32 bits of ticks, so after a longer pause a new block begins. */
static void rests(void) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  static char x[8], y[8];
  start(&o);
  __tsan_read1(x);
  sleep(3); /* more than 2^32 cycles of most CPUs */
  __tsan_read1(y);
  stop();
  struct list l = all_accesses(m);
  expect(&l, 0, x, 1, LOAD);
  expect(&l, 1, y, 1, LOAD);
  CHECK(l.count == 2 && l.seen == 2 && stats().seen == 2, "%zu accesses, seen %llu", l.count,
        (unsigned long long)l.seen);
  free(l.items);
  free_memory(m);
}

/* While a thread hangs in its sink, strap_access_pause times out and counts that thread. When the
 * sink returns, the thread goes on and no access is lost. */
static atomic_int within, go_on;
static int hold(void *context, const void *blocks, size_t size) {
  if (((const struct head *)blocks)->kind == KIND_ACCESSES) {
    atomic_store(&within, 1);
    while (!atomic_load(&go_on)) usleep(1000);
  }
  return keep(context, blocks, size);
}

static void *record_a_block(void *p) {
  for (int i = 0; i < 1000; i++) __tsan_write4(p);
  return NULL;
}

static void stuck(void) {
  struct memory *m = new_memory();
  strap_access_options o = to_memory(m);
  o.sink = hold;
  o.buffer_bytes = 4096;
  start(&o);
  pthread_t id;
  pthread_create(&id, NULL, record_a_block, shared_data);
  while (!atomic_load(&within)) usleep(1000);
  time_t before = time(NULL);
  EXPECT(STRAP_ERR_TIMEOUT, strap_access_pause(&error));
  long waited = (long)(time(NULL) - before);
  CHECK(waited >= 9 && strstr(error.message, "1 threads") != NULL, "%ld s: %s", waited,
        error.message);
  atomic_store(&go_on, 1);
  EXPECT(STRAP_OK, strap_access_resume(&error));
  pthread_join(id, NULL);
  stop();
  struct list l = all_accesses(m);
  CHECK(l.count == stats().recorded && l.lost == 0 && l.ended, "%zu accesses", l.count);
  free(l.items);
  free_memory(m);
}

int main(int argc, char **argv) {
  CHECK(argc == 2, "usage: %s FOLDER|stuck", argv[0]);
  if (strcmp(argv[1], "stuck") == 0) {
    stuck();
    puts("ok");
    return 0;
  }
  hooks();
  copies();
  atomic8();
  atomic16();
  atomic32();
  atomic64();
  atomic128();
  atomics_are_atomic();
  sampling_and_filters();
  threads(4096, 0);
  threads(0, 0);
  threads(50000, 10);
  start_and_stop();
  signals();
  sinks();
  forks();
  in_child(without_membarrier);
  in_child(without_memory);
  arguments(argv[1]);
  failures(argv[1]);
  ranges();
  times(0);
  times(1);
  rests();
  puts("ok");
  return 0;
}
