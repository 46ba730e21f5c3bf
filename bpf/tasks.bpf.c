// tasks.bpf.c - reads the page faults, the core time and the switches of each thread.

//go:build ignore

/*
 * The scheduler and the fault handler keep these counts anyway. An iterator over the threads
 * reads them when a snapshot is taken, so a switch or a fault costs nothing more. Only the end
 * of a thread needs an event, because its counts are gone afterwards.
 *
 * Only threads of the reader's PID namespace are told, numbered as there. The iterator lists no
 * others. An event runs in the thread that ends, which may be in any namespace. So the iterator
 * notes the reader's namespace for it.
 */
#include "kernel.h"

char LICENSE[] SEC("license") = "GPL";

enum { PF_EXITING = 0x4, PF_KTHREAD = 0x00200000 };
enum { EXITING = 1 };

struct task_record {
  __u64 start_ns; /* CLOCK_MONOTONIC */
  __u64 ended_ns; /* 0: it lives; EXITING: its end is or will be in `ended` */
  __u64 run_ns;   /* on a core */
  __u64 wait_ns;  /* ready to run, waiting for a core */
  __u64 minor_faults;
  __u64 major_faults;
  __u64 switches;
  __u32 process; /* as the reader numbers it */
  __u32 thread;
  char name[16];
};

struct {
  __uint(type, BPF_MAP_TYPE_RINGBUF);
  __uint(max_entries, 1 << 20);
} ended SEC(".maps");

/* Keeps the type in the object, for bpf2go. */
const struct task_record *task_record_type;

/* Ends of threads that `ended` had no room for. */
__u64 lost;

/* The reader's PID namespace, set when the iterator runs: its level, 0 for the machine's own, and
 * its address, which is only compared. */
__u32 level;
__u64 namespace;

/* The number of a thread in the reader's PID namespace; 0: it is not in it, or is gone. */
static __always_inline __u32 number_of(struct task_struct *task) {
  struct pid *pid = task->thread_pid;
  if (!pid || pid->level < level) return 0;
  struct upid *own = number_at(pid, level);
  return (__u64)BPF_CORE_READ(own, ns) == namespace ? BPF_CORE_READ(own, nr) : 0;
}

/* Fills in a record. Returns 0 if the thread is not in the reader's namespace. */
static __always_inline int fill(struct task_record *r, struct task_struct *task) {
  r->thread = number_of(task);
  if (!r->thread) return 0;
  r->process = number_of(task->group_leader);
  r->start_ns = task->start_time;
  r->ended_ns = 0;
  r->run_ns = task->se.sum_exec_runtime;
  r->wait_ns = bpf_core_field_exists(task->sched_info.run_delay) ? task->sched_info.run_delay : 0;
  r->minor_faults = task->min_flt;
  r->major_faults = task->maj_flt;
  r->switches = task->nvcsw + task->nivcsw;
  bpf_probe_read_kernel_str(r->name, sizeof r->name, task->comm);
  return 1;
}

SEC("iter/task")
int list(struct bpf_iter__task *ctx) {
  struct task_struct *task = ctx->task, *reader = bpf_get_current_task_btf();
  level = BPF_CORE_READ(reader, thread_pid, level);
  namespace = (__u64)BPF_CORE_READ(number_at(reader->thread_pid, level), ns);
  struct task_record r;
  if (!task || task->flags & PF_KTHREAD || !fill(&r, task)) return 0;
  if (task->flags & PF_EXITING) r.ended_ns = EXITING;
  bpf_seq_write(ctx->meta->seq, &r, sizeof r);
  return 0;
}

SEC("tp_btf/sched_process_exit")
int end(__u64 *ctx) {
  struct task_struct *task = (struct task_struct *)ctx[0];
  if (task->flags & PF_KTHREAD) return 0;
  struct task_record r;
  if (!fill(&r, task)) return 0;
  r.ended_ns = bpf_ktime_get_ns();
  /* No reader waits for the record: the next snapshot reads it. */
  if (bpf_ringbuf_output(&ended, &r, sizeof r, 1 /* BPF_RB_NO_WAKEUP */)) __sync_fetch_and_add(&lost, 1);
  return 0;
}
