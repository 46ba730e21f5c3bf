/*
 * kernel.c - float32 to float16 with its error, and strided copies.
 *
 * The error sums run in float lanes over blocks of BLOCK values and in double
 * beyond, which keeps them to about 1e-6 relative. Values that are not finite in
 * float16 are left out of them by a mask.
 */
#include "kernel.h"

#include <string.h>

#define BLOCK 4096

typedef void block_kernel(uint16_t *dst, const float *src, size_t n, struct strapk_stats *stats);

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>

__attribute__((target("avx512f,avx512bw,avx512vl,popcnt,f16c"))) static void convert_avx512(
    uint16_t *dst, const float *src, size_t n, struct strapk_stats *stats) {
  const __m512 infinity = _mm512_castsi512_ps(_mm512_set1_epi32(0x7F800000));
  __m512 square_error = _mm512_setzero_ps(), square_sum = square_error, max_error = square_error;
  int64_t overflow = 0, count = 0;
  for (size_t i = 0; i < n; i += 16) {
    __mmask16 in = n - i >= 16 ? 0xFFFF : (__mmask16)((1u << (n - i)) - 1);
    __m512 x = _mm512_maskz_loadu_ps(in, src + i);
    __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    _mm256_mask_storeu_epi16(dst + i, in, h);
    __m512 back = _mm512_cvtph_ps(h);
    __mmask16 finite = _mm512_mask_cmp_ps_mask(in, _mm512_abs_ps(back), infinity, _CMP_LT_OQ);
    __mmask16 lost = _mm512_mask_cmp_ps_mask(in & ~finite, _mm512_abs_ps(x), infinity, _CMP_LT_OQ);
    __m512 error = _mm512_maskz_sub_ps(finite, x, back);
    __m512 value = _mm512_maskz_mov_ps(finite, x);
    square_error = _mm512_fmadd_ps(error, error, square_error);
    square_sum = _mm512_fmadd_ps(value, value, square_sum);
    max_error = _mm512_max_ps(max_error, _mm512_abs_ps(error));
    overflow += __builtin_popcount(lost);
    count += __builtin_popcount(finite);
  }
  stats->count += count;
  stats->overflow += overflow;
  stats->square_error += _mm512_reduce_add_ps(square_error);
  stats->square_sum += _mm512_reduce_add_ps(square_sum);
  double largest = _mm512_reduce_max_ps(max_error);
  if (largest > stats->max_error) stats->max_error = largest;
}

__attribute__((target("avx2,f16c,fma,popcnt"))) static void convert_avx2(
    uint16_t *dst, const float *src, size_t n, struct strapk_stats *stats) {
  const __m256 magnitude = _mm256_castsi256_ps(_mm256_set1_epi32(0x7FFFFFFF));
  const __m256 infinity = _mm256_castsi256_ps(_mm256_set1_epi32(0x7F800000));
  __m256 square_error = _mm256_setzero_ps(), square_sum = square_error, max_error = square_error;
  int64_t overflow = 0, count = 0;
  for (size_t i = 0; i < n; i += 8) {
    float in[8] = {0};
    uint16_t out[8];
    size_t have = n - i < 8 ? n - i : 8;
    int lanes = (1 << have) - 1;
    __m256 x;
    if (have == 8) {
      x = _mm256_loadu_ps(src + i);
    } else {
      memcpy(in, src + i, have * sizeof *src);
      x = _mm256_loadu_ps(in);
    }
    __m128i h = _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    if (have == 8) {
      _mm_storeu_si128((__m128i *)(dst + i), h);
    } else {
      _mm_storeu_si128((__m128i *)out, h);
      memcpy(dst + i, out, have * sizeof *dst);
    }
    __m256 back = _mm256_cvtph_ps(h);
    __m256 finite = _mm256_cmp_ps(_mm256_and_ps(back, magnitude), infinity, _CMP_LT_OQ);
    __m256 bounded = _mm256_cmp_ps(_mm256_and_ps(x, magnitude), infinity, _CMP_LT_OQ);
    __m256 error = _mm256_and_ps(finite, _mm256_sub_ps(x, back));
    __m256 value = _mm256_and_ps(finite, x);
    square_error = _mm256_fmadd_ps(error, error, square_error);
    square_sum = _mm256_fmadd_ps(value, value, square_sum);
    max_error = _mm256_max_ps(max_error, _mm256_and_ps(error, magnitude));
    count += __builtin_popcount(_mm256_movemask_ps(finite) & lanes);
    overflow += __builtin_popcount(_mm256_movemask_ps(_mm256_andnot_ps(finite, bounded)) & lanes);
  }
  float e[8], s[8], m[8];
  _mm256_storeu_ps(e, square_error);
  _mm256_storeu_ps(s, square_sum);
  _mm256_storeu_ps(m, max_error);
  for (int i = 0; i < 8; i++) {
    stats->square_error += e[i];
    stats->square_sum += s[i];
    if (m[i] > stats->max_error) stats->max_error = m[i];
  }
  stats->count += count;
  stats->overflow += overflow;
}

