/*
 * strap.h - the C interface of libstrap: stream tensors to disk, read them back.
 *
 * This header alone defines the interface. It is plain C11 and works in C++.
 *
 * Conventions
 *   - Every call returns a strap_status: STRAP_OK (0), a positive outcome that is
 *     no failure (STRAP_END, STRAP_DROPPED, STRAP_DECLINED), or a negative
 *     STRAP_ERR_*.
 *   - Every call takes a strap_error, which may be NULL. A failure fills it, a
 *     success clears it.
 *   - A handle is an id, never a pointer. 0 is never a handle. A call with a
 *     closed or unknown handle returns STRAP_ERR_INVALID_STATE.
 *   - The caller owns every string, array and struct that it passes. libstrap
 *     keeps no pointer to them after the call. It zeroes a struct before it fills
 *     it; bytes after the end of an error's message are undefined. Strings are
 *     UTF-8.
 *   - A struct that may grow begins with struct_size: set it to sizeof. A library
 *     newer than the header reads the missing fields as zero. An older library
 *     refuses non-zero bytes in fields that it does not know.
 *   - Calls are thread-safe. A child of fork() must not use libstrap: every call
 *     returns STRAP_ERR_FORKED there.
 *   - timeout_ms: 0 tries once, a negative value waits without limit. After
 *     STRAP_ERR_TIMEOUT nothing is lost: repeat the call, and it goes on where it
 *     stopped. A loop of calls with short limits ends when one call without a
 *     limit would end.
 *   - libstrap computes in the default floating-point environment, also in a team.
 *     It saves the caller's environment and restores it before it returns. It
 *     calls callbacks and the team in the default one.
 *   - libstrap catches a crash inside itself, stops the session in which it
 *     happened, and returns STRAP_ERR_INTERNAL.
 *
 * All symbols: since 2.0.0 unless said otherwise.
 */
#ifndef STRAP_H
#define STRAP_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

/* Version of the binary interface; rises when a change would break a caller. */
#define STRAP_ABI_VERSION 1

/* ---- status ------------------------------------------------------------- */

typedef int32_t strap_status;
enum {
  STRAP_OK = 0,
  STRAP_END = 1,                   /* no further packet */
  STRAP_DROPPED = 2,               /* STRAP_ON_FULL_DROP left this tensor or a part of it out,
                                      counted */
  STRAP_DECLINED = 3,              /* strap_offer did not take the tensor: enqueue it */
  STRAP_ERR_INVALID_ARGUMENT = -1, /* a value is out of its range; the message names it */
  STRAP_ERR_INVALID_STATE = -2,    /* closed, stale or foreign handle */
  STRAP_ERR_TIMEOUT = -3,          /* not done within timeout_ms; repeat the call */
  STRAP_ERR_IO = -4,               /* the operating system refused; see sys_errno */
  STRAP_ERR_NO_SPACE = -5,         /* disk or quota full */
  STRAP_ERR_NOT_FOUND = -6,        /* no such file or packet */
  STRAP_ERR_PERMISSION = -7,       /* not permitted, or a read-only file system */
  STRAP_ERR_BUSY = -8,             /* the stream is being captured by someone else */
  STRAP_ERR_CORRUPT = -9,          /* bytes on disk are not what was written */
  STRAP_ERR_UNSUPPORTED = -10,     /* this build or file system cannot do it */
  STRAP_ERR_NO_MEMORY = -11,
  STRAP_ERR_FORKED = -12,          /* called in a child after fork() */
  STRAP_ERR_INTERNAL = -13         /* a bug in libstrap; the session has failed */
};

typedef struct strap_error {
  strap_status code;
  int32_t sys_errno; /* errno of the operating system, 0 where none is behind it */
  char message[1016];
} strap_error;

/* ABI version of the loaded library; compare with STRAP_ABI_VERSION. */
int32_t strap_abi_version(void);

/* Release of the library, "MAJOR.MINOR.PATCH"; a static string. */
const char *strap_version(void);

/* ---- element types and codecs ------------------------------------------- */

typedef int32_t strap_dtype;
enum {
  STRAP_FLOAT32 = 1,
  STRAP_FLOAT16 = 2,
  STRAP_BFLOAT16 = 3,
  STRAP_FLOAT64 = 4,
  STRAP_FLOAT8_E4M3FN = 5,
  STRAP_FLOAT8_E5M2 = 6,
  STRAP_FLOAT8_E4M3FNUZ = 7,
  STRAP_FLOAT8_E5M2FNUZ = 8,
  STRAP_FLOAT8_E8M0FNU = 9,
  STRAP_INT8 = 10,
  STRAP_INT16 = 11,
  STRAP_INT32 = 12,
  STRAP_INT64 = 13,
  STRAP_UINT8 = 14,
  STRAP_UINT16 = 15,
  STRAP_UINT32 = 16,
  STRAP_UINT64 = 17,
  STRAP_BOOL = 18,
  STRAP_COMPLEX32 = 19,
  STRAP_COMPLEX64 = 20,
  STRAP_COMPLEX128 = 21
};

typedef int32_t strap_codec;
enum {
  STRAP_CODEC_NONE = 0, /* raw bytes */
  STRAP_CODEC_LZ4 = 1,  /* one LZ4 frame a payload */
  STRAP_CODEC_ZSTD = 2, /* one zstd frame a payload, content size set */
  STRAP_CODEC_ARCHIVE = 3 /* 16-bit floats with a bounded error (docs/STREAM_FORMAT.md), all
                             else as zstd; for captures and their reading, and strap_decode */
};

/* ---- capture ------------------------------------------------------------ */

typedef uint64_t strap_session;

enum { STRAP_ON_FULL_BLOCK = 0, STRAP_ON_FULL_DROP = 1 };
enum { STRAP_MODE_CREATE = 0, STRAP_MODE_RESUME = 1 };

/* Cut a resumed stream nowhere: keep all its complete packets. */
#define STRAP_KEEP_ALL UINT64_MAX

#define STRAP_MAX_DIMS 64

/*
 * A strap_team runs work(argument) in several threads at once, one of them the
 * calling thread, and returns when all are done. An engine whose operators run in
 * OpenMP threads passes GOMP_parallel. An engine with a thread pool passes a
 * function that runs work in the pool. libstrap passes 0 for threads: the host
 * chooses how many. It passes 0 for flags. It calls the team only within
 * strap_enqueue, in the thread of the caller.
 */
typedef void (*strap_team)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);

