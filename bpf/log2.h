/*
 * log2.h - the slots of histograms.
 */
#ifndef STRAP_BPF_LOG2_H
#define STRAP_BPF_LOG2_H

#include "kernel.h"

enum { LOG2_SLOTS = 32 };

/* The slot of a value: [2^slot, 2^(slot+1)). Slot 0 also has 0; the last slot has no upper end. */
static __always_inline __u32 log2_of(__u64 value) {
  __u32 slot = 0;
  if (value >> 32) return LOG2_SLOTS - 1;
  __u32 v = value;
  if (v >> 16) slot += 16, v >>= 16;
  if (v >> 8) slot += 8, v >>= 8;
  if (v >> 4) slot += 4, v >>= 4;
  if (v >> 2) slot += 2, v >>= 2;
  return slot + (v >> 1);
}

#endif
