// syscalls.bpf.c - the system calls of one process.

//go:build ignore

/*
 * The call that a thread is in is kept in the thread's own storage. The kernel frees it with the
 * thread, so a thread that dies within a call leaves nothing behind. `counts` counts the calls
 * that returned, one copy for each CPU. The counts only grow.
 */
#include "log2.h"
#include "process.h"

char LICENSE[] SEC("license") = "GPL";

enum { MAX_SYSCALLS = 512, OTHER_ABI = MAX_SYSCALLS, BEFORE = MAX_SYSCALLS + 1 };
enum { MAX_ERRNO = 4095 };

/* Flags of a thread that makes a call with the numbers of a 32-bit kernel. */
enum { X86_TS_COMPAT = 0x2, ARM64_TIF_32BIT = 22 };

/* Counts of the calls with one number. */
struct syscall_counts {
  __u64 latency[LOG2_SLOTS]; /* [2^slot, 2^(slot+1)) us */
  __u64 count;
  __u64 errors;
  __u64 total_ns;
};

struct call_entry {
  __u64 start_ns; /* 0: the thread is in no call */
  __u32 number;
  __u32 unused;
};

/* A thread that is in a call. */
struct inflight_record {
  __u64 start_ns;
  __u32 number; /* BEFORE: it has made no call since the start */
  __u32 thread; /* as the reader numbers it */
};

/* Keeps the types in the object, for bpf2go. */
const struct syscall_counts *syscall_counts_type;
const struct inflight_record *inflight_record_type;

struct {
  __uint(type, BPF_MAP_TYPE_TASK_STORAGE);
  __uint(map_flags, BPF_F_NO_PREALLOC);
  __type(key, int);
  __type(value, struct call_entry);
} calls SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, MAX_SYSCALLS);
  __type(key, __u32);
  __type(value, struct syscall_counts);
} counts SEC(".maps");

/* Set by user space before the programs are loaded. */
const volatile __u32 arm64;

/* Nonzero for each number that `counts` holds calls of. */
__u8 seen[MAX_SYSCALLS];

/* Calls that `counts` lacks. */
__u64 no_room;      /* the kernel had no memory for a thread's entry */
__u64 unseen_start; /* called before the start, or refused by a filter (seccomp) */
__u64 other_abi;    /* the number is of another ABI, or no call has it */

static __always_inline int native(struct task_struct *task, __u64 number) {
  if (number >= MAX_SYSCALLS) return 0;
  if (arm64) return !(task->thread_info.flags >> ARM64_TIF_32BIT & 1);
  if (bpf_core_field_exists(task->thread_info.status))
    return !(task->thread_info.status & X86_TS_COMPAT);
  return 1;
}

SEC("tp_btf/sys_enter")
int enter(__u64 *ctx) {
  struct task_struct *task = bpf_get_current_task_btf();
  if (!watched(task)) return 0;
  struct call_entry *e = bpf_task_storage_get(&calls, task, 0, BPF_LOCAL_STORAGE_GET_F_CREATE);
  if (!e) {
    __sync_fetch_and_add(&no_room, 1);
    return 0;
  }
  e->number = native(task, ctx[1]) ? ctx[1] : OTHER_ABI;
  e->start_ns = bpf_ktime_get_ns();
  return 0;
}

/* Counts the return of a call that has no entry. */
static __always_inline void unseen(struct task_struct *task) {
  /* A new thread first returns from the call that made it: nothing is lost. */
  if (task->start_time < watch_start_ns) __sync_fetch_and_add(&unseen_start, 1);
}

static __always_inline void count(__u32 number, __u64 ns, __s64 result) {
  struct syscall_counts *c = bpf_map_lookup_elem(&counts, &number);
  if (!c) { /* OTHER_ABI */
    __sync_fetch_and_add(&other_abi, 1);
    return;
  }
  c->latency[log2_of(ns / 1000) & (LOG2_SLOTS - 1)]++;
  c->count++;
  c->total_ns += ns;
  if (result < 0 && result >= -MAX_ERRNO) c->errors++;
  __u8 *known = &seen[number & (MAX_SYSCALLS - 1)];
  if (!*known) *known = 1; /* its cache line is not torn between the cores */
}

SEC("tp_btf/sys_exit")
int leave(__u64 *ctx) {
  struct task_struct *task = bpf_get_current_task_btf();
  if (!watched(task)) return 0;
  struct call_entry *e = bpf_task_storage_get(&calls, task, 0, 0);
  if (!e || !e->start_ns) {
    unseen(task);
    return 0;
  }
  count(e->number, bpf_ktime_get_ns() - e->start_ns, ctx[1]);
  e->start_ns = 0;
  return 0;
}

SEC("iter/task")
int list_inflight(struct bpf_iter__task *ctx) {
  struct task_struct *task = ctx->task;
  if (!task || task->flags & PF_EXITING || !watched(task)) return 0;
  /* A process that watches itself: leave out the thread that reads this list. */
  if (task->pid == (__s32)bpf_get_current_pid_tgid()) return 0;
  struct inflight_record r = {.thread = number_here(task), .number = BEFORE};
  struct call_entry *e = bpf_task_storage_get(&calls, task, 0, 0);
  if (e) {
    r.start_ns = e->start_ns;
    r.number = e->number;
    if (!r.start_ns) return 0;
  } else if (task->start_time >= watch_start_ns) {
    return 0; /* new, and has called nothing */
  }
  bpf_seq_write(ctx->meta->seq, &r, sizeof r);
  return 0;
}