typedef struct strap_open_options {
  uint32_t struct_size;
  strap_codec codec;
  int32_t level;             /* of the codec; 0 is its default, the fastest */
  int32_t workers;           /* compression threads, 1 to 256 */
  uint64_t max_memory_bytes; /* hard limit of the staging memory, at least 1 MiB. libstrap
                                takes less if half of the memory that the machine or its
                                cgroup has left is less; strap_stats reports the limit. Write
                                buffers come on top: a quarter of the limit, at most 24 MiB,
                                and 64 KiB for small tensors */
  int32_t on_full;           /* STRAP_ON_FULL_BLOCK waits for room. STRAP_ON_FULL_DROP never
                                waits; it leaves out what finds no room: a tensor, the float32
                                packet after its float16 packet, or the remaining parts of a
                                split tensor. It also leaves out every tensor larger than the
                                staging memory */
  int32_t mode;              /* STRAP_MODE_*: begin a stream, or append to one */
  uint64_t resume_offset;    /* with RESUME: cut the stream to this many bytes, as a checkpoint
                                reported them, or STRAP_KEEP_ALL. libstrap moves what it cuts to
                                PATH.tail-N, and never deletes it */
  int32_t keep_float32;      /* 0: store float32 as float16, the documented format. 1: store
                                float32 unchanged */
  int32_t rank;              /* stored in the index */
  double error_bound;        /* above 0 and below 1: round values stored as float16 or bfloat16 to
                                as few mantissa bits as keep the packet's squared error within
                                this share of its squared values. No value is rounded by more
                                than those bits. The error of every packet is measured. If
                                float16 alone exceeds the bound, float32 is stored too.
                                0: no rounding. Of an archive: up to 0.01, and 0 means 0.0005 */
  int32_t workers_yield;     /* 0: workers compress each packet at once; for hosts with idle CPUs.
                                1: workers rest while the host computes. They compress when
                                32 MiB wait, when no tensor came for 20 ms, when the oldest tensor
                                waits for 1 s, and in strap_flush, strap_checkpoint and
                                strap_close. The strap_enqueue that reaches 32 MiB waits for the
                                workers, not for the disk. With a team, the team's threads
                                compress instead, within strap_enqueue, when 4 MiB (or a quarter
                                of the memory) wait or the oldest tensor waits for 1 s; the
                                workers rest until no tensor came for 1 s. With
                                STRAP_ON_FULL_DROP no call waits or compresses. A ring takes 1
                                for 0, so that a dump does not stop the host */
  int32_t overwrite;         /* with CREATE. 0: replace only a stream and its index, and refuse
                                any other file at PATH or PATH.index. 1: replace any regular
                                file */
  uint64_t burst_bytes;      /* staging memory to take from the system at once, 0 to
                                max_memory_bytes. Workers that yield rest until this much waits,
                                or three quarters of the memory, however long that takes */
  strap_team team;           /* threads of the host that help to copy large tensors within
                                strap_enqueue, and to compress: see workers_yield. NULL: none */
  const char *capture_id;    /* with RESUME: the id of the capture that PATH must hold, from
                                strap_capture_id; NULL: any. If the index has another id, the
                                answer is CORRUPT and all files stay unchanged. A lost or
                                unreadable index is begun anew with this id. With CREATE: NULL */
  int32_t ring;              /* 0: capture to a stream. 1: keep the last steps in the staging memory
                                until strap_dump writes them. No stream is opened, and PATH is for
                                messages alone. The mode is CREATE. The memory is taken from the system at
                                once */
  int32_t ring_steps;        /* the most steps of the ring; 0: as many as the memory holds */
  double ring_seconds;       /* steps that began so long before the newest one give way; 0: none
                                does for its age */
  const char *ring_file;     /* with a ring: a new file that the staging memory lies in, so that the
                                last steps outlive a process that is killed: see
                                strap_salvage_ring. strap_open reserves room on its file
                                system for the whole staging memory. The bookkeeping of tensors is
                                a part of that memory, and lies in the process. So the end of the
                                file becomes a hole when many tiny tensors are kept. The room of
                                the hole is reserved again when larger tensors need it. While the
                                file system is full, the oldest step gives way instead. A path on tmpfs, such as
                                /dev/shm, costs as much as memory; to a disk the kernel writes all
                                the time. The end of the session removes the file. NULL: none */
  double ring_outlier;       /* strap_alarm finds outliers: tensors of a ring whose largest magnitude
                                is above so many times the usual one of their layer, see there. Above
                                1; 0: it finds none */
} strap_open_options;

/* Bytes of a capture's id: 32 hexadecimal digits and a zero. */
#define STRAP_CAPTURE_ID_BYTES 33

/*
 * Opens PATH for capture, and its index at PATH.index.
 * CREATE replaces an existing stream, RESUME appends to it. Both first lock the stream and open
 * the index, so a refused call changes no file. CREATE puts a new file in the place of the old
 * one: a process that has the old stream open can read it to its end.
 *
 * Errors: INVALID_ARGUMENT (an option, or PATH is a directory or no regular
 * file, or an archive's and ends in .stream, or a file that is no stream stands at PATH, or
 * one that is no index at PATH.index: see overwrite; or a file that is no ring file stands at
 * ring_file), INVALID_STATE (a process that was killed left ring_file: salvage and remove it),
 * UNSUPPORTED (the file system of ring_file reserves no room), BUSY (another session holds
 * PATH or ring_file), NOT_FOUND, PERMISSION, NO_SPACE, NO_MEMORY (the staging memory cannot be
 * mapped), IO; with RESUME also CORRUPT, and NO_MEMORY where the index takes more
 * than half of what this process can still have.
 */
strap_status strap_open(const char *path, const strap_open_options *options,
                        strap_session *session, strap_error *error);

/*
 * Begins a new stream at PATH, with its index at PATH.index, which gets all tensors to come. Layers
 * and requests stay registered, and the staging memory is the same. OVERWRITE is as in
 * strap_open_options. The stream before gets all tensors that were enqueued or offered before.
 *
 * strap_roll does not wait for the disk: strap_flush waits until the stream before has its tensors,
 * and strap_checkpoint until that stream and its index are durable and closed. What fails there is a
 * failure of the session. Only small tensors that strap_enqueue and strap_offer took aside may wait
 * for staging memory, at most timeout_ms; after STRAP_ERR_TIMEOUT call again. From the call on
 * strap_capture_id gives the id of the new stream.
 * stats.file_bytes becomes the length of the new stream when the one before has its tensors; the
 * other counters go on. If strap_roll fails, nothing changes.
 *
 * Errors: those of strap_open in mode CREATE, and those of the session.
 */
strap_status strap_roll(strap_session session, const char *path, int32_t overwrite,
                        int32_t timeout_ms, strap_error *error);

/*
 * Writes what the ring of a session keeps to a new stream at PATH, with its index at PATH.index, and
 * then all tensors to come until strap_dump_end. Between two dumps the ring keeps the last steps: when
 * a tensor finds no room, the oldest step gives way as a whole, and later tensors of that step are left
 * out. So does the oldest step beyond ring_steps and ring_seconds. A step for which the whole memory is
 * too small loses tensors as with STRAP_ON_FULL_DROP. Tensors with step -1 belong to the step before
 * them. A step that was dumped is no longer in the ring.
 *
 * strap_dump does not wait for the disk: strap_checkpoint after strap_dump_end waits until the files are
 * durable and closed. During a dump strap_enqueue may wait for room as in any session.
 *
 * A dump that cannot be written, as on a full disk, is no failure of the session. Its files keep the
 * packets that are whole, the tensors behind those are lost, and strap_checkpoint returns the error, once.
 * From strap_dump_end on the ring keeps what comes, and strap_dump may be called again.
 *
 * Errors: those of strap_roll; INVALID_STATE (the session has no ring, or a dump has not ended).
 */
