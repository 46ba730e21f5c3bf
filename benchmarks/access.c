/*
 * access.c - measures the cost of a memory access in a program that links libstrap-access.
 *
 *     access ROUNDS [FILE]
 *
 * A loop loads and stores 4,096 doubles, 50 times. The program runs it without instrumentation and
 * with. It prints a line for each round with four numbers, in nanoseconds per access: without
 * instrumentation, instrumented with nothing recorded, with each 100th access recorded, and with
 * all accesses recorded. The records go to FILE, or without FILE to a sink that drops them.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "strap_access.h"

enum { VALUES = 4096, PASSES = 50 };

static double values[VALUES];

static __attribute__((noinline)) void traced(void) {
  for (int i = 0; i < VALUES; i++) values[i] = values[i] * 0.5 + 1;
}

static __attribute__((noinline, no_sanitize("thread"))) void plain(void) {
  for (int i = 0; i < VALUES; i++) values[i] = values[i] * 0.5 + 1;
}

static double ns_an_access(void (*loop)(void)) {
  struct timespec begin, end;
  loop(); /* warms up the caches */
  clock_gettime(CLOCK_MONOTONIC, &begin);
  for (int pass = 0; pass < PASSES; pass++) loop();
  clock_gettime(CLOCK_MONOTONIC, &end);
  double ns = (end.tv_sec - begin.tv_sec) * 1e9 + (end.tv_nsec - begin.tv_nsec);
  return ns / (2.0 * VALUES * PASSES);
}

static int drop(void *context, const void *blocks, size_t size) {
  (void)context, (void)blocks, (void)size;
  return 0;
}

static void expect(strap_status status, const strap_error *error) {
  if (status == STRAP_OK) return;
  fprintf(stderr, "access: %s\n", error->message);
  exit(1);
}

static double recording(const char *path, unsigned every) {
  strap_error error;
  strap_access_options options = {
      .struct_size = sizeof options, .sample_every = every, .path = path, .sink = path ? NULL : drop};
  expect(strap_access_start(&options, &error), &error);
  double ns = ns_an_access(traced);
  strap_access_stats_t stats = {.struct_size = sizeof stats};
  expect(strap_access_stats(&stats, &error), &error);
  expect(strap_access_stop(&error), &error);
  if (stats.seen < 2ull * VALUES * PASSES || stats.lost) {
    fprintf(stderr, "access: saw %llu accesses and lost %llu: is the program instrumented?\n",
            (unsigned long long)stats.seen, (unsigned long long)stats.lost);
    exit(1);
  }
  return ns;
}

int main(int argc, char **argv) {
  const char *path = argc > 2 ? argv[2] : NULL;
  for (int round = argc > 1 ? atoi(argv[1]) : 1; round > 0; round--) {
    double bare = ns_an_access(plain), idle = ns_an_access(traced);
    double sampled = recording(path, 100);
    printf("%.3f %.3f %.3f %.3f\n", bare, idle, sampled, recording(path, 1));
  }
}
