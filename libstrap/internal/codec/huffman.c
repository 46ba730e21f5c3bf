// huffman.c - the loops of huffman.go, which describes codes and streams.

//go:build cgo

#include <string.h>

#include "kernel.h"

struct stream {
  const uint8_t *src;
  uint8_t *out;
  uint64_t held, n;
};

/* Takes the last four bytes of the source. */
static inline uint32_t take(struct stream *s) {
  uint32_t v;
  s->src -= sizeof v;
  memcpy(&v, s->src, sizeof v);
  return v;
}

/* Adds a code to the held bits. */
static inline void put(struct stream *s, uint64_t code) {
  s->held = s->held >> (code & 63) | code;
  s->n += code & 255;
}

/* Writes the held bits. Less than eight bits stay held. */
static inline void flush(struct stream *s) {
  uint64_t v = s->held >> (-s->n & 63);
  memcpy(s->out, &v, sizeof v);
  s->out += s->n >> 3;
  s->n &= 7;
}

static void put_bytes(const uint64_t *codes, size_t count, struct stream *s, struct stream *t) {
  struct stream a = *s, b = *t; /* in registers */
  for (; count > 0; count--) {
    uint32_t v = take(&a), w = take(&b);
    put(&a, codes[v >> 24]);
    put(&b, codes[w >> 24]);
    put(&a, codes[v >> 16 & 255]);
    put(&b, codes[w >> 16 & 255]);
    put(&a, codes[v >> 8 & 255]);
    put(&b, codes[w >> 8 & 255]);
    put(&a, codes[v & 255]);
    put(&b, codes[w & 255]);
    flush(&a);
    flush(&b);
  }
  *s = a, *t = b;
}

static void put_words(const uint64_t *codes, int shift, size_t count, struct stream *s,
                      struct stream *t) {
  struct stream a = *s, b = *t;
  for (; count > 0; count--) {
    uint32_t v = take(&a), w = take(&b);
    put(&a, codes[v >> 16 >> shift]);
    put(&b, codes[w >> 16 >> shift]);
    put(&a, codes[(v & 0xFFFF) >> shift]);
    put(&b, codes[(w & 0xFFFF) >> shift]);
    flush(&a);
    flush(&b);
  }
  *s = a, *t = b;
}

static struct stream load_state(const struct strapk_huffman *h, const uint8_t *src, uint8_t *out) {
  return (struct stream){src + h->left, out, h->held, h->n};
}

static void store_state(struct strapk_huffman *h, const struct stream *s, const uint8_t *src,
                      const uint8_t *out) {
  h->held = s->held, h->n = s->n;
  h->left = (size_t)(s->src - src), h->written = (size_t)(s->out - out);
}

void strapk_huffman_pair(const uint64_t *codes, int shift, size_t count, const uint8_t *src_a,
                         const uint8_t *src_b, uint8_t *out_a, uint8_t *out_b,
                         struct strapk_huffman *a, struct strapk_huffman *b) {
  struct stream s = load_state(a, src_a, out_a), t = load_state(b, src_b, out_b);
  if (shift < 0)
    put_bytes(codes, count, &s, &t);
  else
    put_words(codes, shift, count, &s, &t);
  store_state(a, &s, src_a, out_a);
  store_state(b, &t, src_b, out_b);
}

uint64_t strapk_count_words(uint16_t parts[4][1 << STRAPK_WORD_BITS], int shift,
                            const uint8_t *src, size_t n, size_t piece, size_t stride, size_t step) {
  uint64_t all = 0;
  size_t from = 0;
  for (const uint8_t *end = src + 2 * n; src < end; src += 2 * stride) {
    const uint8_t *at = src + 2 * from, *to = at + 2 * piece;
    from += step;
    if (from > stride - piece) from -= stride - piece + 4;
    for (; at < to; at += 8) {
      uint64_t v;
      memcpy(&v, at, sizeof v);
      all |= v;
      parts[0][(v & 0xFFFF) >> shift]++;
      parts[1][(v >> 16 & 0xFFFF) >> shift]++;
      parts[2][(v >> 32 & 0xFFFF) >> shift]++;
      parts[3][v >> 48 >> shift]++;
    }
  }
  return all;
}

void strapk_extent_of(const uint8_t *src, size_t n, struct strapk_extent *extent) {
  uint16_t all = 0, least = 0xFFFF, most = 0;
  for (; n > 0; n--, src += 2) {
    uint16_t v, magnitude, below;
    memcpy(&v, src, sizeof v);
    magnitude = v & 0x7FFF;
    below = (uint16_t)(magnitude - 1); /* of 0 it is the largest */
    all |= v;
    least = below < least ? below : least;
    most = magnitude > most ? magnitude : most;
  }
  *extent = (struct strapk_extent){all, least, most};
}

