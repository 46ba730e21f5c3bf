/*
 * floats.h - the floating-point environment of a thread of the host: the exceptions that trap, the
 * exceptions that were raised, the rounding of results, and whether subnormal numbers count as zeros.
 *
 * The library computes in the default environment, also in threads of the host. A function that is
 * called in a thread of the host begins with OWN_FLOATS. It sets the default environment, and restores
 * the host's environment when the function returns. Registers are written only if their value changes,
 * because writing takes longer than reading.
 */
#ifndef STRAP_FLOATS_H
#define STRAP_FLOATS_H

#if defined(__x86_64__)
#include <xmmintrin.h>

/* control is MXCSR, the register of SSE and AVX. Neither C nor Go uses the x87. */
struct strap_floats {
  unsigned control;
};

static inline struct strap_floats strap_set_default_floats(void) {
  const unsigned usual = 0x1F80, raised = 0x3F; /* nothing traps, results are rounded to nearest */
  const struct strap_floats host = {_mm_getcsr()};
  if ((host.control & ~raised) != usual) _mm_setcsr(usual);
  return host;
}

static inline void strap_restore_floats(const struct strap_floats *host) {
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

static inline struct strap_floats strap_set_default_floats(void) {
  const struct strap_floats host = strap_floats_now();
  if (host.control != 0) __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0));
  return host;
}

static inline void strap_restore_floats(const struct strap_floats *host) {
  const struct strap_floats now = strap_floats_now();
  if (now.control != host->control) __asm__ volatile("msr fpcr, %0" : : "r"(host->control));
  if (now.raised != host->raised) __asm__ volatile("msr fpsr, %0" : : "r"(host->raised));
}

#else

struct strap_floats {
  char none;
};

static inline struct strap_floats strap_set_default_floats(void) { return (struct strap_floats){0}; }

static inline void strap_restore_floats(const struct strap_floats *host) { (void)host; }

#endif

#define OWN_FLOATS                                                                    \
  __attribute__((cleanup(strap_restore_floats), unused)) const struct strap_floats \
      host_floats = strap_set_default_floats()

#endif
