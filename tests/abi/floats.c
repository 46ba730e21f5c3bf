/* A host may use an unusual floating-point environment: exceptions trap, results round upwards,
 * subnormal numbers count as zero. The capture has the same bytes as usual, and the library
 * restores the environment in the calling thread and in the threads of the team. */
#define _GNU_SOURCE
#include "check.h"

#include <fenv.h>
#include <math.h>
#include <pthread.h>

#include "arrow_abi.h"

#if defined(__x86_64__)
#include <immintrin.h>
enum { TO_ZERO = _MM_FLUSH_ZERO_ON | 0x40 /* denormals are zeros */ };
#endif

enum { LARGE = 200003, HELPERS = 3 };

static float floats[LARGE];
static uint16_t words[1 << 16]; /* every 16-bit pattern */

struct environment {
  int traps, rounding, raised;
  unsigned control; /* MXCSR on x86-64, 0 elsewhere */
};

static struct environment environment(void) {
  struct environment e = {fegetexcept(), fegetround(), fetestexcept(FE_ALL_EXCEPT), 0};
#if defined(__x86_64__)
  e.control = _mm_getcsr();
#endif
  return e;
}

static int unusual; /* whether begin_environment sets the unusual environment */

static void begin_environment(void) {
  fesetenv(FE_DFL_ENV);
  if (!unusual) return;
  fesetround(FE_UPWARD);
#if defined(__x86_64__)
  _mm_setcsr(_mm_getcsr() | TO_ZERO);
#endif
  feenableexcept(FE_ALL_EXCEPT);
}

static void end_environment(void) { fesetenv(FE_DFL_ENV); }

static void expect_same(struct environment a, struct environment b, const char *where) {
  CHECK(a.traps == b.traps && a.rounding == b.rounding && a.raised == b.raised &&
            a.control == b.control,
        "%s: traps %x, rounding %x, raised %x, control %x; now %x, %x, %x, %x", where, a.traps,
        a.rounding, a.raised, a.control, b.traps, b.rounding, b.raised, b.control);
}

struct task {
  void (*work)(void *);
  void *argument;
};

static void *help(void *argument) {
  const struct task *task = argument;
  begin_environment();
  const struct environment before = environment();
  task->work(task->argument);
  expect_same(before, environment(), "a thread of the team");
  end_environment();
  return NULL;
}

static void team(void (*work)(void *), void *argument, unsigned threads, unsigned flags) {
  (void)threads, (void)flags;
  struct task task = {work, argument};
  pthread_t helpers[HELPERS];
  for (int i = 0; i < HELPERS; i++)
    CHECK(pthread_create(&helpers[i], NULL, help, &task) == 0, "no thread %d", i);
  work(argument);
  for (int i = 0; i < HELPERS; i++) pthread_join(helpers[i], NULL);
}

static strap_stats_t capture(const char *path, strap_codec codec, double error_bound,
                             strap_team by) {
  strap_open_options options = open_options();
  options.codec = codec;
  options.level = codec == STRAP_CODEC_LZ4; /* at level 0 the bytes depend on the workers' speed */
  options.error_bound = error_bound;
  options.team = by;
  options.workers_yield = by != NULL;
  begin_environment();
  const struct environment before = environment();
  strap_session session = open_stream(path, &options);
  const uint32_t layer = add_layer(session, "layer");
  const int64_t large[] = {LARGE}, few[] = {100}, all[] = {1 << 16}, turned[] = {300, 200};
  const int64_t strides[] = {1, 300};
  strap_conversion told;
  memset(&told, 0, sizeof told);
  told.struct_size = sizeof told;
  told.source = STRAP_FLOAT32;
  told.values = 1, told.square_error = 1e-9, told.max_error = 1e-4; /* a value that became 0 */
  strap_tensor tensors[] = {
      tensor_of(layer, STRAP_FLOAT32, 1, few, floats),
      tensor_of(layer, STRAP_FLOAT32, 1, large, floats),
      tensor_of(layer, STRAP_FLOAT16, 1, all, words),
      tensor_of(layer, STRAP_BFLOAT16, 1, all, words),
      tensor_of(layer, STRAP_FLOAT32, 1, few, floats + 1000), /* infinities and NaN only */
      tensor_of(layer, STRAP_FLOAT32, 2, turned, floats),
      tensor_of(layer, STRAP_FLOAT16, 1, few, words),
  };
  tensors[5].strides = strides;
  tensors[6].conversion = &told;
  for (size_t i = 0; i < sizeof tensors / sizeof *tensors; i++) {
    enqueue(session, &tensors[i]);
    expect_same(before, environment(), "strap_enqueue");
  }
  EXPECT(STRAP_OK, strap_flush(session, -1, &error));
  strap_stats_t stats = stats_of(session);
  close_stream(session);
  expect_same(before, environment(), "the capture");
  end_environment();
  return stats;
}