strap_status strap_dump(strap_session session, const char *path, int32_t overwrite,
                        int32_t timeout_ms, strap_error *error);

/* Ends the dump behind all tensors that were enqueued or offered before. The ring keeps the next
 * tensors. Errors: INVALID_STATE (no dump is being written); TIMEOUT as in strap_roll. */
strap_status strap_dump_end(strap_session session, int32_t timeout_ms, strap_error *error);

/*
 * Tells that all tensors of a step were enqueued or offered, of a session with a ring. In a ring_file
 * the step counts as whole from then on. Tensors may still come for it. Without a ring_file the call
 * has no effect.
 *
 * Errors: INVALID_STATE (the session has no ring); TIMEOUT as in strap_roll.
 */
strap_status strap_step_end(strap_session session, int64_t step, int32_t timeout_ms,
                            strap_error *error);

/* A tensor with a value that is infinite or NaN, or an outlier. */
typedef struct strap_alarm_t {
  uint32_t struct_size;
  uint32_t layer;   /* as in strap_tensor, like the next fields */
  uint32_t request;
  uint32_t call;
  int64_t step;
  int64_t token;
  int64_t element;  /* the number of the first such element, row-major; of an outlier the number of the
                       first one with the largest magnitude */
  double value;     /* of that element; NaN for types that have no other such value */
  int64_t time_ns;  /* CLOCK_MONOTONIC when the tensor was enqueued or offered */
  uint64_t thread;  /* the system's id of the thread that did so */
  double usual;     /* of an outlier: the usual largest magnitude of its layer; 0: it is none */
} strap_alarm_t;

/*
 * Fills *alarm with the first tensor since the last strap_alarm that has a value that is not finite, of a
 * session with a ring. STRAP_END: there is none. The values are those of the tensor, not of the float16
 * that is stored. Of tensors that threads enqueue at once any may be the first.
 *
 * With ring_outlier it finds outliers too, of the types float16, bfloat16, float32 and float64. The usual
 * largest magnitude of a layer is the median over its last 64 tensors whose values are all finite; before
 * there are 16 of them no tensor is an outlier. Magnitudes are those of the stored values, unless float16
 * cannot hold the tensor. If there is a tensor of both kinds, the first one comes first, and the next
 * strap_alarm gives the other.
 *
 * Errors: INVALID_STATE (the session has no ring); TIMEOUT as in strap_roll.
 */
strap_status strap_alarm(strap_session session, strap_alarm_t *alarm, int32_t timeout_ms,
                         strap_error *error);

/*
 * Copies the id of the capture into ID, which has SIZE bytes, and ends it with a zero. No other
 * capture has the same id. The index has it from strap_open on, and a resumed stream keeps it.
 *
 * Errors: INVALID_ARGUMENT (SIZE is below STRAP_CAPTURE_ID_BYTES).
 */
strap_status strap_capture_id(strap_session session, char *id, size_t size, strap_error *error);

/*
 * Registers a source of tensors and returns its id in *layer. MODEL may be NULL. NAME is the
 * layer. PATH is the place of the tensor in the layer's output, NULL or "" for the first tensor.
 * The packet name is NAME followed by PATH, at most 65,535 bytes. name_len is in bytes, so NAME
 * need not end in a zero. MODEL has at most 65,536 bytes. The same MODEL, NAME and PATH give the
 * same id.
 *
 * The session keeps the names of all layers: NO_MEMORY beyond 64 MiB.
 */
strap_status strap_layer(strap_session session, const char *model, const char *name,
                         size_t name_len, const char *path, uint32_t *layer,
                         strap_error *error);

/*
 * Registers a request that a server answers, and returns its id for strap_tensor.request: 1 or
 * more. NAME has 1 to 65,536 bytes. name_len is in bytes, so NAME need not end in a zero.
 *
 * The session keeps the newest names, up to 64 MiB, and counts each with 128 bytes more. The same
 * name gives the same id until other names have taken 32 MiB, and after that a new id. An id is valid
 * for at least the next 32 MiB of names. strap_enqueue answers INVALID_ARGUMENT to an id that is
 * forgotten, so register the name of a request that goes on for long again.
 *
 * Errors: INVALID_ARGUMENT (NAME), NO_MEMORY (tensors of the names that are to be forgotten wait for
 * staging memory, or 2^32 - 1 ids were given).
 */
strap_status strap_request(strap_session session, const char *name, size_t name_len,
                           uint32_t *request, strap_error *error);

/*
 * The error of a host that converts float32 to float16 itself, for example on a device, so that
 * half of the bytes leave it. Convert as the library does: round to nearest, ties to even. Pass a
 * tensor as float32 instead if a finite value became infinite, or if the squared error exceeds the
 * error bound: the stream then stores float32 too.
 */
typedef struct strap_conversion {
  uint32_t struct_size;
  strap_dtype source;  /* of the values before: STRAP_FLOAT32 */
  uint64_t values;     /* how many are finite before and after, at most the elements */
  double square_error; /* sum over them of (value - float16 value)^2 */
  double square_sum;   /* sum over them of value^2 */
  double max_error;    /* largest |value - float16 value| of them */
} strap_conversion;

typedef struct strap_tensor {
  uint32_t struct_size;
  uint32_t layer;         /* from strap_layer */
  strap_dtype dtype;
  int32_t ndim;           /* 0 to STRAP_MAX_DIMS; 0 is a scalar */
  const int64_t *shape;   /* ndim lengths; NULL allowed for a scalar */
  const int64_t *strides; /* in elements, may be 0 or negative; NULL: contiguous, row-major */
  const void *data;       /* first element; NULL allowed when there is none */
  int64_t step;           /* forward step, -1: unknown */
  int64_t token;          /* tokens recorded when the step began, -1: unknown */
  uint32_t call;          /* which call of the layer within the step, from 0 */
  uint32_t request;       /* from strap_request, 0: none */
  const char *transform;  /* what the caller did to the values, for the index; NULL: nothing */
  const char *parameters; /* of the transform, a JSON object; NULL: none. Both together have
                             at most 65,536 bytes, which count as staging memory */
  uint64_t cursor;        /* in and out: 0 at first; see strap_enqueue */
  const strap_conversion *conversion; /* of STRAP_FLOAT16 that the host made of float32: index
                             and statistics say of it what they say of float32 that the
                             library converts, so raw_bytes counts float32. With keep_float32
                             refused. NULL: data is as captured */
} strap_tensor;

