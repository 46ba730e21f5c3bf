//go:build cgo

/*
 * kernel.c - float32 to float16, and rounding to fewer mantissa bits, with the error
 * they make.
 *
 * The sums run in float lanes over blocks of BLOCK values and in double beyond,
 * which keeps them to about 1e-6 relative.
 *
 * A kernel assumes that every value stays finite. Where one does not, its error
 * is infinite or NaN and so is the block's sum of squared errors: then, and only
 * then, the block's sums are taken again with the other values masked out. That
 * keeps the usual loop at the speed of memory.
 */
#include "kernel.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define BLOCK 4096
#define STEP 32 /* a kernel's n is a multiple of it */
#define BFLOAT16 0x7F80 /* the mask of its exponent */

struct sums {
  int64_t finite, overflow;
  float square_error, square_sum, max_error;
};

struct kernel {
  const char *name;
  /* Converts and rounds, and sums up, under the assumption that all values stay finite. */
  void (*convert)(uint16_t *dst, const float *src, size_t n,
                  const struct strapk_rounding *rounding, struct sums *sums);
  /* Sums up those that do, and counts them. */
  void (*measure)(const float *src, size_t n, struct sums *sums);
  /* Rounds words, likewise. */
  void (*round)(uint16_t *dst, const uint16_t *src, size_t n,
                const struct strapk_rounding *rounding, struct sums *sums);
};

#define INLINE static inline __attribute__((always_inline))

static int runs_wide;

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define ROUND (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define AVX512 __attribute__((target(STRAPK_AVX512F ",popcnt")))
#define AVX2 __attribute__((target("avx2,f16c,fma,popcnt")))

/* nearest_...: words rounded to nearest, ties to even; see round_carefully for those
 * that are not finite, or do not stay so. drop > 0. */
AVX512 INLINE __m256i nearest_256(__m256i w, int drop) {
  const __m256i last = _mm256_and_si256(_mm256_srli_epi16(w, drop), _mm256_set1_epi16(1));
  const __m256i below_half = _mm256_set1_epi16((short)((1 << drop) / 2 - 1));
  const __m256i kept = _mm256_set1_epi16((short)(0xFFFFu << drop));
  return _mm256_and_si256(_mm256_add_epi16(_mm256_add_epi16(w, below_half), last), kept);
}

AVX2 INLINE __m128i nearest_128(__m128i w, int drop) {
  const __m128i last = _mm_and_si128(_mm_srli_epi16(w, drop), _mm_set1_epi16(1));
  const __m128i below_half = _mm_set1_epi16((short)((1 << drop) / 2 - 1));
  const __m128i kept = _mm_set1_epi16((short)(0xFFFFu << drop));
  return _mm_and_si128(_mm_add_epi16(_mm_add_epi16(w, below_half), last), kept);
}

AVX512 INLINE void convert_to_avx512(uint16_t *dst, const float *src, size_t n, int drop,
                                     struct sums *sums) {
  __m512 error[2], square[2], largest[2];
  for (int k = 0; k < 2; k++) error[k] = square[k] = largest[k] = _mm512_setzero_ps();
  for (size_t i = 0; i < n; i += 32) {
    for (int k = 0; k < 2; k++) { /* two chains, for the latency of fma */
      __m512 x = _mm512_loadu_ps(src + i + 16 * k);
      __m256i h = _mm512_cvtps_ph(x, ROUND);
      if (drop > 0) h = nearest_256(h, drop);
      _mm256_storeu_si256((__m256i *)(dst + i + 16 * k), h);
      __m512 e = _mm512_sub_ps(x, _mm512_cvtph_ps(h));
      error[k] = _mm512_fmadd_ps(e, e, error[k]);
      square[k] = _mm512_fmadd_ps(x, x, square[k]);
      largest[k] = _mm512_max_ps(largest[k], _mm512_abs_ps(e));
    }
  }
  sums->square_error = _mm512_reduce_add_ps(_mm512_add_ps(error[0], error[1]));
  sums->square_sum = _mm512_reduce_add_ps(_mm512_add_ps(square[0], square[1]));
  sums->max_error = _mm512_reduce_max_ps(_mm512_max_ps(largest[0], largest[1]));
}

AVX512 static void convert_avx512(uint16_t *dst, const float *src, size_t n,
                                  const struct strapk_rounding *rounding, struct sums *sums) {
  if (rounding->drop > 0)
    convert_to_avx512(dst, src, n, rounding->drop, sums);
  else
    convert_to_avx512(dst, src, n, 0, sums);
}

AVX512 static void measure_avx512(const float *src, size_t n, struct sums *sums) {
  const __m512 infinity = _mm512_set1_ps(INFINITY);
  __m512 error = _mm512_setzero_ps(), square = error, largest = error;
  for (size_t i = 0; i < n; i += 16) {
    __m512 x = _mm512_loadu_ps(src + i);
    __m512 back = _mm512_cvtph_ps(_mm512_cvtps_ph(x, ROUND));
    __mmask16 finite = _mm512_cmp_ps_mask(_mm512_abs_ps(back), infinity, _CMP_LT_OQ);
    __mmask16 bounded = _mm512_cmp_ps_mask(_mm512_abs_ps(x), infinity, _CMP_LT_OQ);
    __m512 e = _mm512_maskz_sub_ps(finite, x, back);
    error = _mm512_fmadd_ps(e, e, error);
    square = _mm512_mask3_fmadd_ps(x, x, square, finite);
    largest = _mm512_max_ps(largest, _mm512_abs_ps(e));
    sums->finite += __builtin_popcount(finite);
    sums->overflow += __builtin_popcount(bounded & ~finite);
  }
  sums->square_error = _mm512_reduce_add_ps(error);
  sums->square_sum = _mm512_reduce_add_ps(square);
  sums->max_error = _mm512_reduce_max_ps(largest);
}

AVX2 static inline __m256 abs_avx2(__m256 x) {
  return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x);
}

