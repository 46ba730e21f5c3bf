/* Tensors with any strides are stored in row-major order: transposed, reversed, broadcast, scalar
 * and empty ones, with every element size. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

typedef struct view {
  const char *name;
  int32_t ndim;
  int64_t shape[STRAP_MAX_DIMS], strides[STRAP_MAX_DIMS];
  int64_t first;  /* the buffer's element at which the view begins */
  int contiguous; /* whether to pass no strides */
} view;

static const view views[] = {
    {"scalar", 0, {0}, {0}, 5, 0},
    {"scalar without strides", 0, {0}, {0}, 7, 1},
    {"one", 1, {1}, {1}, 0, 0},
    {"row", 1, {100}, {1}, 3, 1},
    {"every third", 1, {100}, {3}, 0, 0},
    {"reversed", 1, {100}, {-1}, 99, 0},
    {"repeated", 1, {100}, {0}, 42, 0},
    {"matrix", 2, {20, 30}, {30, 1}, 0, 1},
    {"transposed", 2, {30, 20}, {1, 30}, 0, 0},
    {"part of each row", 2, {20, 7}, {30, 1}, 11, 0},
    {"both reversed", 2, {20, 30}, {-30, -1}, 599, 0},
    {"broadcast rows", 2, {20, 30}, {0, 1}, 100, 0},
    {"broadcast columns", 2, {20, 30}, {1, 0}, 100, 0},
    {"permuted", 3, {4, 5, 6}, {1, 24, 4}, 0, 0},
    {"channels last", 4, {2, 3, 5, 7}, {105, 1, 21, 3}, 0, 0},
    {"length one with an odd stride", 3, {5, 1, 6}, {6, 12345, 1}, 0, 0},
    {"overlapping windows", 2, {50, 9}, {1, 1}, 0, 0},
    {"empty", 1, {0}, {1}, 0, 1},
    {"empty matrix", 3, {4, 0, 6}, {0, 9, 1}, 0, 0},
    {"empty without strides", 2, {0, 1000000}, {0}, 0, 1},
    /* 64 dimensions; view_of fills in the shape and strides */
    {"deep", STRAP_MAX_DIMS, {1}, {1}, 0, 0},
};
enum { VIEWS = sizeof views / sizeof *views, ELEMENTS = 1000 };

static const struct {
  strap_dtype dtype;
  size_t size;
} types[] = {
    {STRAP_FLOAT8_E4M3FN, 1}, {STRAP_FLOAT8_E5M2, 1}, {STRAP_FLOAT8_E4M3FNUZ, 1},
    {STRAP_FLOAT8_E5M2FNUZ, 1}, {STRAP_FLOAT8_E8M0FNU, 1}, {STRAP_INT8, 1}, {STRAP_UINT8, 1},
    {STRAP_BOOL, 1}, {STRAP_FLOAT16, 2}, {STRAP_BFLOAT16, 2}, {STRAP_INT16, 2},
    {STRAP_UINT16, 2}, {STRAP_INT32, 4}, {STRAP_UINT32, 4}, {STRAP_COMPLEX32, 4},
    {STRAP_FLOAT64, 8}, {STRAP_INT64, 8}, {STRAP_UINT64, 8}, {STRAP_COMPLEX64, 8},
    {STRAP_COMPLEX128, 16},
};
enum { TYPES = sizeof types / sizeof *types };

static view view_of(int i) {
  view v = views[i];
  if (v.ndim == STRAP_MAX_DIMS) {
    for (int d = 0; d < v.ndim; d++) {
      v.shape[d] = d % 8 == 0 ? 2 : 1;
      v.strides[d] = 1 << d / 8;
    }
  }
  return v;
}

static int64_t elements(const view *v) {
  int64_t n = 1;
  for (int d = 0; d < v->ndim; d++) n *= v->shape[d];
  return n;
}

/* Returns the position in the buffer of element N in row-major order. */
static int64_t place(const view *v, int64_t n) {
  int64_t at = v->first;
  for (int d = v->ndim; d-- > 0; n /= v->shape[d]) at += n % v->shape[d] * v->strides[d];
  return at;
}

