/*
 * Helpers of the ABI programs. A failed check prints its place and message, and ends the
 * program with status 1. A program that passes prints one line.
 */
#ifndef STRAP_TESTS_CHECK_H
#define STRAP_TESTS_CHECK_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "strap.h"

#ifdef __cplusplus
#define CHECK_THREAD_LOCAL thread_local
#else
#define CHECK_THREAD_LOCAL _Thread_local
#endif

/* The error struct that all calls of a program fill. */
static CHECK_THREAD_LOCAL strap_error error;

/* CHECK uses _Exit because other threads may be inside the library, and because a leak report
 * would hide the message. */
#define CHECK(condition, ...)                                           \
  do {                                                                  \
    if (!(condition)) {                                                 \
      fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);   \
      fprintf(stderr, __VA_ARGS__);                                     \
      fputc('\n', stderr);                                              \
      _Exit(1);                                                         \
    }                                                                   \
  } while (0)

/* Checks the status of a call that fills `error`, and that `error` agrees with the status. */
#define EXPECT(want, call)                                                                  \
  do {                                                                                      \
    memset(&error, 0x5a, sizeof error);                                                     \
    strap_status status_ = (call);                                                          \
    error.message[sizeof error.message - 1] = 0;                                            \
    CHECK(status_ == (want), "%s gave %d, not %d: %s", #call, status_, (int)(want),         \
          status_ < 0 ? error.message : "");                                                \
    CHECK(error.code == (status_ < 0 ? status_ : 0), "%s gave %d and reported %d", #call,   \
          status_, error.code);                                                             \
    CHECK((error.message[0] != 0) == (status_ < 0), "%s gave %d with the message \"%s\"",   \
          #call, status_, error.message);                                                   \
  } while (0)

static inline strap_open_options open_options(void) {
  strap_open_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.codec = STRAP_CODEC_NONE;
  o.workers = 2;
  o.max_memory_bytes = 16 << 20;
  return o;
}

static inline strap_session open_stream(const char *path, const strap_open_options *options) {
  strap_session session = 0;
  EXPECT(STRAP_OK, strap_open(path, options, &session, &error));
  CHECK(session != 0, "strap_open gave no handle");
  return session;
}

static inline uint32_t add_layer(strap_session session, const char *name) {
  uint32_t layer;
  EXPECT(STRAP_OK, strap_layer(session, NULL, name, strlen(name), NULL, &layer, &error));
  return layer;
}

/* Returns a contiguous tensor of step 0 and no token. */
static inline strap_tensor tensor_of(uint32_t layer, strap_dtype dtype, int32_t ndim,
                                     const int64_t *shape, const void *data) {
  strap_tensor t;
  memset(&t, 0, sizeof t);
  t.struct_size = sizeof t;
  t.layer = layer;
  t.dtype = dtype;
  t.ndim = ndim;
  t.shape = shape;
  t.data = data;
  t.token = -1;
  return t;
}

static inline void enqueue(strap_session session, strap_tensor *tensor) {
  EXPECT(STRAP_OK, strap_enqueue(session, tensor, -1, &error));
}

static inline strap_stats_t stats_of(strap_session session) {
  strap_stats_t s;
  memset(&s, 0, sizeof s);
  s.struct_size = sizeof s;
  EXPECT(STRAP_OK, strap_stats(session, &s, &error));
  return s;
}

static inline void close_stream(strap_session session) {
  EXPECT(STRAP_OK, strap_close(session, -1, &error));
}

static inline strap_reader open_reader(const char *path, strap_reader_info *info) {
  strap_reader reader = 0;
  strap_reader_info ignored;
  if (info == NULL) info = &ignored;
  memset(info, 0, sizeof *info);
  info->struct_size = sizeof *info;
  EXPECT(STRAP_OK, strap_reader_open(path, NULL, &reader, info, &error));
  CHECK(reader != 0, "strap_reader_open gave no handle");
  return reader;
}

static inline void close_reader(strap_reader reader) {
  EXPECT(STRAP_OK, strap_reader_close(reader, &error));
}

static inline strap_packet packet_at(strap_reader reader, uint64_t row) {
  strap_packet p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  EXPECT(STRAP_OK, strap_reader_at(reader, row, &p, &error));
  return p;
}

/* Returns the elements of a row; the caller frees them. */
static inline void *read_row(strap_reader reader, uint64_t row) {
  size_t size = (size_t)packet_at(reader, row).decoded_bytes;
  void *data = malloc(size + 1);
  CHECK(data != NULL, "no memory for %zu bytes", size);
  EXPECT(STRAP_OK, strap_reader_read(reader, row, data, size, &error));
  return data;
}

/* Returns the name of a row, valid until the next call in this thread. */
static inline const char *name_of(strap_reader reader, uint64_t row) {
  static CHECK_THREAD_LOCAL char name[65536];
  EXPECT(STRAP_OK, strap_reader_name(reader, row, name, sizeof name, &error));
  return name;
}

/* Checks that two files have the same bytes. */
static inline void same_file(const char *a, const char *b) {
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

/* Converts an IEEE 754 binary16 to float32. */
static inline float half_value(uint16_t h) {
  uint32_t sign = (uint32_t)(h >> 15) << 31, exponent = h >> 10 & 31, fraction = h & 1023;
  uint32_t bits;
  float f;
  if (exponent == 31) {
    bits = sign | 0x7f800000 | fraction << 13;
  } else if (exponent != 0) {
    bits = sign | (exponent + 112) << 23 | fraction << 13;
  } else { /* zero or subnormal: fraction times 2^-24 */
    f = (float)fraction / 16777216.0f;
    return sign ? -f : f;
  }
  memcpy(&f, &bits, sizeof f);
  return f;
}

static inline double seconds(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Returns the first argument: the path of the stream that the program may write. */
static inline const char *stream_path(int argc, char **argv) {
  CHECK(argc >= 2, "usage: %s STREAM", argv[0]);
  return argv[1];
}

#endif /* STRAP_TESTS_CHECK_H */