/*
 * Copies a tensor into the staging memory and returns. Background threads compress and write it.
 * If neither takes time, the call copies the tensor straight into the write buffer. The caller may
 * overwrite the data when the call has returned STRAP_OK. In the file, packets have the order of
 * the calls; the calls of one thread keep their order.
 *
 * The call waits up to timeout_ms for room, after the calls that wait already. After
 * STRAP_ERR_TIMEOUT repeat it with the same struct and unchanged data: cursor records how far it
 * came. A tensor larger than the staging memory is streamed through it, and the repeated call goes
 * on in the middle. A call that copied nothing keeps its turn for one second: later calls may only
 * take memory that it does not need. After that second it queues anew. Call strap_abandon with the
 * cursor to give the tensor up: otherwise the writer waits for the rest of a half-copied tensor.
 * With STRAP_ON_FULL_DROP the call never times out.
 *
 * A small tensor (at most 16 KiB, contiguous, without transform and conversion) may first go to a
 * buffer of 64 KiB beside the staging memory. The tensors in the buffer become packets together, in
 * their order: before the packet of any later call, or after about 100 ms. A call that times out
 * while these tensors wait for room leaves its cursor 0: repeat it as it was. Sessions with
 * STRAP_ON_FULL_DROP have no such buffer, nor have more than 16 sessions at once.
 *
 * Once writing has failed, every call returns that failure at once; strap_offer returns
 * STRAP_DECLINED.
 */
strap_status strap_enqueue(strap_session session, strap_tensor *tensor, int32_t timeout_ms,
                           strap_error *error);

/*
 * Copies a small tensor as strap_enqueue does, without waiting. It returns STRAP_DECLINED if the
 * tensor is not small, finds no room, or is invalid, or if the session is closed, unknown or has
 * failed: then call strap_enqueue, which returns the error. A host that holds a lock, such as
 * Python's GIL, calls strap_offer first and releases the lock only for strap_enqueue.
 */
strap_status strap_offer(strap_session session, const strap_tensor *tensor, strap_error *error);

/* Gives up a tensor whose strap_enqueue timed out. If the tensor was copied in part, the unfinished
 * packet is withdrawn and the index notes the tensor; finished packets of a split tensor stay. If
 * nothing was copied, the call loses its turn. With cursor 0 it gives up this thread's strap_flush
 * and strap_checkpoint that timed out. */
strap_status strap_abandon(strap_session session, uint64_t cursor, strap_error *error);

/* Notes in the index that a tensor of this layer could not be captured, and why. The note keeps its
 * place among the packets. stats.failed counts it. While 4,096 notes wait to be written, further
 * notes are only counted. A message is cut at 4,096 bytes. */
strap_status strap_note(strap_session session, uint32_t layer, int64_t step, int64_t token,
                        uint32_t call, const char *message, strap_error *error);

/*
 * Waits until every tensor that was enqueued before the call is in the file.
 *
 * After STRAP_ERR_TIMEOUT the next call of the same thread continues the first: it waits for what
 * was enqueued before the first call, and not for what other threads have enqueued since. It is a
 * new call after one second, and after the thread itself enqueued, offered, abandoned or noted
 * something. The same holds for strap_checkpoint.
 */
strap_status strap_flush(strap_session session, int32_t timeout_ms, strap_error *error);

/* Does strap_flush, and then waits until stream and index are durable (fsync). *offset, if not
 * NULL, receives the length of the stream that is durable. It syncs the folder too, so that the
 * names of new files are durable. A folder that the process cannot read cannot be synced: the files
 * are durable then, and their names become durable when the system writes them. */
strap_status strap_checkpoint(strap_session session, int32_t timeout_ms, uint64_t *offset,
                              strap_error *error);

typedef struct strap_stats_t {
  uint32_t struct_size;
  uint32_t workers;
  uint64_t packets;         /* packets in the stream, or in all streams after strap_roll */
  uint64_t tensors;         /* tensors that strap_enqueue and strap_offer took */
  uint64_t raw_bytes;       /* size of these tensors in their own type */
  uint64_t stored_bytes;    /* size of the payloads in the stream */
  uint64_t file_bytes;      /* length of the stream */
  uint64_t dropped;         /* tensors that STRAP_ON_FULL_DROP left out, whole or in part */
  uint64_t dropped_bytes;   /* what it left out, in the tensors' own type */
  uint64_t failed;          /* tensors that were noted (strap_note) or abandoned */
  uint64_t overflowed;      /* float32 tensors with finite values beyond float16 */
  uint64_t stalls;          /* tensors that waited for room. A small tensor that strap_enqueue took
                               aside may wait in a later call of any kind */
  uint64_t stall_ns;        /* how long they waited together; a running wait counts until now */
  uint64_t queued_packets;  /* packets that are enqueued and not yet written */
  uint64_t queued_bytes;    /* staging memory that these packets hold */
  uint64_t memory_bytes;    /* staging memory of the session now, taken from the system or from an
                               earlier session */
  uint64_t memory_peak;     /* the largest memory_bytes so far */
  uint64_t memory_limit;    /* the limit in force */
  uint64_t write_ns;        /* time in write calls; a running call counts until now */
  uint64_t converted;       /* values that became float16 from float32, were rounded, or went into
                               an archive. The next three fields are about the finite ones */
  double square_error;      /* sum of (value - stored value)^2. It is never below the true sum, but
                               for the rounding of double, and less than 2e-6 of it above. For
                               archives, and for values that the host converted and the library
                               rounded, it is an upper bound. For values that the host converted
                               and nobody rounded, it is what the host said */
  double square_sum;        /* sum of value^2, with the same precision. For values that the host
                               converted, it is what the host said */
  double max_error;         /* largest |value - stored value|. It is exact where square_error is a
                               sum, and an upper bound or the host's number as square_error is */
  strap_status failure;     /* what stopped the writing; STRAP_OK: nothing did */
  int32_t writer_thread;    /* the system's id of the thread that writes; 0: unknown */
  uint64_t yield_ns;        /* time in which strap_enqueue calls left the CPUs to workers or made
                               packets (workers_yield); a running wait counts until now */
  uint64_t repeated;        /* packets that were copied from a recent packet with equal elements,
                               instead of compressed */
  uint64_t underflowed;     /* float32 tensors whose values are too small for float16: float16 alone
                               exceeds error_bound, or without a bound loses more than 0.01 of a
                               packet's squared values. With a bound float32 is stored too. Tensors
                               that count as overflowed do not count here */
  uint64_t ring_steps;      /* steps in the ring now */
  uint64_t ring_packets;    /* packets in the ring now */
  uint64_t ring_bytes;      /* memory that they count for: in the staging memory, and their bookkeeping */
  uint64_t ring_gone_steps; /* steps that gave way to newer ones */
  uint64_t ring_gone_packets; /* packets of those, and tensors that came after their step had gone */
  int64_t ring_oldest_step; /* the least number of a step in the ring; -1: it is empty, or the step's
                               number is unknown */
  int64_t ring_gone_step;   /* the greatest number of a step that gave way; -1: none did */
  int64_t ring_oldest_ns;   /* CLOCK_MONOTONIC of the oldest tensor in the ring; 0: it is empty */
} strap_stats_t;

/* Fills *stats; works until the session is closed, also after a failure. */
strap_status strap_stats(strap_session session, strap_stats_t *stats, strap_error *error);

/*
 * Writes everything that is queued, finishes the index and closes the files. After
 * STRAP_ERR_TIMEOUT the session is closing: strap_enqueue is refused, strap_stats works. Call again
 * to go on waiting. After any other answer the handle is invalid. A failure of the writing is
 * reported here once more.
 *
 * NOT_FOUND: the stream is no longer at PATH. A renamed stream has all packets; the message says
 * its new name, and whether the index is beside it. libstrap moves the index there unless a file is
 * in the way. The packets of a stream that was removed or replaced are lost.
 */
