// offcpu.bpf.c - the waits of one process's threads for a core.

//go:build ignore

/*
 * A wait begins when a thread is switched out and ends when it is switched in. From its wakeup
 * on, the thread waits in the run queue. The program runs at every switch of the machine, under
 * the lock of a run queue. So the memory for threads is allocated before it starts, and the
 * program first checks whether the switch concerns the watched process.
 */
#include "log2.h"
#include "process.h"

char LICENSE[] SEC("license") = "GPL";

enum reason { PREEMPTED, SLEEPING, IO_WAIT, UNINTERRUPTIBLE, OTHER, REASONS };
enum { MAX_FRAMES = 127, MAX_STACKS = 8192, NO_STACK = -1, EEXIST = 17 };

/* The kernel's states of tasks. No header of user space has them. */
enum { TASK_INTERRUPTIBLE = 0x1, TASK_UNINTERRUPTIBLE = 0x2, TASK_DEAD = 0x80 };

/* Counts of the waits for one reason. */
struct wait_counts {
  __u64 latency[LOG2_SLOTS];  /* switched out to switched in: [2^slot, 2^(slot+1)) us */
  __u64 runqueue[LOG2_SLOTS]; /* the part in the run queue, us */
  __u64 count;
  __u64 total_ns;
  __u64 runqueue_ns;
};

/* The last wait of a thread. */
struct wait_entry {
  __u64 out_ns;   /* 0: it runs */
  __u64 ready_ns; /* 0: it sleeps */
  __s32 kernel;   /* numbers of stacks; NO_STACK: none */
  __s32 user;
  __u32 reason;
  __u32 unused;
};

/* A thread that waits. */
struct wait_record {
  struct wait_entry wait; /* out_ns 0: it waits since before the start */
  __u32 thread;           /* as the reader numbers it */
  __u32 unused;
};

struct stack_key {
  __s32 kernel;
  __s32 user;
  __u32 reason;
};

struct stack_counts {
  __u64 count;
  __u64 total_ns;
};

/* Keeps the types in the object, for bpf2go. */
const struct wait_record *wait_record_type;

/* Set by user space before the programs are loaded. */
const volatile __u32 take_stacks;

/* The key is the kernel's number of a thread. An entry is deleted when its thread dies. */
struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __uint(max_entries, 16384);
  __type(key, __s32);
  __type(value, struct wait_entry);
} threads SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, REASONS);
  __type(key, __u32);
  __type(value, struct wait_counts);
} counts SEC(".maps");

/* Two maps, because each holds only one stack for each hash. */
struct {
  __uint(type, BPF_MAP_TYPE_STACK_TRACE);
  __uint(max_entries, MAX_STACKS);
  __uint(key_size, sizeof(__u32));
  __uint(value_size, MAX_FRAMES * sizeof(__u64));
} frames SEC(".maps"), more_frames SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __uint(max_entries, MAX_STACKS);
  __type(key, struct stack_key);
  __type(value, struct stack_counts);
} stacks SEC(".maps");

/* Waits that `counts` or `stacks` lack, or count incompletely. */
__u64 no_room;       /* not counted: `threads` is full */
__u64 no_stack;      /* counted without their stack: no room for it */
__u64 unseen_start;  /* not counted: switched out before the start */
__u64 unseen_wakeup; /* counted, but the part in the run queue is not known */
__u64 unseen_end;    /* not counted: the thread was not seen to be switched in */

static __always_inline void lost(__u64 *what) { __sync_fetch_and_add(what, 1); }

static __always_inline __u32 state_of(struct task_struct *task) {
  return bpf_core_field_exists(task->__state) ? task->__state : task->state;
}

/* If a wakeup is under way already, the state may have changed since the thread went out. */
static __always_inline __u32 reason_of(struct task_struct *task, __u32 state) {
  if (!state) return PREEMPTED; /* or it yielded */
  if (BPF_CORE_READ_BITFIELD(task, in_iowait)) return IO_WAIT;
  if (state & TASK_INTERRUPTIBLE) return SLEEPING;
  if (state & TASK_UNINTERRUPTIBLE) return UNINTERRUPTIBLE;
  return OTHER;
}

/* The number of the running thread's stack in the two maps, or NO_STACK if none was stored. */
static __always_inline __s32 stack_of(void *ctx, __u64 flags) {
  __s64 id = bpf_get_stackid(ctx, &frames, flags);
  if (id == -EEXIST) { /* another stack has its place */
    id = bpf_get_stackid(ctx, &more_frames, flags);
    if (id >= 0) return id + MAX_STACKS;
    lost(&no_stack);
  }
  return id < 0 ? NO_STACK : id;
}

