// quantise.c - the loops of quantise.go, which describes codes and scales.

//go:build cgo

/*
 * Both do the same operations in the same order, so their bytes and sums are the same. This excludes
 * fused multiplications, also if the compiler may use fma.
 */
#if defined(__clang__)
#pragma STDC FP_CONTRACT OFF
#elif defined(__GNUC__)
#pragma GCC optimize("-ffp-contract=off")
#endif

#include "kernel.h"

#if defined(__x86_64__)
#include <float.h>
#include <immintrin.h>
#include <string.h>

#define BLOCK 128
#define STEP_UNIT (1u << 20)
#define STEP_MIN 0x0D800000u
#define CODE_EXACT 0x80
#define UPWARD (1 + 12.0078125 / (1 << 24)) /* quantiseUpward */

#define AVX2 __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline))

AVX2 INLINE __m256 absolute(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

/* Adds sixteen lanes, eight in a and eight in b: the upper half to the lower half, again and again. */
AVX2 INLINE float add_lanes(__m256 a, __m256 b) {
  __m256 eight = _mm256_add_ps(a, b);
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Returns an upper bound of the true sum of a block's squares; see atMost in quantise.go. */
static double at_most(float sum, float largest) {
  const double vanished = 0 < largest && largest < 0x1p-55f ? 0x1p-143 : 0;
  return sum * UPWARD + vanished;
}

AVX2 INLINE float largest_lane(__m256 x) {
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

AVX2 INLINE __m256 widen(__m128i h, int bfloat) {
  if (bfloat) return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(h), 16));
  return _mm256_cvtph_ps(h);
}

/* Rounds to a 16-bit float, to nearest, ties to even, and back. */
AVX2 INLINE __m256 narrowed(__m256 x, int bfloat) {
  if (!bfloat) return _mm256_cvtph_ps(_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
  __m256i b = _mm256_castps_si256(x), one = _mm256_set1_epi32(1);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(b, 16), one);
  b = _mm256_add_epi32(_mm256_add_epi32(b, _mm256_set1_epi32(0x7FFF)), odd);
  return _mm256_castsi256_ps(_mm256_and_si256(b, _mm256_set1_epi32((int)0xFFFF0000)));
}

static uint32_t bits_of(float x) {
  uint32_t b;
  memcpy(&b, &x, sizeof b);
  return b;
}

AVX2 static float step_of(float square, float largest) {
  if (largest == 0) return 0;
  float root = _mm_cvtss_f32(_mm_sqrt_ss(_mm_set_ss(square)));
  uint32_t wanted = bits_of(root) + STEP_UNIT / 2;
  uint32_t b = (wanted > STEP_MIN ? wanted : STEP_MIN) & ~(STEP_UNIT - 1);
  float step;
  memcpy(&step, &b, sizeof step);
  return step;
}

/* Returns the lowest byte of each of the 32 integers in v, in order. */
AVX2 INLINE __m256i lowest_bytes(const __m256 *v) {
  __m256i byte = _mm256_set1_epi32(255);
  __m256i a = _mm256_and_si256(_mm256_castps_si256(v[0]), byte);
  __m256i b = _mm256_and_si256(_mm256_castps_si256(v[1]), byte);
  __m256i c = _mm256_and_si256(_mm256_castps_si256(v[2]), byte);
  __m256i d = _mm256_and_si256(_mm256_castps_si256(v[3]), byte);
  __m256i mixed = _mm256_packus_epi16(_mm256_packus_epi32(a, b), _mm256_packus_epi32(c, d));
  return _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
}

AVX2 INLINE int quantise_block(uint8_t *codes, uint8_t *scale, uint8_t *exact, const uint8_t *src,
                               int bfloat, float spread, struct strapk_quantised *q) {
  __m256 x[BLOCK / 8], a = _mm256_setzero_ps(), b = a, largest = a;
  for (int i = 0; i < BLOCK / 8; i += 2) {
    x[i] = widen(_mm_loadu_si128((const __m128i *)(src + 16 * i)), bfloat);
    x[i + 1] = widen(_mm_loadu_si128((const __m128i *)(src + 16 * i + 16)), bfloat);
    a = _mm256_add_ps(a, _mm256_mul_ps(x[i], x[i]));
    b = _mm256_add_ps(b, _mm256_mul_ps(x[i + 1], x[i + 1]));
    largest = _mm256_max_ps(largest, _mm256_max_ps(absolute(x[i]), absolute(x[i + 1])));
  }
  float square = add_lanes(a, b), most = largest_lane(largest);
  if (!(square <= FLT_MAX)) return 0;
  float step = step_of(square * spread, most);
  __m256 steps = _mm256_set1_ps(step), inverse = _mm256_set1_ps(step > 0 ? 1 / step : 0);
  __m256 integer = _mm256_set1_ps(12582912.0f), most_steps = _mm256_set1_ps(127);
  __m256 code_exact = _mm256_castsi256_ps(_mm256_set1_epi32(CODE_EXACT));
  __m256 furthest = _mm256_setzero_ps(), any = furthest;
  a = b = furthest;
  for (int i = 0; i < BLOCK / 8; i += 4) {
    __m256 v[4], e[4];
    for (int k = 0; k < 4; k++) {
      v[k] = _mm256_add_ps(_mm256_mul_ps(x[i + k], inverse), integer);
      __m256 code = _mm256_sub_ps(v[k], integer);
      __m256 far = _mm256_cmp_ps(absolute(code), most_steps, _CMP_GT_OQ);
      __m256 y = narrowed(_mm256_mul_ps(code, steps), bfloat);
      e[k] = _mm256_andnot_ps(far, absolute(_mm256_sub_ps(y, x[i + k])));
      v[k] = _mm256_blendv_ps(v[k], code_exact, far);
      any = _mm256_or_ps(any, far);
      furthest = _mm256_max_ps(furthest, e[k]);
    }
    for (int k = 0; k < 4; k += 2) {
      a = _mm256_add_ps(a, _mm256_mul_ps(e[k], e[k]));
      b = _mm256_add_ps(b, _mm256_mul_ps(e[k + 1], e[k + 1]));
    }
    _mm256_storeu_si256((__m256i *)(codes + 8 * i), lowest_bytes(v));
  }
  if (_mm256_movemask_ps(any)) {
    for (int i = 0; i < BLOCK; i++) {
      if (codes[i] != CODE_EXACT) continue;
      uint16_t h;
      memcpy(&h, src + 2 * i, sizeof h);
      memcpy(exact + 2 * q->exact++, &h, sizeof h);
      double value = _mm256_cvtss_f32(widen(_mm_cvtsi32_si128(h), bfloat));
      q->square_exact += value * value;
    }
  }
  uint16_t high = (uint16_t)(bits_of(step) >> 16);
  memcpy(scale, &high, sizeof high);
  float error = largest_lane(furthest);
  q->square_error += at_most(add_lanes(a, b), error);
  q->square_sum += at_most(square, most);
  if (most > q->largest) q->largest = most;
  if (error > q->max_error) q->max_error = error;
  return 1;
}

AVX2 INLINE int quantise_all(uint8_t *codes, uint8_t *scales, uint8_t *exact, const uint8_t *src,
                             size_t n, int bfloat, double spread, struct strapk_quantised *q) {
  size_t whole = n - n % BLOCK, rest = n % BLOCK;
  for (size_t i = 0; i < whole; i += BLOCK, scales += 2)
    if (!quantise_block(codes + i, scales, exact, src + 2 * i, bfloat, (float)(spread / BLOCK), q))
      return 0;
  if (rest == 0) return 1;
  uint8_t in[2 * BLOCK] = {0}, out[BLOCK];
  memcpy(in, src + 2 * whole, 2 * rest);
  if (!quantise_block(out, scales, exact, in, bfloat, (float)(spread / (double)rest), q)) return 0;
  memcpy(codes + whole, out, rest);
  return 1;
}

AVX2 static int quantise_float16(uint8_t *codes, uint8_t *scales, uint8_t *exact,
                                 const uint8_t *src, size_t n, double spread,
                                 struct strapk_quantised *q) {
  return quantise_all(codes, scales, exact, src, n, 0, spread, q);
}

AVX2 static int quantise_bfloat16(uint8_t *codes, uint8_t *scales, uint8_t *exact,
                                  const uint8_t *src, size_t n, double spread,
                                  struct strapk_quantised *q) {
  return quantise_all(codes, scales, exact, src, n, 1, spread, q);
}

/* Writes the values of eight codes, code * step, as 16-bit floats. */
AVX2 INLINE __m128i restored(const uint8_t *codes, __m256 step, int bfloat) {
  __m256i code = _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)codes));
  __m256 x = _mm256_mul_ps(_mm256_cvtepi32_ps(code), step);
  if (!bfloat) return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT);
  __m256i b = _mm256_srli_epi32(_mm256_castps_si256(narrowed(x, bfloat)), 16);
  return _mm256_castsi256_si128(
      _mm256_permute4x64_epi64(_mm256_packus_epi32(b, b), _MM_SHUFFLE(3, 1, 2, 0)));
}

