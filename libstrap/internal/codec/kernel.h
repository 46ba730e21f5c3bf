/* kernel.h - the loops of package codec that are worth SIMD. */
#ifndef STRAPK_H
#define STRAPK_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

struct strapk_stats {
  int64_t count, overflow;
  double square_error, square_sum, max_error;
};

/* Converts n floats; adds to *stats. Gives 0, having done nothing, where this
 * processor has no instructions for it. */
int strapk_float32_to_float16(uint16_t *dst, const float *src, size_t n,
                              struct strapk_stats *stats);

/* Copies the elements [start, start + count), row-major, of a strided tensor.
 * ndim >= 1, every length >= 1; strides are in elements. */
void strapk_gather(void *dst, const void *src, size_t item, int ndim, const int64_t *shape,
                   const int64_t *strides, int64_t start, int64_t count);

#pragma GCC visibility pop

#endif
