// block.bpf.c - the times of the requests to block devices.

//go:build ignore

/*
 * A request is followed from block_rq_insert, where an I/O scheduler queues it, through its
 * first block_rq_issue to the block_rq_complete of its last bytes. `requests` has an entry for
 * each request under way; user space maps it, and scans it for requests in flight and for
 * requests that never completed. `counts` counts completed requests, one copy for each CPU. The
 * counts only grow: user space takes differences, and nothing is reset under a running program.
 */
#include "log2.h"
#include "process.h"

char LICENSE[] SEC("license") = "GPL";

enum op { READ, WRITE, FLUSH, DISCARD, OTHER, OPS };
enum { PROBES = 8, MAX_DEVICES = 64, MAX_CGROUP_DEPTH = 32 };

/* Returned in place of a device's index in `devices`. */
enum { NOT_FOLLOWED = -1, NO_DEVICE = -2 };

/* The device of a request that is not followed: a task queued it that was not chosen. */
enum { PASSED_OVER = 0xffff };

/* The kernel's enum req_op. No header of user space has it. */
enum { REQ_OP_MASK = 255, REQ_OP_READ = 0, REQ_OP_WRITE = 1, REQ_OP_FLUSH = 2, REQ_OP_DISCARD = 3,
       REQ_OP_DRV = 32 };

/* A request under way. `request` is the address of the kernel's request. Compare and exchange
 * takes an entry; setting `request` to 0 frees it. */
struct request_entry {
  __u64 request;
  __u64 queued_ns; /* when it was inserted; 0: issued at once */
  __u64 issued_ns; /* when it was first issued; 0: still queued */
  __u32 bytes;
  __u16 device; /* its index in `devices`, or PASSED_OVER */
  __u8 op;
  __u8 requeued;
};

struct device_entry {
  __u64 id; /* major << 20 | minor, + 1 */
  char name[32];
};

/* Counts of the requests of one device and operation. */
struct request_counts {
  __u64 latency[LOG2_SLOTS]; /* first issue to completion: [2^slot, 2^(slot+1)) us */
  __u64 queued[LOG2_SLOTS];  /* insertion to first issue, us */
  __u64 size[LOG2_SLOTS];    /* [2^slot, 2^(slot+1)) bytes */
  __u64 completed;
  __u64 latency_ns;
  __u64 was_queued;
  __u64 queued_ns;
  __u64 bytes;
  __u64 errors;
  __u64 requeues;
  __u64 merges;
  __u64 other_writes; /* part of OTHER: /proc/diskstats counts these as writes */
  __u64 no_room;      /* `requests` was full: not followed at all */
  __u64 unseen_start; /* completed, but was not followed */
  __u64 unseen_end;   /* the kernel gave the request's memory to another */
};

/* Losses that belong to no device in `devices`. */
struct loss_counts {
  __u64 no_device; /* more devices than `devices` holds */
};

enum { ALL_DEVICES, WHOLE_DISKS, PARTITIONS };
enum { ALL_CGROUPS, BY_TASK, BY_BIO };

/* User space sets these and `process` before it loads the programs; 0: no restriction. */
const volatile __u32 request_mask = 8191; /* entries of `requests` - 1 */
const volatile __u32 only_devices;        /* only those in `wanted`: WHOLE_DISKS or PARTITIONS */
const volatile __u32 only_cgroup; /* how to find a request's cgroup: BY_TASK or BY_BIO */
const volatile __u64 cgroup_id;

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(map_flags, BPF_F_MMAPABLE);
  __uint(max_entries, 8192);
  __type(key, __u32);
  __type(value, struct request_entry);
} requests SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_ARRAY);
  __uint(max_entries, MAX_DEVICES);
  __type(key, __u32);
  __type(value, struct device_entry);
} devices SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, MAX_DEVICES * OPS);
  __type(key, __u32);
  __type(value, struct request_counts);
} counts SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, struct loss_counts);
} losses SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_HASH);
  __uint(max_entries, MAX_DEVICES);
  __type(key, __u64);   /* major << 20 | minor */
  __type(value, __u32); /* its index in `devices`; user space fills in both */
} wanted SEC(".maps");

struct {
  __uint(type, BPF_MAP_TYPE_CGROUP_ARRAY);
  __uint(max_entries, 1);
  __type(key, __u32);
  __type(value, __u32);
} cgroup SEC(".maps");

