/*
 * threads.c - the threads that the Go runtime makes.
 *
 * Its monitor, sysmon, sleeps while nothing of Go runs. Each call into the library from
 * a thread of the host wakes it; it then looks around every 20 microseconds, and sleeps
 * again. Where the host computes on all CPUs, each of these moments is taken from one of
 * its threads, for which the others wait. So the monitor's sleeps may last until the
 * system's next tick: what it is for (stopping goroutines that run long, taking back what a
 * blocked thread holds) can wait. Not by its priority, which the threads that it makes
 * would have too, for good.
 *
 * The runtime has no setting for that, and no name for the thread. It is the second that
 * the library makes: the first initialises the runtime and starts it before all else
 * (runtime/proc.go, main). Were another one the second, its timers would be late.
 *
 * A thread begins with the floating-point environment of the one that makes it. The first is
 * made by the host's, when it loads the library: it and all others get the default one.
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

/* In static memory: to give a thread its own later may take the loader's lock. */
static _Thread_local int is_monitor __attribute__((tls_model("initial-exec")));
static unsigned long usual_slack; /* of the process */

static void *run_monitor(void *argument) {
  struct start start = *(struct start *)argument;
  free(argument);
  is_monitor = 1;
  usual_slack = (unsigned long)prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0);
  prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0);
  return start.run(start.argument);
}

/* What the monitor makes does not sleep like it. */
static void *run_other(void *argument) {
  struct start start = *(struct start *)argument;
  free(argument);
  prctl(PR_SET_TIMERSLACK, usual_slack, 0, 0, 0);
  return start.run(start.argument);
}

/* Stands in for the C library's within this library alone. */
__attribute__((visibility("hidden"))) int pthread_create(pthread_t *thread,
                                                         const pthread_attr_t *attributes,
                                                         void *(*run)(void *), void *argument) {
  OWN_FLOATS;
  static atomic_int made;
  static _Atomic(create_fn *) found;
  /* The default one: a sanitizer of the host has its own in front of the C library's. Looked
   * up once, in the thread that loads the library, since dlsym takes the loader's lock: where
   * a constructor calls the library, that thread holds it and waits for the runtime. */
  create_fn *create = atomic_load(&found);
  if (create == NULL) create = (create_fn *)dlsym(RTLD_DEFAULT, "pthread_create");
  if (create == NULL) return ENOSYS;
  atomic_store(&found, create);
  void *(*first)(void *) = NULL;
  if (atomic_load(&made) == MONITOR - 1)
    first = run_monitor;
  else if (is_monitor)
    first = run_other;
  struct start *start = first != NULL ? malloc(sizeof *start) : NULL;
  int failed;
  if (start != NULL) {
    *start = (struct start){run, argument};
    failed = create(thread, attributes, first, start);
    if (failed) free(start); /* and is tried again */
  } else {
    failed = create(thread, attributes, run, argument);
  }
  if (!failed) atomic_fetch_add(&made, 1);
  return failed;
}
#endif