strap_status strap_close(strap_session session, int32_t timeout_ms, strap_error *error);

/* Closes without waiting, for a disk that does not answer. Packets that are not written yet are
 * lost; what is in the file stays valid. The file stays locked until the running write call
 * returns. *lost, if not NULL, receives the number of lost packets. */
strap_status strap_discard(strap_session session, uint64_t *lost, strap_error *error);

/* ---- reading ------------------------------------------------------------ */

typedef uint64_t strap_reader;

/* Read the packets by scanning the stream, whatever its index says. */
enum { STRAP_READ_IGNORE_INDEX = 1 };

typedef struct strap_reader_options {
  uint32_t struct_size;
  uint32_t flags; /* STRAP_READ_* */
} strap_reader_options;

typedef struct strap_reader_info {
  uint32_t struct_size;
  int32_t indexed;      /* 1: described by its index, 0: found by scanning */
  uint64_t rows;        /* index rows: packets, and tensors noted as missing */
  uint64_t packets;     /* complete packets */
  uint64_t file_bytes;  /* length of the stream file */
  uint64_t valid_bytes; /* of it complete packets, from the start */
  uint64_t scanned;     /* packets behind the index's end, found by scanning */
  char problem[512];    /* torn tail, ignored index...; "" when all is well */
  int32_t live;         /* 1: a capture is writing the stream, so a torn tail is no problem */
  int32_t reserved;
} strap_reader_info;

/*
 * Opens a stream. The index gives every packet its shape, type, step and token. Packets that the
 * index does not list are found by scanning; they have a name and a length. All packets are found
 * by scanning if the index is absent, belongs to another stream, or takes more than half of the
 * memory that the process can still have.
 *
 * Errors: NOT_FOUND, PERMISSION, INVALID_ARGUMENT (a directory), IO, CORRUPT
 * (the file does not begin with a packet).
 */
strap_status strap_reader_open(const char *path, const strap_reader_options *options,
                               strap_reader *reader, strap_reader_info *info,
                               strap_error *error);

/*
 * Opens the rows that the stream has got since READER was opened. Row 0 of *next is row FIRST of
 * READER; the new rows come after READER's last row. *next is 0 if nothing changed. READER stays
 * unchanged. Close both readers. The work grows with the number of new rows alone.
 *
 * While info->live is 1, *next has only packets that the index lists: a packet is listed about a
 * second after its capture at most. When info->live is 0, *next has all packets. To follow a
 * capture, repeat the call until info->live is 0. With STRAP_READ_IGNORE_INDEX a packet appears
 * when it is complete.
 *
 * Errors: NOT_FOUND (the stream at the path is another one, or was cut back by a capture that
 * resumes), INVALID_ARGUMENT (FIRST is behind the rows that the index lists), IO, NO_MEMORY.
 */
strap_status strap_reader_follow(strap_reader reader, uint64_t first, strap_reader *next,
                                 strap_reader_info *info, strap_error *error);

typedef struct strap_packet {
  uint32_t struct_size;
  strap_dtype dtype;         /* of the payload; 0: unknown (scanned) */
  strap_dtype source_dtype;  /* of the captured tensor; 0: unknown */
  strap_codec codec;
  uint64_t row;              /* in the index */
  uint64_t sequence;
  uint64_t offset;           /* of the packet in the stream */
  uint64_t payload_bytes;    /* as stored */
  uint64_t decoded_bytes;    /* what strap_reader_read needs */
  int64_t step;
  int64_t token;
  uint32_t call;
  uint32_t part;
  uint32_t parts;
  int32_t ndim;              /* -1: unknown */
  int64_t shape[STRAP_MAX_DIMS]; /* of the whole tensor */
  uint64_t name_bytes;       /* length of the packet name; strap_reader_name copies it */
  int32_t present;           /* 0: the row notes a tensor that is not in the stream */
  int32_t reserved;
} strap_packet;

/*
 * Describes the next row, beginning with row 0. Returns STRAP_END after the last row.
 *
 * CORRUPT, UNSUPPORTED and IO are errors of one row: its packet does not fit the index, or has an
 * unknown length. PACKET then holds what the index says, and decoded_bytes is 0. The next call
 * describes the row after it, so a loop that goes on after these errors visits every row. Only
 * INVALID_ARGUMENT and INVALID_STATE do not move the reader.
 */
strap_status strap_reader_next(strap_reader reader, strap_packet *packet, strap_error *error);

/* Describes row ROW, and does not move strap_reader_next. Returns NOT_FOUND after the last row; the
 * other errors are those of strap_reader_next. */
strap_status strap_reader_at(strap_reader reader, uint64_t row, strap_packet *packet,
                             strap_error *error);

/* Copies the packet name of row ROW into NAME, cut to SIZE - 1 bytes, and ends
 * it with a zero. */
strap_status strap_reader_name(strap_reader reader, uint64_t row, char *name, size_t size,
                               strap_error *error);

/*
 * Verifies the packet's checksum (where the index has it), decodes it and
 * writes its row-major elements to DATA, which has SIZE bytes.
 *
 * Errors: INVALID_ARGUMENT (SIZE is not decoded_bytes), NOT_FOUND (no such row,
 * or no packet there), CORRUPT, IO.
 */
strap_status strap_reader_read(strap_reader reader, uint64_t row, void *data, size_t size,
                               strap_error *error);

/*
 * Decodes the packets of COUNT rows with one call, in the order of ROWS. For many small packets
 * this is much faster than one call for each. DATA has SIZE bytes. Each row's elements begin at the
 * next multiple of ALIGNMENT, a power of two, after the elements of the row before. ends[k] receives
 * the end of the elements of rows[k]. The call stops before the first row for which DATA has no
 * room; *done receives the number of decoded rows. It uses as many threads as there are processors.
 *
 * Errors: those of strap_reader_at and strap_reader_read for the first row. Where a later row has
 * an error, the call stops before that row and answers OK.
 */
strap_status strap_reader_read_many(strap_reader reader, const uint64_t *rows, size_t count,
                                    size_t alignment, void *data, size_t size, uint64_t *ends,
                                    size_t *done, strap_error *error);

/* Bytes FIRST to FIRST + BYTES - 1 of the decoded packet of row ROW, and where they go. */
typedef struct strap_range {
  uint64_t row;
  uint64_t first;
  uint64_t bytes; /* 0 is allowed */
  uint64_t to;    /* place of the first byte in DATA */
} strap_range;

