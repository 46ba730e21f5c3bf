//go:build cgo

/* team.c - from Go to the host's threads and back into Go. */
#include <stdint.h>

typedef void (*parallel_fn)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);

extern void straptWork(uintptr_t work);

static void work(void *argument) { straptWork(*(const uintptr_t *)argument); }

__attribute__((visibility("hidden"))) void strapt_run(void *parallel, uintptr_t handle) {
  ((parallel_fn)parallel)(work, &handle, 0, 0);
}
