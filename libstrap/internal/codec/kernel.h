/* kernel.h - the loops of package codec that are worth C. */
#ifndef STRAPK_H
#define STRAPK_H

#include <stddef.h>
#include <stdint.h>

#pragma GCC visibility push(hidden)

struct strapk_stats {
  int64_t count, overflow;
  double square_error, square_sum, max_error;
};

#if defined(__clang__) && __clang_major__ >= 18 && __clang_major__ <= 21
/* These ask for 512-bit registers by name; zig's baseline takes them away. */
#define STRAPK_AVX512F "avx512f,evex512"
#else
#define STRAPK_AVX512F "avx512f"
#endif

/* How many conversion kernels this processor can run; 0 is the fastest. */
int strapk_kernels(void);

/* The instruction set of a kernel; a static string. */
const char *strapk_kernel_name(int kernel);

/* How 16-bit floats are rounded to fewer mantissa bits. */
struct strapk_rounding {
  uint16_t exponent; /* mask of the exponent's bits: 0x7C00 float16, 0x7F80 bfloat16 */
  uint16_t drop;     /* mantissa bits to drop, 0: none */
};

/* The sums of these functions are the same if the values are cut at a multiple of it. */
#define STRAPK_BLOCK 3072

/* Converts n floats, rounds them and adds to *stats; dst and src do not overlap. */
void strapk_float32_to_float16(int kernel, uint16_t *dst, const float *src, size_t n,
                               const struct strapk_rounding *rounding,
                               struct strapk_stats *stats);

/* Rounds n 16-bit floats, drop > 0, and adds to *stats. */
void strapk_round(int kernel, uint16_t *dst, const uint16_t *src, size_t n,
                  const struct strapk_rounding *rounding, struct strapk_stats *stats);

/* A function like GOMP_parallel: runs work(argument) in several threads at once, the
 * caller's among them, and returns when all are through. */
typedef void (*strapk_team)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);

enum strapk_way { STRAPK_CONVERT, STRAPK_ROUND, STRAPK_COPY };

/* A checksum of n bytes, n at least STRAPK_SUMMED, that go on from a checksum. */
typedef uint32_t (*strapk_sum)(uint32_t before, const uint8_t *data, size_t n);
#define STRAPK_SUMMED 256

/* The most pieces of a copy. More than there are threads, for those may be late; few enough
 * that their sums fit the caller's stack. */
#define STRAPK_SHARES 32

/* Checksums of the pieces of a copy, in their order, each of `share` bytes but the last. */
struct strapk_checksums {
  size_t share;
  uint32_t of[STRAPK_SHARES]; /* from 0; undefined for less than STRAPK_SUMMED bytes */
};

/* strapk_float32_to_float16, strapk_round, or memcpy of n bytes, shared out to a team. The
 * sums are the same for every team. sum may be NULL; what it is called with is in the
 * caches of the thread that wrote it. */
void strapk_share(strapk_team team, enum strapk_way way, int kernel, void *dst, const void *src,
                  size_t n, const struct strapk_rounding *rounding, struct strapk_stats *stats,
                  strapk_sum sum, struct strapk_checksums *checksums);

/* Copies the elements [start, start + count), row-major, of a strided tensor.
 * 1 <= ndim <= 64, every length >= 1, item a power of two up to 16; strides are
 * in elements. */
void strapk_gather(void *dst, const void *src, size_t item, int ndim, const int64_t *shape,
                   const int64_t *strides, int64_t start, int64_t count);

/* A stream of Huffman codes; what is held is described in huffman.go. */
struct strapk_huffman {
  uint64_t held, n;
  size_t left;    /* source bytes */
  size_t written; /* bytes, by the call */
};

/* Writes the codes of the last 4 * count bytes of a->left at src_a to out_a, from the
 * end, and likewise those at src_b, in turns. codes are those of bytes, or where shift
 * is not negative those of 16-bit words, shifted. Eight bytes beyond what is written
 * may be overwritten. Little endian machines only. */
void strapk_huffman_pair(const uint64_t *codes, int shift, size_t count, const uint8_t *src_a,
                         const uint8_t *src_b, uint8_t *out_a, uint8_t *out_b,
                         struct strapk_huffman *a, struct strapk_huffman *b);

/* strapk_huffman_pair for 64 * count bytes of each stream and codes of bytes alone: the
 * code << 4 | its length. b may be NULL, for one stream. For the kernel "avx512" alone. */
void strapk_huffman_wide(const uint16_t codes[256], size_t count, const uint8_t *src_a,
                         const uint8_t *src_b, uint8_t *out_a, uint8_t *out_b,
                         struct strapk_huffman *a, struct strapk_huffman *b);

#define STRAPK_WORD_BITS 12 /* huffWordBits */

/* Adds to the counts of n 16-bit words at src, n a multiple of 4, shifted so that they have
 * STRAPK_WORD_BITS at most: word i is counted in part i % 4. Returns the union of the words,
 * four at a time. Little endian machines only. */
uint64_t strapk_count_words(uint16_t parts[4][1 << STRAPK_WORD_BITS], int shift,
                            const uint8_t *src, size_t n);

/* What quantising did to the values; see struct quantised in quantise.go. */
struct strapk_quantised {
  double square_error, square_sum, square_exact;
  float largest, max_error;
  size_t exact; /* values that are kept as they are */
};

/* Whether this processor can run strapk_quantise. */
int strapk_quantises(void);

/* Quantises n 16-bit floats (see quantise.go) and adds to *q; 0 where the values or their
 * squares are not finite. Nothing overlaps, nothing need be aligned.
 * Little endian machines only. */
int strapk_quantise(uint8_t *codes, uint8_t *scales, uint8_t *exact, const uint8_t *src, size_t n,
                    int bfloat, double spread, struct strapk_quantised *q);

#pragma GCC visibility pop

#endif
