// team.c - calls a Go function in the host's threads.

//go:build cgo

#include "floats.h"

#include <stdatomic.h>
#include <stdint.h>

typedef void (*parallel_fn)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);

extern void straptWork(uintptr_t work);

struct task {
  uintptr_t work;
  atomic_uint begun;
  unsigned n;
};

static void begin(void *argument) {
  OWN_FLOATS;
  struct task *task = argument;
  /* The other threads of a large team need not enter Go. */
  if (atomic_fetch_add_explicit(&task->begun, 1, memory_order_relaxed) < task->n)
    straptWork(task->work);
}

__attribute__((visibility("hidden"))) void strapt_run(void *parallel, unsigned n, uintptr_t work) {
  struct task task = {.work = work, .n = n};
  /* Ask for the usual number of threads, not for n: for a smaller team runtimes end threads. */
  ((parallel_fn)parallel)(begin, &task, 0, 0);
}
