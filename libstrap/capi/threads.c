/*
 * threads.c - stands in for pthread_create, so that Go's monitor does not disturb the host.
 *
 * The Go runtime has a monitor thread, sysmon. It sleeps while no Go code runs. Each call into the
 * library wakes it. It then looks around every 20 microseconds for a while, and sleeps again. If the
 * host computes on all CPUs, each look takes time from one of its threads, and the other threads
 * wait for that one. So the monitor gets a large timer slack: its sleeps may last until the system's
 * next tick. Its work can wait that long: it stops goroutines that run long, and takes processors
 * back from blocked threads. A lower priority would not do, because the threads that the monitor
 * makes would inherit it for good.
 *
 * The runtime has no setting for that, and no name for the thread. The monitor is the second thread
 * that the library makes: the first one initialises the runtime, and starts the monitor before all
 * else (runtime/proc.go, main). If another thread were the second one, its timers would be late.
 *
 * A new thread inherits the floating-point environment of the thread that makes it. The host's
 * thread makes the first one when it loads the library. OWN_FLOATS gives it, and so all others, the
 * default environment.
 */
#if defined(__linux__)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/prctl.h>

#include "floats.h"

#define MONITOR 2
#define SLACK_NS 10000000ul /* more than a tick */

typedef int create_fn(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

struct start {
  void *(*run)(void *);
  void *argument;
};

/* In the initial thread-local block: allocating it later may take the loader's lock. */
static _Thread_local int is_monitor __attribute__((tls_model("initial-exec")));
static unsigned long usual_slack; /* the timer slack of the process */

static void *run_monitor(void *argument) {
  struct start start = *(struct start *)argument;
  free(argument);
  is_monitor = 1;
  usual_slack = (unsigned long)prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0);
  return start.run(start.argument);
}

/* Threads that the monitor makes get the usual timer slack back. */
static void *run_other(void *argument) {
  struct start start = *(struct start *)argument;
  free(argument);
  prctl(PR_SET_TIMERSLACK, usual_slack, 0, 0, 0);
  return start.run(start.argument);
}

/* Replaces the C library's pthread_create, within this library alone. */
__attribute__((visibility("hidden"))) int pthread_create(pthread_t *thread,
                                                         const pthread_attr_t *attributes,
                                                         void *(*run)(void *), void *argument) {
  OWN_FLOATS;
  static atomic_int made;
  static _Atomic(create_fn *) found;
  /* RTLD_DEFAULT, because a sanitizer of the host has its own pthread_create before the C
   * library's. It is looked up once, in the thread that loads the library: dlsym takes the loader's
   * lock, and a thread whose constructor calls the library holds that lock while it waits for the
   * runtime. */
  create_fn *create = atomic_load(&found);
  if (create == NULL) create = (create_fn *)dlsym(RTLD_DEFAULT, "pthread_create");
  if (create == NULL) return ENOSYS;
  atomic_store(&found, create);
  void *(*first)(void *) = NULL;
  /* A new thread may get here before the call that made it returns, so each counts beforehand. */
  if (atomic_fetch_add(&made, 1) == MONITOR - 1)
    first = run_monitor;
  else if (is_monitor)
    first = run_other;
  struct start *start = first != NULL ? malloc(sizeof *start) : NULL;
  int failed;
  if (start != NULL) {
    *start = (struct start){run, argument};
    failed = create(thread, attributes, first, start);
    if (failed) free(start);
  } else {
    failed = create(thread, attributes, run, argument);
  }
  if (failed) atomic_fetch_sub(&made, 1); /* the runtime tries again */
  return failed;
}
#endif
