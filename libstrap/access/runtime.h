/*
 * runtime.h - what the files behind the hooks share.
 *
 * Locks: `registry` (which threads there are, and the recording's settings) before
 * `output` (the file or sink, the ranges, the totals). A thread that holds one is busy,
 * so that no signal handler on it records and asks for the same lock.
 *
 * Nothing here calls memcpy or memset, by name or by an assignment that the compiler
 * turns into one: a program may be linked with --wrap=memcpy. Loops over bytes go through
 * volatile pointers for that reason.
 */
#ifndef STRAP_ACCESS_RUNTIME_H
#define STRAP_ACCESS_RUNTIME_H

#include "access.h"

#include <pthread.h>
#include <sys/types.h>

/* Its functions are all that leaves the library beside the hooks. */
#pragma GCC visibility push(default)
#include "strap_access.h"
#pragma GCC visibility pop

/* Values of thread.busy. In a call of the interface a thread does not touch its own
 * buffer unless it holds the registry, so that others need not wait for it. */
enum { IDLE = 0, RECORDING = 1, IN_CALL = 2 };

struct range {
  struct range *next;
  uint64_t id, start, length;
  int64_t ns;
  uint32_t type;
  uint32_t name_length;
  char name[];
};

struct recorder {
  pthread_mutex_t registry;
  struct thread *threads;
  int open;              /* a recording is under way */
  int paused;
  uint32_t session;      /* its number */
  size_t buffer_bytes;
  strap_access_filter filters[STRAP_ACCESS_MAX_FILTERS];

  pthread_mutex_t output;
  int fd;                /* -1: none */
  strap_access_sink sink; /* NULL: none */
  void *context;
  pid_t owner;           /* a child of fork() writes nothing */
  int failure;           /* errno that ended the writing */
  struct range *ranges;  /* the live ones, newest first */
  uint64_t seen, recorded, unwritten, lost, bytes;
};

extern HIDDEN struct recorder access_recorder;

/* Threads without a buffer: while they get one, or are in a call of the interface; and
 * where there is no memory for one. They are always busy. */
extern HIDDEN struct thread access_attaching, access_starved;

/* output.c; all but the first two under the output lock */
HIDDEN int64_t access_now(void);
HIDDEN void access_read_pair(uint64_t *ticks, int64_t *ns); /* one moment on both clocks */
HIDDEN int access_counter_is_steady(void);
HIDDEN void access_emit_start(void); /* the program, its modules, the live ranges */
HIDDEN void access_emit_range(const struct range *r, int added, int64_t ns);
HIDDEN void access_emit_end(void);
/* Writes t->block, whose header is filled but for what all blocks have; 0 where the
 * output has failed. */
HIDDEN int access_emit_records(struct thread *t, uint64_t bytes);

/* threads.c */
HIDDEN int access_watch_threads(void); /* once, before the first recording; an errno */
/* Hands the records of a thread on, which is busy or does not record, and begins its next
 * block. */
HIDDEN void access_close_block(struct thread *t);
/* Keeps this thread from recording during a call of the interface; 0 where it is
 * recording, that is, where a sink or a signal handler makes the call. */
HIDDEN int access_enter_call(void);
HIDDEN void access_leave_call(void);
/* Sets the state and waits until no other thread records under the old one. Gives how
 * many threads did not come out in ten seconds, or a minute without a CPU. Under the
 * registry. */
HIDDEN int access_quiesce(unsigned state);

static inline struct record *first_record(struct thread *t) {
  return (struct record *)(t->block + 1);
}

#endif /* STRAP_ACCESS_RUNTIME_H */