/*
 * Decodes COUNT ranges of packets with one call. DATA has SIZE bytes. It receives the bytes of each
 * range at the range's place; other bytes of DATA stay. If ranges overlap in DATA, either one's bytes
 * are there. *done receives the number of decoded ranges. The call uses as many threads as there are
 * processors.
 *
 * A packet is decoded once for all its ranges among 65,536 ranges, and only as far as they need it. Of
 * raw payloads the call reads the ranges. Of LZ4 and zstd frames and archives it decodes the blocks or
 * chunks that have the ranges, if the blocks do not need each other, and otherwise the frame from its
 * beginning to the end of the ranges. docs/STREAM_FORMAT.md says which frames have independent blocks.
 *
 * Where the call reads a packet's whole payload, it verifies the checksum (where the index has it), as
 * strap_reader_read does: for ranges that together are the whole packet or, of raw payloads, half of
 * it; for packets with at most 64 KiB of decoded bytes; and for frames that it decodes to their end. A
 * part of a payload cannot be verified. The codec finds some damage of it, and none of raw values.
 *
 * Errors: those of strap_reader_at and strap_reader_read for the first range, and INVALID_ARGUMENT if
 * it reaches outside its packet or DATA. Where a later range has an error, the call stops before that range
 * and answers OK. An error of a packet is an error of each of its ranges among these 65,536.
 */
strap_status strap_reader_read_ranges(strap_reader reader, const strap_range *ranges, size_t count,
                                      void *data, size_t size, size_t *done, strap_error *error);

/*
 * Starts to read the packets of COUNT rows, and does not wait for them. A later call that decodes them
 * then finds them in memory. Rows without a packet are skipped. All of this is advice: where the system
 * cannot do it, the later call reads the packets.
 *
 * On Linux, packets that stand together in the file and have 256 KiB or more are read past the page
 * cache, by threads of the library. The reader takes up to 4 MiB of memory for them, and 8 MiB more for
 * each processor. Other packets are read into the page cache: those that a call asks for beyond this
 * memory, and those of a disk with less than 500 MB/s, if the stream is at most half as large as the
 * free memory. Packets that the page cache has are read from there.
 *
 * Ask for the packets of the next call before each call that decodes. A call without rows gives the
 * memory back.
 *
 * Errors: NOT_FOUND if there is no such row; INVALID_ARGUMENT.
 */
strap_status strap_reader_prefetch(strap_reader reader, const uint64_t *rows, size_t count,
                                   strap_error *error);

strap_status strap_reader_close(strap_reader reader, strap_error *error);

/*
 * Exchanges rows of a shuffle buffer with one pass over them. The buffer has ROWS rows of ROW_BYTES
 * each. For each k below COUNT, in turn, row SLOTS[k] is copied to row k of OUT. Then row k of IN takes
 * its place, unless IN is NULL. A slot that is named again gives the row that came in before.
 *
 * OUT and IN have COUNT rows. The buffer, OUT and IN must not overlap. After an error nothing is
 * copied.
 *
 * Errors: INVALID_ARGUMENT, also for a slot from ROWS on.
 */
strap_status strap_exchange_rows(void *buffer, size_t rows, size_t row_bytes, const uint64_t *slots,
                                 size_t count, void *out, const void *in, strap_error *error);

/*
 * A part of a damaged stream that is not in the new one. With a name it is a packet, known from the
 * index or from its own header. Without a name it is a range of bytes. Every lost byte is in one
 * range. A packet that the index lists may lie beyond the file's end.
 */
typedef struct strap_lost {
  uint64_t offset;     /* in the damaged stream */
  uint64_t length;
  const char *name;    /* of the packet, NAME_BYTES long; NULL: a range of bytes */
  size_t name_bytes;
  const char *reason;  /* why the packet was left out; NULL for a range */
} strap_lost;

typedef struct strap_salvage_options {
  uint32_t struct_size;
  int32_t force; /* 1: replace what stands at OUT */
  /* Called now and then with the number of bytes that are searched, and about how many there are.
   * May be NULL. If it returns anything but 0, strap_salvage stops with INVALID_STATE. */
  int32_t (*progress)(void *context, uint64_t done, uint64_t total);
  /* Called for each lost part, when the new stream is there. May be NULL. The memory that LOST
   * points to is valid until the callback returns. */
  void (*lost)(void *context, const strap_lost *lost);
  void *context;
} strap_salvage_options;

typedef struct strap_salvage_report {
  uint32_t struct_size;
  uint32_t reserved;
  uint64_t packets;      /* in the new stream */
  uint64_t bytes;        /* its length */
  uint64_t verified;     /* packets whose checksum in the index fits */
  uint64_t repaired;     /* verified packets of which only the header was damaged */
  uint64_t unlisted;     /* packets that are not in the index, so without shape and type */
  uint64_t lost_packets; /* lost parts with a name */
  uint64_t lost_ranges;  /* lost ranges of bytes */
  uint64_t lost_bytes;   /* bytes in these ranges */
  char problem[512];     /* what is wrong with the index; "" when nothing is */
} strap_salvage_report;

/*
 * Copies the intact packets of the stream at PATH to a new stream OUT with an index. The source is
 * only read. The new files appear when they are whole and durable. If the index at PATH.index lists
 * a packet, the checksum there decides whether the packet is intact. The new index notes the lost
 * packets.
 *
 * The callbacks are called from the calling thread. OPTIONS and REPORT may be NULL.
 *
 * Errors: NOT_FOUND, INVALID_ARGUMENT (OUT is the source, or exists without
 * force), BUSY (OUT is being captured), CORRUPT (nothing is intact), IO, NO_SPACE.
 */
strap_status strap_salvage(const char *path, const char *out,
                           const strap_salvage_options *options,
                           strap_salvage_report *report, strap_error *error);

/* A step of a ring file, for strap_salvage_ring. It is whole if it has ended, and the last two numbers
 * are 0. */
typedef struct strap_ring_step {
  int64_t step;          /* its number; -1: unknown */
  uint64_t packets;      /* in the new stream */
  int32_t ended;         /* 1: strap_step_end was called for it */
  int32_t whole;         /* 1: all its tensors are in the new stream */
  uint64_t missing;      /* packets that it had when it ended, and the new stream lacks: it was giving
                            way to a newer step, a dump had taken it, or the file is damaged */
  uint64_t not_captured; /* tensors that were dropped, or could not be captured */
} strap_ring_step;

typedef struct strap_salvage_ring_options {
  uint32_t struct_size;
  int32_t force; /* 1: replace what stands at OUT */
  /* As in strap_salvage_options. */
  int32_t (*progress)(void *context, uint64_t done, uint64_t total);
  /* Called for each step in the order of the new stream, when that is there. May be NULL. */
  void (*step)(void *context, const strap_ring_step *step);
  void *context;
} strap_salvage_ring_options;

typedef struct strap_salvage_ring_report {
  uint32_t struct_size;
  int32_t pid;           /* of the process that left the file */
  uint64_t packets;      /* in the new stream */
  uint64_t bytes;        /* its length */
  uint64_t steps;        /* with packets in the file */
  uint64_t whole_steps;  /* of these */
  uint64_t damaged;      /* packets that were left out, because their values have another checksum */
  char problem[512];     /* what is wrong with the file; "" when nothing is */
} strap_salvage_ring_report;