AVX2 static void reduce_avx2(__m256 error, __m256 square, __m256 largest, struct sums *sums) {
  float e[8], s[8], m[8];
  _mm256_storeu_ps(e, error);
  _mm256_storeu_ps(s, square);
  _mm256_storeu_ps(m, largest);
  for (int i = 0; i < 8; i++) {
    sums->square_error += e[i];
    sums->square_sum += s[i];
    if (m[i] > sums->max_error) sums->max_error = m[i];
  }
}

AVX2 INLINE void convert_to_avx2(uint16_t *dst, const float *src, size_t n, int drop,
                                 struct sums *sums) {
  __m256 error[2], square[2], largest[2];
  for (int k = 0; k < 2; k++) error[k] = square[k] = largest[k] = _mm256_setzero_ps();
  for (size_t i = 0; i < n; i += 16) {
    for (int k = 0; k < 2; k++) {
      __m256 x = _mm256_loadu_ps(src + i + 8 * k);
      __m128i h = _mm256_cvtps_ph(x, ROUND);
      if (drop > 0) h = nearest_128(h, drop);
      _mm_storeu_si128((__m128i *)(dst + i + 8 * k), h);
      __m256 e = _mm256_sub_ps(x, _mm256_cvtph_ps(h));
      error[k] = _mm256_fmadd_ps(e, e, error[k]);
      square[k] = _mm256_fmadd_ps(x, x, square[k]);
      largest[k] = _mm256_max_ps(largest[k], abs_avx2(e));
    }
  }
  reduce_avx2(_mm256_add_ps(error[0], error[1]), _mm256_add_ps(square[0], square[1]),
              _mm256_max_ps(largest[0], largest[1]), sums);
}

AVX2 static void convert_avx2(uint16_t *dst, const float *src, size_t n,
                              const struct strapk_rounding *rounding, struct sums *sums) {
  if (rounding->drop > 0)
    convert_to_avx2(dst, src, n, rounding->drop, sums);
  else
    convert_to_avx2(dst, src, n, 0, sums);
}

AVX2 static void measure_avx2(const float *src, size_t n, struct sums *sums) {
  const __m256 infinity = _mm256_set1_ps(INFINITY);
  __m256 error = _mm256_setzero_ps(), square = error, largest = error;
  for (size_t i = 0; i < n; i += 8) {
    __m256 x = _mm256_loadu_ps(src + i);
    __m256 back = _mm256_cvtph_ps(_mm256_cvtps_ph(x, ROUND));
    __m256 finite = _mm256_cmp_ps(abs_avx2(back), infinity, _CMP_LT_OQ);
    __m256 bounded = _mm256_cmp_ps(abs_avx2(x), infinity, _CMP_LT_OQ);
    __m256 e = _mm256_and_ps(finite, _mm256_sub_ps(x, back));
    __m256 value = _mm256_and_ps(finite, x);
    error = _mm256_fmadd_ps(e, e, error);
    square = _mm256_fmadd_ps(value, value, square);
    largest = _mm256_max_ps(largest, abs_avx2(e));
    sums->finite += __builtin_popcount(_mm256_movemask_ps(finite));
    sums->overflow += __builtin_popcount(_mm256_movemask_ps(_mm256_andnot_ps(finite, bounded)));
  }
  reduce_avx2(error, square, largest, sums);
}

