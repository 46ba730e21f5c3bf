//go:build cgo

/*
 * huffman.c - the loops of huffman.go, which says what codes and streams look like.
 */
#include <string.h>

#include "kernel.h"

struct stream {
  const uint8_t *src;
  uint8_t *out;
  uint64_t held, n;
};

static inline uint32_t take(struct stream *s) {
  uint32_t v;
  s->src -= sizeof v;
  memcpy(&v, s->src, sizeof v);
  return v;
}

static inline void put(struct stream *s, uint64_t code) {
  s->held = s->held >> (code & 63) | code;
  s->n += code & 255;
}

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

void strapk_huffman_pair(const uint64_t *codes, int shift, size_t count, const uint8_t *src_a,
                         const uint8_t *src_b, uint8_t *out_a, uint8_t *out_b,
                         struct strapk_huffman *a, struct strapk_huffman *b) {
  struct stream s = {src_a + a->left, out_a, a->held, a->n};
  struct stream t = {src_b + b->left, out_b, b->held, b->n};
  if (shift < 0)
    put_bytes(codes, count, &s, &t);
  else
    put_words(codes, shift, count, &s, &t);
  a->held = s.held, a->n = s.n, a->left -= 4 * count, a->written = (size_t)(s.out - out_a);
  b->held = t.held, b->n = t.n, b->left -= 4 * count, b->written = (size_t)(t.out - out_b);
}
