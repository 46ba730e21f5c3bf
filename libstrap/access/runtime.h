/*
 * runtime.h - shared by the files behind the hooks.
 *
 * Locks: `registry` guards the list of threads and the settings of the recording. `output`
 * guards the file or sink, the ranges and the totals. A thread that takes both takes
 * `registry` first. A thread that holds a lock is busy, so a signal handler on that thread
 * does not record, and does not ask for the same lock.
 *
 * A program may be linked with --wrap=memcpy. So nothing here calls memcpy or memset, by
 * name or by an assignment that the compiler turns into a call. That is why loops over
 * bytes use volatile pointers.
 */
#ifndef STRAP_ACCESS_RUNTIME_H
#define STRAP_ACCESS_RUNTIME_H

#include "access.h"

#include <pthread.h>
#include <sys/types.h>

/* The library exports these functions and the hooks, and nothing else. */
#pragma GCC visibility push(default)
#include "strap_access.h"
#pragma GCC visibility pop

/* Values of thread.busy. IN_CALL: the thread is in a call of the interface. There it touches
 * its own buffer only with the registry locked, so other threads need not wait for it. */
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
  uint32_t session;      /* number of the recording under way, or of the last one */
  size_t buffer_bytes;
  strap_access_filter filters[STRAP_ACCESS_MAX_FILTERS];

  pthread_mutex_t output;
  int fd;                /* -1: none */
  strap_access_sink sink; /* NULL: none */
  void *context;
  pid_t owner;           /* a child of fork() writes nothing */
  int failure;           /* errno that ended the writing; 0: none */
  struct range *ranges;  /* the live ranges, newest first */
  uint64_t seen, recorded, unwritten, lost, bytes;
};

extern HIDDEN struct recorder access_recorder;

/* Stand for threads without a buffer, and are always busy. access_attaching: the thread is
 * getting a buffer, or is in a call of the interface. access_starved: there was no memory for
 * a buffer. */
extern HIDDEN struct thread access_attaching, access_starved;

/* output.c. The access_emit_ functions need the output lock. */
HIDDEN int64_t access_now(void); /* CLOCK_MONOTONIC in ns */
HIDDEN void access_read_pair(uint64_t *ticks, int64_t *ns); /* reads both clocks at one moment */
HIDDEN int access_counter_is_steady(void);
HIDDEN void access_emit_start(void); /* the program, its modules, the live ranges */
HIDDEN void access_emit_range(const struct range *r, int added, int64_t ns);
HIDDEN void access_emit_end(void);
/* Writes t->block with BYTES of records. The caller has filled the fields of the header that
 * belong to the thread. Returns 0 if the output has failed. */
HIDDEN int access_emit_records(struct thread *t, uint64_t bytes);

/* threads.c */
/* Registers for ends of threads and forks, once. Returns 0 or an errno value. */
HIDDEN int access_watch_threads(void);
/* Passes the records of a thread to the output and begins the thread's next block. The thread
 * must be the caller, or must not be recording. */
HIDDEN void access_close_block(struct thread *t);
/* Keeps this thread from recording during a call of the interface. Returns 0 if the thread is
 * busy already: a sink or a signal handler makes the call. */
HIDDEN int access_enter_call(void);
HIDDEN void access_leave_call(void);
/* Sets the state, and waits until no other thread records under the old one. Returns how many
 * threads did not finish within ten seconds, or within a minute without a CPU. The caller holds
 * the registry. */
HIDDEN int access_quiesce(unsigned state);

static inline struct record *first_record(struct thread *t) {
  return (struct record *)(t->block + 1);
}

#endif /* STRAP_ACCESS_RUNTIME_H */