/* By hand: the runtime of some compilers has no __builtin_cpu_supports. */
static block_kernel *choose(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d)) return NULL;
  const unsigned fma = 1u << 12, popcnt = 1u << 23, osxsave = 1u << 27, avx = 1u << 28,
                 f16c = 1u << 29, need = fma | popcnt | osxsave | avx | f16c;
  if ((c & need) != need) return NULL;
  unsigned low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  if ((low & 0x06) != 0x06) return NULL; /* the system saves xmm and ymm */
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return NULL;
  const unsigned avx2 = 1u << 5, avx512 = 1u << 16 | 1u << 30 | 1u << 31; /* f, bw, vl */
  if ((b & avx512) == avx512 && (low & 0xE6) == 0xE6) return convert_avx512;
  return b & avx2 ? convert_avx2 : NULL;
}

#elif defined(__aarch64__)
#include <arm_neon.h>

static void convert_neon(uint16_t *dst, const float *src, size_t n, struct strapk_stats *stats) {
  const float32x4_t infinity = vreinterpretq_f32_u32(vdupq_n_u32(0x7F800000));
  float32x4_t square_error = vdupq_n_f32(0), square_sum = square_error, max_error = square_error;
  int64_t overflow = 0, count = 0;
  const uint32x4_t lane = {0, 1, 2, 3};
  for (size_t i = 0; i < n; i += 4) {
    float in[4] = {0};
    uint16_t out[4];
    size_t have = n - i < 4 ? n - i : 4;
    memcpy(in, src + i, have * sizeof *src);
    float32x4_t x = vld1q_f32(in);
    uint32x4_t used = vcltq_u32(lane, vdupq_n_u32((uint32_t)have));
    float16x4_t h = vcvt_f16_f32(x);
    vst1_u16(out, vreinterpret_u16_f16(h));
    memcpy(dst + i, out, have * sizeof *dst);
    float32x4_t back = vcvt_f32_f16(h);
    uint32x4_t finite = vcltq_f32(vabsq_f32(back), infinity);
    uint32x4_t bounded = vcltq_f32(vabsq_f32(x), infinity);
    float32x4_t error = vreinterpretq_f32_u32(
        vandq_u32(finite, vreinterpretq_u32_f32(vsubq_f32(x, back))));
    float32x4_t value = vreinterpretq_f32_u32(vandq_u32(finite, vreinterpretq_u32_f32(x)));
    square_error = vfmaq_f32(square_error, error, error);
    square_sum = vfmaq_f32(square_sum, value, value);
    max_error = vmaxq_f32(max_error, vabsq_f32(error));
    count += vaddvq_u32(vshrq_n_u32(vandq_u32(finite, used), 31));
    overflow += vaddvq_u32(vshrq_n_u32(vbicq_u32(vandq_u32(bounded, used), finite), 31));
  }
  stats->square_error += vaddvq_f32(square_error);
  stats->square_sum += vaddvq_f32(square_sum);
  double largest = vmaxvq_f32(max_error);
  if (largest > stats->max_error) stats->max_error = largest;
  stats->count += count;
  stats->overflow += overflow;
}

static block_kernel *choose(void) { return convert_neon; }

#else
static block_kernel *choose(void) { return NULL; }
#endif

static block_kernel *kernel;

__attribute__((constructor)) static void choose_kernel(void) { kernel = choose(); }

int strapk_float32_to_float16(uint16_t *dst, const float *src, size_t n,
                              struct strapk_stats *stats) {
  if (kernel == NULL) return 0;
  for (; n > 0;) {
    size_t some = n < BLOCK ? n : BLOCK;
    kernel(dst, src, some, stats);
    dst += some;
    src += some;
    n -= some;
  }
  return 1;
}

/* A run along the last dimension; item is a constant in each case, so that
 * memcpy becomes one load and one store. */
static void run(char *dst, const char *src, size_t item, int64_t stride, int64_t n) {
  if (stride == 1) {
    memcpy(dst, src, (size_t)n * item);
    return;
  }
#define CASE(size)                                            \
  case size:                                                  \
    for (int64_t i = 0; i < n; i++)                           \
      memcpy(dst + i * (size), src + i * stride * (size), (size)); \
    return
  switch (item) {
    CASE(1);
    CASE(2);
    CASE(4);
    CASE(8);
    CASE(16);
  }
#undef CASE
}

void strapk_gather(void *dst, const void *src, size_t item, int ndim, const int64_t *shape,
                   const int64_t *strides, int64_t start, int64_t count) {
  int64_t at[64];
  int64_t rest = start, offset = 0;
  for (int d = ndim - 1; d >= 0; d--) {
    at[d] = rest % shape[d];
    rest /= shape[d];
    offset += at[d] * strides[d];
  }
  const int last = ndim - 1;
  char *out = dst;
  while (count > 0) {
    int64_t n = shape[last] - at[last];
    if (n > count) n = count;
    run(out, (const char *)src + offset * (int64_t)item, item, strides[last], n);
    out += (size_t)n * item;
    count -= n;
    /* On to the first element of the next run. */
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
