// gather.c - copies strided tensors to contiguous memory.

//go:build cgo

#include "kernel.h"

#include <string.h>

#define LINE 64 /* bytes of a cache line */

/* Calls action(size) with item as a constant. So the memcpy of one element becomes a load and a
 * store. */
#define BY_ITEM(item, action) \
  switch (item) {             \
    case 1: action(1); break; \
    case 2: action(2); break; \
    case 4: action(4); break; \
    case 8: action(8); break; \
    default: action(16);      \
  }

/* Copies n elements along one dimension. */
static void copy_run(char *dst, const char *src, size_t item, int64_t stride, int64_t n) {
  if (stride == 1) {
    memcpy(dst, src, (size_t)n * item);
    return;
  }
#define COPY(size) \
  for (int64_t i = 0; i < n; i++) memcpy(dst + i * (size), src + i * stride * (size), (size))
  BY_ITEM(item, COPY)
#undef COPY
}

/* Transposes a tile. A side is at most one cache line. Columns are contiguous in src, column_bytes
 * apart. Rows are contiguous in dst, row_bytes apart. Each cache line of src and dst is touched once.
 * This matters if the distances are powers of two, because then the lines compete for the same places
 * of the cache. */
static void copy_tile(char *dst, int64_t row_bytes, const char *src, int64_t column_bytes,
                      size_t item, int64_t rows, int64_t columns) {
  char tile[LINE * LINE];
  for (int64_t c = 0; c < columns; c++)
    memcpy(tile + c * LINE, src + c * column_bytes, (size_t)rows * item);
#define TRANSPOSE(size)                 \
  for (int64_t r = 0; r < rows; r++)    \
    for (int64_t c = 0; c < columns; c++) \
    memcpy(dst + r * row_bytes + c * (size), tile + c * LINE + r * (size), (size))
  BY_ITEM(item, TRANSPOSE)
#undef TRANSPOSE
}

/* Copies whole rows of a transposed matrix: the elements of a column are contiguous in src. */
static void copy_transposed(char *dst, const char *src, size_t item, int64_t stride, int64_t rows,
                            int64_t columns) {
  const int64_t size = (int64_t)item, side = LINE / size;
  for (int64_t r = 0; r < rows; r += side) {
    for (int64_t c = 0; c < columns; c += side) {
      copy_tile(dst + (r * columns + c) * size, columns * size, src + (r + c * stride) * size,
                stride * size, item, rows - r < side ? rows - r : side,
                columns - c < side ? columns - c : side);
    }
  }
}

void strapk_gather(void *dst, const void *src, size_t item, int ndim, const int64_t *shape,
                   const int64_t *strides, int64_t start, int64_t count) {
  const int last = ndim - 1;
  const int transposed = last > 0 && strides[last - 1] == 1 && strides[last] != 0 && strides[last] != 1;
  int64_t at[64];
  int64_t offset = 0;
  for (int d = last; d >= 0; d--) {
    at[d] = start % shape[d];
    start /= shape[d];
    offset += at[d] * strides[d];
  }
  char *out = dst;
  while (count > 0) {
    const char *from = (const char *)src + offset * (int64_t)item;
    int64_t done, rows = 0;
    if (transposed && at[last] == 0) {
      rows = shape[last - 1] - at[last - 1];
      if (rows > count / shape[last]) rows = count / shape[last];
    }
    if (rows > 1) {
      done = rows * shape[last];
      copy_transposed(out, from, item, strides[last], rows, shape[last]);
      at[last - 1] += rows - 1;
      offset += rows - 1;
    } else {
      done = shape[last] - at[last];
      if (done > count) done = count;
      copy_run(out, from, item, strides[last], done);
    }
    out += (size_t)done * item;
    count -= done;
    /* Go to the first element of the next row. */
    offset -= at[last] * strides[last];
    at[last] = 0;
    for (int d = last - 1; d >= 0; d--) {
      offset += strides[d];
      if (++at[d] < shape[d]) break;
      offset -= shape[d] * strides[d];
      at[d] = 0;
    }
  }
}
