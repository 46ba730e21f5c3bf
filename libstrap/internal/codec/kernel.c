// kernel.c - converts float32 to float16, rounds to fewer mantissa bits, and measures the error.

//go:build cgo

/*
 * A few squares at a time are added in float lanes. Adding each square in double takes twice the time.
 * A float addition can round down, so the sums are made larger by the most that rounding can lose. A
 * reported sum is never below the true sum, and less than 2e-6 of it above.
 *
 * A kernel's copy assumes that all values stay finite. If a value does not, the sums become infinite or
 * NaN. Only then the block is measured again, without the values that are not finite. The sums also
 * show if squares are too large or too small for float. Then the squares are added in double, one by
 * one. So the usual loop runs at the speed of memory.
 *
 * The loops need the default floating-point environment: it rounds to nearest, keeps subnormal
 * numbers, and traps no exception. See floats.h in package team.
 */
#include "kernel.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

#define STEP 32 /* a kernel's n is a multiple of it */
#define BFLOAT16_EXPONENT 0x7F80

/* A float lane adds FEW squares, and is then added to a second lane. SUMS of the results are added in
 * float too, and the rest in double. So a square goes through at most FEW + SUMS roundings to float. A
 * rounding loses at most 2^-24 of the sum. UPWARD makes up for this. Its 0.01 covers the terms of
 * second order, the sums in double and LEAST_SUM. */
#define FEW 12
#define SUMS 4
#define UPWARD (1 + (FEW + SUMS + 0.01) * 0x1p-24)

/* Values that are measured again together. The sums of a block do not depend on other blocks. */
#define BLOCK STRAPK_BLOCK
_Static_assert(BLOCK % (FEW * SUMS * STEP) == 0, "the last sums of a block would be short");

/* The least sum of a block that is used. An addition of tiny floats loses at most 2^-150, so a block
 * loses at most 2^-37 of this sum. */
#define LEAST_SUM 0x1p-100

/* The type of the values. FLOAT32 is stored as float16, the others in their own type. */
enum type { FLOAT32, FLOAT16, BFLOAT16 };

struct sums {
  int64_t finite, overflow;
  double square_error, square_sum;
  float max_error;
};

struct kernel {
  const char *name;
  /* Converts to 16 bits, drops mantissa bits, and sums. The sums are valid if all values stay finite. */
  void (*copy)(uint16_t *dst, const void *src, size_t n, enum type from, int drop,
               struct sums *sums);
  /* Counts and sums the values whose stored values are finite. */
  void (*measure)(uint16_t *stored, const void *src, size_t n, enum type from, struct sums *sums);
};

#define INLINE static inline __attribute__((always_inline))

INLINE size_t size_of(enum type type) {
  return type == FLOAT32 ? sizeof(float) : sizeof(uint16_t);
}

/* Returns the end of the next FEW steps from i. */
INLINE size_t after_few(size_t i, size_t step, size_t n) {
  return n - i < FEW * step ? n : i + FEW * step;
}

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

#define ROUND (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
#define AVX512 __attribute__((target(STRAPK_AVX512F ",avx512bw,avx512dq,popcnt")))
#define AVX2 __attribute__((target("avx2,f16c,fma,popcnt")))

/* nearest_512, nearest_256 and nearest_neon round words to nearest, ties to even. drop > 0. They are
 * wrong for values that are not finite, or do not stay finite; round_words rounds these. */
AVX512 INLINE void nearest_512(__m256i pair[2], int drop) {
  const __m512i below_half = _mm512_set1_epi16((short)((1 << drop) / 2 - 1));
  const __m512i kept = _mm512_set1_epi16((short)(0xFFFFu << drop));
  const __m512i w = _mm512_inserti64x4(_mm512_castsi256_si512(pair[0]), pair[1], 1);
  const __m512i last = _mm512_and_si512(_mm512_srli_epi16(w, (unsigned)drop), _mm512_set1_epi16(1));
  const __m512i r =
      _mm512_and_si512(_mm512_add_epi16(_mm512_add_epi16(w, below_half), last), kept);
  pair[0] = _mm512_castsi512_si256(r), pair[1] = _mm512_extracti64x4_epi64(r, 1);
}

