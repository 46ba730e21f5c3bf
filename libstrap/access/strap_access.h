/*
 * strap_access.h - libstrap-access: records the memory accesses of a program that
 * a compiler has instrumented. docs/ACCESS_TRACING.md has the compiler's flags and
 * the format of what is recorded.
 *
 * The library stands alone: it needs neither libstrap.so nor a sanitizer's runtime,
 * which it replaces. From strap.h it takes the status codes and strap_error only.
 *
 * Calls are thread-safe and may be made at any time, except from a sink. They are
 * not for signal handlers; the recording itself is: it allocates nothing and takes
 * no lock that its own thread can hold. After fork() the child is not traced, until
 * it calls strap_access_start itself; the parent goes on.
 */
#ifndef STRAP_ACCESS_H
#define STRAP_ACCESS_H

#include "strap.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- recording ---------------------------------------------------------- */

/* Accesses that touch [start, end) are recorded, whole. */
typedef struct strap_access_filter {
  uint64_t start;
  uint64_t end;
} strap_access_filter;

#define STRAP_ACCESS_MAX_FILTERS 64

/*
 * Takes SIZE bytes, always whole blocks, and answers 0, or an errno value, which
 * ends the recording. Called by whichever thread has a full buffer, by one at a
 * time, and by strap_access_start, _stop, _flush and strap_range_*. What the sink
 * itself accesses is not recorded, and counted as lost where it is instrumented.
 */
typedef int (*strap_access_sink)(void *context, const void *blocks, size_t size);

typedef struct strap_access_options {
  uint32_t struct_size;
  uint32_t sample_every;  /* records each Nth access of a thread; 0 and 1: all */
  uint32_t clock_every;   /* 0: the time of every access by the CPU's counter, where it
                             is steady, else as 64; N: each Nth access reads the clock,
                             and those behind it have its time */
  uint32_t filter_count;  /* 0: every address; at most STRAP_ACCESS_MAX_FILTERS */
  const strap_access_filter *filters;
  uint64_t buffer_bytes;  /* of each thread, 4 KiB to 1 GiB; 0: 1 MiB */
  const char *path;       /* the file to write; it is replaced. NULL: a sink is given */
  strap_access_sink sink; /* NULL: a path is given */
  void *context;          /* for the sink */
  int32_t paused;         /* 1: nothing is recorded before strap_access_resume */
  int32_t reserved;       /* 0 */
} strap_access_options;

/*
 * Begins to record. Until then, and after strap_access_stop, an instrumented access
 * costs a few instructions and leaves nothing.
 *
 * Errors: INVALID_ARGUMENT (an option), INVALID_STATE (it is recording), BUSY
 * (another process records to PATH), NOT_FOUND, PERMISSION, NO_SPACE, IO.
 */
strap_status strap_access_start(const strap_access_options *options, strap_error *error);

/* Nothing is recorded between the two. INVALID_STATE: strap_access_start was not
 * called. */
strap_status strap_access_pause(strap_error *error);
strap_status strap_access_resume(strap_error *error);

/* Hands the buffers of all threads to the file or sink; threads that access memory
 * meanwhile wait. */
strap_status strap_access_flush(strap_error *error);

/*
 * Flushes and ends the recording; a normal exit of the program does the same. A
 * program that ends otherwise (_exit, exec, a signal) loses what its threads have
 * buffered, and the reader says so.
 *
 * Answers what the writing failed with, if it did: NO_SPACE, IO. TIMEOUT: a thread
 * stands in the recording for more than ten seconds (a signal handler left it by a
 * jump), or for a minute in which it got no CPU; its last buffer is missing.
 * INVALID_STATE: it is not recording.
 */
strap_status strap_access_stop(strap_error *error);

typedef struct strap_access_stats_t {
  uint32_t struct_size;
  int32_t recording; /* 0: no, 1: yes, 2: paused */
  uint64_t threads;  /* with a buffer now */
  uint64_t seen;     /* accesses within the filters */
  uint64_t recorded; /* of them kept by sample_every */
  uint64_t lost;     /* not recorded: made while the same thread was recording (signal
                        handlers, the sink), or on a thread without memory for a buffer */
  uint64_t unwritten; /* recorded, but the file or sink had failed */
  uint64_t bytes;    /* handed to the file or sink */
} strap_access_stats_t;

/* Fills *stats with what the recording under way, or else the last one, has done.
 * While threads record, the counts are those of a moment ago. */
strap_status strap_access_stats(strap_access_stats_t *stats, strap_error *error);

/* ---- ranges ------------------------------------------------------------- */

typedef int32_t strap_region;
enum {
  STRAP_REGION_WEIGHT = 1,
  STRAP_REGION_KV_CACHE = 2,
  STRAP_REGION_ACTIVATION = 3,
  STRAP_REGION_RUNTIME = 4
};

#define STRAP_RANGE_MAX_NAME 255

/*
 * Says what LENGTH bytes at START hold from now on, until strap_range_remove. The
 * trace carries it with its times, so that accesses are labelled by what was there
 * when they happened. May be called before strap_access_start, and by programs that
 * are not instrumented at all. NAME is UTF-8, or NULL.
 *
 * Errors: INVALID_ARGUMENT (an empty range, one beyond the address space, an unknown
 * type, a name over STRAP_RANGE_MAX_NAME bytes), NO_MEMORY.
 */
strap_status strap_range_add(const void *start, size_t length, strap_region type,
                             const char *name, uint64_t *id, strap_error *error);

/* Ends the range: its memory holds something else, or nothing. NOT_FOUND: there is
 * no such range (any more). */
strap_status strap_range_remove(uint64_t id, strap_error *error);

#ifdef __cplusplus
}
#endif

#endif /* STRAP_ACCESS_H */
