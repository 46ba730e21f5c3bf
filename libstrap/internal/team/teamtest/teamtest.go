//go:build cgo

// Package teamtest has a team for tests. It makes its threads anew for each call.
package teamtest

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra
#include <pthread.h>

enum { HELPERS = 3 };

struct task {
  void (*work)(void *);
  void *argument;
};

static void *help(void *task) {
  ((struct task *)task)->work(((struct task *)task)->argument);
  return NULL;
}

static void parallel(void (*work)(void *), void *argument, unsigned threads, unsigned flags) {
  (void)threads, (void)flags;
  struct task task = {work, argument};
  pthread_t helpers[HELPERS];
  int made = 0;
  while (made < HELPERS && pthread_create(&helpers[made], NULL, help, &task) == 0) made++;
  work(argument);
  while (made > 0) pthread_join(helpers[--made], NULL);
}

static void *address(void) { return (void *)parallel; }
*/
import "C"

import "github.com/libstrap/strap/libstrap/internal/team"

// New returns a team of four threads, the calling thread included.
func New() team.Team { return team.Team{Parallel: C.address()} }
