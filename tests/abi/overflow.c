/* If a tensor has finite float32 values too large for float16, its float16 packet is followed by a
 * packet NAME!float32 with the exact values. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <math.h>

static const float plain[] = {0, -0.0f, 1.5f, -65504, 65519.996f, 6e-8f, 1e-30f};
static const float large[] = {1, 65520, -70000, 3e38f};
static const float infinite[] = {1, INFINITY, -INFINITY, NAN};

static void capture(const char *path, int keep_float32) {
  strap_open_options options = open_options();
  options.keep_float32 = keep_float32;
  strap_session session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "mlp");
  const int64_t seven[] = {7}, four[] = {4};
  strap_tensor tensors[] = {tensor_of(layer, STRAP_FLOAT32, 1, seven, plain),
                            tensor_of(layer, STRAP_FLOAT32, 1, four, large),
                            tensor_of(layer, STRAP_FLOAT32, 1, four, infinite)};
  for (int i = 0; i < 3; i++) {
    tensors[i].step = i;
    enqueue(session, &tensors[i]);
  }
  EXPECT(STRAP_OK, strap_flush(session, -1, &error));
  strap_stats_t s = stats_of(session);
  CHECK(s.tensors == 3 && s.overflowed == (keep_float32 ? 0 : 1), "%llu of %llu overflowed",
        (unsigned long long)s.overflowed, (unsigned long long)s.tensors);
  CHECK(s.packets == (keep_float32 ? 3 : 4), "%llu packets", (unsigned long long)s.packets);
  CHECK(isfinite(s.square_error) && isfinite(s.square_sum) && isfinite(s.max_error),
        "the errors are %g, %g and %g", s.square_error, s.square_sum, s.max_error);
  close_stream(session);
}

static void expect_row(strap_reader reader, uint64_t row, const char *name, strap_dtype dtype,
                       int64_t step, int64_t values) {
  strap_packet p = packet_at(reader, row);
  CHECK(strcmp(name_of(reader, row), name) == 0, "row %llu is %s", (unsigned long long)row,
        name_of(reader, row));
  CHECK(p.dtype == dtype && p.source_dtype == STRAP_FLOAT32, "row %llu: types %d and %d",
        (unsigned long long)row, p.dtype, p.source_dtype);
  CHECK(p.step == step && p.ndim == 1 && p.shape[0] == values, "row %llu: step %lld",
        (unsigned long long)row, (long long)p.step);
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  capture(path, 0);
  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.rows == 4, "%llu rows", (unsigned long long)info.rows);
  expect_row(reader, 0, "mlp", STRAP_FLOAT16, 0, 7);
  expect_row(reader, 1, "mlp", STRAP_FLOAT16, 1, 4);
  expect_row(reader, 2, "mlp!float32", STRAP_FLOAT32, 1, 4);
  expect_row(reader, 3, "mlp", STRAP_FLOAT16, 2, 4);

  uint16_t *half = (uint16_t *)read_row(reader, 0);
  /* Round to nearest, ties to even: 65519.996 becomes 65504, 6e-8 the smallest subnormal. */
  static const uint16_t expected[] = {0, 0x8000, 0x3e00, 0xfbff, 0x7bff, 0x0001, 0};
  CHECK(memcmp(half, expected, sizeof expected) == 0, "rounding: %04x %04x %04x %04x %04x %04x %04x",
        half[0], half[1], half[2], half[3], half[4], half[5], half[6]);
  free(half);
  half = (uint16_t *)read_row(reader, 1);
  CHECK(half[0] == 0x3c00 && half[1] == 0x7c00 && half[2] == 0xfc00 && half[3] == 0x7c00,
        "too large: %04x %04x %04x %04x", half[0], half[1], half[2], half[3]);
  free(half);
  float *twin = (float *)read_row(reader, 2);
  CHECK(memcmp(twin, large, sizeof large) == 0, "the twin begins with %g", twin[0]);
  free(twin);
  half = (uint16_t *)read_row(reader, 3);
  CHECK(half[1] == 0x7c00 && half[2] == 0xfc00 && isnan(half_value(half[3])), "infinities");
  free(half);
  close_reader(reader);

  capture(path, 1);
  reader = open_reader(path, &info);
  CHECK(info.rows == 3, "%llu rows", (unsigned long long)info.rows);
  expect_row(reader, 1, "mlp", STRAP_FLOAT32, 1, 4);
  float *kept = (float *)read_row(reader, 2);
  CHECK(memcmp(kept, infinite, sizeof infinite) == 0, "kept float32 changed");
  free(kept);
  close_reader(reader);
  puts("values beyond float16 have a float32 packet");
  return 0;
}