/*
 * Copies the packets of the ring_file at PATH, which a killed process has left, to a new stream OUT with
 * an index. Packets that were being copied when the process ended are left out. Steps that are not whole
 * have a note in the index. The ring file is only read. The new files appear when they are whole and
 * durable. The payloads are raw.
 *
 * The callbacks are called from the calling thread. OPTIONS and REPORT may be NULL.
 *
 * Errors: NOT_FOUND, INVALID_ARGUMENT (OUT is the source, or exists without force), BUSY (the process
 * lives, or OUT is being captured), CORRUPT (PATH is no ring file, or its head is damaged), IO, NO_SPACE.
 */
strap_status strap_salvage_ring(const char *path, const char *out,
                                const strap_salvage_ring_options *options,
                                strap_salvage_ring_report *report, strap_error *error);

/* ---- payloads ----------------------------------------------------------- */

/* The number of bytes that strap_encode needs for SIZE source bytes. It is 0 if the codec is
 * unknown or the number is above PTRDIFF_MAX; strap_encode then returns INVALID_ARGUMENT. It is
 * also 0 for SIZE 0 without compression. */
size_t strap_encode_bound(strap_codec codec, size_t size);

/* Encodes SIZE bytes at SOURCE as one payload at DATA, which has room for strap_encode_bound bytes.
 * *length receives the length of the payload. LEVEL is that of strap_open_options. */
strap_status strap_encode(strap_codec codec, int32_t level, const void *source, size_t size,
                          void *data, size_t room, size_t *length, strap_error *error);

/* *length receives the decoded length of a payload. A frame that does not state its length is
 * decoded to learn it. That takes the memory of a decoder, with a zstd window of at most 128 MiB, and
 * no memory for the content.
 *
 * Errors: CORRUPT (the payload is not of this codec, or states a length that its bytes cannot
 * decode to), UNSUPPORTED (the payload needs a dictionary or a larger window, or it does not state
 * its length and decodes to more than 4 GiB). */
strap_status strap_decoded_size(strap_codec codec, const void *payload, size_t size,
                                uint64_t *length, strap_error *error);

/* Decodes a payload of SIZE bytes to DATA. LENGTH is the decoded length of the payload, and the
 * size of DATA. */
strap_status strap_decode(strap_codec codec, const void *payload, size_t size, void *data,
                          size_t length, strap_error *error);

/* ---- index -------------------------------------------------------------- */

/* The Arrow C stream interface,
 * https://arrow.apache.org/docs/format/CStreamInterface.html */
struct ArrowArrayStream;

/* Exports the index as record batches in row order; docs/STREAM_FORMAT.md has the columns. The
 * caller must release STREAM, which stays valid after the reader is closed. */
strap_status strap_index_export(strap_reader reader, struct ArrowArrayStream *stream,
                                strap_error *error);

/* Exports some columns of the index. COLUMNS are their names, separated by commas. Columns of text
 * are dictionaries with int32 indices. INVALID_ARGUMENT: the index has no column of a name. */
strap_status strap_index_columns(strap_reader reader, const char *columns,
                                 struct ArrowArrayStream *stream, strap_error *error);

/* ---- memory traces ------------------------------------------------------ */

/*
 * A trace is a stream of record batches whose rows are loads and stores. docs/MEMORY_TRACES.md has
 * its columns. Traces are passed as Arrow C streams. A function takes ownership of the stream that
 * it is given, also when it fails: it leaves the caller's struct released. The stream stays the caller's
 * only if the call answers STRAP_ERR_FORKED, or a required pointer is NULL.
 *
 * strap_trace_parse and strap_trace_label return a stream that does the work while it is read.
 * strap_trace_analyse, strap_trace_partial and strap_trace_write_parquet read a stream to its end while
 * strap_trace_run runs, and strap_trace_merge reads files. Each also returns a handle, for its counts
 * and tables. The handle may be closed at any time.
 *
 * OPTIONS is a JSON object in UTF-8. NULL and "" mean no options. A key that is not listed is
 * refused by name.
 */
typedef uint64_t strap_trace;

/*
 * Reads the text at PATH. FORMAT is one of
 *   "perf_script"  what `perf script` prints of perf mem or page-fault samples
 *   "lackey"       valgrind --tool=lackey --trace-mem=yes. It has no time: row N gets N ns, which
 *                  tells the order alone
 *   "page_faults"  page faults as `perf script` or tracefs print them
 *   "access"       a file of libstrap-access (docs/ACCESS_TRACING.md). The rows are in the order of
 *                  time over all threads. Tables: "ranges" (start, end, from_ns, to_ns, region_type,
 *                  region_id, name: the option of strap_trace_label), "program" (key, value), and
 *                  "problems" (text: what the file lacks, and which symbols were not found so far).
 *                  It takes the options run_id, phases, batch_rows, and source (true: a last column
 *                  "source" with "FILE:LINE").
 * Lines that are no samples are skipped and counted. So are samples without a data address: perf
 * prints them without -F +addr, and for events such as cpu-clock. Damaged lines are counted; the
 * table "malformed" (line, text) has them.
 *
 * Options: run_id (text), phases ([{phase, start_ns, end_ns}], end exclusive), workers (1 to 256),
 * batch_rows, sample_every (N keeps each Nth row), cycles_per_ns (converts the latencies of perf
 * from cycles to ns), instructions (true: lackey's instruction fetches become loads of the symbol
 * "[instruction]"; false: they are left out).
 */
strap_status strap_trace_parse(const char *format, const char *path, const char *options,
                               struct ArrowArrayStream *out, strap_trace *trace,
                               strap_error *error);

/*
 * Gives every row of IN its region_type and region_id. The other columns stay as they are. When the
 * stream has been read, three tables tell what was seen:
 *   "region_map"          the regions
 *   "kv_block_lifecycle"  a row for each page of the KV cache. It returns INVALID_ARGUMENT if rows
 *                         of more than 64 pages each give it more than 2^24 rows
 *   "label_coverage"      (region_type, n_rows, n_bytes) how much of the trace has which type,
 *                         before the policy leaves rows out or names them
 *
 * Options: rules ([{region_type, phase, op_type, symbol_re, dso_re}], the first that matches wins;
 * default: the documented ones), policy ("keep", "skip", "error" or "runtime": what to do with rows
 * that nothing classifies), ranges ([{start, end, from_ns, to_ns, region_type, region_id, name}], end
 * exclusive, from_ns and to_ns 0 for all time, region_id 0 for a new region).
 */
strap_status strap_trace_label(struct ArrowArrayStream *in, const char *options,
                               struct ArrowArrayStream *out, strap_trace *trace,
                               strap_error *error);

/*
 * Computes tables about the labelled trace IN; docs/MEMORY_TRACES.md lists them.
 *
 * The table "support" (table, reason) has a row for each table: why a trace of this kind cannot give
 * it, or null if it can.
 *
 * Options: tables (names; default: the ten of the summary), ordered (true: the rows come in the order
 * of time, so none are kept for sorting, and a row out of order returns INVALID_ARGUMENT), workers
 * (1 to 256), memory_bytes (for rows to sort and for the values behind exact quantiles; the rest goes
 * to files in spill_dir), spill_dir, bins, cdf_points, windows, top.
 */
strap_status strap_trace_analyse(struct ArrowArrayStream *in, const char *options,
                                 strap_trace *trace, strap_error *error);