AVX2 INLINE __m256 widen_avx2(__m128i words, bool bfloat16) {
  if (!bfloat16) return _mm256_cvtph_ps(words);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

AVX2 INLINE void round_to_avx2(uint16_t *dst, const uint16_t *src, size_t n, int drop,
                               bool bfloat16, struct sums *sums) {
  __m256 error[2], square[2], largest[2];
  for (int k = 0; k < 2; k++) error[k] = square[k] = largest[k] = _mm256_setzero_ps();
  for (size_t i = 0; i < n; i += 16) {
    for (int k = 0; k < 2; k++) {
      __m128i w = _mm_loadu_si128((const __m128i *)(src + i + 8 * k));
      __m128i r = nearest_128(w, drop);
      _mm_storeu_si128((__m128i *)(dst + i + 8 * k), r);
      __m256 x = widen_avx2(w, bfloat16);
      __m256 e = _mm256_sub_ps(x, widen_avx2(r, bfloat16));
      error[k] = _mm256_fmadd_ps(e, e, error[k]);
      square[k] = _mm256_fmadd_ps(x, x, square[k]);
      largest[k] = _mm256_max_ps(largest[k], abs_avx2(e));
    }
  }
  reduce_avx2(_mm256_add_ps(error[0], error[1]), _mm256_add_ps(square[0], square[1]),
              _mm256_max_ps(largest[0], largest[1]), sums);
}

AVX2 static void round_avx2(uint16_t *dst, const uint16_t *src, size_t n,
                            const struct strapk_rounding *rounding, struct sums *sums) {
  if (rounding->exponent == BFLOAT16)
    round_to_avx2(dst, src, n, rounding->drop, true, sums);
  else
    round_to_avx2(dst, src, n, rounding->drop, false, sums);
}

static const struct kernel avx512 = {"avx512f", convert_avx512, measure_avx512, round_avx2};
static const struct kernel avx2 = {"avx2", convert_avx2, measure_avx2, round_avx2};

/* Lists what this processor and system can run, the fastest first. By hand: the
 * runtime of some compilers has no __builtin_cpu_supports. */
static int list_kernels(const struct kernel **list) {
  const unsigned fma = 1u << 12, popcnt = 1u << 23, osxsave = 1u << 27, avx = 1u << 28,
                 f16c = 1u << 29, basis = fma | popcnt | osxsave | avx | f16c;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & basis) != basis) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  unsigned saved, high; /* the registers that the system saves */
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const unsigned ymm = 0x06, zmm = 0xE6;
  int n = 0;
  const unsigned bmi2 = 1u << 8, avx512f = 1u << 16, avx512bw = 1u << 30,
                 wide = bmi2 | avx512f | avx512bw;
  if ((b & avx512f) && (saved & zmm) == zmm) list[n++] = &avx512;
  runs_wide = n > 0 && (b & wide) == wide;
  if ((b & 1u << 5) && (saved & ymm) == ymm) list[n++] = &avx2;
  return n;
}

#elif defined(__aarch64__)
#include <arm_neon.h>

INLINE uint16x4_t nearest_neon(uint16x4_t w, int drop) {
  const uint16x4_t last = vand_u16(vshl_u16(w, vdup_n_s16((int16_t)-drop)), vdup_n_u16(1));
  const uint16x4_t below_half = vdup_n_u16((uint16_t)((1u << drop) / 2 - 1));
  return vand_u16(vadd_u16(vadd_u16(w, below_half), last), vdup_n_u16((uint16_t)(0xFFFFu << drop)));
}

INLINE void convert_to_neon(uint16_t *dst, const float *src, size_t n, int drop,
                            struct sums *sums) {
  float32x4_t error[4], square[4], largest[4];
  for (int k = 0; k < 4; k++) error[k] = square[k] = largest[k] = vdupq_n_f32(0);
  for (size_t i = 0; i < n; i += 16) {
    for (int k = 0; k < 4; k++) {
      float32x4_t x = vld1q_f32(src + i + 4 * k);
      uint16x4_t h = vreinterpret_u16_f16(vcvt_f16_f32(x));
      if (drop > 0) h = nearest_neon(h, drop);
      vst1_u16(dst + i + 4 * k, h);
      float32x4_t e = vsubq_f32(x, vcvt_f32_f16(vreinterpret_f16_u16(h)));
      error[k] = vfmaq_f32(error[k], e, e);
      square[k] = vfmaq_f32(square[k], x, x);
      largest[k] = vmaxq_f32(largest[k], vabsq_f32(e));
    }
  }
  for (int k = 0; k < 4; k++) {
    sums->square_error += vaddvq_f32(error[k]);
    sums->square_sum += vaddvq_f32(square[k]);
    sums->max_error = fmaxf(sums->max_error, vmaxvq_f32(largest[k]));
  }
}

