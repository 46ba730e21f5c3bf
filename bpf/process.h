/*
 * process.h - the one process that a program watches.
 */
#ifndef STRAP_BPF_PROCESS_H
#define STRAP_BPF_PROCESS_H

#include "kernel.h"

enum { PF_EXITING = 0x4 };

/* User space sets these before it loads the programs: the process as the kernel numbers it, when
 * it began, and when the watching began. Times are on CLOCK_MONOTONIC. The start time tells the
 * process from a later one with the same number. */
const volatile __s32 process;
const volatile __u64 process_start_ns;
const volatile __u64 watch_start_ns;

/* Whether a thread belongs to the process. Most do not, so the number is compared first. An
 * execve changes neither of the two. */
static __always_inline int watched(struct task_struct *task) {
  return task->tgid == process && task->group_leader->start_time == process_start_ns;
}

/* The number of a thread in the PID namespace of the task that reads the iterator. */
static __always_inline int number_here(struct task_struct *task) {
  struct task_struct *reader = bpf_get_current_task_btf();
  struct pid *pid = task->thread_pid;
  if (!pid) return 0; /* it is gone */
  __u32 level = BPF_CORE_READ(reader, thread_pid, level);
  return BPF_CORE_READ(number_at(pid, level), nr);
}

#endif
