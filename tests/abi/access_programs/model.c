/*
 * A small "model". In each of STEPS steps, two threads compute y = W x, then y is appended to a
 * cache and cleared. The test knows the number of accesses. The program is instrumented, and names
 * its ranges.
 *
 *     model TRACE        records itself to TRACE
 *     model              is recorded through the environment variable STRAP_ACCESS
 */
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strap_access.h"

enum { N = 64, STEPS = 3, THREADS = 2 };

struct cache {
  float rows[STEPS][N];
};
struct block {
  float values[25000];
};

static float *weights, *x, *y;
static struct cache *cache;
static struct block *from, *to;
static _Atomic int done_rows;

static void check(strap_status status, const strap_error *error) {
  if (status == STRAP_OK) return;
  fprintf(stderr, "%s\n", error->message);
  exit(1);
}

static void name(const void *p, size_t size, strap_region type, const char *what) {
  uint64_t id;
  strap_error error;
  check(strap_range_add(p, size, type, what, &id, &error), &error);
}

__attribute__((noinline)) static float dot(const float *a, const float *b, size_t n) {
  float sum = 0;
  for (size_t i = 0; i < n; i++) sum += a[i] * b[i]; /* two loads */
  return sum;
}

static void *half(void *p) {
  size_t first = (size_t)p * N / THREADS;
  for (size_t i = first; i < first + N / THREADS; i++) {
    y[i] = dot(weights + i * N, x, N); /* one store */
    atomic_fetch_add(&done_rows, 1);   /* a load and a store */
  }
  return NULL;
}

__attribute__((noinline)) static void append(struct cache *c, size_t step, const float *row, size_t bytes) {
  memcpy(c->rows[step], row, bytes);
}

__attribute__((noinline)) static void clear(float *row, size_t bytes) { memset(row, 0, bytes); }

/* An assignment that compilers turn into a call of memcpy. */
__attribute__((noinline)) static void assign(struct block *a, const struct block *b) { *a = *b; }

int main(int argc, char **argv) {
  strap_error error;
  weights = malloc(N * N * sizeof *weights);
  x = malloc(N * sizeof *x);
  y = malloc(N * sizeof *y);
  cache = malloc(sizeof *cache);
  from = calloc(1, sizeof *from);
  to = calloc(1, sizeof *to);
  for (int i = 0; i < N * N; i++) weights[i] = (float)i / N;
  for (int i = 0; i < N; i++) x[i] = 1;
  name(weights, N * N * sizeof *weights, STRAP_REGION_WEIGHT, "weights");
  if (argc > 1) {
    strap_access_options options = {.struct_size = sizeof options, .path = argv[1]};
    check(strap_access_start(&options, &error), &error);
  }
  name(x, N * sizeof *x, STRAP_REGION_ACTIVATION, "x");
  name(y, N * sizeof *y, STRAP_REGION_ACTIVATION, "y");
  name(cache, sizeof *cache, STRAP_REGION_KV_CACHE, "cache");
  name(&done_rows, sizeof done_rows, STRAP_REGION_RUNTIME, "done_rows");
  name(from, sizeof *from, STRAP_REGION_RUNTIME, "from");
  name(to, sizeof *to, STRAP_REGION_RUNTIME, "to");
  for (size_t step = 0; step < STEPS; step++) {
    pthread_t threads[THREADS];
    for (size_t i = 0; i < THREADS; i++) pthread_create(&threads[i], NULL, half, (void *)i);
    for (size_t i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
    append(cache, step, y, N * sizeof *y);
    clear(y, N * sizeof *y);
  }
  assign(to, from);
  int rows = atomic_load(&done_rows);
  if (argc > 1) check(strap_access_stop(&error), &error);
  printf("%d rows, cache[%d][%d] = %g\n", rows, STEPS - 1, N - 1, (double)cache->rows[STEPS - 1][N - 1]);
  return 0;
}
