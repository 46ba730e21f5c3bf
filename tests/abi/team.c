/* Threads of the host take part in copying: what is stored is the same, bit for bit. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <math.h>
#include <pthread.h>

enum { HELPERS = 3, LARGE = 1000003, SMALL = 1000 };

static int calls;

struct task {
  void (*work)(void *);
  void *argument;
};

static void *help(void *argument) {
  const struct task *task = argument;
  task->work(task->argument);
  return NULL;
}

/* As GOMP_parallel does it, but with new threads. */
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
    int called; /* with a large tensor, where a team is given */
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

static void same_file(const char *a, const char *b) {
  FILE *f = fopen(a, "rb"), *g = fopen(b, "rb");
  CHECK(f != NULL && g != NULL, "a stream cannot be opened");
  for (long at = 0;; at++) {
    int c = getc(f);
    CHECK(c == getc(g), "the streams differ at byte %ld", at);
    if (c == EOF) break;
  }
  fclose(f);
  fclose(g);
}

static void near(double a, double b) {
  CHECK(fabs(a - b) <= 1e-12 * fabs(a), "%.17g without a team, %.17g with one", a, b);
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
  puts("the same bytes with and without a team");
  return 0;
}
