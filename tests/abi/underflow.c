/* A tensor whose float32 values are too small for float16 is counted as underflowed. With an error
 * bound, a packet NAME!float32 with the exact values follows its float16 packet. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

static const float tiny[] = {1e-8f, -2e-8f, 1.5e-8f, 0};
static const float beside[] = {1e-8f, -2e-8f, 1.5e-8f, 1};

static strap_stats_t capture(const char *path, double error_bound, int keep_float32) {
  strap_open_options options = open_options();
  options.error_bound = error_bound;
  options.keep_float32 = keep_float32;
  strap_session session = open_stream(path, &options);
  const int64_t four[] = {4};
  strap_tensor lost = tensor_of(add_layer(session, "lost"), STRAP_FLOAT32, 1, four, tiny);
  strap_tensor held = tensor_of(add_layer(session, "held"), STRAP_FLOAT32, 1, four, beside);
  enqueue(session, &lost);
  enqueue(session, &held);
  EXPECT(STRAP_OK, strap_flush(session, -1, &error));
  strap_stats_t s = stats_of(session);
  close_stream(session);
  CHECK(s.tensors == 2 && s.overflowed == 0, "%llu overflowed", (unsigned long long)s.overflowed);
  return s;
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  strap_stats_t s = capture(path, 0, 0);
  CHECK(s.underflowed == 1 && s.packets == 2, "%llu counted", (unsigned long long)s.underflowed);

  s = capture(path, 0, 1);
  CHECK(s.underflowed == 0 && s.packets == 2, "%llu counted", (unsigned long long)s.underflowed);

  s = capture(path, 1e-4, 0);
  CHECK(s.underflowed == 1 && s.packets == 3, "%llu counted", (unsigned long long)s.underflowed);
  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(strcmp(name_of(reader, 1), "lost!float32") == 0, "row 1 is %s", name_of(reader, 1));
  float *twin = (float *)read_row(reader, 1);
  CHECK(memcmp(twin, tiny, sizeof tiny) == 0, "the twin begins with %g", twin[0]);
  free(twin);
  close_reader(reader);
  puts("values too small for float16 are told");
  return 0;
}
