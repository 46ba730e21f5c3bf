/* kernel.h - the loops of package codec that are written in C. */
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
/* These compilers have 512-bit registers as a feature of its own, and zig's baseline excludes it. */
#define STRAPK_AVX512F "avx512f,evex512"
#else
#define STRAPK_AVX512F "avx512f"
#endif

/* Returns how many kernels this processor can run. Kernel 0 is the fastest. */
int strapk_kernels(void);

/* Returns the name of a kernel's instruction set, a static string. */
const char *strapk_kernel_name(int kernel);

/* How 16-bit floats are rounded to fewer mantissa bits. */
struct strapk_rounding {
  uint16_t exponent; /* mask of the exponent's bits: 0x7C00 for float16, 0x7F80 for bfloat16 */
  uint16_t drop;     /* number of mantissa bits to drop, 0 for none */
};

/* The next functions give the same sums if the values are cut at a multiple of STRAPK_BLOCK. */
#define STRAPK_BLOCK 3072

/* Converts n floats to float16, rounds them, and adds to *stats. dst and src must not overlap. */
void strapk_float32_to_float16(int kernel, uint16_t *dst, const float *src, size_t n,
                               const struct strapk_rounding *rounding,
                               struct strapk_stats *stats);

/* Rounds n 16-bit floats, drop > 0, and adds to *stats. */
void strapk_round(int kernel, uint16_t *dst, const uint16_t *src, size_t n,
                  const struct strapk_rounding *rounding, struct strapk_stats *stats);

/* A function like GOMP_parallel. It runs work(argument) in the calling thread and other threads at
 * once, and returns when all have returned. */
typedef void (*strapk_team)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);

enum strapk_way { STRAPK_CONVERT, STRAPK_ROUND, STRAPK_COPY };

/* Continues the checksum `before` with n bytes, n at least STRAPK_SUMMED. */
typedef uint32_t (*strapk_sum)(uint32_t before, const uint8_t *data, size_t n);
#define STRAPK_SUMMED 256

/* The most pieces of a copy. They are more than the threads, because a thread can be late, and few
 * enough that their sums fit on the caller's stack. */
#define STRAPK_SHARES 32

/* Checksums of the pieces of a copy, in order. */
struct strapk_checksums {
  size_t share;               /* bytes of a piece; the last piece has the rest */
  uint32_t of[STRAPK_SHARES]; /* each begins with 0; undefined for less than STRAPK_SUMMED bytes */
};

/* Runs strapk_float32_to_float16, strapk_round, or memcpy of n bytes in the threads of a team. The
 * statistics are the same for every team. Each thread calls sum, if it is not NULL, with the bytes
 * that the thread has just written, because they are in its caches. */
void strapk_share(strapk_team team, enum strapk_way way, int kernel, void *dst, const void *src,
                  size_t n, const struct strapk_rounding *rounding, struct strapk_stats *stats,
                  strapk_sum sum, struct strapk_checksums *checksums);

/* Copies the elements [start, start + count) of a strided tensor, in row-major order. item is the
 * bytes of an element, a power of two up to 16. 1 <= ndim <= 64, every length >= 1. Strides are in
 * elements. */
void strapk_gather(void *dst, const void *src, size_t item, int ndim, const int64_t *shape,
                   const int64_t *strides, int64_t start, int64_t count);

/* A stream of Huffman codes. huffStream in huffman.go describes held and n. */
struct strapk_huffman {
  uint64_t held, n;
  size_t left;    /* source bytes that are not yet coded */
  size_t written; /* bytes that the call wrote */
};

/* Codes the last 4 * count of the a->left bytes at src_a to out_a, from the end, and likewise bytes
 * of src_b to out_b, in turns. codes has the codes of bytes if shift is negative, else the codes of
 * 16-bit words, which are shifted right by shift. Up to eight bytes after the output may be
 * overwritten. Little endian machines only. */
void strapk_huffman_pair(const uint64_t *codes, int shift, size_t count, const uint8_t *src_a,
                         const uint8_t *src_b, uint8_t *out_a, uint8_t *out_b,
                         struct strapk_huffman *a, struct strapk_huffman *b);

/* Like strapk_huffman_pair, for 64 * count bytes of each stream. codes has the codes of bytes, each
 * code << 4 | its length. b may be NULL, for one stream. For the kernel "avx512" alone. */
void strapk_huffman_wide(const uint16_t codes[256], size_t count, const uint8_t *src_a,
                         const uint8_t *src_b, uint8_t *out_a, uint8_t *out_b,
                         struct strapk_huffman *a, struct strapk_huffman *b);

#define STRAPK_WORD_BITS 12 /* huffWordBits */

/* Counts 16-bit words at src. Of n words, `piece` of each `stride` words are counted: in the first
 * stride the first words, in each next stride from `step` words later on, modulo stride - piece + 4.
 * piece, stride and step are multiples of 4, step is at most stride - piece, and n is a multiple of
 * stride. Each word is shifted right by shift, to at most STRAPK_WORD_BITS bits. Word i is counted in
 * part i % 4. Returns the OR of all counted groups of four words. Little endian machines only. */
uint64_t strapk_count_words(uint16_t parts[4][1 << STRAPK_WORD_BITS], int shift,
                            const uint8_t *src, size_t n, size_t piece, size_t stride, size_t step);

/* Bounds of 16-bit words; see extent in huffman.go. */
struct strapk_extent {
  uint16_t all;   /* the OR of all words */
  uint16_t least; /* the smallest magnitude above 0, minus 1; 65535 if all words are 0 */
  uint16_t most;  /* the largest magnitude */
};

/* Bounds n 16-bit words, n a multiple of 32. Little endian machines only. */
void strapk_extent_of(const uint8_t *src, size_t n, struct strapk_extent *extent);

/* Does the same as strapk_extent_of. For the level "avx512" only. */
void strapk_extent_wide(const uint8_t *src, size_t n, struct strapk_extent *extent);

/* Sums and error of quantised values; see quantised in quantise.go. */
struct strapk_quantised {
  double square_error, square_sum, square_exact;
  float largest, max_error;
  size_t exact; /* number of values that are stored exactly */
};

/* Returns whether this processor can run strapk_quantise and strapk_restore. */
int strapk_quantises(void);

/* Quantises n 16-bit floats (see quantise.go) and adds to *q. Returns 0 if a value or the sum of a
 * block's squares is not finite. The buffers must not overlap, and need no alignment. Little endian
 * machines only. */
int strapk_quantise(uint8_t *codes, uint8_t *scales, uint8_t *exact, const uint8_t *src, size_t n,
                    int bfloat, double spread, struct strapk_quantised *q);

/* Writes the values of n codes as 16-bit floats; see restore in quantise.go. The buffers must not
 * overlap, and need no alignment. Little endian machines only. */
void strapk_restore(uint8_t *dst, const uint8_t *codes, const uint8_t *scales, size_t n,
                    int bfloat);

#pragma GCC visibility pop

#endif
