// process.bpf.c - finds the process to watch by its number. It counts nothing; see tasks.bpf.c.

//go:build ignore

/*
 * In a PID namespace, as in a container, processes have other numbers than those that programs
 * at tracepoints see. An iterator lists the processes of its reader's namespace.
 */
#include "process.h"

char LICENSE[] SEC("license") = "GPL";

struct process_record {
  __u64 start_ns; /* CLOCK_MONOTONIC */
  __s32 process;
  __u32 unused;
};

/* Keeps the type in the object, for bpf2go. */
const struct process_record *process_record_type;

/* The number of the process in the reader's PID namespace. */
const volatile __s32 wanted;

SEC("iter/task")
int find(struct bpf_iter__task *ctx) {
  struct task_struct *task = ctx->task;
  if (!task || task->pid != task->tgid || number_here(task) != wanted) return 0;
  struct process_record r = {.start_ns = task->start_time, .process = task->tgid};
  bpf_seq_write(ctx->meta->seq, &r, sizeof r);
  return 0;
}