/* Raw tracepoints (-DRAW) read the kernel's memory with a helper. Typed ones read it directly,
 * because the verifier knows the types of their arguments. The verifier allows no arithmetic on
 * a typed pointer, so number_of reads the argument as a number with the helper. */
#ifdef RAW
#define TRACEPOINT(name) SEC("raw_tp/" #name)
#define READ(p, field) BPF_CORE_READ(p, field)
static __always_inline __u64 number_of(const __u64 *argument) { return *argument; }
#else
#define TRACEPOINT(name) SEC("tp_btf/" #name)
#define READ(p, field) ((p)->field)
static __always_inline __u64 number_of(const __u64 *argument) {
  __u64 number = 0;
  bpf_probe_read_kernel(&number, sizeof number, argument);
  return number;
}
#endif

/* Hashes the addresses of requests and the numbers of devices. */
static __always_inline __u32 mix(__u64 value) { return value * 0x9e3779b97f4a7c15ull >> 40; }

static __always_inline struct request_entry *entry_at(__u64 request, __u32 probe) {
  __u32 at = (mix(request) + probe) & request_mask;
  return bpf_map_lookup_elem(&requests, &at);
}

/* The entry of a request, or NULL. */
static __always_inline struct request_entry *find(__u64 request) {
  for (__u32 i = 0; i < PROBES; i++) {
    struct request_entry *e = entry_at(request, i);
    if (e && e->request == request) return e;
  }
  return NULL;
}

/* Takes a free entry for a request that has none. Returns NULL if there is no room. */
static __always_inline struct request_entry *take(__u64 request) {
  for (__u32 i = 0; i < PROBES; i++) {
    struct request_entry *e = entry_at(request, i);
    if (e && e->request == 0 && __sync_val_compare_and_swap(&e->request, 0, request) == 0) return e;
  }
  return NULL;
}

/* Frees an entry. The times are cleared first: user space may look in between, and must not
 * take them for the times of the entry's next request. */
static __always_inline void give_back(struct request_entry *e) {
  *(volatile __u64 *)&e->queued_ns = 0;
  *(volatile __u64 *)&e->issued_ns = 0;
  *(volatile __u64 *)&e->request = 0;
}

static __always_inline struct gendisk *disk_of(struct request *rq) {
  if (bpf_core_field_exists(rq->rq_disk)) return READ(rq, rq_disk);
  struct request_queue *q = READ(rq, q);
  return READ(q, disk);
}

/* The index of the request's disk in `devices` if it was chosen, or of its chosen partition. */
static __always_inline int wanted_device(struct request *rq, __u64 disk) {
  __u32 *slot = bpf_map_lookup_elem(&wanted, &disk);
  if (!slot && only_devices == PARTITIONS) {
    struct bio *bio = READ(rq, bio);
    if (!bio) return NOT_FOLLOWED;
    struct block_device *part = READ(bio, bi_bdev);
    __u64 id = READ(part, bd_dev);
    slot = bpf_map_lookup_elem(&wanted, &id);
  }
  return slot ? (int)*slot : NOT_FOLLOWED;
}

/* The index of the request's device in `devices`. A new device is added, unless only chosen ones
 * are followed (NOT_FOLLOWED) or the table is full (NO_DEVICE). */
static __always_inline int device_of(struct request *rq) {
  struct gendisk *disk = disk_of(rq);
  if (!disk) return NOT_FOLLOWED; /* a passthrough to no disk */
  __u64 id = (__u64)(__u32)READ(disk, major) << 20 | (__u32)READ(disk, first_minor);
  if (only_devices) return wanted_device(rq, id);
  id++;
  __u32 at = mix(id);
  for (__u32 i = 0; i < PROBES; i++) {
    __u32 slot = (at + i) & (MAX_DEVICES - 1);
    struct device_entry *d = bpf_map_lookup_elem(&devices, &slot);
    if (!d) return NO_DEVICE;
    if (d->id == id) return slot;
    if (d->id == 0) {
      __u64 before = __sync_val_compare_and_swap(&d->id, 0, id);
      if (before == 0) BPF_CORE_READ_STR_INTO(&d->name, disk, disk_name);
      if (before == 0 || before == id) return slot;
    }
  }
  return NO_DEVICE;
}

