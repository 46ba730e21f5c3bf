/*
 * access.h - shared by the hooks: the layout of a trace, and the recording of an access.
 *
 * A trace is a sequence of blocks. A block is a header of 64 bytes and its payload,
 * little-endian. libstrap/internal/memtrace/access reads it.
 */
#ifndef STRAP_ACCESS_INTERNAL_H
#define STRAP_ACCESS_INTERNAL_H

#if !defined(__linux__)
#error "libstrap-access needs Linux: /proc/self/maps, membarrier and thread ids"
#endif
#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || __SIZEOF_POINTER__ != 8
#error "libstrap-access is for 64-bit little-endian machines"
#endif

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define BLOCK_MAGIC 0x42434153u /* "SACB" */
#define BLOCK_VERSION 1

enum block_kind {
  BLOCK_START = 1,    /* text: lines of "key value" about the program and the options */
  BLOCK_MAPS = 2,     /* text: the executable lines of /proc/self/maps; blocks with the
                         same maps number belong together */
  BLOCK_ACCESSES = 3, /* records of one thread, in the thread's order */
  BLOCK_RANGE = 4,    /* struct range_event and the name */
  BLOCK_END = 5       /* text as in BLOCK_START: the totals. It is missing if the program
                         did not end the recording. */
};

struct block {
  uint32_t magic;
  uint16_t version;
  uint16_t kind;
  uint64_t bytes;    /* of the payload */
  uint32_t thread;   /* the system's thread id */
  uint32_t maps;     /* number of the newest module map when the block was written, from 1 */
  int64_t start_ns;  /* CLOCK_MONOTONIC: time of tick 0 of a block of accesses, or of the event */
  int64_t end_ns;    /* CLOCK_MONOTONIC when the block was closed */
  uint64_t ticks;    /* counter at end_ns, from 0 at start_ns */
  uint64_t seen;     /* accesses of the thread since its previous block */
  uint64_t lost;     /* further accesses that were not recorded, see strap_access_stats_t */
};
_Static_assert(sizeof(struct block) == 64, "the header is 64 bytes");

enum op { OP_LOAD = 1, OP_STORE = 2, OP_BOTH = 3, OP_ATOMIC = 4 };

struct record {
  uint64_t address;
  uint64_t pc_op;  /* bits 0-47: return address of the hook; 48-55: enum op */
  uint32_t ticks;  /* since the block's start */
  uint32_t size;   /* bytes, never 0 */
};
_Static_assert(sizeof(struct record) == 24, "a record is 24 bytes");

struct range_event {
  uint64_t id;
  uint64_t start;
  uint64_t length;
  uint32_t type;
  uint32_t added; /* 1: the range begins at the block's start_ns; 0: it ends then */
};
_Static_assert(sizeof(struct range_event) == 32, "a range event is 32 bytes");

/*
 * A thread and its buffer. Only the owning thread writes `busy`. While `busy` is not 0, a
 * signal handler on that thread records nothing. While it is 1 (RECORDING), another thread
 * that needs the buffer waits.
 */
struct thread {
  atomic_int busy;       /* IDLE, RECORDING or IN_CALL, see runtime.h */
  uint32_t session;      /* the recording that the buffer belongs to */
  struct record *next;   /* place of the next record; NULL: there is no buffer yet */
  struct record *end;
  uint64_t start_ticks;  /* counter at the start of the block under way */
  uint64_t seen;         /* accesses in this recording */
  uint64_t reported;     /* accesses in blocks before this one */
  uint64_t until_sample; /* accesses until the next recorded one */
  uint32_t until_clock;  /* accesses until the clock is read */
  uint32_t id;           /* the system's thread id */
  uint64_t last_ticks;   /* the last reading of the clock */
  atomic_ullong lost;    /* accesses not recorded since the last block */
  struct block *block;   /* the header; the records follow */
  size_t mapped;         /* bytes at block */
  int64_t start_ns;      /* CLOCK_MONOTONIC at start_ticks */
  struct announced {     /* the last two ranges of access_record_range, in turn */
    uint64_t address, size, seen;
    uintptr_t pc;
    unsigned op;
  } ranges[2];
  unsigned turn;
  struct thread *before, *after; /* all threads, under the registry's lock */
};

/* The state is STATE_OFF, STATE_WAIT (threads that access memory wait), or the number of the
 * recording under way, from STATE_FIRST. */
enum { STATE_OFF = 0, STATE_WAIT = 1, STATE_FIRST = 2 };

struct settings {
  atomic_uint state;
  uint32_t clock_every; /* 0: read the CPU's counter at every access */
  uint64_t sample_every;
  uint32_t filter_count;
  uint32_t fences;      /* 1: the kernel has no membarrier, so each access has a fence */
};

#define HIDDEN __attribute__((visibility("hidden")))
#define EXPORT __attribute__((visibility("default")))

