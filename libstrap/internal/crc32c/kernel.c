// kernel.c - CRC-32C by folding.

//go:build cgo

/*
 * See V. Gopal et al., Fast CRC Computation for Generic Polynomials Using PCLMULQDQ Instruction
 * (Intel, 2009), for polynomials with their bits reflected.
 *
 * The first 128 bits of a message can be removed: multiply them by x^D and add the product D bits
 * further on. The result is congruent to the message modulo P. The product has two parts: the first 64
 * bits times x^(D+32) mod P, and the other 64 bits times x^(D-32) mod P. The 32 is there because the
 * crc32 instruction multiplies by x^32 at the end.
 */
#include "kernel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#include <string.h>

#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ <= 21
#define EXTENSIONS "sse4.2,crc32,pclmul,vpclmulqdq,avx512f,evex512"
#elif defined(__clang__) /* clang has the crc32 instruction as a feature beside SSE 4.2 */
#define EXTENSIONS "sse4.2,crc32,pclmul,vpclmulqdq,avx512f"
#else
#define EXTENSIONS "sse4.2,pclmul,vpclmulqdq,avx512f"
#endif
#define TARGET __attribute__((target(EXTENSIONS)))
#define INLINE TARGET static inline __attribute__((always_inline))

#define REFLECTED 0x82F63B78u /* P without x^32 */

/* The factors for a shift by 2048, 512 and 128 bits. */
static uint64_t by2048[2], by512[2], by128[2];

/* Returns x^n mod P, reflected, times x. */
static uint64_t power(int n) {
  uint32_t r = 0x80000000;
  while (n-- > 0) r = r >> 1 ^ (r & 1 ? REFLECTED : 0);
  return (uint64_t)r << 1;
}

static void factors(uint64_t k[2], int distance) {
  k[0] = power(distance + 32);
  k[1] = power(distance - 32);
}

__attribute__((constructor)) static void make_factors(void) {
  factors(by2048, 2048);
  factors(by512, 512);
  factors(by128, 128);
}

/* Moves each 128 bits of x by the distance of k, and adds them to onto. */
INLINE __m512i fold(__m512i x, __m512i k, __m512i onto) {
  return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00),
                                   _mm512_clmulepi64_epi128(x, k, 0x11), onto, 0x96 /* xor */);
}

INLINE __m128i fold128(__m128i x, __m128i k, __m128i onto) {
  return _mm_xor_si128(_mm_xor_si128(_mm_clmulepi64_si128(x, k, 0x00), _mm_clmulepi64_si128(x, k, 0x11)), onto);
}

INLINE __m512i pair(const uint64_t k[2]) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)k));
}

/* n is at least 256. */
TARGET uint32_t strapcrc_update(uint32_t crc, const uint8_t *data, size_t n) {
  const __m512i k2048 = pair(by2048), k512 = pair(by512);
  __m512i x[4];
  for (int i = 0; i < 4; i++) x[i] = _mm512_loadu_si512(data + 64 * i);
  x[0] = _mm512_xor_si512(x[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc)));
  for (data += 256, n -= 256; n >= 256; data += 256, n -= 256)
    for (int i = 0; i < 4; i++) x[i] = fold(x[i], k2048, _mm512_loadu_si512(data + 64 * i));
  for (int i = 1; i < 4; i++) x[i] = fold(x[i - 1], k512, x[i]);
  for (; n >= 64; data += 64, n -= 64) x[3] = fold(x[3], k512, _mm512_loadu_si512(data));

  const __m128i k128 = _mm_loadu_si128((const __m128i *)by128);
  __m128i y = _mm512_castsi512_si128(x[3]);
  y = fold128(y, k128, _mm512_extracti32x4_epi32(x[3], 1));
  y = fold128(y, k128, _mm512_extracti32x4_epi32(x[3], 2));
  y = fold128(y, k128, _mm512_extracti32x4_epi32(x[3], 3));
  uint64_t c = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(y));
  c = _mm_crc32_u64(c, (uint64_t)_mm_extract_epi64(y, 1));
  for (; n >= 8; data += 8, n -= 8) {
    uint64_t v;
    memcpy(&v, data, sizeof v);
    c = _mm_crc32_u64(c, v);
  }
  for (; n > 0; data++, n--) c = _mm_crc32_u8((uint32_t)c, *data);
  return ~(uint32_t)c;
}

int strapcrc_runs(void) {
  const unsigned pclmul = 1u << 1, sse42 = 1u << 20, osxsave = 1u << 27,
                 basis = pclmul | sse42 | osxsave;
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || (c & basis) != basis) return 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  unsigned saved, high; /* the registers that the system saves */
  __asm__ volatile("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  const unsigned zmm = 0xE6, avx512f = 1u << 16, vpclmulqdq = 1u << 10;
  return (saved & zmm) == zmm && (b & avx512f) && (c & vpclmulqdq);
}

#else

int strapcrc_runs(void) { return 0; }

uint32_t strapcrc_update(uint32_t crc, const uint8_t *data, size_t n) {
  (void)data, (void)n;
  return crc;
}
#endif