static void convert_neon(uint16_t *dst, const float *src, size_t n,
                         const struct strapk_rounding *rounding, struct sums *sums) {
  if (rounding->drop > 0)
    convert_to_neon(dst, src, n, rounding->drop, sums);
  else
    convert_to_neon(dst, src, n, 0, sums);
}

static float32x4_t and_f32(uint32x4_t mask, float32x4_t x) {
  return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(x)));
}

static void measure_neon(const float *src, size_t n, struct sums *sums) {
  const float32x4_t infinity = vdupq_n_f32(INFINITY);
  float32x4_t error = vdupq_n_f32(0), square = error, largest = error;
  for (size_t i = 0; i < n; i += 4) {
    float32x4_t x = vld1q_f32(src + i);
    float32x4_t back = vcvt_f32_f16(vcvt_f16_f32(x));
    uint32x4_t finite = vcltq_f32(vabsq_f32(back), infinity);
    uint32x4_t bounded = vcltq_f32(vabsq_f32(x), infinity);
    float32x4_t e = and_f32(finite, vsubq_f32(x, back));
    float32x4_t value = and_f32(finite, x);
    error = vfmaq_f32(error, e, e);
    square = vfmaq_f32(square, value, value);
    largest = vmaxq_f32(largest, vabsq_f32(e));
    sums->finite += vaddvq_u32(vshrq_n_u32(finite, 31));
    sums->overflow += vaddvq_u32(vshrq_n_u32(vbicq_u32(bounded, finite), 31));
  }
  sums->square_error = vaddvq_f32(error);
  sums->square_sum = vaddvq_f32(square);
  sums->max_error = vmaxvq_f32(largest);
}

INLINE float32x4_t widen_neon(uint16x4_t words, bool bfloat16) {
  if (!bfloat16) return vcvt_f32_f16(vreinterpret_f16_u16(words));
  return vreinterpretq_f32_u32(vshll_n_u16(words, 16));
}

INLINE void round_to_neon(uint16_t *dst, const uint16_t *src, size_t n, int drop, bool bfloat16,
                          struct sums *sums) {
  float32x4_t error = vdupq_n_f32(0), square = error, largest = error;
  for (size_t i = 0; i < n; i += 4) {
    uint16x4_t w = vld1_u16(src + i);
    uint16x4_t r = nearest_neon(w, drop);
    vst1_u16(dst + i, r);
    float32x4_t x = widen_neon(w, bfloat16);
    float32x4_t e = vsubq_f32(x, widen_neon(r, bfloat16));
    error = vfmaq_f32(error, e, e);
    square = vfmaq_f32(square, x, x);
    largest = vmaxq_f32(largest, vabsq_f32(e));
  }
  sums->square_error = vaddvq_f32(error);
  sums->square_sum = vaddvq_f32(square);
  sums->max_error = vmaxvq_f32(largest);
}

static void round_neon(uint16_t *dst, const uint16_t *src, size_t n,
                       const struct strapk_rounding *rounding, struct sums *sums) {
  if (rounding->exponent == BFLOAT16)
    round_to_neon(dst, src, n, rounding->drop, true, sums);
  else
    round_to_neon(dst, src, n, rounding->drop, false, sums);
}

static const struct kernel neon = {"neon", convert_neon, measure_neon, round_neon};

static int list_kernels(const struct kernel **list) {
  list[0] = &neon;
  return 1;
}

#else
static int list_kernels(const struct kernel **list) {
  (void)list;
  return 0;
}
#endif

static const struct kernel *kernels[2];
static int kernel_count;

/* Before Go's runtime starts, a constructor too: package codec asks once, at its beginning. */
__attribute__((constructor(101))) static void find_kernels(void) {
  kernel_count = list_kernels(kernels);
}

int strapk_kernels(void) { return kernel_count; }

int strapk_runs_wide(void) { return runs_wide; }

const char *strapk_kernel_name(int kernel) { return kernels[kernel]->name; }