/*
 * Computes what the ten tables need of a part of a trace, and writes it to a file, which appears at PATH
 * when it is whole. IN has the rows of the part alone. docs/MEMORY_TRACES.md has the format.
 *
 * Options: trace ({fingerprint, rows, bytes}: the same for all parts of a trace, and for no other
 * trace), first_row and end_row (the rows of the part, end exclusive; required), rows_kept (true: the
 * file has the rows too, for parts that overlap in time; the same for all parts), and ordered,
 * workers, memory_bytes and spill_dir as for strap_trace_analyse.
 */
strap_status strap_trace_partial(struct ArrowArrayStream *in, const char *path, const char *options,
                                 strap_trace *trace, strap_error *error);

/*
 * Computes the ten tables of the files that strap_trace_partial wrote for all parts of a trace. They equal
 * those of strap_trace_analyse. It also has the table "support".
 *
 * Options: paths (of the files, in any order; required), workers, memory_bytes and spill_dir as for
 * strap_trace_analyse.
 *
 * strap_trace_run returns INVALID_ARGUMENT if a part is missing, given twice, overlaps another one or is
 * of another trace (the message names the files and rows), UNSUPPORTED for a file of another version,
 * CORRUPT for a damaged one.
 */
strap_status strap_trace_merge(const char *options, strap_trace *trace, strap_error *error);

/* Writes IN to a Parquet file, which appears at PATH when it is whole.
 * Options: row_group_rows, compression ("zstd", "snappy", "gzip", "none"). */
strap_status strap_trace_write_parquet(struct ArrowArrayStream *in, const char *path,
                                       const char *options, strap_trace *trace,
                                       strap_error *error);

/* Works for about timeout_ms on an analysis, a merge or a file. Returns STRAP_ERR_TIMEOUT when there is more
 * to do: call again. Any other failure is final. */
strap_status strap_trace_run(strap_trace trace, int32_t timeout_ms, strap_error *error);

typedef struct strap_trace_counts_t {
  uint32_t struct_size;
  int32_t done;         /* 1: the stream has been read to its end */
  uint64_t rows;        /* that parse and label returned, or that analyse and write read */
  uint64_t skipped;     /* lines that are no samples, or rows that label left out */
  uint64_t malformed;   /* damaged lines */
  uint64_t bytes;       /* of the text, read so far */
  uint64_t total_bytes; /* length of the text; 0: unknown */
  uint64_t unaddressed; /* samples of perf that were left out: they have no data address */
  uint64_t renumbered;  /* regions that label gave a new id, because another region has their id */
} strap_trace_counts_t;

/* Fills *counts, at any time. Returns the failure of the work, if it failed. */
strap_status strap_trace_counts(strap_trace trace, strap_trace_counts_t *counts,
                                strap_error *error);

/* Exports a table as an Arrow stream; a long table has several batches. NOT_FOUND: no table has
 * that name. INVALID_STATE: the analysis is not done. */
strap_status strap_trace_table(strap_trace trace, const char *name,
                               struct ArrowArrayStream *out, strap_error *error);

/* Gives up unfinished work, and removes an unfinished file. */
strap_status strap_trace_close(strap_trace trace, strap_error *error);

/* ---- accesses of instrumented programs ---------------------------------- */

/*
 * A program that links libstrap-access (libstrap/access/strap_access.h) can pass its records to this
 * library instead of a file of its own: give strap_access_start a sink that passes its blocks to
 * strap_access_write.
 */
typedef uint64_t strap_access;

/*
 * Begins a trace that becomes the Parquet file PATH when it is closed. Until then its blocks are in
 * PATH.access. If the program ends before, they stay there, and strap_trace_parse reads them.
 *
 * Options, as for strap_trace_parse: run_id (text), source (true: the column "source"),
 * keep_blocks (true: PATH.access stays), row_group_rows and compression (see
 * strap_trace_write_parquet).
 *
 * Errors: INVALID_ARGUMENT (an option), NOT_FOUND, PERMISSION, NO_SPACE, IO.
 */
strap_status strap_access_open(const char *path, const char *options, strap_access *access,
                               strap_error *error);

/* Takes SIZE bytes of whole blocks, from any thread. INVALID_ARGUMENT: the bytes are not whole
 * blocks. A failing disk (NO_SPACE, IO) ends the trace after its last whole block. */
strap_status strap_access_write(strap_access access, const void *blocks, size_t size,
                                strap_error *error);

/*
 * Writes PATH: all accesses in the order of time, with their symbols. Accesses within named ranges
 * have the labels of these ranges. Works for about timeout_ms: on STRAP_ERR_TIMEOUT call again. Any
 * other answer closes the handle; after a failure PATH.access stays. *rows, if not NULL, receives the
 * number of rows so far.
 */
strap_status strap_access_close(strap_access access, int32_t timeout_ms, uint64_t *rows,
                                strap_error *error);

/* ---- the machine beside the program ------------------------------------- */

/* A probe watches the machine by programs in the Linux kernel (eBPF). */
typedef uint64_t strap_probe;

/*
 * Starts a probe. KIND is one of
 *   "block"     the requests to block devices
 *   "system"    each process's time on and off the cores and its page faults; pressure
 *   "syscalls"  the system calls of one process
 *   "off_cpu"   the waits of one process for a core
 *
 * OPTIONS is a JSON object, or NULL. Options of "block":
 *   devices     names or paths of disks or partitions; default: all disks
 *   pid         the process whose threads issue the requests; 0: the caller; default: all
 *   cgroup      the directory of a control group; requests of it and of groups below it count;
 *               default: all
 *   requests    how many requests can be under way at a time, a power of two; default: 8192
 *   expire_s    a request that does not complete within so many seconds is given up; default: 600
 * Options of "syscalls" and "off_cpu":
 *   pid         default: 0, the caller
 *   stacks      of "off_cpu" alone, true: record stacks; default: false
 * "system" has no options. Every pid, in options and snapshots, is of the caller's PID namespace.
 * "system" sees the processes of that namespace alone.
 *
 * Errors: INVALID_ARGUMENT (the kind or an option), NOT_FOUND (a device, process or cgroup),
 * PERMISSION (the user may not load programs: root may, or CAP_BPF with CAP_PERFMON),
 * UNSUPPORTED (the kernel cannot run them; the message says what it lacks).
 */
strap_status strap_probe_start(const char *kind, const char *options, strap_probe *probe,
                               strap_error *error);

/*
 * Fills JSON with a snapshot: what happened since the previous call, or since the start. It is one
 * object on one line, ended by a zero (docs/PROBES.md). *needed, if not NULL, receives the bytes that
 * it takes. If SIZE is smaller, the call returns INVALID_ARGUMENT, and the next call returns the same
 * snapshot.
 */
strap_status strap_probe_read(strap_probe probe, char *json, size_t size, size_t *needed,
                              strap_error *error);

/* Ends the probe: its programs leave the kernel. */
strap_status strap_probe_stop(strap_probe probe, strap_error *error);

#ifdef __cplusplus
}
#endif

#endif /* STRAP_H */
