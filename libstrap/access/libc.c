/*
 * libc.c - records memcpy, memmove and memset. A program linked with --wrap for them calls
 * the __wrap_ functions here. Newer compilers call the __tsan_ functions instead.
 */
#include "access.h"

#include <string.h>

/* If the linker wraps memcpy, it defines __real_memcpy. A call to memcpy here would then come
 * back to __wrap_memcpy. */
extern __attribute__((weak)) void *__real_memcpy(void *, const void *, size_t);
extern __attribute__((weak)) void *__real_memmove(void *, const void *, size_t);
extern __attribute__((weak)) void *__real_memset(void *, int, size_t);
extern __attribute__((weak)) void *__real___memcpy_chk(void *, const void *, size_t, size_t);
extern __attribute__((weak)) void *__real___memmove_chk(void *, const void *, size_t, size_t);
extern __attribute__((weak)) void *__real___memset_chk(void *, int, size_t, size_t);
extern void *__memcpy_chk(void *, const void *, size_t, size_t);
extern void *__memmove_chk(void *, const void *, size_t, size_t);
extern void *__memset_chk(void *, int, size_t, size_t);

#define REAL(name) (__real_##name != NULL ? __real_##name : name)

#define COPY(name)                                                                   \
  void *access_##name(void *to, const void *from, size_t size, uintptr_t pc) {       \
    access_record_copy(to, from, size, pc);                                          \
    return REAL(name)(to, from, size);                                               \
  }                                                                                  \
  EXPORT void *__wrap_##name(void *to, const void *from, size_t size) {              \
    return access_##name(to, from, size, CALLER);                                    \
  }                                                                                  \
  EXPORT void *__tsan_##name(void *to, const void *from, size_t size) {              \
    return access_##name(to, from, size, CALLER);                                    \
  }

COPY(memcpy)
COPY(memmove)

void *access_memset(void *to, int value, size_t size, uintptr_t pc) {
  access_record_copy(to, NULL, size, pc);
  return REAL(memset)(to, value, size);
}

EXPORT void *__wrap_memset(void *to, int value, size_t size) {
  return access_memset(to, value, size, CALLER);
}

EXPORT void *__tsan_memset(void *to, int value, size_t size) {
  return access_memset(to, value, size, CALLER);
}

/* Code compiled with _FORTIFY_SOURCE calls these. */
EXPORT void *__wrap___memcpy_chk(void *to, const void *from, size_t size, size_t room) {
  access_record_copy(to, from, size, CALLER);
  return REAL(__memcpy_chk)(to, from, size, room);
}

EXPORT void *__wrap___memmove_chk(void *to, const void *from, size_t size, size_t room) {
  access_record_copy(to, from, size, CALLER);
  return REAL(__memmove_chk)(to, from, size, room);
}

EXPORT void *__wrap___memset_chk(void *to, int value, size_t size, size_t room) {
  access_record_copy(to, NULL, size, CALLER);
  return REAL(__memset_chk)(to, value, size, room);
}
