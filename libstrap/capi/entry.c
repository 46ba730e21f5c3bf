/*
 * entry.c - the exported functions. Each does four things before it enters Go:
 * it refuses a forked child, in which the Go runtime has no threads; it clears the
 * caller's out-structs, because Go must not see uninitialised memory; it checks
 * pointers; and it brings structs of other sizes to the size of this build.
 */
#include <inttypes.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#ifdef __linux__
#include <features.h>
#ifndef __GLIBC__
#error "libstrap needs glibc: Go's c-shared libraries do not load under musl"
#endif
#include <sys/syscall.h>
#endif

#include "files.h"
#include "floats.h"
#include "intake.h"
#include "rows.h"
#include "strap.h"
#include "_cgo_export.h"

static volatile int forked;

static void in_child(void) {
  forked = 1;
  files_in_child();
}

__attribute__((constructor)) static void watch_forks(void) {
  pthread_atfork(files_before_fork, files_behind_fork, in_child);
}

int strap_is_forked(void) { return forked; }

/* Clears the first byte of the message alone: a call that succeeds touches little memory. */
static void clear_error(strap_error *error) {
  if (error == NULL) return;
  error->code = STRAP_OK;
  error->sys_errno = 0;
  error->message[0] = '\0';
}

__attribute__((format(printf, 3, 4))) static strap_status refuse(strap_error *error,
                                                                 strap_status code,
                                                                 const char *format, ...) {
  if (error != NULL) {
    va_list args;
    va_start(args, format);
    error->code = code;
    vsnprintf(error->message, sizeof error->message, format, args);
    va_end(args);
  }
  return code;
}

/* Every export begins with ENTER, and checks with NEED each pointer that must not be NULL. ENTER_C
 * is for exports that stay in C and compute with no floating-point numbers. */
#define ENTER(error) \
  OWN_FLOATS;        \
  ENTER_C(error)

#define ENTER_C(error)                                                            \
  do {                                                                            \
    clear_error(error);                                                           \
    if (forked)                                                                   \
      return refuse(error, STRAP_ERR_FORKED,                                      \
                    "libstrap cannot be used in a child after fork(): start the " \
                    "process with spawn or exec");                                \
  } while (0)

#define NEED(pointer, error)                                                     \
  do {                                                                           \
    if ((pointer) == NULL)                                                       \
      return refuse(error, STRAP_ERR_INVALID_ARGUMENT, "%s is NULL", #pointer);  \
  } while (0)

/* Copies a caller's struct, of an older or newer header, into one of this build. */
static strap_status take(void *own, size_t own_size, const void *theirs, const char *what,
                         strap_error *error) {
  uint32_t size;
  memcpy(&size, theirs, sizeof size);
  if (size < sizeof size || size > 1 << 16)
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT,
                  "%s.struct_size = %u: set it to sizeof the struct", what, (unsigned)size);
  for (size_t i = own_size; i < size; i++)
    if (((const unsigned char *)theirs)[i] != 0)
      return refuse(error, STRAP_ERR_INVALID_ARGUMENT,
                    "%s has a value in byte %zu, which this libstrap (%zu bytes) does not know",
                    what, i, own_size);
  memset(own, 0, own_size);
  memcpy(own, theirs, size < own_size ? size : own_size);
  memcpy(own, &size, sizeof size);
  return STRAP_OK;
}

/* Clears a caller's out-struct; its size must be set. */
static strap_status clear(void *theirs, const char *what, strap_error *error) {
  uint32_t size;
  memcpy(&size, theirs, sizeof size);
  if (size < sizeof size || size > 1 << 16)
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT,
                  "%s.struct_size = %u: set it to sizeof the struct", what, (unsigned)size);
  memset((char *)theirs + sizeof size, 0, size - sizeof size);
  return STRAP_OK;
}

/* Copies a filled struct of this build to the caller's, as many bytes as that one has. */
static void give(void *theirs, const void *own, size_t own_size) {
  uint32_t size;
  memcpy(&size, theirs, sizeof size);
  size_t n = size < own_size ? size : own_size;
  memcpy((char *)theirs + sizeof size, (const char *)own + sizeof size, n - sizeof size);
}

static int64_t now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* The progress of a call that timed out; see session.Flush. */
struct wait {
  uint64_t cursor; /* 0: it did not time out */
  int64_t until;   /* a call after this time is a new one */
};

#define KEPT_NS 1000000000 /* a session keeps a place in its line as long; see session.keptFor */