static __always_inline struct wait_entry *entry_of(struct task_struct *task) {
  __s32 thread = task->pid;
  struct wait_entry *e = bpf_map_lookup_elem(&threads, &thread);
  if (e) return e;
  struct wait_entry none = {};
  bpf_map_update_elem(&threads, &thread, &none, BPF_NOEXIST);
  return bpf_map_lookup_elem(&threads, &thread);
}

static __always_inline void out(void *ctx, struct task_struct *task, int preempt, __u64 now) {
  __u32 state = preempt ? 0 : state_of(task);
  if (state & TASK_DEAD) {
    __s32 thread = task->pid;
    bpf_map_delete_elem(&threads, &thread);
    return;
  }
  struct wait_entry *e = entry_of(task);
  if (!e) {
    lost(&no_room);
    return;
  }
  if (e->out_ns) lost(&unseen_end);
  e->reason = reason_of(task, state);
  e->ready_ns = e->reason == PREEMPTED ? now : 0;
  e->kernel = e->user = NO_STACK;
  if (take_stacks) {
    e->kernel = stack_of(ctx, 0);
    e->user = stack_of(ctx, BPF_F_USER_STACK);
  }
  e->out_ns = now;
}

static __always_inline void count_stack(const struct wait_entry *e, __u64 ns) {
  struct stack_key key = {.kernel = e->kernel, .user = e->user, .reason = e->reason};
  struct stack_counts none = {};
  struct stack_counts *s = bpf_map_lookup_elem(&stacks, &key);
  if (!s) {
    bpf_map_update_elem(&stacks, &key, &none, BPF_NOEXIST);
    s = bpf_map_lookup_elem(&stacks, &key);
  }
  if (!s) {
    lost(&no_stack);
    return;
  }
  __sync_fetch_and_add(&s->count, 1);
  __sync_fetch_and_add(&s->total_ns, ns);
}

static __always_inline void in(struct task_struct *task, __u64 now) {
  __s32 thread = task->pid;
  struct wait_entry *e = bpf_map_lookup_elem(&threads, &thread);
  if (!e || !e->out_ns) {
    /* A new thread was not switched out before: nothing is lost. */
    if (task->start_time < watch_start_ns && !e) lost(&unseen_start);
    return;
  }
  __u32 reason = e->reason;
  struct wait_counts *c = bpf_map_lookup_elem(&counts, &reason);
  if (!c) return;
  if (!e->ready_ns) lost(&unseen_wakeup);
  __u64 ns = now - e->out_ns;
  __u64 ready_ns = e->ready_ns ? now - e->ready_ns : 0;
  c->latency[log2_of(ns / 1000) & (LOG2_SLOTS - 1)]++;
  c->runqueue[log2_of(ready_ns / 1000) & (LOG2_SLOTS - 1)]++;
  c->count++;
  c->total_ns += ns;
  c->runqueue_ns += ready_ns;
  if (take_stacks) count_stack(e, ns);
  e->out_ns = 0;
}

SEC("tp_btf/sched_switch")
int switched(__u64 *ctx) {
  struct task_struct *prev = (void *)ctx[1], *next = (void *)ctx[2];
  int leaves = watched(prev), comes = watched(next);
  if (!leaves && !comes) return 0;
  __u64 now = bpf_ktime_get_ns();
  if (leaves) out(ctx, prev, ctx[0], now);
  if (comes) in(next, now);
  return 0;
}

SEC("tp_btf/sched_wakeup")
int woken(__u64 *ctx) {
  struct task_struct *task = (void *)ctx[0];
  if (!watched(task)) return 0;
  __s32 thread = task->pid;
  struct wait_entry *e = bpf_map_lookup_elem(&threads, &thread);
  if (e && e->out_ns && !e->ready_ns) e->ready_ns = bpf_ktime_get_ns();
  return 0;
}

SEC("iter/task")
int list_waits(struct bpf_iter__task *ctx) {
  struct task_struct *task = ctx->task;
  if (!task || task->flags & PF_EXITING || !watched(task)) return 0;
  struct wait_record r = {.thread = number_here(task)};
  __s32 thread = task->pid;
  struct wait_entry *e = bpf_map_lookup_elem(&threads, &thread);
  if (e) {
    r.wait = *e;
    if (!r.wait.out_ns) return 0;
  } else {
    __u32 state = state_of(task);
    if (!state || task->start_time >= watch_start_ns) return 0;
    r.wait.reason = reason_of(task, state);
    r.wait.kernel = r.wait.user = NO_STACK;
  }
  bpf_seq_write(ctx->meta->seq, &r, sizeof r);
  return 0;
}
