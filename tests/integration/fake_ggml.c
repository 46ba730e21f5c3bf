/* A fake ggml with the functions that llm_instrumentation.mrm.engines.ggml calls. LAYOUT chooses the
 * order of the fields of a tensor: 1 as in ggml 0.25, 2 another order, 3 one that the engine cannot
 * find out. */
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct buffer {
  char *base;
  size_t size;
  int usage;
} buffer;

typedef struct tensor {
  int type;
#if LAYOUT == 1
  buffer *buffer;
  int64_t ne[4];
  int op_params[16];
  struct tensor *src[10], *view_src;
  size_t view_offs;
  void *data;
#elif LAYOUT == 2
  int64_t ne[4], nb[4];
  struct tensor *src[4], *view_src;
  void *data;
  buffer *buffer;
#else
  int64_t ne[4];
  struct tensor *view_src, *src[10];
  void *data;
  buffer *buffer;
#endif
  char name[64];
} tensor;

struct init_params {
  size_t size;
  void *memory;
  bool no_alloc;
};

static int made;

void *ggml_init(struct init_params p) { return p.no_alloc && p.memory == NULL ? malloc(p.size) : NULL; }
void ggml_free(void *context) { free(context); }
tensor *ggml_new_tensor_1d(void *context, int type, int64_t n) {
  (void)context;
  static tensor pool[64];
  tensor *t = &pool[made++ % 64];
  memset(t, 0, sizeof *t);
  t->type = type;
  t->ne[0] = n;
  return t;
}
tensor *ggml_add(void *context, tensor *a, tensor *b) {
  tensor *t = ggml_new_tensor_1d(context, a->type, a->ne[0]);
  t->src[0] = a;
  t->src[1] = b;
  return t;
}
tensor *ggml_view_tensor(void *context, tensor *of) {
  tensor *t = ggml_new_tensor_1d(context, of->type, of->ne[0]);
  t->view_src = of;
  t->data = of->data;
  return t;
}
char *ggml_get_name(tensor *t) { return t->name; }
void *ggml_get_data(tensor *t) { return t->data; }
size_t ggml_nbytes(tensor *t) { return 4 * (size_t)t->ne[0]; }
void *ggml_backend_cpu_buffer_type(void) { return &made; }
buffer *ggml_backend_buft_alloc_buffer(void *type, size_t size) {
  (void)type;
  buffer *b = malloc(sizeof *b);
  *b = (buffer){malloc(size), size, 0};
  return b;
}
void ggml_backend_buffer_free(buffer *b) {
  free(b->base);
  free(b);
}
int ggml_backend_tensor_alloc(buffer *b, tensor *t, void *data) {
  t->buffer = b;
  t->data = data;
  return 0;
}
#ifndef WITHOUT_USAGE
int ggml_backend_buffer_get_usage(buffer *b) { return b->usage; }
#endif
void *ggml_backend_buffer_get_base(buffer *b) { return b->base; }
size_t ggml_backend_buffer_get_size(buffer *b) { return b->size; }

/* SCALE multiplies all sizes, for tests that look at pages. */
#ifndef SCALE
#define SCALE 1
#endif

/* The memory of the fake: two weights side by side, a cache with keys and values, and a buffer of
 * results. */
__attribute__((aligned(4096))) char memory[4096 * SCALE];
static buffer weights = {memory, 1024 * SCALE, 1}, caches = {memory + 1024 * SCALE, 1024 * SCALE, 0},
              results = {memory + 2048 * SCALE, 1024 * SCALE, 2};

/* Writes the caches and the results, as a model does. The weights stay unwritten, because llama.cpp
 * maps them from a file. */
void work(void) { memset(caches.base, 1, caches.size + results.size); }

/* Returns a new tensor of n * SCALE elements, at offset * SCALE bytes in b. */
static tensor *placed(const char *name, buffer *b, size_t offset, int64_t n) {
  tensor *t = ggml_new_tensor_1d(NULL, 0, n * SCALE);
  strcpy(t->name, name);
  ggml_backend_tensor_alloc(b, t, b->base + offset * SCALE);
  return t;
}

/* Calls show for the operations of a model, two times each. They read weights, read and write the
 * cache through views, and place results; the last operation's tensor is in no buffer. Returns true
 * if no call asked to stop at its operation. */
bool run(bool (*show)(tensor *, bool, void *)) {
  tensor *k = placed("cache_k_l0", &caches, 0, 64), *v = placed("cache_v_l0", &caches, 256, 64);
  tensor *other = placed("control", &caches, 512, 8);
  tensor *ops[] = {
      ggml_add(NULL, placed("blk.0.q", &weights, 0, 60), placed("inp", &results, 0, 4)),
      ggml_add(NULL, placed("blk.0.k", &weights, 256, 64), other),
      ggml_add(NULL, ggml_view_tensor(NULL, k), ggml_view_tensor(NULL, v)),
      ggml_view_tensor(NULL, k),
      ggml_new_tensor_1d(NULL, 0, 1),
  };
  for (int i = 0; i < 3; i++) ggml_backend_tensor_alloc(&results, ops[i], results.base + 64 * SCALE);
  bool stops = false;
  for (int round = 0; round < 2; round++)
    for (size_t i = 0; i < sizeof ops / sizeof *ops; i++) stops |= show(ops[i], true, NULL);
  return !stops;
}
