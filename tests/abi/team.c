/* A team of the host's threads shares copies and makes packets. The stream has the same bytes as
 * without a team. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <math.h>
#include <pthread.h>

enum { HELPERS = 3, LARGE = 1000003, SMALL = 1000 };

static _Atomic int calls;

struct task {
  void (*work)(void *);
  void *argument;
};

static void *help(void *argument) {
  const struct task *task = argument;
  task->work(task->argument);
  return NULL;
}

/* Runs WORK in several threads, as GOMP_parallel does, but with new threads. */
static void team(void (*work)(void *), void *argument, unsigned threads, unsigned flags) {
  CHECK(threads == 0 && flags == 0, "threads = %u, flags = %u", threads, flags);
  calls++;
  struct task task = {work, argument};
  pthread_t helpers[HELPERS];
  for (int i = 0; i < HELPERS; i++)
    CHECK(pthread_create(&helpers[i], NULL, help, &task) == 0, "no thread %d", i);
  work(argument);
  for (int i = 0; i < HELPERS; i++) pthread_join(helpers[i], NULL);
}

static float floats[LARGE];
static uint16_t words[LARGE];

static strap_stats_t capture(const char *path, strap_team by, double error_bound) {
  strap_open_options options = open_options();
  options.team = by;
  options.error_bound = error_bound;
  strap_session session = open_stream(path, &options);
  const uint32_t layer = add_layer(session, "layer");
  const int64_t large[] = {LARGE}, small[] = {SMALL};
  const struct {
    strap_dtype dtype;
    const void *data;
    int called; /* whether a large tensor calls the team */
  } kinds[] = {{STRAP_FLOAT32, floats, 1}, {STRAP_FLOAT16, words, 1}, {STRAP_BFLOAT16, words, 1},
               {STRAP_INT32, floats, 1}};
  for (size_t i = 0; i < sizeof kinds / sizeof *kinds; i++) {
    strap_tensor t = tensor_of(layer, kinds[i].dtype, 1, small, kinds[i].data);
    calls = 0;
    enqueue(session, &t);
    CHECK(calls == 0, "a small tensor was shared out");
    t.shape = large;
    enqueue(session, &t);
    CHECK((calls > 0) == (by != NULL), "%d calls for dtype %d", calls, (int)kinds[i].dtype);
  }
  strap_stats_t stats = stats_of(session);
  close_stream(session);
  return stats;
}

static void near(double a, double b) {
  CHECK(fabs(a - b) <= 1e-12 * fabs(a), "%.17g without a team, %.17g with one", a, b);
}

enum { TENSORS = 256, VALUES = 50000, CAPTURERS = 4 }; /* VALUES are too few to share a copy */

static strap_session session;

static void enqueue_some(uint32_t layer, int from) {
  const int64_t shape[] = {VALUES};
  for (int i = 0; i < TENSORS; i++) {
    strap_tensor t = tensor_of(layer, STRAP_FLOAT32, 1, shape, floats + from + 1000 * i);
    t.step = i;
    enqueue(session, &t);
  }
}

/* Captures TENSORS tensors with yielding workers. About 42 tensors may wait; then the team makes
 * packets. */
static strap_stats_t capture_many(const char *path, strap_team by, strap_codec codec) {
  strap_open_options options = open_options();
  options.codec = codec;
  options.error_bound = codec == STRAP_CODEC_ZSTD ? 1e-4 : 0;
  options.workers_yield = 1;
  options.max_memory_bytes = 64 << 20;
  options.team = by;
  session = open_stream(path, &options);
  calls = 0;
  enqueue_some(add_layer(session, "many"), 0);
  strap_stats_t stats = stats_of(session);
  close_stream(session);
  return stats;
}

static void *capture_in_thread(void *argument) {
  const int thread = *(const int *)argument;
  char name[32];
  snprintf(name, sizeof name, "thread.%d", thread);
  enqueue_some(add_layer(session, name), thread);
  return NULL;
}

/* Several threads capture at once, each with a team. The packets of each thread keep their order. */
static void capture_from_threads(const char *path) {
  strap_open_options options = open_options();
  options.codec = STRAP_CODEC_LZ4;
  options.workers_yield = 1;
  options.team = team;
  session = open_stream(path, &options);
  pthread_t threads[CAPTURERS];
  int numbers[CAPTURERS], next[CAPTURERS] = {0};
  for (int i = 0; i < CAPTURERS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[i], NULL, capture_in_thread, &numbers[i]) == 0, "no thread");
  }
  for (int i = 0; i < CAPTURERS; i++) pthread_join(threads[i], NULL);
  close_stream(session);

  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.packets == CAPTURERS * TENSORS, "%llu packets", (unsigned long long)info.packets);
  uint64_t end = 0;
  for (uint64_t row = 0; row < info.rows; row++) {
    strap_packet p = packet_at(reader, row);
    CHECK(p.offset == end, "row %llu is not behind the one before", (unsigned long long)row);
    end = p.offset + 6 + p.name_bytes + p.payload_bytes;
    int thread;
    CHECK(sscanf(name_of(reader, row), "thread.%d", &thread) == 1 && thread < CAPTURERS, "name");
    CHECK(p.step == next[thread]++, "a packet of thread %d is out of order", thread);
  }
  EXPECT(STRAP_OK, strap_reader_close(reader, &error));
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  char with[4096];
  CHECK(snprintf(with, sizeof with, "%s.with", path) < (int)sizeof with, "a long path");
  uint32_t seed = 1;
  for (int i = 0; i < LARGE; i++) {
    seed = seed * 1664525 + 1013904223;
    words[i] = (uint16_t)(seed >> 16);
    floats[i] = (float)(seed >> 8) / (1 << 20) - 8;
  }
  floats[5] = NAN, floats[70000] = INFINITY, floats[LARGE - 1] = 1e6f;

  const double bounds[] = {0, 1e-4};
  for (int i = 0; i < 2; i++) {
    const strap_stats_t alone = capture(path, NULL, bounds[i]);
    const strap_stats_t shared = capture(with, team, bounds[i]);
    same_file(path, with);
    CHECK(alone.converted == shared.converted, "%llu and %llu values measured",
          (unsigned long long)alone.converted, (unsigned long long)shared.converted);
    CHECK(alone.overflowed == 1 && shared.overflowed == 1, "overflows");
    near(alone.square_error, shared.square_error);
    near(alone.square_sum, shared.square_sum);
    CHECK(alone.max_error == shared.max_error, "largest errors");
  }
  const strap_codec codecs[] = {STRAP_CODEC_NONE, STRAP_CODEC_LZ4, STRAP_CODEC_ZSTD};
  for (int i = 0; i < 3; i++) {
    capture_many(path, NULL, codecs[i]);
    const strap_stats_t stats = capture_many(with, team, codecs[i]);
    if (codecs[i] == STRAP_CODEC_ZSTD) { /* the other codecs store these values uncompressed */
      CHECK(calls >= TENSORS / 64, "%d calls", calls); /* 100 KB a packet, about 4 MiB a call */
      CHECK(stats.yield_ns > 0, "no time was counted");
    }
    same_file(path, with);
  }
  capture_from_threads(with);
  puts("the same bytes with and without a team");
  return 0;
}