AVX2 INLINE void nearest_256(__m128i pair[2], int drop) {
  const __m256i below_half = _mm256_set1_epi16((short)((1 << drop) / 2 - 1));
  const __m256i kept = _mm256_set1_epi16((short)(0xFFFFu << drop));
  const __m256i w = _mm256_inserti128_si256(_mm256_castsi128_si256(pair[0]), pair[1], 1);
  const __m256i last = _mm256_and_si256(_mm256_srli_epi16(w, drop), _mm256_set1_epi16(1));
  const __m256i r =
      _mm256_and_si256(_mm256_add_epi16(_mm256_add_epi16(w, below_half), last), kept);
  pair[0] = _mm256_castsi256_si128(r), pair[1] = _mm256_extracti128_si256(r, 1);
}

AVX512 INLINE __m512 widen_512(__m256i words, enum type type) {
  if (type != BFLOAT16) return _mm512_cvtph_ps(words);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(words), 16));
}

AVX512 INLINE __m512d low_512(__m512 x) { return _mm512_cvtps_pd(_mm512_castps512_ps256(x)); }

AVX512 INLINE __m512d high_512(__m512 x) {
  return _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1));
}

/* Adds the lanes of x to a sum in double. */
AVX512 INLINE __m512d add_512(__m512d sum, __m512 x) {
  return _mm512_add_pd(_mm512_add_pd(sum, low_512(x)), high_512(x));
}

#define LARGER_MAGNITUDE 0x0B /* the larger magnitude of two, without a sign */
#define NOT_FINITE 0x99       /* infinities, quiet NaN and signalling NaN */

/* Copies the values, or with `again` measures values that were copied. */
AVX512 INLINE void sum_512(uint16_t *dst, const void *src, size_t n, enum type from, int drop,
                           bool again, struct sums *sums) {
  const __m512 zero = _mm512_setzero_ps();
  __m512 largest[2] = {zero, zero};
  __m512d error = _mm512_setzero_pd(), square = error;
  int64_t finite_values = 0, overflows = 0;
  for (size_t i = 0; i < n;) {
    __m512 more_error = zero, more_square = zero;
    for (int sum = 0; sum < SUMS && i < n; sum++) {
      __m512 errors[2] = {zero, zero}, squares[2] = {zero, zero};
      for (const size_t end = after_few(i, 32, n); i < end; i += 32) {
        __m512 x[2];
        __m256i h[2];
        for (int k = 0; k < 2; k++) { /* two chains hide the latency of fma */
          const void *at = (const char *)src + (i + 16 * k) * size_of(from);
          if (from == FLOAT32) {
            x[k] = _mm512_loadu_ps(at);
            h[k] = _mm512_cvtps_ph(x[k], ROUND);
          } else {
            h[k] = _mm256_loadu_si256(at);
            x[k] = widen_512(h[k], from);
          }
          if (again) h[k] = _mm256_loadu_si256((const __m256i *)(dst + i + 16 * k));
        }
        if (drop > 0) nearest_512(h, drop);
        for (int k = 0; k < 2; k++) {
          __m512 back = widen_512(h[k], from), e = _mm512_sub_ps(x[k], back);
          if (again) {
            const __mmask16 finite = (__mmask16)~_mm512_fpclass_ps_mask(back, NOT_FINITE);
            const __mmask16 bounded = (__mmask16)~_mm512_fpclass_ps_mask(x[k], NOT_FINITE);
            finite_values += __builtin_popcount(finite);
            overflows += __builtin_popcount(bounded & ~finite);
            e = _mm512_maskz_mov_ps(finite, e);
            x[k] = _mm512_maskz_mov_ps(finite, x[k]);
          } else {
            _mm256_storeu_si256((__m256i *)(dst + i + 16 * k), h[k]);
          }
          errors[k] = _mm512_fmadd_ps(e, e, errors[k]);
          squares[k] = _mm512_fmadd_ps(x[k], x[k], squares[k]);
          largest[k] = _mm512_range_ps(largest[k], e, LARGER_MAGNITUDE);
        }
      }
      more_error = _mm512_add_ps(more_error, _mm512_add_ps(errors[0], errors[1]));
      more_square = _mm512_add_ps(more_square, _mm512_add_ps(squares[0], squares[1]));
    }
    error = add_512(error, more_error);
    square = add_512(square, more_square);
  }
  sums->finite = finite_values, sums->overflow = overflows;
  sums->square_error = _mm512_reduce_add_pd(error);
  sums->square_sum = _mm512_reduce_add_pd(square);
  sums->max_error = _mm512_reduce_max_ps(_mm512_max_ps(largest[0], largest[1]));
}