/* Whether the request belongs to the cgroup, or to one below it. */
static __always_inline int of_cgroup(struct request *rq) {
  if (only_cgroup == BY_TASK) return bpf_current_task_under_cgroup(&cgroup, 0) == 1;
  struct bio *bio = READ(rq, bio);
  if (!bio) return 0; /* the kernel's own flush */
  struct blkcg_gq *group = READ(bio, bi_blkg);
  if (!group) return 0;
  struct blkcg *blkcg = READ(group, blkcg);
  struct cgroup_subsys_state *css = &blkcg->css;
  for (int i = 0; i < MAX_CGROUP_DEPTH && css; i++) {
    struct cgroup *one = READ(css, cgroup);
    struct kernfs_node *node = READ(one, kn);
    if (READ(node, id) == cgroup_id) return 1;
    css = READ(css, parent);
  }
  return 0;
}

static __always_inline __u8 op_of(struct request *rq) {
  switch (READ(rq, cmd_flags) & REQ_OP_MASK) {
    case REQ_OP_READ: return READ;
    case REQ_OP_WRITE: return WRITE;
    case REQ_OP_FLUSH: return FLUSH;
    case REQ_OP_DISCARD: return DISCARD;
    default: return OTHER;
  }
}

/* Whether /proc/diskstats counts a request of OTHER as a write. It does not count passthrough. */
static __always_inline int is_write(struct request *rq) {
  __u32 op = READ(rq, cmd_flags) & REQ_OP_MASK;
  return (op & 1) && op < REQ_OP_DRV;
}

static __always_inline struct request_counts *counts_at(__u32 device, __u8 op) {
  __u32 at = (device & (MAX_DEVICES - 1)) * OPS + op;
  return bpf_map_lookup_elem(&counts, &at);
}

static __always_inline struct request_counts *counts_of(const struct request_entry *e) {
  return counts_at(e->device, e->op);
}

/* Whether the running task decides if a request is followed. */
static __always_inline int by_task(void) { return process || only_cgroup == BY_TASK; }

/* Remembers that a request is not to be followed, until it is issued. */
static __always_inline void pass_over(__u64 key, __u8 requeued) {
  struct request_entry *e = take(key);
  if (!e) return;
  e->queued_ns = bpf_ktime_get_ns();
  e->issued_ns = 0;
  e->device = PASSED_OVER;
  e->requeued = requeued;
}

/* Begins to follow a request that has no entry. Returns NULL if it is not followed. */
static __always_inline struct request_entry *follow(struct request *rq, __u64 key) {
  int device = device_of(rq);
  if (device == NO_DEVICE) {
    __u32 zero = 0;
    struct loss_counts *lost = bpf_map_lookup_elem(&losses, &zero);
    if (lost) lost->no_device++;
  }
  if (device < 0) return NULL;
  if (process && !watched(bpf_get_current_task_btf())) return NULL;
  if (only_cgroup && !of_cgroup(rq)) return NULL;
  struct request_entry *e = take(key);
  if (!e) {
    struct request_counts *c = counts_at(device, op_of(rq));
    if (c) c->no_room++;
    return NULL;
  }
  e->queued_ns = e->issued_ns = 0;
  e->bytes = READ(rq, __data_len);
  e->device = device;
  e->op = op_of(rq);
  e->requeued = 0;
  return e;
}

/* Frees the entry of a request whose end was missed: the kernel uses its memory for another. */
static __always_inline void end_unseen(struct request_entry *e) {
  struct request_counts *c = counts_of(e);
  if (c && e->device != PASSED_OVER) c->unseen_end++;
  give_back(e);
}

/* Counts a completed request that was not followed. */
static __always_inline void count_unfollowed(struct request *rq, __u32 bytes) {
  if (process || only_cgroup) return; /* most likely it was another's */
  int device = device_of(rq);
  if (device < 0) return;
  __u8 op = op_of(rq);
  struct bio *bio = READ(rq, bio);
  if (op == WRITE && bytes == 0) {
    /* A write with a flush before or after it. Its data completed as a request of its own. If
     * it had no data, /proc/diskstats still counts it. */
    if (!bio || READ(bio, bi_io_vec)) return;
    struct request_counts *c = counts_at(device, OTHER);
    if (c) c->other_writes++;
    return;
  }
  struct request_counts *c = counts_at(device, op);
  if (c) c->unseen_start++;
}

static __always_inline int on_insert(struct request *rq, __u64 key) {
  struct request_entry *e = find(key);
  if (e && e->requeued) return 0; /* its clock runs on */
  if (e) {
    end_unseen(e);
  }
  e = follow(rq, key);
  if (e) e->queued_ns = bpf_ktime_get_ns();
  else if (by_task()) pass_over(key, 0);
  return 0;
}