#if defined(__x86_64__)
#include <immintrin.h>

#define WIDE __attribute__((target(STRAPK_AVX512F ",avx512bw,bmi2")))
#define WIDE_INLINE WIDE static inline __attribute__((always_inline))

WIDE void strapk_extent_wide(const uint8_t *src, size_t n, struct strapk_extent *extent) {
  const __m512i magnitudes = _mm512_set1_epi16(0x7FFF), one = _mm512_set1_epi16(1);
  __m512i all = _mm512_setzero_si512(), most = all, least = _mm512_set1_epi16(-1);
  for (const uint8_t *end = src + 2 * n; src < end; src += 64) {
    const __m512i v = _mm512_loadu_si512(src), magnitude = _mm512_and_si512(v, magnitudes);
    all = _mm512_or_si512(all, v);
    most = _mm512_max_epu16(most, magnitude);
    least = _mm512_min_epu16(least, _mm512_sub_epi16(magnitude, one));
  }
  uint16_t lanes[3][32];
  _mm512_storeu_si512(lanes[0], all);
  _mm512_storeu_si512(lanes[1], least);
  _mm512_storeu_si512(lanes[2], most);
  *extent = (struct strapk_extent){0, 0xFFFF, 0};
  for (int i = 0; i < 32; i++) {
    extent->all |= lanes[0][i];
    extent->least = lanes[1][i] < extent->least ? lanes[1][i] : extent->least;
    extent->most = lanes[2][i] > extent->most ? lanes[2][i] : extent->most;
  }
}

/* The codes of 64 bytes. A lane has the joined codes of four words. The codes of the last lane are
 * written first. If a lane is too long to be added to seven held bits, `split` is set. Then a lane has
 * the codes of two words, and the codes in `high` are written before the codes in `low`. */
struct lanes {
  uint64_t quad[8], quad_bits[8];
  uint64_t high[8], high_bits[8], low[8], low_bits[8];
  int split;
};

/* Returns the codes of 32 bytes in 16-bit lanes, from a table in eight registers. */
WIDE_INLINE __m512i look_up(const __m512i table[8], __m512i bytes) {
  const __mmask32 b6 = _mm512_test_epi16_mask(bytes, _mm512_set1_epi16(64));
  const __mmask32 b7 = _mm512_test_epi16_mask(bytes, _mm512_set1_epi16(128));
  __m512i part[4]; /* looked up by bits 0 to 5 of the bytes */
  for (int i = 0; i < 4; i++)
    part[i] = _mm512_permutex2var_epi16(table[2 * i], bytes, table[2 * i + 1]);
  return _mm512_mask_blend_epi16(b7, _mm512_mask_blend_epi16(b6, part[0], part[1]),
                                 _mm512_mask_blend_epi16(b6, part[2], part[3]));
}

/* Joins the codes of the 64 bytes at src. */
WIDE_INLINE void join(const __m512i table[8], const uint8_t *src, struct lanes *out) {
  const __m512i low4 = _mm512_set1_epi16(15), low8 = _mm512_set1_epi16(255),
                low16 = _mm512_set1_epi32(0xFFFF), low32 = _mm512_set1_epi64(0xFFFFFFFF),
                most = _mm512_set1_epi64(56);
  /* In each word the high byte's code comes first. */
  const __m512i v = _mm512_loadu_si512(src);
  const __m512i h = look_up(table, _mm512_srli_epi16(v, 8));
  const __m512i l = look_up(table, _mm512_and_si512(v, low8));
  const __m512i code_h = _mm512_srli_epi16(h, 4), code_l = _mm512_srli_epi16(l, 4);
  const __m512i bits_h = _mm512_and_si512(h, low4);
  const __m512i bits = _mm512_add_epi16(bits_h, _mm512_and_si512(l, low4));

  /* The words with even and with odd index, in 32-bit lanes. */
  const __m512i even = _mm512_or_si512(
      _mm512_and_si512(code_h, low16),
      _mm512_sllv_epi32(_mm512_and_si512(code_l, low16), _mm512_and_si512(bits_h, low16)));
  const __m512i odd = _mm512_or_si512(
      _mm512_srli_epi32(code_h, 16),
      _mm512_sllv_epi32(_mm512_srli_epi32(code_l, 16), _mm512_srli_epi32(bits_h, 16)));
  const __m512i odd_bits = _mm512_srli_epi32(bits, 16);
  const __m512i two_bits = _mm512_add_epi32(_mm512_and_si512(bits, low16), odd_bits);

  /* Two words, in 64-bit lanes. The code of the odd word comes first. */
  const __m512i low = _mm512_or_si512(
      _mm512_and_si512(odd, low32),
      _mm512_sllv_epi64(_mm512_and_si512(even, low32), _mm512_and_si512(odd_bits, low32)));
  const __m512i high = _mm512_or_si512(
      _mm512_srli_epi64(odd, 32),
      _mm512_sllv_epi64(_mm512_srli_epi64(even, 32), _mm512_srli_epi64(odd_bits, 32)));
  const __m512i low_bits = _mm512_and_si512(two_bits, low32);
  const __m512i high_bits = _mm512_srli_epi64(two_bits, 32);
  const __m512i quad_bits = _mm512_add_epi64(low_bits, high_bits);

  out->split = _mm512_cmpgt_epi64_mask(quad_bits, most) != 0;
  if (__builtin_expect(out->split, 0)) {
    _mm512_storeu_si512(out->high, high);
    _mm512_storeu_si512(out->high_bits, high_bits);
    _mm512_storeu_si512(out->low, low);
    _mm512_storeu_si512(out->low_bits, low_bits);
    return;
  }
  _mm512_storeu_si512(out->quad, _mm512_or_si512(high, _mm512_sllv_epi64(low, high_bits)));
  _mm512_storeu_si512(out->quad_bits, quad_bits);
}

