// share.c - copies in the host's threads.

//go:build cgo

#include "floats.h"
#include "kernel.h"

#include <stdatomic.h>
#include <string.h>

#define LEAST (6 * STRAPK_BLOCK) /* least elements of a piece, or bytes of a STRAPK_COPY */

struct share_out {
  enum strapk_way way;
  int kernel;
  char *dst;
  const char *src;
  size_t n, share;
  const struct strapk_rounding *rounding;
  atomic_size_t next;
  struct strapk_stats stats[STRAPK_SHARES];
  strapk_sum sum;
  uint32_t *checksums;
};

/* Returns the bytes that are written for an element, or for a byte of a STRAPK_COPY. */
static size_t written(enum strapk_way way) { return way == STRAPK_COPY ? 1 : sizeof(uint16_t); }

/* Takes one piece after another until none is left. */
static void work(void *argument) {
  OWN_FLOATS;
  struct share_out *s = argument;
  for (size_t i; (i = atomic_fetch_add_explicit(&s->next, 1, memory_order_relaxed)) * s->share < s->n;) {
    const size_t at = i * s->share, left = s->n - at, n = left < s->share ? left : s->share;
    switch (s->way) {
    case STRAPK_CONVERT:
      strapk_float32_to_float16(s->kernel, (uint16_t *)s->dst + at, (const float *)s->src + at, n,
                                s->rounding, &s->stats[i]);
      break;
    case STRAPK_ROUND:
      strapk_round(s->kernel, (uint16_t *)s->dst + at, (const uint16_t *)s->src + at, n,
                   s->rounding, &s->stats[i]);
      break;
    case STRAPK_COPY:
      memcpy(s->dst + at, s->src + at, n);
      break;
    }
    const size_t size = written(s->way);
    if (s->sum != NULL && n * size >= STRAPK_SUMMED)
      s->checksums[i] = s->sum(0, (const uint8_t *)s->dst + at * size, n * size);
  }
}

void strapk_share(strapk_team team, enum strapk_way way, int kernel, void *dst, const void *src,
                  size_t n, const struct strapk_rounding *rounding, struct strapk_stats *stats,
                  strapk_sum sum, struct strapk_checksums *checksums) {
  struct share_out s = {.way = way, .kernel = kernel, .dst = dst, .src = src, .n = n, .rounding = rounding,
                        .sum = sum, .checksums = checksums->of};
  s.share = (n / STRAPK_SHARES / LEAST + 1) * LEAST;
  checksums->share = s.share * written(way);
  team(work, &s, 0, 0);
  for (size_t i = 0; i * s.share < n; i++) {
    stats->count += s.stats[i].count;
    stats->overflow += s.stats[i].overflow;
    stats->square_error += s.stats[i].square_error;
    stats->square_sum += s.stats[i].square_sum;
    if (s.stats[i].max_error > stats->max_error) stats->max_error = s.stats[i].max_error;
  }
}
