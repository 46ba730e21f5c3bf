/*
 * Doubles an array with vectors of 16, 32 and 64 bytes, and with a loop that a compiler may
 * vectorise. It makes no calls of the runtime; it is recorded through the environment variable
 * STRAP_ACCESS. It prints the addresses of its arrays.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { N = 4096 };

typedef float v16 __attribute__((vector_size(16)));
typedef float v32 __attribute__((vector_size(32)));
typedef float v64 __attribute__((vector_size(64)));

#define SCALE(type, name)                                                        \
  __attribute__((noinline)) static void name(type *out, const type *in) {        \
    for (size_t i = 0; i < N * sizeof(float) / sizeof(type); i++) out[i] = in[i] + in[i]; \
  }
SCALE(float, scale_loop)
SCALE(v16, scale16)
SCALE(v32, scale32)
SCALE(v64, scale64)

#if defined(__AVX__)
__attribute__((noinline)) static void scale_avx(float *out, const float *in) {
  for (size_t i = 0; i < N; i += 8) {
    __m256 a = _mm256_loadu_ps(in + i);
    _mm256_storeu_ps(out + i, _mm256_add_ps(a, a));
  }
}
#endif

static void *array(const char *what) {
  float *p = aligned_alloc(64, N * sizeof(float));
  for (int i = 0; i < N; i++) p[i] = (float)i;
  printf("%s %p\n", what, (void *)p);
  return p;
}

int main(void) {
  float *in = array("in");
  scale_loop(array("loop"), in);
  scale16(array("v16"), (v16 *)in);
  scale32(array("v32"), (v32 *)in);
  scale64(array("v64"), (v64 *)in);
#if defined(__AVX__)
  scale_avx(array("avx"), in);
#endif
  return 0;
}