/* The flushes and checkpoints of a thread that timed out. */
struct repeated {
  strap_session session; /* 0: none */
  struct wait flush, checkpoint;
};

/* A thread seldom waits for more sessions in turns. A session that loses its place to another
 * begins a new call. */
enum { REPEATED = 4 };

/* In one struct, because each lookup of a thread-local variable takes time. */
static _Thread_local struct {
  uint64_t id; /* the system's number of the thread; 0: not asked yet */
  struct repeated calls[REPEATED];
} thread;

static uint64_t thread_id(void) {
  if (thread.id == 0) {
#ifdef __linux__
    thread.id = (uint64_t)syscall(SYS_gettid);
#else
    pthread_threadid_np(NULL, &thread.id);
#endif
  }
  return thread.id;
}

static struct repeated *repeated_of(strap_session session) {
  struct repeated *calls = &thread.calls[session / 2 % REPEATED]; /* sessions have every other id */
  if (calls->session != session) *calls = (struct repeated){.session = session};
  return calls;
}

static uint64_t *resumed(struct wait *call) {
  if (now() > call->until) call->cursor = 0;
  return &call->cursor;
}

static void timed(struct wait *call) { call->until = now() + KEPT_NS; }

/* The thread's next flush or checkpoint is a new call. So it covers what the thread captures now. */
static void captures(strap_session session) {
  struct repeated *calls = &thread.calls[session / 2 % REPEATED];
  if (calls->session == session) calls->session = 0;
}

int32_t strap_abi_version(void) { return STRAP_ABI_VERSION; }

#ifndef STRAP_VERSION /* libstrap/build.sh gives it */
#define STRAP_VERSION "0.0.0-unversioned"
#endif

const char *strap_version(void) { return STRAP_VERSION; }

strap_status strap_open(const char *path, const strap_open_options *options,
                        strap_session *session, strap_error *error) {
  ENTER(error);
  NEED(path, error);
  NEED(options, error);
  NEED(session, error);
  *session = 0;
  strap_open_options own;
  strap_status status = take(&own, sizeof own, options, "strap_open_options", error);
  if (status != STRAP_OK) return status;
  return strapgoOpen((char *)path, &own, session, error);
}

strap_status strap_roll(strap_session session, const char *path, int32_t overwrite,
                        int32_t timeout_ms, strap_error *error) {
  ENTER(error);
  NEED(path, error);
  return strapgoRoll(session, (char *)path, overwrite, timeout_ms, error);
}

strap_status strap_dump(strap_session session, const char *path, int32_t overwrite,
                        int32_t timeout_ms, strap_error *error) {
  ENTER(error);
  NEED(path, error);
  return strapgoDump(session, (char *)path, overwrite, timeout_ms, error);
}

strap_status strap_dump_end(strap_session session, int32_t timeout_ms, strap_error *error) {
  ENTER(error);
  return strapgoDumpEnd(session, timeout_ms, error);
}

strap_status strap_step_end(strap_session session, int64_t step, int32_t timeout_ms,
                            strap_error *error) {
  ENTER(error);
  return strapgoStepEnd(session, step, timeout_ms, error);
}

strap_status strap_alarm(strap_session session, strap_alarm_t *alarm, int32_t timeout_ms,
                         strap_error *error) {
  ENTER(error);
  NEED(alarm, error);
  strap_status status = clear(alarm, "strap_alarm_t", error);
  if (status != STRAP_OK) return status;
  strap_alarm_t own = {0};
  status = strapgoAlarm(session, &own, timeout_ms, error);
  if (status == STRAP_OK) give(alarm, &own, sizeof own);
  return status;
}

strap_status strap_capture_id(strap_session session, char *id, size_t size, strap_error *error) {
  ENTER(error);
  NEED(id, error);
  if (size > 0) id[0] = '\0';
  return strapgoCaptureID(session, id, size, error);
}

strap_status strap_layer(strap_session session, const char *model, const char *name,
                         size_t name_len, const char *path, uint32_t *layer,
                         strap_error *error) {
  ENTER(error);
  NEED(name, error);
  NEED(layer, error);
  *layer = 0;
  return strapgoLayer(session, (char *)model, (char *)name, name_len, (char *)path, layer, error);
}

strap_status strap_request(strap_session session, const char *name, size_t name_len,
                           uint32_t *request, strap_error *error) {
  ENTER(error);
  NEED(name, error);
  NEED(request, error);
  *request = 0;
  return strapgoRequest(session, (char *)name, name_len, request, error);
}