/* Writes a lane. The held bits are the lowest bits of s->held. s->n < 8, bits <= 56. */
WIDE_INLINE void put_lane(struct stream *s, uint64_t codes, uint64_t bits) {
  uint64_t held = s->held | codes << s->n, n = s->n + bits;
  memcpy(s->out, &held, sizeof held);
  s->out += n >> 3;
  s->held = held >> (n & 56);
  s->n = n & 7;
}

WIDE_INLINE void put_lanes(struct stream *s, const struct lanes *in) {
  for (int i = 7; i >= 0; i--) {
    if (in->split) {
      put_lane(s, in->high[i], in->high_bits[i]);
      put_lane(s, in->low[i], in->low_bits[i]);
    } else {
      put_lane(s, in->quad[i], in->quad_bits[i]);
    }
  }
}

/* lowered moves the held bits to the lowest bits of held, where put_lane needs them. raised moves them
 * back. */
static struct stream lowered(struct stream s) {
  s.held = s.held >> 1 >> (63 - s.n);
  return s;
}

static struct stream raised(struct stream s) {
  s.held = s.held << 1 << (63 - s.n);
  return s;
}

WIDE static struct stream put_one(const __m512i table[8], size_t count, struct stream s) {
  for (; count > 0; count--) {
    struct lanes x;
    join(table, s.src -= 64, &x);
    put_lanes(&s, &x);
  }
  return s;
}

WIDE void strapk_huffman_wide(const uint16_t codes[256], size_t count, const uint8_t *src_a,
                              const uint8_t *src_b, uint8_t *out_a, uint8_t *out_b,
                              struct strapk_huffman *a, struct strapk_huffman *b) {
  __m512i table[8];
  for (int i = 0; i < 8; i++) table[i] = _mm512_loadu_si512(codes + 32 * i);
  struct stream s = lowered(load_state(a, src_a, out_a));
  if (b == NULL) {
    s = raised(put_one(table, count, s));
    store_state(a, &s, src_a, out_a);
    return;
  }
  struct stream t = lowered(load_state(b, src_b, out_b));
  for (; count > 0; count--) {
    struct lanes x, y;
    join(table, s.src -= 64, &x);
    join(table, t.src -= 64, &y);
    if (__builtin_expect(x.split | y.split, 0)) {
      put_lanes(&s, &x);
      put_lanes(&t, &y);
      continue;
    }
    for (int i = 7; i >= 0; i--) { /* in turns, so that one stream's shifts do not wait for the other's */
      put_lane(&s, x.quad[i], x.quad_bits[i]);
      put_lane(&t, y.quad[i], y.quad_bits[i]);
    }
  }
  s = raised(s), t = raised(t);
  store_state(a, &s, src_a, out_a);
  store_state(b, &t, src_b, out_b);
}

#else

void strapk_extent_wide(const uint8_t *src, size_t n, struct strapk_extent *extent) {
  strapk_extent_of(src, n, extent);
}

void strapk_huffman_wide(const uint16_t codes[256], size_t count, const uint8_t *src_a,
                         const uint8_t *src_b, uint8_t *out_a, uint8_t *out_b,
                         struct strapk_huffman *a, struct strapk_huffman *b) {
  (void)codes, (void)count, (void)src_a, (void)src_b, (void)out_a, (void)out_b, (void)a, (void)b;
}
#endif
