/*
 * blocks.h - a sink that keeps the blocks of a trace in memory, and functions that read them, for
 * the tests of libstrap-access. This code is not instrumented.
 */
#ifndef ACCESS_TESTS_BLOCKS_H
#define ACCESS_TESTS_BLOCKS_H

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "strap_access.h"

static __thread strap_error error;

#define CHECK(condition, ...)                                          \
  do {                                                                 \
    if (!(condition)) {                                                \
      fprintf(stderr, "%s:%d: %s: ", __FILE__, __LINE__, #condition);  \
      fprintf(stderr, __VA_ARGS__);                                    \
      fputc('\n', stderr);                                             \
      _Exit(1);                                                        \
    }                                                                  \
  } while (0)

#define EXPECT(want, call)                                                                 \
  do {                                                                                     \
    memset(&error, 0x5a, sizeof error);                                                    \
    strap_status status_ = (call);                                                         \
    error.message[sizeof error.message - 1] = 0;                                           \
    CHECK(status_ == (want), "%s gave %d, not %d: %s", #call, status_, (int)(want),        \
          error.message);                                                                  \
    CHECK(error.code == status_ && (error.message[0] != 0) == (status_ < 0),               \
          "%s gave %d and reported %d, \"%s\"", #call, status_, error.code, error.message); \
  } while (0)

/* The header and records of a trace's blocks; see docs/ACCESS_TRACING.md. */
struct head {
  uint32_t magic;
  uint16_t version, kind;
  uint64_t bytes;
  uint32_t thread, maps;
  int64_t start_ns, end_ns;
  uint64_t ticks, seen, lost;
};
struct access {
  uint64_t address, pc_op;
  uint32_t ticks, size;
};
enum { KIND_START = 1, KIND_MAPS, KIND_ACCESSES, KIND_RANGE, KIND_END };
enum { LOAD = 1, STORE = 2, BOTH = 3, ATOMIC = 4 };

/* A trace in memory. */
struct memory {
  char *data;
  size_t size, room, calls;
  int fail_after; /* the number of calls that succeed; -1 for all */
};

static inline int keep(void *context, const void *blocks, size_t size) {
  struct memory *m = context;
  if (m->fail_after == 0) return 28; /* ENOSPC */
  if (m->fail_after > 0) m->fail_after--;
  if (m->size + size > m->room) {
    m->room = (m->size + size) * 2;
    m->data = realloc(m->data, m->room);
    CHECK(m->data != NULL, "no memory");
  }
  memcpy(m->data + m->size, blocks, size);
  m->size += size;
  m->calls++;
  return 0;
}

static inline struct memory *new_memory(void) {
  struct memory *m = calloc(1, sizeof *m);
  CHECK(m != NULL, "no memory");
  m->fail_after = -1;
  return m;
}

static inline void free_memory(struct memory *m) {
  free(m->data);
  free(m);
}

static inline strap_access_options to_memory(struct memory *m) {
  strap_access_options o;
  memset(&o, 0, sizeof o);
  o.struct_size = sizeof o;
  o.sink = keep;
  o.context = m;
  return o;
}

/* Calls F for every block, in order. */
static inline void each_block(const struct memory *m,
                              void (*f)(const struct head *, const char *, void *), void *context) {
  size_t at = 0;
  while (at < m->size) {
    struct head h;
    CHECK(m->size - at >= sizeof h, "a torn header");
    memcpy(&h, m->data + at, sizeof h);
    CHECK(h.magic == 0x42434153 && h.version == 1, "no block at %zu", at);
    CHECK(h.bytes <= m->size - at - sizeof h, "a torn block");
    CHECK(h.start_ns <= h.end_ns, "times %lld to %lld", (long long)h.start_ns, (long long)h.end_ns);
    CHECK((at == 0) == (h.kind == KIND_START), "a start at %zu", at);
    f(&h, m->data + at + sizeof h, context);
    at += sizeof h + h.bytes;
  }
}

/* The accesses of all threads in the order of the blocks; the caller frees ITEMS. */
struct list {
  struct access *items;
  size_t count, room;
  uint64_t seen, lost, ended;
};

static inline void add_block(const struct head *h, const char *payload, void *context) {
  struct list *l = context;
  l->ended = h->kind == KIND_END;
  if (h->kind != KIND_ACCESSES) return;
  l->seen += h->seen;
  l->lost += h->lost;
  CHECK(h->bytes % sizeof(struct access) == 0, "no whole records");
  size_t n = h->bytes / sizeof(struct access);
  if (l->count + n > l->room) {
    l->room = (l->count + n) * 2;
    l->items = realloc(l->items, l->room * sizeof *l->items);
    CHECK(l->items != NULL, "no memory");
  }
  if (n > 0) memcpy(l->items + l->count, payload, h->bytes);
  for (size_t i = l->count; i < l->count + n; i++) {
    CHECK(i == l->count || l->items[i].ticks >= l->items[i - 1].ticks, "time runs backwards");
    CHECK(l->items[i].ticks <= h->ticks, "a tick behind the end of its block");
  }
  l->count += n;
}

static inline struct list all_accesses(const struct memory *m) {
  struct list l = {0};
  each_block(m, add_block, &l);
  return l;
}

static inline unsigned op_of(const struct access *a) { return (unsigned)(a->pc_op >> 48) & 0xff; }

#endif
