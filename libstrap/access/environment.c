/*
 * environment.c - records a program without changes to it: with STRAP_ACCESS=PATH in the
 * environment, from before main to a normal exit. STRAP_ACCESS_EVERY=N records each Nth
 * access of a thread.
 */
#define _GNU_SOURCE 1
#include "runtime.h"

#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

/* Starts the recording if STRAP_ACCESS is set. Replaces %p in the path by the process id. */
__attribute__((constructor(101))) static void start_from_environment(void) {
  const char *given = secure_getenv("STRAP_ACCESS");
  if (given == NULL || *given == 0) return;
  char path[PATH_MAX];
  size_t n = 0;
  for (const char *p = given; *p != 0; p++) {
    if (n + 24 > sizeof path) {
      fputs("libstrap-access: STRAP_ACCESS is too long a path: not recording\n", stderr);
      return;
    }
    if (p[0] == '%' && p[1] == 'p') {
      n += (size_t)snprintf(path + n, sizeof path - n, "%d", (int)getpid());
      p++;
    } else {
      path[n++] = *p;
    }
  }
  path[n] = 0;
  strap_access_options options = {.struct_size = sizeof options, .path = path};
  const char *every = secure_getenv("STRAP_ACCESS_EVERY");
  if (every != NULL) {
    char *end;
    errno = 0;
    unsigned long value = strtoul(every, &end, 10);
    if (errno != 0 || end == every || *end != 0 || value == 0 || value > UINT32_MAX) {
      fprintf(stderr, "libstrap-access: STRAP_ACCESS_EVERY=%s is no count: not recording\n", every);
      return;
    }
    options.sample_every = (uint32_t)value;
  }
  strap_error error;
  if (strap_access_start(&options, &error) != STRAP_OK)
    fprintf(stderr, "libstrap-access: not recording: %s\n", error.message);
}

__attribute__((destructor)) static void stop_at_exit(void) {
  if (!access_recorder.open || getpid() != access_recorder.owner) return;
  strap_error error;
  if (strap_access_stop(&error) != STRAP_OK)
    fprintf(stderr, "libstrap-access: %s\n", error.message);
}