static __always_inline int on_issue(struct request *rq, __u64 key) {
  struct request_entry *e = find(key);
  if (e && e->device == PASSED_OVER) {
    give_back(e);
    return 0;
  }
  if (e && e->issued_ns) {
    if (e->requeued) { /* the first issue started its clock */
      e->requeued = 0;
      return 0;
    }
    end_unseen(e);
    e = NULL;
  }
  if (!e) e = follow(rq, key);
  if (!e) return 0;
  e->bytes = READ(rq, __data_len); /* bios may have been merged in since */
  e->issued_ns = bpf_ktime_get_ns();
  return 0;
}

static __always_inline int on_complete(struct request *rq, __u64 key, int error, __u32 bytes) {
  struct request_entry *e = find(key);
  if (bytes < READ(rq, __data_len)) return 0; /* more of it is to come */
  if (!e || !e->issued_ns) {
    if (e) give_back(e);
    count_unfollowed(rq, bytes);
    return 0;
  }
  struct request_counts *c = counts_of(e);
  if (c) {
    __u64 latency = bpf_ktime_get_ns() - e->issued_ns;
    c->latency[log2_of(latency / 1000) & (LOG2_SLOTS - 1)]++;
    c->size[log2_of(e->bytes) & (LOG2_SLOTS - 1)]++;
    c->completed++;
    c->latency_ns += latency;
    c->bytes += e->bytes;
    if (error) c->errors++;
    if (e->op == OTHER && is_write(rq)) c->other_writes++;
    if (e->queued_ns) {
      __u64 queued = e->issued_ns - e->queued_ns;
      c->queued[log2_of(queued / 1000) & (LOG2_SLOTS - 1)]++;
      c->was_queued++;
      c->queued_ns += queued;
    }
  }
  give_back(e);
  return 0;
}

static __always_inline int on_requeue(__u64 key) {
  struct request_entry *e = find(key);
  if (!e && by_task()) pass_over(key, 1);
  if (!e) return 0;
  e->requeued = 1;
  struct request_counts *c = counts_of(e);
  if (c && e->device != PASSED_OVER) c->requeues++;
  return 0;
}

/* A queued request was merged into another. */
static __always_inline int on_merge(__u64 key) {
  struct request_entry *e = find(key);
  if (!e) return 0;
  struct request_counts *c = counts_of(e);
  if (c && e->device != PASSED_OVER) c->merges++;
  give_back(e);
  return 0;
}

TRACEPOINT(block_rq_insert)
int insert(__u64 *ctx) { return on_insert((void *)ctx[0], number_of(&ctx[0])); }

TRACEPOINT(block_rq_issue)
int issue(__u64 *ctx) { return on_issue((void *)ctx[0], number_of(&ctx[0])); }

TRACEPOINT(block_rq_complete)
int complete(__u64 *ctx) {
  return on_complete((void *)ctx[0], number_of(&ctx[0]), (__u8)ctx[1], (__u32)ctx[2]);
}

TRACEPOINT(block_rq_requeue)
int requeue(__u64 *ctx) { return on_requeue(number_of(&ctx[0])); }

TRACEPOINT(block_rq_merge)
int merge(__u64 *ctx) { return on_merge(number_of(&ctx[0])); }

#ifndef RAW
/* An entry whose request is not in flight in the kernel. Its end was missed, or it is ending at
 * this moment. */
struct ended_entry {
  __u64 request;
  __u64 issued_ns;
  __u32 at;
  __u32 unused;
};

/* Keeps the type in the object, for bpf2go. */
const struct ended_entry *ended_entry_type;

SEC("iter/bpf_map_elem")
int list_ended(struct bpf_iter__bpf_map_elem *ctx) {
  const struct request_entry *e = ctx->value;
  const __u32 *key = ctx->key;
  if (!e || !key || !e->request || !e->issued_ns) return 0;
  struct request *rq = (struct request *)e->request;
  if (BPF_CORE_READ(rq, state) == MQ_RQ_IN_FLIGHT) return 0;
  struct ended_entry ended = {.request = e->request, .issued_ns = e->issued_ns, .at = *key};
  bpf_seq_write(ctx->meta->seq, &ended, sizeof ended);
  return 0;
}
#endif