strap_status strap_enqueue(strap_session session, strap_tensor *tensor, int32_t timeout_ms,
                           strap_error *error) {
  ENTER_C(error);
  NEED(tensor, error);
  captures(session);
  if (tensor->struct_size == sizeof *tensor && tensor->conversion == NULL) {
    const int64_t time_ns = now();
    if (intake_take(session, tensor, thread_id(), time_ns)) return STRAP_OK;
    OWN_FLOATS;
    return strapgoEnqueue(session, tensor, thread_id(), time_ns, timeout_ms, error);
  }
  OWN_FLOATS;
  strap_tensor own;
  strap_status status = take(&own, sizeof own, tensor, "strap_tensor", error);
  if (status != STRAP_OK) return status;
  strap_conversion conversion;
  if (own.conversion != NULL) {
    status = take(&conversion, sizeof conversion, own.conversion, "strap_conversion", error);
    if (status != STRAP_OK) return status;
    own.conversion = &conversion;
  }
  if (tensor->struct_size < offsetof(strap_tensor, cursor) + sizeof own.cursor)
    return refuse(error, STRAP_ERR_INVALID_ARGUMENT,
                  "strap_tensor.struct_size = %u: set it to sizeof the struct",
                  (unsigned)tensor->struct_size);
  status = strapgoEnqueue(session, &own, thread_id(), now(), timeout_ms, error);
  tensor->cursor = own.cursor;
  return status;
}

strap_status strap_offer(strap_session session, const strap_tensor *tensor, strap_error *error) {
  ENTER_C(error);
  NEED(tensor, error);
  captures(session);
  if (tensor->struct_size == sizeof *tensor && intake_take(session, tensor, thread_id(), now()))
    return STRAP_OK;
  return STRAP_DECLINED;
}

strap_status strap_abandon(strap_session session, uint64_t cursor, strap_error *error) {
  ENTER(error);
  captures(session);
  return strapgoAbandon(session, cursor, error);
}

strap_status strap_note(strap_session session, uint32_t layer, int64_t step, int64_t token,
                        uint32_t call, const char *message, strap_error *error) {
  ENTER(error);
  NEED(message, error);
  captures(session);
  return strapgoNote(session, layer, step, token, call, (char *)message, thread_id(), now(),
                     error);
}

strap_status strap_flush(strap_session session, int32_t timeout_ms, strap_error *error) {
  ENTER(error);
  struct wait *call = &repeated_of(session)->flush;
  strap_status status = strapgoFlush(session, resumed(call), timeout_ms, error);
  timed(call);
  return status;
}

strap_status strap_checkpoint(strap_session session, int32_t timeout_ms, uint64_t *offset,
                              strap_error *error) {
  ENTER(error);
  uint64_t covered = 0;
  struct wait *call = &repeated_of(session)->checkpoint;
  strap_status status = strapgoCheckpoint(session, resumed(call), timeout_ms, &covered, error);
  timed(call);
  if (offset != NULL) *offset = covered;
  return status;
}

strap_status strap_stats(strap_session session, strap_stats_t *stats, strap_error *error) {
  ENTER(error);
  NEED(stats, error);
  strap_status status = clear(stats, "strap_stats_t", error);
  if (status != STRAP_OK) return status;
  strap_stats_t own = {0};
  status = strapgoStats(session, &own, error);
  if (status == STRAP_OK) give(stats, &own, sizeof own);
  return status;
}

strap_status strap_close(strap_session session, int32_t timeout_ms, strap_error *error) {
  ENTER(error);
  return strapgoClose(session, timeout_ms, error);
}

strap_status strap_discard(strap_session session, uint64_t *lost, strap_error *error) {
  ENTER(error);
  uint64_t given_up = 0;
  strap_status status = strapgoDiscard(session, &given_up, error);
  if (lost != NULL) *lost = given_up;
  return status;
}

strap_status strap_reader_open(const char *path, const strap_reader_options *options,
                               strap_reader *reader, strap_reader_info *info,
                               strap_error *error) {
  ENTER(error);
  NEED(path, error);
  NEED(reader, error);
  *reader = 0;
  strap_status status;
  strap_reader_options own = {0};
  if (options != NULL) {
    status = take(&own, sizeof own, options, "strap_reader_options", error);
    if (status != STRAP_OK) return status;
  }
  if (info != NULL) {
    status = clear(info, "strap_reader_info", error);
    if (status != STRAP_OK) return status;
  }
  strap_reader_info found = {0};
  status = strapgoReaderOpen((char *)path, &own, reader, &found, error);
  if (status == STRAP_OK && info != NULL) give(info, &found, sizeof found);
  return status;
}

