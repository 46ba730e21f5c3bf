/*
 * floats.h - the floating-point environment of a thread of the host: which exceptions trap,
 * which were raised, how results are rounded, whether subnormal numbers count as zeros.
 *
 * The library computes in the default environment, in threads of the host too. A function that
 * such a thread enters begins with OWN_FLOATS: it sets the default environment, and the
 * host's again when the function returns. Registers are written only where that changes
 * something, since that takes longer than reading them.
 */
#ifndef STRAP_FLOATS_H
#define STRAP_FLOATS_H

#if defined(__x86_64__)
#include <xmmintrin.h>

/* The register of SSE and AVX. Neither C nor Go uses the x87. */
struct strap_floats {
  unsigned control;
};

static inline struct strap_floats strap_take_floats(void) {
  const unsigned usual = 0x1F80, raised = 0x3F; /* nothing traps, results are rounded to nearest */
  const struct strap_floats host = {_mm_getcsr()};
  if ((host.control & ~raised) != usual) _mm_setcsr(usual);
  return host;
}

static inline void strap_give_floats_back(const struct strap_floats *host) {
  if (_mm_getcsr() != host->control) _mm_setcsr(host->control);
}

#elif defined(__aarch64__)
#include <stdint.h>

struct strap_floats {
  uint64_t control, raised;
};

static inline struct strap_floats strap_floats_now(void) {
  struct strap_floats now;
  __asm__ volatile("mrs %0, fpcr" : "=r"(now.control));
  __asm__ volatile("mrs %0, fpsr" : "=r"(now.raised));
  return now;
}

static inline struct strap_floats strap_take_floats(void) {
  const struct strap_floats host = strap_floats_now();
  if (host.control != 0) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
  return host;
}

static inline void strap_give_floats_back(const struct strap_floats *host) {
  const struct strap_floats now = strap_floats_now();
  if (now.control != host->control) __asm__ volatile("msr fpcr, %0" : : "r"(host->control));
  if (now.raised != host->raised) __asm__ volatile("msr fpsr, %0" : : "r"(host->raised));
}

#else

struct strap_floats {
  char none;
};

static inline struct strap_floats strap_take_floats(void) { return (struct strap_floats){0}; }

static inline void strap_give_floats_back(const struct strap_floats *host) { (void)host; }

#endif

#define OWN_FLOATS                                                                    \
  __attribute__((cleanup(strap_give_floats_back), unused)) const struct strap_floats \
      host_floats = strap_take_floats()

#endif