AVX2 INLINE __m256 abs_256(__m256 x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

AVX2 INLINE int count_256(__m256 mask) {
  return __builtin_popcount((unsigned)_mm256_movemask_ps(mask));
}

AVX2 INLINE __m256d low_256(__m256 x) { return _mm256_cvtps_pd(_mm256_castps256_ps128(x)); }

AVX2 INLINE __m256d high_256(__m256 x) { return _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1)); }

AVX2 INLINE __m256d add_256(__m256d sum, __m256 x) {
  return _mm256_add_pd(_mm256_add_pd(sum, low_256(x)), high_256(x));
}

AVX2 INLINE __m256 widen_256(__m128i words, enum type type) {
  if (type != BFLOAT16) return _mm256_cvtph_ps(words);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(words), 16));
}

AVX2 INLINE void sum_256(uint16_t *dst, const void *src, size_t n, enum type from, int drop,
                         bool again, struct sums *sums) {
  const __m256 zero = _mm256_setzero_ps(), infinity = _mm256_set1_ps(INFINITY);
  __m256 largest[2] = {zero, zero};
  __m256d error = _mm256_setzero_pd(), square = error;
  int64_t finite_values = 0, overflows = 0;
  for (size_t i = 0; i < n;) {
    __m256 more_error = zero, more_square = zero;
    for (int sum = 0; sum < SUMS && i < n; sum++) {
      __m256 errors[2] = {zero, zero}, squares[2] = {zero, zero};
      for (const size_t end = after_few(i, 16, n); i < end; i += 16) {
        __m256 x[2];
        __m128i h[2];
        for (int k = 0; k < 2; k++) {
          const void *at = (const char *)src + (i + 8 * k) * size_of(from);
          if (from == FLOAT32) {
            x[k] = _mm256_loadu_ps(at);
            h[k] = _mm256_cvtps_ph(x[k], ROUND);
          } else {
            h[k] = _mm_loadu_si128(at);
            x[k] = widen_256(h[k], from);
          }
          if (again) h[k] = _mm_loadu_si128((const __m128i *)(dst + i + 8 * k));
        }
        if (drop > 0) nearest_256(h, drop);
        for (int k = 0; k < 2; k++) {
          __m256 back = widen_256(h[k], from), e = _mm256_sub_ps(x[k], back);
          if (again) {
            const __m256 finite = _mm256_cmp_ps(abs_256(back), infinity, _CMP_LT_OQ);
            const __m256 bounded = _mm256_cmp_ps(abs_256(x[k]), infinity, _CMP_LT_OQ);
            finite_values += count_256(finite);
            overflows += count_256(_mm256_andnot_ps(finite, bounded));
            e = _mm256_and_ps(finite, e);
            x[k] = _mm256_and_ps(finite, x[k]);
          } else {
            _mm_storeu_si128((__m128i *)(dst + i + 8 * k), h[k]);
          }
          errors[k] = _mm256_fmadd_ps(e, e, errors[k]);
          squares[k] = _mm256_fmadd_ps(x[k], x[k], squares[k]);
          largest[k] = _mm256_max_ps(largest[k], abs_256(e));
        }
      }
      more_error = _mm256_add_ps(more_error, _mm256_add_ps(errors[0], errors[1]));
      more_square = _mm256_add_ps(more_square, _mm256_add_ps(squares[0], squares[1]));
    }
    error = add_256(error, more_error);
    square = add_256(square, more_square);
  }
  __m256d both = _mm256_hadd_pd(error, square);
  __m128d sum = _mm_add_pd(_mm256_castpd256_pd128(both), _mm256_extractf128_pd(both, 1));
  __m256 eight = _mm256_max_ps(largest[0], largest[1]);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  sums->finite = finite_values, sums->overflow = overflows;
  sums->square_error = _mm_cvtsd_f64(sum);
  sums->square_sum = _mm_cvtsd_f64(_mm_unpackhi_pd(sum, sum));
  sums->max_error = _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

/* The loops for each type. The type and drop are constants in each. */
AVX512 static void copy_512(uint16_t *dst, const void *src, size_t n, enum type from, int drop,
                            struct sums *sums) {
  if (from == BFLOAT16)
    sum_512(dst, src, n, BFLOAT16, drop, false, sums);
  else if (from == FLOAT16)
    sum_512(dst, src, n, FLOAT16, drop, false, sums);
  else if (drop > 0)
    sum_512(dst, src, n, FLOAT32, drop, false, sums);
  else
    sum_512(dst, src, n, FLOAT32, 0, false, sums);
}

AVX512 static void measure_512(uint16_t *stored, const void *src, size_t n, enum type from,
                               struct sums *sums) {
  if (from == BFLOAT16)
    sum_512(stored, src, n, BFLOAT16, 0, true, sums);
  else if (from == FLOAT16)
    sum_512(stored, src, n, FLOAT16, 0, true, sums);
  else
    sum_512(stored, src, n, FLOAT32, 0, true, sums);
}

AVX2 static void copy_256(uint16_t *dst, const void *src, size_t n, enum type from, int drop,
                          struct sums *sums) {
  if (from == BFLOAT16)
    sum_256(dst, src, n, BFLOAT16, drop, false, sums);
  else if (from == FLOAT16)
    sum_256(dst, src, n, FLOAT16, drop, false, sums);
  else if (drop > 0)
    sum_256(dst, src, n, FLOAT32, drop, false, sums);
  else
    sum_256(dst, src, n, FLOAT32, 0, false, sums);
}

AVX2 static void measure_256(uint16_t *stored, const void *src, size_t n, enum type from,
                             struct sums *sums) {
  if (from == BFLOAT16)
    sum_256(stored, src, n, BFLOAT16, 0, true, sums);
  else if (from == FLOAT16)
    sum_256(stored, src, n, FLOAT16, 0, true, sums);
  else
    sum_256(stored, src, n, FLOAT32, 0, true, sums);
}

static const struct kernel avx512 = {"avx512", copy_512, measure_512};
static const struct kernel avx2 = {"avx2", copy_256, measure_256};

/* Lists the kernels that this processor and system can run, the fastest first. The runtime of some
 * compilers has no __builtin_cpu_supports. */
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
  /* All extensions of AVX-512 that this package uses. Each processor since Skylake has them. */
  const unsigned with_avx2 = 1u << 5, bmi2 = 1u << 8, avx512f = 1u << 16, avx512dq = 1u << 17,
                 avx512bw = 1u << 30, wide = with_avx2 | bmi2 | avx512f | avx512dq | avx512bw;
  if ((b & wide) == wide && (saved & zmm) == zmm) list[n++] = &avx512;
  if ((b & with_avx2) && (saved & ymm) == ymm) list[n++] = &avx2;
  return n;
}