strap_status strap_reader_follow(strap_reader reader, uint64_t first, strap_reader *next,
                                 strap_reader_info *info, strap_error *error) {
  ENTER(error);
  NEED(next, error);
  *next = 0;
  if (info != NULL) {
    strap_status status = clear(info, "strap_reader_info", error);
    if (status != STRAP_OK) return status;
  }
  strap_reader_info found = {0};
  strap_status status = strapgoReaderFollow(reader, first, next, &found, error);
  if (status == STRAP_OK && *next != 0 && info != NULL) give(info, &found, sizeof found);
  return status;
}

strap_status strap_reader_next(strap_reader reader, strap_packet *packet, strap_error *error) {
  ENTER(error);
  NEED(packet, error);
  strap_status status = clear(packet, "strap_packet", error);
  if (status != STRAP_OK) return status;
  strap_packet own = {0};
  status = strapgoReaderNext(reader, &own, error);
  give(packet, &own, sizeof own);
  return status;
}

strap_status strap_reader_at(strap_reader reader, uint64_t row, strap_packet *packet,
                             strap_error *error) {
  ENTER(error);
  NEED(packet, error);
  strap_status status = clear(packet, "strap_packet", error);
  if (status != STRAP_OK) return status;
  strap_packet own = {0};
  status = strapgoReaderAt(reader, row, &own, error);
  give(packet, &own, sizeof own);
  return status;
}

strap_status strap_reader_name(strap_reader reader, uint64_t row, char *name, size_t size,
                               strap_error *error) {
  ENTER(error);
  NEED(name, error);
  if (size == 0) return refuse(error, STRAP_ERR_INVALID_ARGUMENT, "size = 0: no room for a name");
  memset(name, 0, size);
  return strapgoReaderName(reader, row, name, size, error);
}

strap_status strap_reader_read(strap_reader reader, uint64_t row, void *data, size_t size,
                               strap_error *error) {
  ENTER(error);
  if (size > 0) NEED(data, error);
  return strapgoReaderRead(reader, row, data, size, error);
}

strap_status strap_reader_read_many(strap_reader reader, const uint64_t *rows, size_t count,
                                    size_t alignment, void *data, size_t size, uint64_t *ends,
                                    size_t *done, strap_error *error) {
  ENTER(error);
  NEED(done, error);
  *done = 0;
  if (count > 0) {
    NEED(rows, error);
    NEED(ends, error);
  }
  if (size > 0) NEED(data, error);
  return strapgoReaderReadMany(reader, (uint64_t *)rows, count, alignment, data, size, ends, done,
                               error);
}

strap_status strap_reader_read_ranges(strap_reader reader, const strap_range *ranges, size_t count,
                                      void *data, size_t size, size_t *done, strap_error *error) {
  ENTER(error);
  NEED(done, error);
  *done = 0;
  if (count > 0) NEED(ranges, error);
  if (size > 0) NEED(data, error);
  return strapgoReaderReadRanges(reader, (strap_range *)ranges, count, data, size, done, error);
}

strap_status strap_reader_prefetch(strap_reader reader, const uint64_t *rows, size_t count,
                                   strap_error *error) {
  ENTER(error);
  if (count > 0) NEED(rows, error);
  return strapgoReaderPrefetch(reader, (uint64_t *)rows, count, error);
}

strap_status strap_reader_close(strap_reader reader, strap_error *error) {
  ENTER(error);
  return strapgoReaderClose(reader, error);
}

strap_status strap_exchange_rows(void *buffer, size_t rows, size_t row_bytes, const uint64_t *slots,
                                 size_t count, void *out, const void *in, strap_error *error) {
  ENTER_C(error);
  if (count == 0) return STRAP_OK;
  NEED(slots, error);
  if (row_bytes > 0) {
    NEED(buffer, error);
    NEED(out, error);
  }
  for (size_t k = 0; k < count; k++)
    if (slots[k] >= rows)
      return refuse(error, STRAP_ERR_INVALID_ARGUMENT, "slots[%zu] = %" PRIu64 ": the buffer has %zu rows", k,
                    slots[k], rows);
  rows_exchange(buffer, row_bytes, slots, count, out, in);
  return STRAP_OK;
}

