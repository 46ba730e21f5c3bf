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

/* How many conversion kernels this processor can run; 0 is the fastest. */
int strapk_kernels(void);

/* The instruction set of a kernel; a static string. */
const char *strapk_kernel_name(int kernel);

/* Converts n floats and adds to *stats; dst and src do not overlap. */
void strapk_float32_to_float16(int kernel, uint16_t *dst, const float *src, size_t n,
                               struct strapk_stats *stats);

/* Copies the elements [start, start + count), row-major, of a strided tensor.
 * 1 <= ndim <= 64, every length >= 1, item a power of two up to 16; strides are
 * in elements. */
void strapk_gather(void *dst, const void *src, size_t item, int ndim, const int64_t *shape,
                   const int64_t *strides, int64_t start, int64_t count);

#pragma GCC visibility pop

#endif
