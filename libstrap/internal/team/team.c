//go:build cgo

/* team.c - from Go to the host's threads and back into Go. */
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
  /* The others of a large team need not enter Go to find that nothing is left. */
  if (atomic_fetch_add_explicit(&task->begun, 1, memory_order_relaxed) < task->n)
    straptWork(task->work);
}

__attribute__((visibility("hidden"))) void strapt_run(void *parallel, unsigned n, uintptr_t work) {
  struct task task = {.work = work, .n = n};
  /* Not n threads: runtimes end those that a smaller team has no use for. */
  ((parallel_fn)parallel)(begin, &task, 0, 0);
}