#elif defined(__aarch64__)
#include <arm_neon.h>

INLINE uint16x4_t nearest_neon(uint16x4_t w, int drop) {
  const uint16x4_t last = vand_u16(vshl_u16(w, vdup_n_s16((int16_t)-drop)), vdup_n_u16(1));
  const uint16x4_t below_half = vdup_n_u16((uint16_t)((1u << drop) / 2 - 1));
  return vand_u16(vadd_u16(vadd_u16(w, below_half), last), vdup_n_u16((uint16_t)(0xFFFFu << drop)));
}

INLINE float32x4_t widen_neon(uint16x4_t words, enum type type) {
  if (type != BFLOAT16) return vcvt_f32_f16(vreinterpret_f16_u16(words));
  return vreinterpretq_f32_u32(vshll_n_u16(words, 16));
}

/* Adds the lanes of x to a sum in double. */
INLINE float64x2_t add_neon(float64x2_t sum, float32x4_t x) {
  return vaddq_f64(vaddq_f64(sum, vcvt_f64_f32(vget_low_f32(x))), vcvt_high_f64_f32(x));
}

INLINE float32x4_t and_f32(uint32x4_t mask, float32x4_t x) {
  return vreinterpretq_f32_u32(vandq_u32(mask, vreinterpretq_u32_f32(x)));
}