AVX2 INLINE void restore_block(uint8_t *dst, const uint8_t *codes, const uint8_t *scale,
                               int bfloat) {
  uint32_t b = (uint32_t)scale[0] << 16 | (uint32_t)scale[1] << 24;
  float step;
  memcpy(&step, &b, sizeof step);
  __m256 steps = _mm256_set1_ps(step);
  for (int i = 0; i < BLOCK; i += 8)
    _mm_storeu_si128((__m128i *)(dst + 2 * i), restored(codes + i, steps, bfloat));
}

AVX2 INLINE void restore_all(uint8_t *dst, const uint8_t *codes, const uint8_t *scales, size_t n,
                             int bfloat) {
  size_t whole = n - n % BLOCK, rest = n % BLOCK;
  for (size_t i = 0; i < whole; i += BLOCK, scales += 2)
    restore_block(dst + 2 * i, codes + i, scales, bfloat);
  if (rest == 0) return;
  uint8_t in[BLOCK] = {0}, out[2 * BLOCK];
  memcpy(in, codes + whole, rest);
  restore_block(out, in, scales, bfloat);
  memcpy(dst + 2 * whole, out, 2 * rest);
}

AVX2 static void restore_float16(uint8_t *dst, const uint8_t *codes, const uint8_t *scales,
                                 size_t n) {
  restore_all(dst, codes, scales, n, 0);
}

