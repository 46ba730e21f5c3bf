/*
 * tsan.c - the hooks that -fsanitize=thread calls. atomics.c has those for atomic operations.
 */
#include "access.h"

#define HOOK(name, size, op) \
  EXPORT void __tsan_##name(void *p) { record(p, size, op, CALLER); }

#define HOOKS(size)                                        \
  HOOK(read##size, size, OP_LOAD)                          \
  HOOK(write##size, size, OP_STORE)                        \
  HOOK(read_write##size, size, OP_BOTH)                    \
  HOOK(volatile_read##size, size, OP_LOAD)                 \
  HOOK(volatile_write##size, size, OP_STORE)

#define UNALIGNED_HOOKS(size)                              \
  HOOK(unaligned_read##size, size, OP_LOAD)                \
  HOOK(unaligned_write##size, size, OP_STORE)              \
  HOOK(unaligned_read_write##size, size, OP_BOTH)          \
  HOOK(unaligned_volatile_read##size, size, OP_LOAD)       \
  HOOK(unaligned_volatile_write##size, size, OP_STORE)

HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
UNALIGNED_HOOKS(2)
UNALIGNED_HOOKS(4)
UNALIGNED_HOOKS(8)
UNALIGNED_HOOKS(16)

EXPORT void __tsan_read_range(void *p, long size) {
  access_record_range(p, (uint64_t)size, OP_LOAD, CALLER);
}
EXPORT void __tsan_write_range(void *p, long size) {
  access_record_range(p, (uint64_t)size, OP_STORE, CALLER);
}

EXPORT void __tsan_vptr_read(void *p) { record(p, sizeof(void *), OP_LOAD, CALLER); }
EXPORT void __tsan_vptr_update(void *p, void *value) {
  (void)value;
  record(p, sizeof(void *), OP_STORE, CALLER);
}

EXPORT void __tsan_init(void) {}
EXPORT void __tsan_func_entry(void *pc) { (void)pc; }
EXPORT void __tsan_func_exit(void *pc) { (void)pc; }
EXPORT void __tsan_ignore_thread_begin(void) {}
EXPORT void __tsan_ignore_thread_end(void) {}

/* Annotations in programs and C++ libraries for the race detector. They record nothing. */
EXPORT void __tsan_acquire(void *p) { (void)p; }
EXPORT void __tsan_release(void *p) { (void)p; }
EXPORT void __tsan_mutex_create(void *p, unsigned flags) { (void)p, (void)flags; }
EXPORT void __tsan_mutex_destroy(void *p, unsigned flags) { (void)p, (void)flags; }
EXPORT void __tsan_mutex_pre_lock(void *p, unsigned flags) { (void)p, (void)flags; }
EXPORT void __tsan_mutex_post_lock(void *p, unsigned flags, int depth) {
  (void)p, (void)flags, (void)depth;
}
EXPORT int __tsan_mutex_pre_unlock(void *p, unsigned flags) {
  (void)p, (void)flags;
  return 0;
}
EXPORT void __tsan_mutex_post_unlock(void *p, unsigned flags) { (void)p, (void)flags; }
EXPORT void __tsan_mutex_pre_signal(void *p, unsigned flags) { (void)p, (void)flags; }
EXPORT void __tsan_mutex_post_signal(void *p, unsigned flags) { (void)p, (void)flags; }
EXPORT void __tsan_mutex_pre_divert(void *p, unsigned flags) { (void)p, (void)flags; }
EXPORT void __tsan_mutex_post_divert(void *p, unsigned flags) { (void)p, (void)flags; }