INLINE int count_neon(uint32x4_t mask) { return (int)vaddvq_u32(vshrq_n_u32(mask, 31)); }

/* Copies the values, or with `again` measures values that were copied. */
INLINE void sum_neon(uint16_t *dst, const void *src, size_t n, enum type from, int drop, bool again,
                     struct sums *sums) {
  const float32x4_t zero = vdupq_n_f32(0), infinity = vdupq_n_f32(INFINITY);
  float32x4_t largest[4] = {zero, zero, zero, zero};
  float64x2_t error = vdupq_n_f64(0), square = error;
  int64_t finite_values = 0, overflows = 0;
  for (size_t i = 0; i < n;) {
    float32x4_t more_errors[2] = {zero, zero}, more_squares[2] = {zero, zero};
    for (int sum = 0; sum < SUMS && i < n; sum++) {
      float32x4_t errors[4] = {zero, zero, zero, zero}, squares[4] = {zero, zero, zero, zero};
      for (const size_t end = after_few(i, 16, n); i < end; i += 16) {
        for (int k = 0; k < 4; k++) { /* four chains hide the latency of fma */
          const void *at = (const char *)src + (i + 4 * k) * size_of(from);
          float32x4_t x;
          uint16x4_t h;
          if (from == FLOAT32) {
            x = vld1q_f32(at);
            h = vreinterpret_u16_f16(vcvt_f16_f32(x));
          } else {
            h = vld1_u16(at);
            x = widen_neon(h, from);
          }
          if (again) h = vld1_u16(dst + i + 4 * k);
          if (drop > 0) h = nearest_neon(h, drop);
          float32x4_t back = widen_neon(h, from), e = vsubq_f32(x, back);
          if (again) {
            const uint32x4_t finite = vcltq_f32(vabsq_f32(back), infinity);
            const uint32x4_t bounded = vcltq_f32(vabsq_f32(x), infinity);
            finite_values += count_neon(finite);
            overflows += count_neon(vbicq_u32(bounded, finite));
            e = and_f32(finite, e);
            x = and_f32(finite, x);
          } else {
            vst1_u16(dst + i + 4 * k, h);
          }
          errors[k] = vfmaq_f32(errors[k], e, e);
          squares[k] = vfmaq_f32(squares[k], x, x);
          largest[k] = vmaxq_f32(largest[k], vabsq_f32(e));
        }
      }
      for (int k = 0; k < 2; k++) {
        more_errors[k] = vaddq_f32(more_errors[k], vaddq_f32(errors[k], errors[k + 2]));
        more_squares[k] = vaddq_f32(more_squares[k], vaddq_f32(squares[k], squares[k + 2]));
      }
    }
    for (int k = 0; k < 2; k++) {
      error = add_neon(error, more_errors[k]);
      square = add_neon(square, more_squares[k]);
    }
  }
  sums->finite = finite_values, sums->overflow = overflows;
  sums->square_error = vaddvq_f64(error);
  sums->square_sum = vaddvq_f64(square);
  sums->max_error = vmaxvq_f32(
      vmaxq_f32(vmaxq_f32(largest[0], largest[1]), vmaxq_f32(largest[2], largest[3])));
}

