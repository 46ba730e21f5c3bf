/*
 * rows.c - exchanges rows of a buffer that is much larger than the caches.
 *
 * The processor cannot foresee where the next row is. So its lines are asked for while the row before is
 * copied. The row that takes its place is copied while these lines are in the caches. If many rows go out,
 * they are written past the caches: otherwise each line of OUT would be read before it is overwritten.
 */
#include "rows.h"

#include <string.h>

#ifdef __SSE2__
#include <emmintrin.h>
#define STREAMS 1
#else
#define STREAMS 0
#endif

#define LINE 64             /* bytes that a processor's caches hold together */
#define STREAMED (1u << 20) /* fewer bytes at OUT are left in the caches, for the caller to read */

/* Copies a line past the caches. TO begins at a multiple of 16. */
static inline void stream_line(char *to, const char *from) {
#if STREAMS
  for (int i = 0; i < LINE; i += 16)
    _mm_stream_si128((__m128i *)(to + i), _mm_loadu_si128((const __m128i *)(from + i)));
#else
  memcpy(to, from, LINE);
#endif
}

/* Copies a row to OUT, and IN to its place. It asks for the lines of the next row. */
static inline void exchange(char *row, const char *next, size_t bytes, char *out, const char *in, int streams) {
  size_t at = 0;
  for (; at + LINE <= bytes; at += LINE) {
    __builtin_prefetch(next + at);
    if (streams)
      stream_line(out + at, row + at);
    else
      memcpy(out + at, row + at, LINE);
    if (in != NULL) memcpy(row + at, in + at, LINE);
  }
  memcpy(out + at, row + at, bytes - at);
  if (in != NULL) memcpy(row + at, in + at, bytes - at);
}

void rows_exchange(char *buffer, size_t row_bytes, const uint64_t *slots, size_t count, char *out,
                   const char *in) {
  const int streams = STREAMS && ((uintptr_t)out | row_bytes) % 16 == 0 && count * row_bytes >= STREAMED;
  for (size_t k = 0; k < count; k++) {
    char *row = buffer + slots[k] * row_bytes;
    const char *next = buffer + slots[k + 1 < count ? k + 1 : k] * row_bytes;
    exchange(row, next, row_bytes, out + k * row_bytes, in == NULL ? NULL : in + k * row_bytes, streams);
  }
#if STREAMS
  if (streams) _mm_sfence();
#endif
}