int32_t call_progress(const strap_salvage_options *options, uint64_t done,
                            uint64_t total) {
  return options->progress == NULL ? 0 : options->progress(options->context, done, total);
}

void call_lost(const strap_salvage_options *options, const strap_lost *lost) {
  if (options->lost != NULL) options->lost(options->context, lost);
}

strap_status strap_salvage(const char *path, const char *out,
                           const strap_salvage_options *options,
                           strap_salvage_report *report, strap_error *error) {
  ENTER(error);
  NEED(path, error);
  NEED(out, error);
  strap_status status;
  strap_salvage_options own = {0};
  if (options != NULL) {
    status = take(&own, sizeof own, options, "strap_salvage_options", error);
    if (status != STRAP_OK) return status;
  }
  if (report != NULL) {
    status = clear(report, "strap_salvage_report", error);
    if (status != STRAP_OK) return status;
  }
  strap_salvage_report found = {0};
  status = strapgoSalvage((char *)path, (char *)out, &own, &found, error);
  if (status == STRAP_OK && report != NULL) give(report, &found, sizeof found);
  return status;
}

int32_t call_ring_progress(const strap_salvage_ring_options *options, uint64_t done,
                           uint64_t total) {
  return options->progress == NULL ? 0 : options->progress(options->context, done, total);
}

void call_ring_step(const strap_salvage_ring_options *options, const strap_ring_step *step) {
  if (options->step != NULL) options->step(options->context, step);
}

strap_status strap_salvage_ring(const char *path, const char *out,
                                const strap_salvage_ring_options *options,
                                strap_salvage_ring_report *report, strap_error *error) {
  ENTER(error);
  NEED(path, error);
  NEED(out, error);
  strap_status status;
  strap_salvage_ring_options own = {0};
  if (options != NULL) {
    status = take(&own, sizeof own, options, "strap_salvage_ring_options", error);
    if (status != STRAP_OK) return status;
  }
  if (report != NULL) {
    status = clear(report, "strap_salvage_ring_report", error);
    if (status != STRAP_OK) return status;
  }
  strap_salvage_ring_report found = {0};
  status = strapgoSalvageRing((char *)path, (char *)out, &own, &found, error);
  if (status == STRAP_OK && report != NULL) give(report, &found, sizeof found);
  return status;
}

size_t strap_encode_bound(strap_codec codec, size_t size) {
  OWN_FLOATS;
  return forked ? 0 : strapgoEncodeBound(codec, size);
}

strap_status strap_encode(strap_codec codec, int32_t level, const void *source, size_t size,
                          void *data, size_t room, size_t *length, strap_error *error) {
  ENTER(error);
  NEED(length, error);
  *length = 0;
  if (size > 0) NEED(source, error);
  if (room > 0) NEED(data, error);
  return strapgoEncode(codec, level, (void *)source, size, data, room, length, error);
}

strap_status strap_decoded_size(strap_codec codec, const void *payload, size_t size,
                                uint64_t *length, strap_error *error) {
  ENTER(error);
  NEED(length, error);
  *length = 0;
  if (size > 0) NEED(payload, error);
  return strapgoDecodedSize(codec, (void *)payload, size, length, error);
}

strap_status strap_decode(strap_codec codec, const void *payload, size_t size, void *data,
                          size_t length, strap_error *error) {
  ENTER(error);
  if (size > 0) NEED(payload, error);
  if (length > 0) NEED(data, error);
  return strapgoDecode(codec, (void *)payload, size, data, length, error);
}

strap_status strap_index_export(strap_reader reader, struct ArrowArrayStream *stream,
                                strap_error *error) {
  ENTER(error);
  NEED(stream, error);
  return strapgoIndexExport(reader, stream, error);
}

strap_status strap_index_columns(strap_reader reader, const char *columns,
                                 struct ArrowArrayStream *stream, strap_error *error) {
  ENTER(error);
  NEED(columns, error);
  NEED(stream, error);
  return strapgoIndexColumns(reader, (char *)columns, stream, error);
}

strap_status strap_trace_parse(const char *format, const char *path, const char *options,
                               struct ArrowArrayStream *out, strap_trace *trace,
                               strap_error *error) {
  ENTER(error);
  NEED(format, error);
  NEED(path, error);
  NEED(out, error);
  NEED(trace, error);
  *trace = 0;
  memset(out, 0, sizeof *out);
  return strapgoTraceParse((char *)format, (char *)path, (char *)options, out, trace, error);
}

