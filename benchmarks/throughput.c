/*
 * Captures the tensors of a file again and again, as fast as libstrap takes them.
 *
 *   throughput TENSORS LENGTHS STREAM codec error_bound bytes memory workers
 *
 * TENSORS is a file of float32 values. LENGTHS is a file of int64: the number of values of each
 * tensor. Both are read into memory first. It captures at least `bytes` bytes, and prints one JSON
 * object: the captured bytes; the seconds until the last tensor was taken, until the stream was
 * closed and until it was durable; and counters of libstrap.
 */
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "strap.h"

static void fail(const char *what, const char *why) {
  fprintf(stderr, "%s: %s\n", what, why);
  exit(1);
}

static void *read_file(const char *path, size_t *size) {
  struct stat told;
  FILE *file = fopen(path, "rb");
  if (file == NULL || fstat(fileno(file), &told) != 0) fail(path, "cannot be opened");
  char *data = malloc((size_t)told.st_size);
  if (data == NULL || fread(data, 1, (size_t)told.st_size, file) != (size_t)told.st_size)
    fail(path, "cannot be read");
  fclose(file);
  *size = (size_t)told.st_size;
  return data;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static void make_durable(const char *path) {
  int file = open(path, O_RDONLY);
  if (file < 0 || fsync(file) != 0) fail(path, "cannot be synced");
  close(file);
}

int main(int argc, char **argv) {
  if (argc != 9) fail(argv[0], "TENSORS LENGTHS STREAM codec error_bound bytes memory workers");
  strap_error error;
  size_t size, lengths_size;
  const float *values = read_file(argv[1], &size);
  const int64_t *lengths = read_file(argv[2], &lengths_size);
  const size_t count = lengths_size / sizeof *lengths;
  const uint64_t wanted = strtoull(argv[6], NULL, 10);

  strap_open_options options;
  memset(&options, 0, sizeof options);
  options.struct_size = sizeof options;
  options.codec = atoi(argv[4]);
#ifdef HAVE_ERROR_BOUND
  options.error_bound = atof(argv[5]);
#else
  if (atof(argv[5]) != 0) fail("error_bound", "this library has none");
#endif
  options.max_memory_bytes = strtoull(argv[7], NULL, 10);
  options.workers = atoi(argv[8]);

  uint64_t handed = 0;
  const double began = now();
  strap_session session;
  if (strap_open(argv[3], &options, &session, &error)) fail("strap_open", error.message);
  uint32_t *layers = malloc(count * sizeof *layers);
  if (layers == NULL) fail("layers", "no memory");
  for (size_t i = 0; i < count; i++) {
    char name[32];
    const int length = snprintf(name, sizeof name, "tensor.%zu", i);
    if (strap_layer(session, NULL, name, (size_t)length, NULL, &layers[i], &error))
      fail("strap_layer", error.message);
  }
  for (int64_t step = 0; handed < wanted; step++) {
    const float *at = values;
    for (size_t i = 0; i < count; at += lengths[i], i++) {
      strap_tensor tensor;
      memset(&tensor, 0, sizeof tensor);
      tensor.struct_size = sizeof tensor;
      tensor.layer = layers[i];
      tensor.dtype = STRAP_FLOAT32;
      tensor.ndim = 1;
      tensor.shape = &lengths[i];
      tensor.data = at;
      tensor.step = step;
      tensor.token = -1;
      if (strap_enqueue(session, &tensor, -1, &error)) fail("strap_enqueue", error.message);
      handed += (uint64_t)lengths[i] * sizeof *values;
    }
  }
  const double taken = now();
  strap_stats_t stats;
  memset(&stats, 0, sizeof stats);
  stats.struct_size = sizeof stats;
  if (strap_flush(session, -1, &error)) fail("strap_flush", error.message);
  if (strap_stats(session, &stats, &error)) fail("strap_stats", error.message);
  if (strap_close(session, -1, &error)) fail("strap_close", error.message);
  const double closed = now();
  make_durable(argv[3]);
  const double durable = now();
  printf("{\"bytes\": %" PRIu64 ", \"taken\": %.6f, \"closed\": %.6f, \"durable\": %.6f, "
         "\"stored\": %" PRIu64 ", \"mse\": %g, \"normalized_mse\": %g, \"stall\": %.6f}\n",
         handed, taken - began, closed - began, durable - began, stats.stored_bytes,
         stats.converted ? stats.square_error / (double)stats.converted : 0,
         stats.square_sum > 0 ? stats.square_error / stats.square_sum : 0,
         (double)stats.stall_ns / 1e9);
  return 0;
}
