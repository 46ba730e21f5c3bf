/*
 * strap_access.h - libstrap-access: records the memory accesses of a program that
 * a compiler has instrumented. docs/ACCESS_TRACING.md has the flags of the compilers
 * and the format of the trace.
 *
 * The library stands alone. It replaces the sanitizer's runtime and does not need
 * libstrap.so. From strap.h it takes only the status codes and strap_error.
 *
 * Calls are thread-safe and may be made at any time, except from a sink and from a
 * signal handler. Accesses of signal handlers are recorded: the recording allocates
 * nothing on the heap, and takes no lock that its own thread can hold. A child of
 * fork() is not traced until it calls strap_access_start itself; the parent goes on.
 */
#ifndef STRAP_ACCESS_H
#define STRAP_ACCESS_H

#include "strap.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- recording ---------------------------------------------------------- */

/* Selects the accesses that touch [start, end). An access that is only partly inside is
 * recorded with its whole size. */
typedef struct strap_access_filter {
  uint64_t start;
  uint64_t end;
} strap_access_filter;

#define STRAP_ACCESS_MAX_FILTERS 64

/*
 * Takes SIZE bytes, always whole blocks. Returns 0, or an errno value: then nothing more
 * is written. A thread calls the sink when its buffer is full and when it ends.
 * strap_access_start, _stop, _flush and strap_range_* call it too. There is one call at a
 * time. Accesses of the sink itself are not recorded. If the sink is instrumented, they
 * are counted as lost.
 */
typedef int (*strap_access_sink)(void *context, const void *blocks, size_t size);

typedef struct strap_access_options {
  uint32_t struct_size;
  uint32_t sample_every;  /* N: record each Nth access of a thread; 0 and 1: all */
  uint32_t clock_every;   /* 0: read the CPU's counter at every access, or do as with 64 if
                             the counter is not steady. N: read the system's clock at each
                             Nth access; the accesses up to the next read get its time */
  uint32_t filter_count;  /* 0: every address; at most STRAP_ACCESS_MAX_FILTERS */
  const strap_access_filter *filters;
  uint64_t buffer_bytes;  /* of each thread's buffer, 4 KiB to 1 GiB; 0: 1 MiB */
  const char *path;       /* the file to write; it is replaced. NULL: a sink is given */
  strap_access_sink sink; /* NULL: a path is given */
  void *context;          /* for the sink */
  int32_t paused;         /* 1: nothing is recorded before strap_access_resume */
  int32_t reserved;       /* 0 */
} strap_access_options;

/*
 * Begins to record. Before this call, and after strap_access_stop, an instrumented
 * access takes a few instructions and is not recorded.
 *
 * Errors: INVALID_ARGUMENT (an option), INVALID_STATE (it is recording), BUSY
 * (another process records to PATH), NOT_FOUND, PERMISSION, NO_SPACE, IO.
 */
strap_status strap_access_start(const strap_access_options *options, strap_error *error);

/* Nothing is recorded between strap_access_pause and strap_access_resume. INVALID_STATE:
 * strap_access_start was not called. TIMEOUT of strap_access_pause: see strap_access_stop. */
strap_status strap_access_pause(strap_error *error);
strap_status strap_access_resume(strap_error *error);

/* Passes the buffers of all threads to the file or sink. Threads that access memory
 * meanwhile wait. Errors: those of strap_access_stop. */
strap_status strap_access_flush(strap_error *error);

/*
 * Flushes and ends the recording. A normal exit of the program does the same. A
 * program that ends otherwise (_exit, exec, a signal) loses the buffers of its
 * threads, and the reader reports that.
 *
 * Errors: if writing the trace has failed, the failure (NO_SPACE, IO or another).
 * TIMEOUT: a thread did not finish recording one access within ten seconds, or within
 * a minute if it got no CPU, for example because a signal handler left the recording
 * by longjmp. The last buffer of that thread is missing. INVALID_STATE: it is not
 * recording.
 */
strap_status strap_access_stop(strap_error *error);

typedef struct strap_access_stats_t {
  uint32_t struct_size;
  int32_t recording; /* 0: no, 1: yes, 2: paused */
  uint64_t threads;  /* that have a buffer now */
  uint64_t seen;     /* accesses within the filters */
  uint64_t recorded; /* of the seen accesses, those that sample_every keeps */
  uint64_t lost;     /* accesses that could not be recorded: the same thread was recording
                        another one (signal handlers, the sink), or had no memory for a
                        buffer */
  uint64_t unwritten; /* recorded accesses that are missing: the file or sink had failed */
  uint64_t bytes;    /* passed to the file or sink */
} strap_access_stats_t;

/* Fills *stats with the counts of the recording under way, or of the last one if there is
 * none. While threads record, the counts are a little old. */
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
 * States what the LENGTH bytes at START hold from now on, until strap_range_remove. The
 * trace contains the range with the times of both calls, so an access is labelled by what
 * the memory held at the time of the access. The call may come before strap_access_start,
 * and from programs that are not instrumented. NAME is UTF-8, or NULL. *id receives the id
 * for strap_range_remove.
 *
 * Errors: INVALID_ARGUMENT (an empty range, a range that exceeds the address space, an
 * unknown type, a name over STRAP_RANGE_MAX_NAME bytes), NO_MEMORY.
 */
strap_status strap_range_add(const void *start, size_t length, strap_region type,
                             const char *name, uint64_t *id, strap_error *error);

/* Ends the range: its memory holds something else from now on, or nothing. NOT_FOUND: no
 * live range has this id. */
strap_status strap_range_remove(uint64_t id, strap_error *error);

#ifdef __cplusplus
}
#endif

#endif /* STRAP_ACCESS_H */
