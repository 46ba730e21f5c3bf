/*
 * asan.c - the hooks that clang's -fsanitize=address calls, with
 * -mllvm -asan-instrumentation-with-call-threshold=0, which makes every check a call. These
 * hooks announce accesses of every size. Clang's -fsanitize=thread does not announce vectors
 * of more than 16 bytes.
 */
#include "access.h"

#define HOOKS(size)                                                                      \
  EXPORT void __asan_load##size(uintptr_t p) {                                           \
    record((const void *)p, size, OP_LOAD, CALLER);                                      \
  }                                                                                      \
  EXPORT void __asan_store##size(uintptr_t p) {                                          \
    record((const void *)p, size, OP_STORE, CALLER);                                     \
  }

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

EXPORT void __asan_loadN(uintptr_t p, size_t size) {
  access_record_range((const void *)p, size, OP_LOAD, CALLER);
}

EXPORT void __asan_storeN(uintptr_t p, size_t size) {
  access_record_range((const void *)p, size, OP_STORE, CALLER);
}

EXPORT void *__asan_memcpy(void *to, const void *from, size_t size) {
  return access_memcpy(to, from, size, CALLER);
}

EXPORT void *__asan_memmove(void *to, const void *from, size_t size) {
  return access_memmove(to, from, size, CALLER);
}

EXPORT void *__asan_memset(void *to, int value, size_t size) {
  return access_memset(to, value, size, CALLER);
}

/* C++ keeps the length of some arrays before the first element: the array cookie. */
EXPORT void __asan_poison_cxx_array_cookie(uintptr_t p) { (void)p; }
EXPORT uintptr_t __asan_load_cxx_array_cookie(uintptr_t *p) { return *p; }

EXPORT void __asan_init(void) {}
EXPORT void __asan_version_mismatch_check_v8(void) {}
EXPORT void __asan_handle_no_return(void) {}