/* Reads all rows and the whole index of a stream. */
static void read_back(const char *path) {
  begin_environment();
  const struct environment before = environment();
  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  for (uint64_t row = 0; row < info.rows; row++) free(read_row(reader, row));
  struct ArrowArrayStream stream;
  EXPECT(STRAP_OK, strap_index_export(reader, &stream, &error));
  struct ArrowSchema schema;
  CHECK(stream.get_schema(&stream, &schema) == 0, "no schema");
  schema.release(&schema);
  struct ArrowArray array;
  do {
    CHECK(stream.get_next(&stream, &array) == 0, "no batch");
    if (array.release == NULL) break;
    array.release(&array);
  } while (1);
  stream.release(&stream);
  close_reader(reader);
  expect_same(before, environment(), "reading");
  end_environment();
}

int main(int argc, char **argv) {
  char path[4096], other[4096];
  CHECK(snprintf(path, sizeof path, "%s.usual", stream_path(argc, argv)) < (int)sizeof path &&
            snprintf(other, sizeof other, "%s.unusual", argv[1]) < (int)sizeof other,
        "a long path");
  for (int i = 0; i < LARGE; i++) floats[i] = sinf((float)i) * expf((float)(i % 40) - 30);
  const float odd[] = {NAN, INFINITY, -INFINITY, 1e6f, 65520, 1e-40f, 1e-45f, 3e38f, -0.0f};
  for (int i = 0; i < 9; i++) floats[11 * i] = floats[LARGE - 1 - 7 * i] = odd[i];
  for (int i = 1000; i < 1100; i++) floats[i] = i % 2 ? NAN : INFINITY;
  const uint32_t signalling = 0x7F800001;
  memcpy(&floats[3], &signalling, sizeof signalling);
  for (int i = 0; i < 1 << 16; i++) words[i] = (uint16_t)i;

  const struct {
    strap_codec codec;
    double bound;
    strap_team by;
  } ways[] = {{STRAP_CODEC_NONE, 0, NULL},       {STRAP_CODEC_NONE, 1e-4, team},
              {STRAP_CODEC_LZ4, 1e-300, NULL},   {STRAP_CODEC_ZSTD, 1e-4, team},
              {STRAP_CODEC_ARCHIVE, 5e-4, NULL}, {STRAP_CODEC_ARCHIVE, 1e-2, team}};
  for (size_t i = 0; i < sizeof ways / sizeof *ways; i++) {
    unusual = 0;
    const strap_stats_t a = capture(path, ways[i].codec, ways[i].bound, ways[i].by);
    unusual = 1;
    const strap_stats_t b = capture(other, ways[i].codec, ways[i].bound, ways[i].by);
    read_back(other);
    same_file(path, other);
    CHECK(a.converted == b.converted && a.overflowed == b.overflowed, "counts of way %zu", i);
    CHECK(a.square_error == b.square_error && a.square_sum == b.square_sum &&
              a.max_error == b.max_error,
          "way %zu: errors %.17g of %.17g, at most %.17g, and %.17g of %.17g, at most %.17g", i,
          a.square_error, a.square_sum, a.max_error, b.square_error, b.square_sum, b.max_error);
  }
  puts("the host's floating-point environment makes no difference");
  return 0;
}
