/* Declares the hooks that compilers call, for programs that call them by hand. */
#ifndef ACCESS_TESTS_HOOKS_H
#define ACCESS_TESTS_HOOKS_H

#include <stddef.h>
#include <stdint.h>

#define DECLARE_SIZE(prefix, n)                    \
  void __tsan_##prefix##read##n(void *);           \
  void __tsan_##prefix##write##n(void *);
DECLARE_SIZE(, 1)
DECLARE_SIZE(, 2)
DECLARE_SIZE(, 4)
DECLARE_SIZE(, 8)
DECLARE_SIZE(, 16)
DECLARE_SIZE(volatile_, 1)
DECLARE_SIZE(volatile_, 16)
DECLARE_SIZE(unaligned_, 2)
DECLARE_SIZE(unaligned_, 16)
DECLARE_SIZE(unaligned_volatile_, 8)
void __tsan_read_write4(void *);
void __tsan_unaligned_read_write8(void *);
void __tsan_read_range(void *, long);
void __tsan_write_range(void *, long);
void __tsan_vptr_read(void *);
void __tsan_vptr_update(void *, void *);
void *__tsan_memcpy(void *, const void *, size_t);
void *__tsan_memmove(void *, const void *, size_t);
void *__tsan_memset(void *, int, size_t);

__extension__ typedef unsigned __int128 u128;

#define DECLARE_ATOMIC(bits, type)                                                           \
  type __tsan_atomic##bits##_load(const volatile void *, int);                               \
  void __tsan_atomic##bits##_store(volatile void *, type, int);                              \
  type __tsan_atomic##bits##_exchange(volatile void *, type, int);                           \
  type __tsan_atomic##bits##_fetch_add(volatile void *, type, int);                          \
  type __tsan_atomic##bits##_fetch_sub(volatile void *, type, int);                          \
  type __tsan_atomic##bits##_fetch_and(volatile void *, type, int);                          \
  type __tsan_atomic##bits##_fetch_or(volatile void *, type, int);                           \
  type __tsan_atomic##bits##_fetch_xor(volatile void *, type, int);                          \
  type __tsan_atomic##bits##_fetch_nand(volatile void *, type, int);                         \
  _Bool __tsan_atomic##bits##_compare_exchange_strong(volatile void *, void *, type, int, int); \
  _Bool __tsan_atomic##bits##_compare_exchange_weak(volatile void *, void *, type, int, int);  \
  type __tsan_atomic##bits##_compare_exchange_val(volatile void *, type, type, int, int);
DECLARE_ATOMIC(8, uint8_t)
DECLARE_ATOMIC(16, uint16_t)
DECLARE_ATOMIC(32, uint32_t)
DECLARE_ATOMIC(64, uint64_t)
DECLARE_ATOMIC(128, u128)
void __tsan_atomic_thread_fence(int);

#endif