AVX2 static void restore_bfloat16(uint8_t *dst, const uint8_t *codes, const uint8_t *scales,
                                  size_t n) {
  restore_all(dst, codes, scales, n, 1);
}

void strapk_restore(uint8_t *dst, const uint8_t *codes, const uint8_t *scales, size_t n,
                    int bfloat) {
  (bfloat ? restore_bfloat16 : restore_float16)(dst, codes, scales, n);
}

int strapk_quantises(void) { return strapk_kernels() > 0; /* each kernel needs AVX2 */ }

int strapk_quantise(uint8_t *codes, uint8_t *scales, uint8_t *exact, const uint8_t *src, size_t n,
                    int bfloat, double spread, struct strapk_quantised *q) {
  return (bfloat ? quantise_bfloat16 : quantise_float16)(codes, scales, exact, src, n, spread, q);
}

#else
int strapk_quantises(void) { return 0; }

int strapk_quantise(uint8_t *codes, uint8_t *scales, uint8_t *exact, const uint8_t *src, size_t n,
                    int bfloat, double spread, struct strapk_quantised *q) {
  (void)codes, (void)scales, (void)exact, (void)src, (void)n, (void)bfloat, (void)spread, (void)q;
  return 0;
}

void strapk_restore(uint8_t *dst, const uint8_t *codes, const uint8_t *scales, size_t n,
                    int bfloat) {
  (void)dst, (void)codes, (void)scales, (void)n, (void)bfloat;
}
#endif