/* The loops for each type. The type and drop are constants in each. */
static void copy_neon(uint16_t *dst, const void *src, size_t n, enum type from, int drop,
                     struct sums *sums) {
  if (from == BFLOAT16)
    sum_neon(dst, src, n, BFLOAT16, drop, false, sums);
  else if (from == FLOAT16)
    sum_neon(dst, src, n, FLOAT16, drop, false, sums);
  else if (drop > 0)
    sum_neon(dst, src, n, FLOAT32, drop, false, sums);
  else
    sum_neon(dst, src, n, FLOAT32, 0, false, sums);
}

static void measure_neon(uint16_t *stored, const void *src, size_t n, enum type from,
                        struct sums *sums) {
  if (from == BFLOAT16)
    sum_neon(stored, src, n, BFLOAT16, 0, true, sums);
  else if (from == FLOAT16)
    sum_neon(stored, src, n, FLOAT16, 0, true, sums);
  else
    sum_neon(stored, src, n, FLOAT32, 0, true, sums);
}

static const struct kernel neon = {"neon", copy_neon, measure_neon};

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

/* Runs before the constructor that starts Go's runtime, because package codec asks for the kernels when
 * it is initialised. */
__attribute__((constructor(101))) static void find_kernels(void) {
  kernel_count = list_kernels(kernels);
}

int strapk_kernels(void) { return kernel_count; }

const char *strapk_kernel_name(int kernel) { return kernels[kernel]->name; }

/* Rounds words to nearest, ties to even. Words that are not finite stay the same. Words that would not
 * stay finite are rounded towards zero. dst may be src. */
static void round_words(uint16_t *dst, const uint16_t *src, size_t n,
                        const struct strapk_rounding *rounding) {
  const uint16_t exponent = rounding->exponent, drop = rounding->drop,
                 kept = (uint16_t)(0xFFFFu << drop), below_half = (uint16_t)((1u << drop) / 2 - 1);
  for (size_t i = 0; i < n; i++) {
    const uint16_t w = src[i];
    uint16_t r = (uint16_t)(w + below_half + (w >> drop & 1)) & kept;
    if ((r & exponent) == exponent) r = w & kept;
    dst[i] = (w & exponent) == exponent ? w : r;
  }
}