extern HIDDEN struct settings access_settings;
extern HIDDEN _Thread_local struct thread *access_self __attribute__((tls_model("initial-exec")));

/* The slow paths of record(); they keep errno. access_enter makes this thread busy and returns
 * it, or returns NULL if it cannot record now. The others are called while the thread is busy. */
HIDDEN struct thread *access_enter(void);
HIDDEN int access_filtered(uint64_t address, uint64_t size);
HIDDEN void access_next_block(struct thread *t);
HIDDEN uint64_t access_read_clock(void);

static inline uint64_t read_counter(void) {
#if defined(__x86_64__)
  return __builtin_ia32_rdtsc();
#elif defined(__aarch64__)
  uint64_t ticks;
  __asm__ volatile("mrs %0, cntvct_el0" : "=r"(ticks));
  return ticks;
#else
  return access_read_clock();
#endif
}

static inline uint64_t read_ticks(struct thread *t) {
  if (access_settings.clock_every == 0) return read_counter();
  if (--t->until_clock == 0) {
    t->until_clock = access_settings.clock_every;
    t->last_ticks = access_read_clock();
  }
  return t->last_ticks;
}

/* Makes this thread busy and returns it. Returns NULL if nothing is to be recorded. */
static inline struct thread *enter(void) {
  unsigned state = atomic_load_explicit(&access_settings.state, memory_order_relaxed);
  if (__builtin_expect(state == STATE_OFF, 1)) return NULL;
  struct thread *t = access_self;
  if (__builtin_expect(t == NULL, 0)) return access_enter();
  if (__builtin_expect(atomic_load_explicit(&t->busy, memory_order_relaxed), 0)) {
    atomic_fetch_add_explicit(&t->lost, 1, memory_order_relaxed);
    return NULL;
  }
  atomic_store_explicit(&t->busy, 1, memory_order_relaxed);
  /* access_quiesce stores the state, then loads busy. This thread stores busy, then loads the
   * state. At least one of the two must see the other's store. access_quiesce ensures that with
   * membarrier; without membarrier, the fence here does. */
  if (__builtin_expect(access_settings.fences, 0))
    atomic_thread_fence(memory_order_seq_cst);
  else
    atomic_signal_fence(memory_order_seq_cst);
  state = atomic_load_explicit(&access_settings.state, memory_order_acquire);
  if (__builtin_expect(t->session != state, 0)) {
    atomic_store_explicit(&t->busy, 0, memory_order_release);
    return access_enter();
  }
  return t;
}

static inline void leave(struct thread *t) {
  atomic_store_explicit(&t->busy, 0, memory_order_release);
}

/* Records one access of at most UINT32_MAX bytes on a busy thread. */
static inline void put(struct thread *t, uint64_t address, uint32_t size, unsigned op,
                       uintptr_t pc) {
  if (__builtin_expect(access_settings.filter_count != 0, 0) && access_filtered(address, size))
    return;
  t->seen++;
  if (--t->until_sample != 0) return;
  t->until_sample = access_settings.sample_every;
  uint64_t ticks = read_ticks(t) - t->start_ticks;
  if (__builtin_expect(ticks > UINT32_MAX, 0)) { /* also if the counter went back */
    t->seen--; /* the next block counts this access */
    access_next_block(t);
    t->seen++;
    ticks = 0;
  }
  struct record *r = t->next;
  r->address = address;
  r->pc_op = ((uint64_t)pc & 0xffffffffffff) | (uint64_t)op << 48;
  r->ticks = (uint32_t)ticks;
  r->size = size;
  t->next = ++r;
  if (__builtin_expect(r == t->end, 0)) access_next_block(t);
}

/* Records one access of this thread. pc is the return address of the hook. */
static inline void record(const volatile void *p, uint32_t size, unsigned op, uintptr_t pc) {
  struct thread *t = enter();
  if (t == NULL) return;
  put(t, (uint64_t)(uintptr_t)p, size, op, pc);
  leave(t);
}

/* Records an access of any size. Compilers announce accesses to vectors and structs this way. */
HIDDEN void access_record_range(const void *p, uint64_t size, unsigned op, uintptr_t pc);

/* Records the accesses of memcpy, memmove or memset: a load of the source, and a store to the
 * target. from is NULL for memset. */
HIDDEN void access_record_copy(const void *to, const void *from, uint64_t size, uintptr_t pc);

/* Record a copy and do it. */
HIDDEN void *access_memcpy(void *to, const void *from, size_t size, uintptr_t pc);
HIDDEN void *access_memmove(void *to, const void *from, size_t size, uintptr_t pc);
HIDDEN void *access_memset(void *to, int value, size_t size, uintptr_t pc);

#define CALLER ((uintptr_t)__builtin_return_address(0))

#endif /* STRAP_ACCESS_INTERNAL_H */
