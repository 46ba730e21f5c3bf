/* A call that times out may be repeated until it succeeds, although other threads capture faster
 * than the writer writes. A repeated call keeps its place in the line, so it waits only for the
 * work that was queued at its first call. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>

enum { THREADS = 4, SMALL = 50000, LARGE = 400000, SLICE_MS = 1, MOST_SECONDS = 30 };

static strap_session session;
static uint32_t layer;
static atomic_int stop;
static atomic_long captured;

/* Returns N values that are slow to compress; the caller frees them. */
static int32_t *noise(int n, uint32_t x) {
  int32_t *values = malloc((size_t)n * sizeof *values);
  CHECK(values != NULL, "no memory");
  for (int i = 0; i < n; i++) {
    x = x * 1664525u + 1013904223u;
    values[i] = (int32_t)(x >> 20);
  }
  return values;
}

static void *capture(void *number) {
  const int64_t length = SMALL;
  int32_t *values = noise(SMALL, (uint32_t)(size_t)number);
  while (!stop) {
    strap_tensor t = tensor_of(layer, STRAP_INT32, 1, &length, values);
    strap_status status;
    while ((status = strap_enqueue(session, &t, SLICE_MS, &error)) == STRAP_ERR_TIMEOUT) continue;
    CHECK(status == STRAP_OK, "%d, %s", status, error.message);
    captured++;
  }
  free(values);
  return NULL;
}

/* Repeats CALL while it times out, and counts the calls in CALLS. */
#define REPEATED(calls, call)                                                          \
  do {                                                                                 \
    const double begin_ = seconds();                                                   \
    strap_status status_;                                                              \
    for (calls = 1; (status_ = (call)) == STRAP_ERR_TIMEOUT; calls++)                  \
      CHECK(seconds() - begin_ < MOST_SECONDS, "%s has no end in %d calls", #call, calls); \
    CHECK(status_ == STRAP_OK, "%s gave %d: %s", #call, status_, error.message);       \
  } while (0)

int main(int argc, char **argv) {
  CHECK(argc == 2, "usage: %s STREAM", argv[0]);
  strap_open_options options = open_options();
  options.codec = STRAP_CODEC_ZSTD;
  options.level = 4;
  options.workers = 1;
  options.max_memory_bytes = 8 << 20;
  session = open_stream(argv[1], &options);
  layer = add_layer(session, "layer");
  pthread_t threads[THREADS];
  for (size_t i = 0; i < THREADS; i++)
    CHECK(pthread_create(&threads[i], NULL, capture, (void *)i) == 0, "no thread");
  while (stats_of(session).stalls < 3) nanosleep(&(struct timespec){0, 1000000}, NULL);

  uint64_t offset = 0;
  int flushes, checkpoints, enqueues;
  REPEATED(flushes, strap_flush(session, SLICE_MS, &error));
  REPEATED(checkpoints, strap_checkpoint(session, SLICE_MS, &offset, &error));
  CHECK(offset > 0, "a checkpoint of nothing");
  const int64_t length = LARGE;
  int32_t *values = noise(LARGE, 7);
  strap_tensor t = tensor_of(layer, STRAP_INT32, 1, &length, values);
  /* Count from the first call on: before it, a busy machine may let other threads go first. */
  strap_status status = strap_enqueue(session, &t, SLICE_MS, &error);
  const long before = captured;
  CHECK(status == STRAP_OK || status == STRAP_ERR_TIMEOUT, "%d, %s", status, error.message);
  enqueues = 0;
  if (status != STRAP_OK) REPEATED(enqueues, strap_enqueue(session, &t, SLICE_MS, &error));
  const long overtook = captured - before;
  CHECK(overtook <= 3 * THREADS, "%ld tensors of other threads were taken meanwhile", overtook);
  stop = 1;
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  close_stream(session);
  free(values);
  printf("%d, %d and %d calls\n", flushes, checkpoints, enqueues);
  return 0;
}