strap_status strap_trace_label(struct ArrowArrayStream *in, const char *options,
                               struct ArrowArrayStream *out, strap_trace *trace,
                               strap_error *error) {
  ENTER(error);
  NEED(in, error);
  NEED(out, error);
  NEED(trace, error);
  *trace = 0;
  memset(out, 0, sizeof *out);
  return strapgoTraceLabel(in, (char *)options, out, trace, error);
}

strap_status strap_trace_analyse(struct ArrowArrayStream *in, const char *options,
                                 strap_trace *trace, strap_error *error) {
  ENTER(error);
  NEED(in, error);
  NEED(trace, error);
  *trace = 0;
  return strapgoTraceAnalyse(in, (char *)options, trace, error);
}

strap_status strap_trace_write_parquet(struct ArrowArrayStream *in, const char *path,
                                       const char *options, strap_trace *trace,
                                       strap_error *error) {
  ENTER(error);
  NEED(in, error);
  NEED(path, error);
  NEED(trace, error);
  *trace = 0;
  return strapgoTraceWriteParquet(in, (char *)path, (char *)options, trace, error);
}

strap_status strap_trace_partial(struct ArrowArrayStream *in, const char *path, const char *options,
                                 strap_trace *trace, strap_error *error) {
  ENTER(error);
  NEED(in, error);
  NEED(path, error);
  NEED(trace, error);
  *trace = 0;
  return strapgoTracePartial(in, (char *)path, (char *)options, trace, error);
}

strap_status strap_trace_merge(const char *options, strap_trace *trace, strap_error *error) {
  ENTER(error);
  NEED(trace, error);
  *trace = 0;
  return strapgoTraceMerge((char *)options, trace, error);
}

strap_status strap_trace_run(strap_trace trace, int32_t timeout_ms, strap_error *error) {
  ENTER(error);
  return strapgoTraceRun(trace, timeout_ms, error);
}

strap_status strap_trace_counts(strap_trace trace, strap_trace_counts_t *counts,
                                strap_error *error) {
  ENTER(error);
  NEED(counts, error);
  strap_status status = clear(counts, "strap_trace_counts_t", error);
  if (status != STRAP_OK) return status;
  strap_trace_counts_t own = {0};
  status = strapgoTraceCounts(trace, &own, error);
  give(counts, &own, sizeof own);
  return status;
}

strap_status strap_trace_table(strap_trace trace, const char *name,
                               struct ArrowArrayStream *out, strap_error *error) {
  ENTER(error);
  NEED(name, error);
  NEED(out, error);
  memset(out, 0, sizeof *out);
  return strapgoTraceTable(trace, (char *)name, out, error);
}

strap_status strap_trace_close(strap_trace trace, strap_error *error) {
  ENTER(error);
  return strapgoTraceClose(trace, error);
}

strap_status strap_access_open(const char *path, const char *options, strap_access *access,
                               strap_error *error) {
  ENTER(error);
  NEED(path, error);
  NEED(access, error);
  *access = 0;
  return strapgoAccessOpen((char *)path, (char *)options, access, error);
}

strap_status strap_access_write(strap_access access, const void *blocks, size_t size,
                                strap_error *error) {
  ENTER(error);
  if (size > 0) NEED(blocks, error);
  return strapgoAccessWrite(access, (void *)blocks, size, error);
}

strap_status strap_access_close(strap_access access, int32_t timeout_ms, uint64_t *rows,
                                strap_error *error) {
  ENTER(error);
  uint64_t done = 0;
  strap_status status = strapgoAccessClose(access, timeout_ms, &done, error);
  if (rows != NULL) *rows = done;
  return status;
}

strap_status strap_probe_start(const char *kind, const char *options, strap_probe *probe,
                               strap_error *error) {
  ENTER(error);
  NEED(kind, error);
  NEED(probe, error);
  *probe = 0;
  return strapgoProbeStart((char *)kind, (char *)options, probe, error);
}

strap_status strap_probe_read(strap_probe probe, char *json, size_t size, size_t *needed,
                              strap_error *error) {
  ENTER(error);
  if (size > 0) NEED(json, error);
  size_t bytes = 0;
  strap_status status = strapgoProbeRead(probe, json, size, &bytes, error);
  if (needed != NULL) *needed = bytes;
  return status;
}

strap_status strap_probe_stop(strap_probe probe, strap_error *error) {
  ENTER(error);
  return strapgoProbeStop(probe, error);
}
