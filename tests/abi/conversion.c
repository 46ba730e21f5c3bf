/* A host may convert float32 to float16 itself and report the error in strap_conversion. The
 * capture then has the same bytes, types and error sums as if the library had converted. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <math.h>

enum { VALUES = 10000 };

static float values[VALUES];
static uint16_t halves[VALUES];

/* Captures one tensor to a new stream and returns the statistics. */
static strap_stats_t capture(const char *path, strap_tensor *tensor) {
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  tensor->layer = add_layer(session, "mlp");
  enqueue(session, tensor);
  EXPECT(STRAP_OK, strap_flush(session, -1, &error));
  strap_stats_t s = stats_of(session);
  close_stream(session);
  return s;
}

/* Reads the tensor into `halves`, and checks that it is float16 made from float32. */
static void read_back(const char *path) {
  strap_reader reader = open_reader(path, NULL);
  strap_packet p = packet_at(reader, 0);
  CHECK(p.dtype == STRAP_FLOAT16 && p.source_dtype == STRAP_FLOAT32, "types %d and %d", p.dtype,
        p.source_dtype);
  void *data = read_row(reader, 0);
  memcpy(halves, data, sizeof halves);
  free(data);
  close_reader(reader);
}

static strap_conversion loss_of_halves(void) {
  strap_conversion c;
  memset(&c, 0, sizeof c);
  c.struct_size = sizeof c;
  c.source = STRAP_FLOAT32;
  for (int i = 0; i < VALUES; i++) {
    double e = (double)values[i] - (double)half_value(halves[i]);
    if (!isfinite(e)) continue;
    c.values++;
    c.square_error += e * e;
    c.square_sum += (double)values[i] * (double)values[i];
    c.max_error = fmax(c.max_error, fabs(e));
  }
  return c;
}

static int near(double a, double b) { return fabs(a - b) <= 1e-5 * fabs(b); }

static void expect_same(strap_stats_t told, strap_stats_t own) {
  CHECK(told.raw_bytes == own.raw_bytes && told.raw_bytes == sizeof values, "%llu raw bytes",
        (unsigned long long)told.raw_bytes);
  CHECK(told.converted == own.converted, "%llu values of %llu",
        (unsigned long long)told.converted, (unsigned long long)own.converted);
  CHECK(near(told.square_error, own.square_error) && near(told.square_sum, own.square_sum) &&
            near(told.max_error, own.max_error),
        "errors %g of %g, at most %g", told.square_error, told.square_sum, told.max_error);
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  for (int i = 0; i < VALUES; i++) values[i] = sinf((float)i) * expf((float)(i % 20) - 15);
  values[5] = NAN;
  values[6] = -INFINITY;
  const int64_t shape[] = {100, VALUES / 100};
  strap_tensor tensor = tensor_of(0, STRAP_FLOAT32, 2, shape, values);
  const strap_stats_t own = capture(path, &tensor);
  read_back(path);
  uint16_t expected[VALUES];
  memcpy(expected, halves, sizeof halves);

  strap_conversion loss = loss_of_halves();
  tensor = tensor_of(0, STRAP_FLOAT16, 2, shape, expected);
  tensor.conversion = &loss;
  expect_same(capture(path, &tensor), own);
  read_back(path);
  CHECK(memcmp(halves, expected, sizeof halves) == 0, "other float16 are stored");

  /* A newer host passes a longer struct. The library accepts it if the unknown bytes are zero. */
  struct {
    strap_conversion known;
    char more[16];
  } newer = {loss, {0}};
  newer.known.struct_size = sizeof newer;
  tensor.conversion = &newer.known;
  expect_same(capture(path, &tensor), own);
  newer.more[3] = 1;
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  tensor.layer = add_layer(session, "mlp");
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_enqueue(session, &tensor, 0, &error));

  /* An older host passes a strap_tensor without the field `conversion`. The library must not read
   * the pointer that follows the shorter struct. */
  tensor.struct_size = offsetof(strap_tensor, conversion);
  enqueue(session, &tensor);
  CHECK(stats_of(session).converted == 0, "a conversion was read behind the struct");
  close_stream(session);

  /* A session with keep_float32 refuses a conversion. */
  options.keep_float32 = 1;
  session = open_stream(path, &options);
  tensor = tensor_of(add_layer(session, "mlp"), STRAP_FLOAT16, 2, shape, expected);
  tensor.conversion = &loss;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_enqueue(session, &tensor, 0, &error));
  CHECK(strstr(error.message, "keep_float32") != NULL, "%s", error.message);
  close_stream(session);
  puts("a conversion by the host counts as the library's own");
  return 0;
}