/* Sets the row-major strides, for the views that pass no strides. */
static void fill_strides(view *v) {
  int64_t stride = 1;
  for (int d = v->ndim; d-- > 0; stride *= v->shape[d]) v->strides[d] = stride;
}

static void capture(strap_session session, const unsigned char *buffer) {
  uint32_t layer = add_layer(session, "view");
  for (int i = 0; i < VIEWS; i++) {
    view v = view_of(i);
    for (int k = 0; k < TYPES; k++) {
      strap_tensor t = tensor_of(layer, types[k].dtype, v.ndim, v.ndim > 0 ? v.shape : NULL,
                                 buffer + (size_t)v.first * types[k].size);
      if (!v.contiguous) t.strides = v.strides;
      if (elements(&v) == 0) t.data = NULL;
      t.step = i;
      enqueue(session, &t);
    }
  }
}

static void read_back(strap_reader reader, const unsigned char *buffer) {
  uint64_t row = 0;
  for (int i = 0; i < VIEWS; i++) {
    view v = view_of(i);
    if (v.contiguous) fill_strides(&v);
    for (int k = 0; k < TYPES; k++, row++) {
      size_t size = types[k].size;
      strap_packet p = packet_at(reader, row);
      CHECK(p.dtype == types[k].dtype && p.ndim == v.ndim && p.step == i,
            "%s, type %d: type %d and %d dimensions", v.name, types[k].dtype, p.dtype, p.ndim);
      CHECK(memcmp(p.shape, v.shape, (size_t)v.ndim * sizeof *v.shape) == 0, "%s: shape", v.name);
      CHECK(p.decoded_bytes == (uint64_t)elements(&v) * size, "%s, type %d: %llu bytes", v.name,
            types[k].dtype, (unsigned long long)p.decoded_bytes);
      unsigned char *read = (unsigned char *)read_row(reader, row);
      for (int64_t n = 0; n < elements(&v); n++)
        CHECK(memcmp(read + (size_t)n * size, buffer + (size_t)place(&v, n) * size, size) == 0,
              "%s, type %d: element %lld differs", v.name, types[k].dtype, (long long)n);
      free(read);
    }
  }
}

/* float32 is captured separately, because its conversion to float16 has its own code paths. */
static void capture_floats(strap_session session, const float *values) {
  uint32_t layer = add_layer(session, "view");
  for (int i = 0; i < VIEWS; i++) {
    view v = view_of(i);
    strap_tensor t = tensor_of(layer, STRAP_FLOAT32, v.ndim, v.shape, values + v.first);
    if (!v.contiguous) t.strides = v.strides;
    t.step = i;
    enqueue(session, &t);
  }
}

static void read_floats(strap_reader reader, const float *values, int kept) {
  for (int i = 0; i < VIEWS; i++) {
    view v = view_of(i);
    if (v.contiguous) fill_strides(&v);
    void *read = read_row(reader, (uint64_t)i);
    for (int64_t n = 0; n < elements(&v); n++) {
      float got = kept ? ((float *)read)[n] : half_value(((uint16_t *)read)[n]);
      CHECK(got == values[place(&v, n)], "%s: element %lld is %g, not %g", v.name, (long long)n,
            got, values[place(&v, n)]);
    }
    free(read);
  }
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  static unsigned char buffer[ELEMENTS * 16];
  static float values[ELEMENTS];
  for (size_t i = 0; i < sizeof buffer; i++) buffer[i] = (unsigned char)(i * 167 + i / 256 * 13);
  for (int i = 0; i < ELEMENTS; i++) values[i] = (float)(i - 500) / 4;

  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  capture(session, buffer);
  close_stream(session);
  strap_reader reader = open_reader(path, NULL);
  read_back(reader, buffer);
  close_reader(reader);

  for (options.keep_float32 = 0; options.keep_float32 <= 1; options.keep_float32++) {
    session = open_stream(path, &options);
    capture_floats(session, values);
    close_stream(session);
    reader = open_reader(path, NULL);
    read_floats(reader, values, options.keep_float32);
    close_reader(reader);
  }
  printf("%d views of %d types are stored in row-major order\n", VIEWS, TYPES + 1);
  return 0;
}
