/*
 * intake.c - copies small tensors into buffers, for strap_enqueue and strap_offer, before Go is
 * entered. session/intake.go makes packets of them later, and says why.
 */
#include <string.h>

#include "intake.h"

/* Static, because a late call may look at the intake of a closed session. */
static struct intake intakes[INTAKE_COUNT] = {
    [0 ... INTAKE_COUNT - 1] = {.lock = PTHREAD_MUTEX_INITIALIZER}};
static _Alignas(INTAKE_LINE) char buffers[INTAKE_COUNT][INTAKE_BYTES];

/* The intake that a session may have. Sessions have every other id. */
static struct intake *intake_of(strap_session session) {
  return &intakes[session / 2 % INTAKE_COUNT];
}

static uint32_t round_up(size_t n) {
  return (uint32_t)((n + INTAKE_LINE - 1) / INTAKE_LINE * INTAKE_LINE);
}

static size_t size_of(strap_dtype dtype) {
  static const uint8_t sizes[] = {
      [STRAP_FLOAT32] = 4,         [STRAP_FLOAT16] = 2,         [STRAP_BFLOAT16] = 2,
      [STRAP_FLOAT64] = 8,         [STRAP_FLOAT8_E4M3FN] = 1,   [STRAP_FLOAT8_E5M2] = 1,
      [STRAP_FLOAT8_E4M3FNUZ] = 1, [STRAP_FLOAT8_E5M2FNUZ] = 1, [STRAP_FLOAT8_E8M0FNU] = 1,
      [STRAP_INT8] = 1,            [STRAP_INT16] = 2,           [STRAP_INT32] = 4,
      [STRAP_INT64] = 8,           [STRAP_UINT8] = 1,           [STRAP_UINT16] = 2,
      [STRAP_UINT32] = 4,          [STRAP_UINT64] = 8,          [STRAP_BOOL] = 1,
      [STRAP_COMPLEX32] = 4,       [STRAP_COMPLEX64] = 8,       [STRAP_COMPLEX128] = 16,
  };
  return dtype >= 0 && (size_t)dtype < sizeof sizes ? sizes[dtype] : 0;
}

/* Whether an intake may take a tensor, apart from its shape and strides. */
static int is_plain(const strap_tensor *t) {
  return t->data != NULL && t->ndim >= 0 && t->ndim <= STRAP_MAX_DIMS && t->cursor == 0 &&
         t->transform == NULL && t->parameters == NULL &&
         t->conversion == NULL && (t->ndim == 0 || t->shape != NULL);
}

/* Bytes of a tensor's elements; 0 if it has none, too many, or they are not contiguous. */
static size_t small_bytes(const strap_tensor *t, const int64_t *shape) {
  size_t n = size_of(t->dtype);
  int64_t stride = 1;
  for (int i = t->ndim - 1; i >= 0 && n > 0; i--) {
    if (shape[i] < 0 || shape[i] > INTAKE_SMALL) return 0;
    if (t->strides != NULL && shape[i] != 1 && t->strides[i] != stride) return 0;
    stride *= shape[i];
    n *= (size_t)shape[i];
    if (n > INTAKE_SMALL) return 0;
  }
  return n;
}

int intake_take(strap_session session, const strap_tensor *t, uint64_t thread, int64_t time_ns) {
  if (session == 0 || !is_plain(t)) return 0;
  int64_t shape[STRAP_MAX_DIMS]; /* read once, because the host's memory may change */
  const size_t lengths = (size_t)t->ndim * sizeof *shape;
  if (lengths > 0) memcpy(shape, t->shape, lengths);
  const size_t bytes = small_bytes(t, shape);
  struct intake *in = intake_of(session);
  if (bytes == 0 || pthread_mutex_trylock(&in->lock) != 0) return 0;
  const uint32_t data = in->used + round_up(sizeof(struct intake_tensor) + lengths);
  const uint32_t next = data + round_up(bytes);
  const int taken = in->session == session && !in->held && t->layer < in->layers &&
                    (t->request == 0 || (t->request >= in->least && t->request <= in->requests)) &&
                    next <= INTAKE_BYTES;
  if (taken) {
    struct intake_tensor *own = (struct intake_tensor *)(in->buffer + in->used);
    *own = (struct intake_tensor){thread,  time_ns,  t->step, t->token, t->layer,
                                  t->call, t->request, t->dtype, t->ndim, data, next};
    if (lengths > 0) memcpy(own + 1, shape, lengths);
    memcpy(in->buffer + data, t->data, bytes);
    in->used = next;
    __atomic_store_n(&in->bytes, in->bytes + bytes, __ATOMIC_RELAXED);
    __atomic_store_n(&in->tensors, in->tensors + 1, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&in->lock);
  return taken;
}

struct intake *intake_open(strap_session session) {
  struct intake *in = intake_of(session);
  pthread_mutex_lock(&in->lock);
  const int is_free = in->session == 0;
  if (is_free) {
    in->session = session;
    in->buffer = buffers[in - intakes];
    in->layers = in->least = in->requests = in->used = 0;
    in->held = 0;
    __atomic_store_n(&in->bytes, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&in->tensors, 0, __ATOMIC_RELAXED);
  }
  pthread_mutex_unlock(&in->lock);
  return is_free ? in : NULL;
}

/* Locks the intake of a session. Returns NULL if the session has none any more. */
static struct intake *lock_own(strap_session session) {
  struct intake *in = intake_of(session);
  pthread_mutex_lock(&in->lock);
  if (in->session == session) return in;
  pthread_mutex_unlock(&in->lock);
  return NULL;
}

void intake_close(strap_session session) {
  struct intake *in = lock_own(session);
  if (in == NULL) return;
  in->session = 0;
  pthread_mutex_unlock(&in->lock);
}

void intake_admit(strap_session session, uint32_t layers, uint32_t least, uint32_t requests) {
  struct intake *in = lock_own(session);
  if (in == NULL) return;
  in->layers = layers;
  in->least = least;
  in->requests = requests;
  pthread_mutex_unlock(&in->lock);
}

uint32_t intake_hold(strap_session session) {
  struct intake *in = lock_own(session);
  if (in == NULL) return 0;
  in->held = 1;
  const uint32_t used = in->used;
  pthread_mutex_unlock(&in->lock);
  return used;
}

void intake_resume(strap_session session) {
  struct intake *in = lock_own(session);
  if (in == NULL) return;
  in->held = 0;
  in->used = 0;
  pthread_mutex_unlock(&in->lock);
}
