//go:build cgo

/* share.c - a copy shared out to the host's threads. */
#include "kernel.h"

#include <stdatomic.h>
#include <string.h>

/* Shares of one copy. More than there are threads, for those may be late; few enough that
 * their sums fit the caller's stack. */
#define SHARES 32
#define LEAST 16384 /* elements of a share, or bytes; a multiple of what a kernel works on */

struct share_out {
  enum strapk_way way;
  int kernel;
  char *dst;
  const char *src;
  size_t n, share;
  const struct strapk_rounding *rounding;
  atomic_size_t next;
  struct strapk_stats stats[SHARES];
};

static void work(void *argument) {
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
  }
}

void strapk_share(strapk_team team, enum strapk_way way, int kernel, void *dst, const void *src,
                  size_t n, const struct strapk_rounding *rounding, struct strapk_stats *stats) {
  struct share_out s = {.way = way, .kernel = kernel, .dst = dst, .src = src, .n = n, .rounding = rounding};
  s.share = (n / SHARES / LEAST + 1) * LEAST;
  team(work, &s, 0, 0);
  for (size_t i = 0; i * s.share < n; i++) {
    stats->count += s.stats[i].count;
    stats->overflow += s.stats[i].overflow;
    stats->square_error += s.stats[i].square_error;
    stats->square_sum += s.stats[i].square_sum;
    if (s.stats[i].max_error > stats->max_error) stats->max_error = s.stats[i].max_error;
  }
}
