/* The caller may overwrite its buffer as soon as strap_enqueue returns, also if the tensor is
 * larger than the arena. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

enum { TENSORS = 300, LARGE = 3 << 20 }; /* LARGE values take 6 MiB; the arena has 1 MiB */

static int64_t length(int i) { return i % 50 == 49 ? LARGE : 1 + i * 37 % 5000; }

static uint16_t value(int i, int64_t at) { return (uint16_t)(i * 257 + at * 3); }

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  strap_open_options options = open_options();
  options.max_memory_bytes = 1 << 20;
  strap_session session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "reused");
  uint16_t *buffer = (uint16_t *)malloc(LARGE * sizeof *buffer);
  CHECK(buffer != NULL, "no memory");

  for (int i = 0; i < TENSORS; i++) {
    int64_t n = length(i);
    for (int64_t at = 0; at < n; at++) buffer[at] = value(i, at);
    strap_tensor t = tensor_of(layer, STRAP_UINT16, 1, &n, buffer);
    t.step = i;
    enqueue(session, &t);
    memset(buffer, 0xee, (size_t)n * sizeof *buffer);
  }
  free(buffer);
  strap_stats_t s = stats_of(session);
  CHECK(s.memory_peak <= options.max_memory_bytes, "%llu bytes of staging memory",
        (unsigned long long)s.memory_peak);
  close_stream(session);

  strap_reader reader = open_reader(path, NULL);
  for (int i = 0; i < TENSORS; i++) {
    strap_packet p = packet_at(reader, (uint64_t)i);
    CHECK(p.decoded_bytes == (uint64_t)length(i) * 2, "tensor %d has %llu bytes", i,
          (unsigned long long)p.decoded_bytes);
    uint16_t *read = (uint16_t *)read_row(reader, (uint64_t)i);
    for (int64_t at = 0; at < length(i); at++)
      CHECK(read[at] == value(i, at), "value %lld of tensor %d is %u, not %u", (long long)at, i,
            read[at], value(i, at));
    free(read);
  }
  close_reader(reader);
  printf("%d tensors were copied before their buffer was overwritten\n", TENSORS);
  return 0;
}
