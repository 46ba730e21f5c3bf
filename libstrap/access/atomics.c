/*
 * atomics.c - the functions that -fsanitize=thread calls in place of atomic operations.
 *
 * Each does the operation and records it. The operation is sequentially consistent, which
 * is at least as strong as the requested order. A compare-exchange is recorded as a load,
 * and also as a store if it stored.
 */
#include "access.h"

#define LOADED (OP_LOAD | OP_ATOMIC)
#define STORED (OP_STORE | OP_ATOMIC)
#define EXCHANGED (OP_BOTH | OP_ATOMIC)

#define FETCH(bits, type, name)                                                          \
  EXPORT type __tsan_atomic##bits##_fetch_##name(volatile void *p, type v, int order) {  \
    (void)order;                                                                         \
    record(p, bits / 8, EXCHANGED, CALLER);                                              \
    return fetch_##name##bits(p, v);                                                     \
  }

#define COMPARE_EXCHANGE(bits, type, strength)                                             \
  EXPORT _Bool __tsan_atomic##bits##_compare_exchange_##strength(                          \
      volatile void *p, void *expected, type v, int order, int failure) {                  \
    (void)order, (void)failure;                                                            \
    _Bool done = compare_exchange##bits(p, expected, v);                                   \
    record(p, bits / 8, done ? EXCHANGED : LOADED, CALLER);                                \
    return done;                                                                           \
  }

#define ATOMICS(bits, type)                                                                \
  EXPORT type __tsan_atomic##bits##_load(const volatile void *p, int order) {              \
    (void)order;                                                                           \
    record(p, bits / 8, LOADED, CALLER);                                                   \
    return load##bits(p);                                                                  \
  }                                                                                        \
  EXPORT void __tsan_atomic##bits##_store(volatile void *p, type v, int order) {           \
    (void)order;                                                                           \
    record(p, bits / 8, STORED, CALLER);                                                   \
    store##bits(p, v);                                                                     \
  }                                                                                        \
  EXPORT type __tsan_atomic##bits##_exchange(volatile void *p, type v, int order) {        \
    (void)order;                                                                           \
    record(p, bits / 8, EXCHANGED, CALLER);                                                \
    return exchange##bits(p, v);                                                           \
  }                                                                                        \
  FETCH(bits, type, add)                                                                   \
  FETCH(bits, type, sub)                                                                   \
  FETCH(bits, type, and)                                                                   \
  FETCH(bits, type, or)                                                                    \
  FETCH(bits, type, xor)                                                                   \
  FETCH(bits, type, nand)                                                                  \
  COMPARE_EXCHANGE(bits, type, strong)                                                     \
  COMPARE_EXCHANGE(bits, type, weak)                                                       \
  EXPORT type __tsan_atomic##bits##_compare_exchange_val(volatile void *p, type expected,  \
                                                         type v, int order, int failure) { \
    (void)order, (void)failure;                                                            \
    _Bool done = compare_exchange##bits(p, &expected, v);                                  \
    record(p, bits / 8, done ? EXCHANGED : LOADED, CALLER);                                \
    return expected;                                                                       \
  }

/* The machine has these operations for up to 64 bits. */
#define FETCH_OF(bits, type, name)                                          \
  static inline type fetch_##name##bits(volatile type *p, type v) {         \
    return __atomic_fetch_##name(p, v, __ATOMIC_SEQ_CST);                   \
  }

#define OPERATIONS(bits, type)                                              \
  static inline type load##bits(const volatile type *p) {                   \
    return __atomic_load_n(p, __ATOMIC_SEQ_CST);                            \
  }                                                                         \
  static inline void store##bits(volatile type *p, type v) {                \
    __atomic_store_n(p, v, __ATOMIC_SEQ_CST);                               \
  }                                                                         \
  static inline type exchange##bits(volatile type *p, type v) {             \
    return __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);                     \
  }                                                                         \
  static inline _Bool compare_exchange##bits(volatile type *p, type *e, type v) {            \
    return __atomic_compare_exchange_n(p, e, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);    \
  }                                                                         \
  FETCH_OF(bits, type, add)                                                 \
  FETCH_OF(bits, type, sub)                                                 \
  FETCH_OF(bits, type, and)                                                 \
  FETCH_OF(bits, type, or)                                                  \
  FETCH_OF(bits, type, xor)                                                 \
  FETCH_OF(bits, type, nand)

OPERATIONS(8, uint8_t)
OPERATIONS(16, uint16_t)
OPERATIONS(32, uint32_t)
OPERATIONS(64, uint64_t)
ATOMICS(8, uint8_t)
ATOMICS(16, uint16_t)
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)

/* Operations on 128 bits are loops around the machine's compare-and-swap, because no other
 * operation on 128 bits is atomic on every processor. A load is one compare-and-swap, so its
 * memory must be writable. */
__extension__ typedef unsigned __int128 u128;

static inline u128 swap128(volatile u128 *p, u128 expected, u128 v) {
  return __sync_val_compare_and_swap(p, expected, v);
}

static inline _Bool compare_exchange128(volatile u128 *p, u128 *expected, u128 v) {
  u128 found = swap128(p, *expected, v);
  _Bool done = found == *expected;
  *expected = found;
  return done;
}

#define LOOP128(value)                                \
  u128 old = swap128(p, 0, 0);                        \
  for (;;) {                                          \
    u128 found = swap128(p, old, (value));            \
    if (found == old) return old;                     \
    old = found;                                      \
  }

static inline u128 load128(const volatile u128 *p) { return swap128((volatile u128 *)p, 0, 0); }
static inline u128 exchange128(volatile u128 *p, u128 v) { LOOP128(v) }
static inline void store128(volatile u128 *p, u128 v) { exchange128(p, v); }
static inline u128 fetch_add128(volatile u128 *p, u128 v) { LOOP128(old + v) }
static inline u128 fetch_sub128(volatile u128 *p, u128 v) { LOOP128(old - v) }
static inline u128 fetch_and128(volatile u128 *p, u128 v) { LOOP128(old & v) }
static inline u128 fetch_or128(volatile u128 *p, u128 v) { LOOP128(old | v) }
static inline u128 fetch_xor128(volatile u128 *p, u128 v) { LOOP128(old ^ v) }
static inline u128 fetch_nand128(volatile u128 *p, u128 v) { LOOP128(~(old & v)) }
ATOMICS(128, u128)

EXPORT void __tsan_atomic_thread_fence(int order) {
  (void)order;
  atomic_thread_fence(memory_order_seq_cst);
}

EXPORT void __tsan_atomic_signal_fence(int order) {
  (void)order;
  atomic_signal_fence(memory_order_seq_cst);
}
