/*
 * threads.c - the threads that the Go runtime makes.
 *
 * Its monitor, sysmon, sleeps while nothing of Go runs. Each call into the library from
 * a thread of the host wakes it; it then looks around every 20 microseconds, and sleeps
 * again. Where the host computes on all CPUs, each of these moments is taken from one of
 * its threads, for which the others wait. So the monitor gets the lowest priority: what
 * it is for (stopping goroutines that run long, taking back what a blocked thread holds)
 * can wait.
 *
 * The runtime has no setting for that, and no name for the thread. It is the second that
 * the library makes: the first initialises the runtime and starts it before all else
 * (runtime/proc.go, main). Were another one the second, that would have the priority of
 * the workers.
 */
#if defined(__linux__)
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define MONITOR 2
#define LOWEST 19

typedef int create_fn(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *);

struct start {
  void *(*run)(void *);
  void *argument;
};

static void *run_lowest(void *argument) {
  struct start start = *(struct start *)argument;
  free(argument);
  setpriority(PRIO_PROCESS, (id_t)syscall(SYS_gettid), LOWEST);
  return start.run(start.argument);
}

/* Stands in for the C library's within this library alone. */
__attribute__((visibility("hidden"))) int pthread_create(pthread_t *thread,
                                                         const pthread_attr_t *attributes,
                                                         void *(*run)(void *), void *argument) {
  static atomic_int made;
  /* The default one: a sanitizer of the host has its own in front of the C library's. */
  create_fn *create = (create_fn *)dlsym(RTLD_DEFAULT, "pthread_create");
  if (create == NULL) return ENOSYS;
  if (atomic_load(&made) == MONITOR - 1) {
    struct start *start = malloc(sizeof *start);
    if (start != NULL) {
      *start = (struct start){run, argument};
      int failed = create(thread, attributes, run_lowest, start);
      if (failed)
        free(start); /* and is tried again */
      else
        atomic_fetch_add(&made, 1);
      return failed;
    }
  }
  int failed = create(thread, attributes, run, argument);
  if (!failed) atomic_fetch_add(&made, 1);
  return failed;
}
#endif
