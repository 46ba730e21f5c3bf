/*
 * Captures the activations of a small model and reads them back.
 *
 *   ./capture [FILE]        FILE: default capture.stream
 */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strap.h>

enum { LAYERS = 3, STEPS = 4, TOKENS = 2, WIDTH = 256 };

static const char *const layer_names[LAYERS] = {"embed", "mlp.up", "mlp.down"};

/* Returns 1 if the status is no failure. Otherwise prints the error and returns 0. */
static int succeeded(strap_status status, const char *what, const strap_error *error) {
  if (status >= 0) return 1;
  fprintf(stderr, "%s: %s (status %d, errno %d)\n", what, error->message, error->code,
          error->sys_errno);
  return 0;
}

/* One layer of the model: reads and overwrites the activations in place. */
static void forward(int layer, int step, float activations[TOKENS][WIDTH]) {
  for (int t = 0; t < TOKENS; t++)
    for (int i = 0; i < WIDTH; i++) {
      float input = layer == 0 ? (float)(step + t) : activations[t][i];
      activations[t][i] = sinf(input * (float)(layer + 1) + (float)i * 0.01f);
    }
}

/* Captures one tensor; returns 0 on failure. strap_enqueue copies the tensor
 * before it returns, so the next layer may overwrite it. Each call waits at most
 * 1 s. So a program can handle a signal or a slow disk between two calls; this
 * one prints that it waits. */
static int capture_tensor(strap_session session, strap_tensor *tensor) {
  strap_error error;
  strap_status status;
  while ((status = strap_enqueue(session, tensor, 1000, &error)) == STRAP_ERR_TIMEOUT)
    fprintf(stderr, "waiting for the disk\n");
  return succeeded(status, "capturing a tensor", &error);
}

static int run_model(strap_session session) {
  strap_error error;
  uint32_t ids[LAYERS];
  for (int l = 0; l < LAYERS; l++)
    if (!succeeded(strap_layer(session, "demo", layer_names[l], strlen(layer_names[l]), NULL,
                               &ids[l], &error),
                   layer_names[l], &error))
      return 0;

  static float activations[TOKENS][WIDTH];
  const int64_t shape[] = {TOKENS, WIDTH};
  for (int step = 0; step < STEPS; step++)
    for (int l = 0; l < LAYERS; l++) {
      forward(l, step, activations);
      strap_tensor tensor = {
          .struct_size = sizeof tensor,
          .layer = ids[l],
          .dtype = STRAP_FLOAT32,
          .ndim = 2,
          .shape = shape,
          .data = activations,
          .step = step,
          .token = -1, /* not known here */
      };
      if (!capture_tensor(session, &tensor)) return 0;
    }
  return 1;
}

static int capture(const char *path) {
  strap_error error;
  strap_open_options options = {
      .struct_size = sizeof options,
      .codec = STRAP_CODEC_ZSTD,
      .workers = 2,
      .max_memory_bytes = 64 << 20,
      .on_full = STRAP_ON_FULL_BLOCK,
      .mode = STRAP_MODE_CREATE,
  };
  strap_session session;
  if (!succeeded(strap_open(path, &options, &session, &error), path, &error)) return 0;

  int ok = run_model(session);
  strap_stats_t stats = {.struct_size = sizeof stats};
  if (ok) ok = succeeded(strap_checkpoint(session, -1, NULL, &error), "checkpoint", &error) &&
               succeeded(strap_stats(session, &stats, &error), "stats", &error);
  /* strap_close also reports an earlier failed write, so check it in any case. */
  ok = succeeded(strap_close(session, -1, &error), "close", &error) && ok;
  if (ok)
    printf("captured %" PRIu64 " tensors, %" PRIu64 " bytes, in %" PRIu64 " bytes\n\n",
           stats.tensors, stats.raw_bytes, stats.file_bytes);
  return ok;
}

/* The value of an IEEE 754 binary16. The stream stores float32 in this format. */
static float half_value(uint16_t h) {
  int exponent = h >> 10 & 31, fraction = h & 1023;
  float sign = h >> 15 ? -1.0f : 1.0f;
  if (exponent == 31) return fraction ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * ldexpf((float)fraction, -24);
  return sign * ldexpf((float)(fraction + 1024), exponent - 25);
}

/* Prints the table's row for a packet: its step, layer, shape, stored bytes, mean
 * and norm. Returns 0 on failure. */
static int print_packet(strap_reader reader, const strap_packet *packet) {
  strap_error error;
  char name[64];
  if (!succeeded(strap_reader_name(reader, packet->row, name, sizeof name, &error), "name", &error))
    return 0;
  if (!packet->present) {
    printf("%4" PRId64 "  %-10s not captured\n", packet->step, name);
    return 1;
  }
  uint16_t *halves = malloc(packet->decoded_bytes + 1);
  if (halves == NULL) {
    fprintf(stderr, "no memory for %" PRIu64 " bytes\n", packet->decoded_bytes);
    return 0;
  }
  int ok = succeeded(strap_reader_read(reader, packet->row, halves, packet->decoded_bytes, &error),
                     name, &error);
  if (ok) {
    uint64_t n = packet->decoded_bytes / sizeof *halves;
    double sum = 0, squares = 0;
    for (uint64_t i = 0; i < n; i++) {
      double v = half_value(halves[i]);
      sum += v;
      squares += v * v;
    }
    printf("%4" PRId64 "  %-10s %3" PRId64 " x %-4" PRId64 " %8" PRIu64 " %9.4f %9.4f\n",
           packet->step, name, packet->shape[0], packet->shape[1], packet->payload_bytes,
           sum / (double)n, sqrt(squares));
  }
  free(halves);
  return ok;
}

static int print_table(const char *path) {
  strap_error error;
  strap_reader reader;
  strap_reader_info info = {.struct_size = sizeof info};
  if (!succeeded(strap_reader_open(path, NULL, &reader, &info, &error), path, &error)) return 0;
  if (info.problem[0] != 0) printf("note: %s\n", info.problem);

  printf("step  layer      shape          bytes      mean      norm\n");
  strap_packet packet = {.struct_size = sizeof packet};
  strap_status status;
  int ok = 1;
  while (ok && (status = strap_reader_next(reader, &packet, &error)) != STRAP_END)
    ok = succeeded(status, "next packet", &error) && print_packet(reader, &packet);
  return succeeded(strap_reader_close(reader, &error), "close", &error) && ok;
}

int main(int argc, char **argv) {
  const char *path = argc > 1 ? argv[1] : "capture.stream";
  if (strap_abi_version() != STRAP_ABI_VERSION) {
    fprintf(stderr, "libstrap %s has interface %d, this program needs %d\n", strap_version(),
            strap_abi_version(), STRAP_ABI_VERSION);
    return 1;
  }
  return capture(path) && print_table(path) ? 0 : 1;
}
