/*
 * kernel.h - the fields that the programs read of the kernel's structures, in any order. The
 * loader finds their offsets in the running kernel's BTF (CO-RE).
 */
#ifndef STRAP_BPF_KERNEL_H
#define STRAP_BPF_KERNEL_H

/* Types and values of linux/bpf.h. With the system's headers the compiled objects would depend
 * on the machine that builds them. */
typedef signed char __s8;
typedef unsigned char __u8;
typedef short __s16;
typedef unsigned short __u16;
typedef int __s32;
typedef unsigned int __u32;
typedef long long __s64;
typedef unsigned long long __u64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef __u32 __wsum;

enum { BPF_MAP_TYPE_HASH = 1, BPF_MAP_TYPE_ARRAY = 2, BPF_MAP_TYPE_PERCPU_ARRAY = 6 };
enum { BPF_MAP_TYPE_STACK_TRACE = 7, BPF_MAP_TYPE_CGROUP_ARRAY = 8 };
enum { BPF_MAP_TYPE_RINGBUF = 27, BPF_MAP_TYPE_TASK_STORAGE = 29 };
enum { BPF_F_NO_PREALLOC = 1 << 0, BPF_F_USER_STACK = 1 << 8, BPF_F_MMAPABLE = 1 << 10 };
enum { BPF_NOEXIST = 1 };
enum { BPF_LOCAL_STORAGE_GET_F_CREATE = 1 << 0 };

#include <bpf/bpf_core_read.h>
#include <bpf/bpf_helpers.h>

#ifndef NULL
#define NULL ((void *)0)
#endif

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct gendisk {
  int major;
  int first_minor;
  char disk_name[32];
};

struct request_queue {
  struct gendisk *disk; /* since Linux 5.17 */
};

struct kernfs_node {
  __u64 id;
};

struct cgroup {
  struct kernfs_node *kn;
};

struct cgroup_subsys_state {
  struct cgroup *cgroup;
  struct cgroup_subsys_state *parent;
};

struct blkcg {
  struct cgroup_subsys_state css;
};

struct blkcg_gq {
  struct blkcg *blkcg;
};

struct block_device {
  __u32 bd_dev; /* major << 20 | minor */
};

struct bio_vec;

struct bio {
  struct block_device *bi_bdev;
  struct bio_vec *bi_io_vec;
  struct blkcg_gq *bi_blkg;
};

enum mq_rq_state { MQ_RQ_IDLE, MQ_RQ_IN_FLIGHT, MQ_RQ_COMPLETE };

struct request {
  struct request_queue *q;
  unsigned int cmd_flags;
  unsigned int __data_len;
  struct bio *bio;
  struct gendisk *rq_disk; /* before Linux 5.17 */
  enum mq_rq_state state;
};

struct sched_info {
  unsigned long long run_delay;
};

struct sched_entity {
  __u64 sum_exec_runtime;
};

struct thread_info {
  unsigned long flags;
  __u32 status; /* x86 */
};

struct pid_namespace;

struct upid {
  int nr;
  struct pid_namespace *ns;
};

struct pid {
  unsigned int level;
  struct upid numbers[1];
};

struct task_struct {
  struct thread_info thread_info;
  unsigned int __state; /* since Linux 5.14 */
  long state;           /* before Linux 5.14 */
  unsigned in_iowait : 1;
  unsigned int flags;
  int pid;
  int tgid;
  struct task_struct *group_leader;
  struct pid *thread_pid;
  struct sched_entity se;
  struct sched_info sched_info;
  unsigned long nvcsw;
  unsigned long nivcsw;
  __u64 start_time;
  unsigned long min_flt;
  unsigned long maj_flt;
  char comm[16];
};

struct seq_file;

struct bpf_iter_meta {
  struct seq_file *seq;
};

struct bpf_map;

struct bpf_iter__bpf_map_elem {
  struct bpf_iter_meta *meta;
  struct bpf_map *map;
  void *key;
  void *value;
};

struct bpf_iter__task {
  struct bpf_iter_meta *meta;
  struct task_struct *task;
};

#pragma clang attribute pop

/* The number of a thread in the PID namespace at a level; the machine's own is level 0. The
 * thread's own namespace must be at that level or deeper. */
static __always_inline struct upid *number_at(struct pid *pid, __u32 level) {
  void *first = __builtin_preserve_access_index(&pid->numbers[0]);
  return first + level * bpf_core_type_size(struct upid);
}

#endif