/* Converts a 16-bit float to float32. */
static float widen(uint16_t word, enum type type) {
  uint32_t bits = (uint32_t)word << 16;
  if (type != BFLOAT16) {
    const uint32_t sign = bits & 0x80000000, magnitude = word & 0x7FFF;
    if (magnitude < 0x400) return (sign ? -0x1p-24f : 0x1p-24f) * (float)magnitude; /* subnormal */
    bits = sign | ((magnitude << 13) + ((magnitude < 0x7C00 ? 112u : 224u) << 23));
  }
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

/* Does the work of a kernel's measure, with all sums in double. */
static void measure_in_double(const uint16_t *stored, const void *src, size_t n, enum type from,
                              struct sums *sums) {
  for (size_t i = 0; i < n; i++) {
    float back = widen(stored[i], from), x;
    if (from == FLOAT32)
      memcpy(&x, (const char *)src + i * sizeof x, sizeof x);
    else
      x = widen(((const uint16_t *)src)[i], from);
    if (!isfinite(back)) {
      if (isfinite(x)) sums->overflow++;
      continue;
    }
    const float e = x - back, magnitude = fabsf(e);
    sums->finite++;
    sums->square_error += (double)e * (double)e;
    sums->square_sum += (double)x * (double)x;
    if (magnitude > sums->max_error) sums->max_error = magnitude;
  }
}

/* Returns whether the sums, times UPWARD, are not below the true sums: no square was too large or too
 * small for float. float16 values are multiples of 2^-24. So if their squares vanish and they have no
 * error, they are zeros. */
static bool in_range(const struct sums *s, enum type from) {
  if (!isfinite(s->square_error) || !isfinite(s->square_sum)) return false;
  if (s->square_sum == 0 && s->max_error == 0 && from != BFLOAT16) return true;
  return s->square_sum >= LEAST_SUM && (s->square_error >= LEAST_SUM || s->max_error == 0);
}

/* Copies and measures a block of n values, n a multiple of STEP. The last `padding` values do not count.
 * If there is padding, the values are few, and are measured in double. */
static void copy_block(const struct kernel *kernel, uint16_t *dst, const void *src, size_t n,
                       size_t padding, enum type from, const struct strapk_rounding *rounding,
                       struct strapk_stats *stats) {
  struct sums sums = {0};
  kernel->copy(dst, src, n, from, rounding->drop, &sums);
  if (isfinite(sums.square_error)) {
    sums.finite = (int64_t)n;
  } else {
    if (rounding->drop > 0) {
      if (from == FLOAT32) kernel->copy(dst, src, n, from, 0, &sums);
      round_words(dst, from == FLOAT32 ? dst : src, n, rounding);
    }
    sums = (struct sums){0};
    kernel->measure(dst, src, n, from, &sums);
  }
  if (padding == 0 && in_range(&sums, from)) {
    sums.square_error *= UPWARD;
    sums.square_sum *= UPWARD;
  } else {
    sums = (struct sums){0};
    measure_in_double(dst, src, n - padding, from, &sums);
  }
  stats->count += sums.finite;
  stats->overflow += sums.overflow;
  stats->square_error += sums.square_error;
  stats->square_sum += sums.square_sum;
  if (sums.max_error > stats->max_error) stats->max_error = sums.max_error;
}

static void copy_all(int kernel, uint16_t *dst, const void *src, size_t n, enum type from,
                     const struct strapk_rounding *rounding, struct strapk_stats *stats) {
  const struct kernel *k = kernels[kernel];
  const size_t size = size_of(from), rest = n % STEP, whole = n - rest;
  for (size_t done = 0; done < whole;) {
    const size_t some = whole - done < BLOCK ? whole - done : BLOCK;
    copy_block(k, dst + done, (const char *)src + done * size, some, 0, from, rounding, stats);
    done += some;
  }
  if (rest == 0) return;
  float in[STEP] = {0};
  uint16_t out[STEP];
  memcpy(in, (const char *)src + whole * size, rest * size);
  copy_block(k, out, in, STEP, STEP - rest, from, rounding, stats);
  memcpy(dst + whole, out, rest * sizeof *out);
}

void strapk_float32_to_float16(int kernel, uint16_t *dst, const float *src, size_t n,
                               const struct strapk_rounding *rounding,
                               struct strapk_stats *stats) {
  copy_all(kernel, dst, src, n, FLOAT32, rounding, stats);
}

void strapk_round(int kernel, uint16_t *dst, const uint16_t *src, size_t n,
                  const struct strapk_rounding *rounding, struct strapk_stats *stats) {
  copy_all(kernel, dst, src, n, rounding->exponent == BFLOAT16_EXPONENT ? BFLOAT16 : FLOAT16,
           rounding, stats);
}