/* Widens a 16-bit float. */
static float widen(uint16_t word, uint16_t exponent) {
  uint32_t bits = (uint32_t)word << 16;
  if (exponent != BFLOAT16) {
    uint32_t sign = bits & 0x80000000, fraction = word & 0x3FF;
    switch (word & 0x7C00) {
    case 0: return (sign ? -1.0f : 1.0f) * (float)fraction * 0x1p-24f;
    case 0x7C00: bits = sign | 0x7F800000 | fraction << 13; break;
    default: bits = sign | (((uint32_t)(word & 0x7FFF) << 13) + (112u << 23));
    }
  }
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Rounds words of which some are not finite, or do not stay so; the values are those
 * of before, or NULL where src has them. dst may be src. */
static void round_carefully(uint16_t *dst, const uint16_t *src, const float *values, size_t n,
                            const struct strapk_rounding *rounding, struct sums *sums) {
  const uint16_t exponent = rounding->exponent, kept = (uint16_t)(0xFFFFu << rounding->drop);
  for (size_t i = 0; i < n; i++) {
    uint16_t w = src[i], r = w;
    if ((w & exponent) != exponent) {
      r = (uint16_t)(w + (1u << rounding->drop) / 2 - 1 + (w >> rounding->drop & 1)) & kept;
      if ((r & exponent) == exponent) r = w & kept;
      float value = values != NULL ? values[i] : widen(w, exponent);
      float e = fabsf(value - widen(r, exponent));
      sums->square_error += e * e;
      sums->square_sum += value * value;
      if (e > sums->max_error) sums->max_error = e;
      sums->finite++;
    }
    dst[i] = r;
  }
}

/* The sums of a block of n values, a multiple of STEP, without the last `padding`. */
static void add_sums(struct strapk_stats *stats, const struct sums *sums, size_t padding) {
  stats->count += sums->finite - (int64_t)padding;
  stats->overflow += sums->overflow;
  stats->square_error += sums->square_error;
  stats->square_sum += sums->square_sum;
  if (sums->max_error > stats->max_error) stats->max_error = sums->max_error;
}

static void convert_block(const struct kernel *kernel, uint16_t *dst, const float *src, size_t n,
                          size_t padding, const struct strapk_rounding *rounding,
                          struct strapk_stats *stats) {
  const struct strapk_rounding none = {rounding->exponent, 0};
  struct sums sums = {0}, converted = {0};
  kernel->convert(dst, src, n, rounding, &sums);
  sums.finite = (int64_t)n;
  if (!isfinite(sums.square_error)) {
    sums = (struct sums){0};
    kernel->measure(src, n, &sums);
    if (rounding->drop > 0) {
      int64_t overflow = sums.overflow;
      sums = (struct sums){.overflow = overflow};
      kernel->convert(dst, src, n, &none, &converted);
      round_carefully(dst, dst, src, n, rounding, &sums);
    }
  }
  add_sums(stats, &sums, padding);
}

static void round_block(const struct kernel *kernel, uint16_t *dst, const uint16_t *src, size_t n,
                        size_t padding, const struct strapk_rounding *rounding,
                        struct strapk_stats *stats) {
  struct sums sums = {0};
  kernel->round(dst, src, n, rounding, &sums);
  sums.finite = (int64_t)n;
  if (!isfinite(sums.square_error)) {
    sums = (struct sums){0};
    round_carefully(dst, src, NULL, n, rounding, &sums);
  }
  add_sums(stats, &sums, padding);
}

void strapk_float32_to_float16(int kernel, uint16_t *dst, const float *src, size_t n,
                               const struct strapk_rounding *rounding,
                               struct strapk_stats *stats) {
  const struct kernel *k = kernels[kernel];
  size_t whole = n - n % STEP;
  for (size_t done = 0; done < whole;) {
    size_t some = whole - done < BLOCK ? whole - done : BLOCK;
    convert_block(k, dst + done, src + done, some, 0, rounding, stats);
    done += some;
  }
  size_t rest = n - whole;
  if (rest == 0) return;
  float in[STEP] = {0};
  uint16_t out[STEP];
  memcpy(in, src + whole, rest * sizeof *in);
  convert_block(k, out, in, STEP, STEP - rest, rounding, stats);
  memcpy(dst + whole, out, rest * sizeof *out);
}

void strapk_round(int kernel, uint16_t *dst, const uint16_t *src, size_t n,
                  const struct strapk_rounding *rounding, struct strapk_stats *stats) {
  const struct kernel *k = kernels[kernel];
  size_t whole = n - n % STEP;
  for (size_t done = 0; done < whole;) {
    size_t some = whole - done < BLOCK ? whole - done : BLOCK;
    round_block(k, dst + done, src + done, some, 0, rounding, stats);
    done += some;
  }
  size_t rest = n - whole;
  if (rest == 0) return;
  uint16_t in[STEP] = {0}, out[STEP];
  memcpy(in, src + whole, rest * sizeof *in);
  round_block(k, out, in, STEP, STEP - rest, rounding, stats);
  memcpy(dst + whole, out, rest * sizeof *out);
}
