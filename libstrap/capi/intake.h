/* The buffers of intakes: small tensors are copied here before Go is entered. */
#ifndef STRAP_INTAKE_H
#define STRAP_INTAKE_H

#include <pthread.h>

#include "strap.h"

/* Bytes of the largest tensor, of a buffer, and of the elements' alignment; the number of buffers. A
 * larger tensor, or one that finds no room, goes into Go at once. */
enum { INTAKE_SMALL = 16 << 10, INTAKE_BYTES = 64 << 10, INTAKE_LINE = 64, INTAKE_COUNT = 16 };

/* A tensor that waits. Its shape follows, and from the next multiple of INTAKE_LINE on its elements,
 * row-major. */
struct intake_tensor {
  uint64_t thread;
  int64_t time_ns, step, token;
  uint32_t layer, call, request;
  int32_t dtype, ndim;
  uint32_t data, next; /* offsets in the buffer of its elements, and of the next tensor */
};

struct intake {
  pthread_mutex_t lock;
  strap_session session; /* 0: none */
  uint32_t layers;       /* takes tensors of the layers below this id */
  uint32_t least, requests; /* takes tensors of no request, and of those from one id to the other */
  int held;              /* takes no tensor until intake_resume */
  char *buffer;          /* INTAKE_BYTES. While held, Go reads it without the lock */
  uint32_t used;         /* bytes of the buffer */
  /* These change under the lock, and Go reads them without it. */
  uint64_t tensors, bytes; /* taken so far */
};

/* Copies a tensor into its session's buffer. Returns 0 if the tensor is not small, or finds no room. */
int intake_take(strap_session session, const strap_tensor *tensor, uint64_t thread,
                int64_t time_ns);

/* Gives a session its intake; NULL: another session has it. The functions below do nothing for a
 * session without an intake. */
struct intake *intake_open(strap_session session);
void intake_close(strap_session session);
void intake_admit(strap_session session, uint32_t layers, uint32_t least, uint32_t requests);
uint32_t intake_hold(strap_session session); /* take no tensor; returns the bytes used */
void intake_resume(strap_session session);   /* empty the buffer, and take tensors again */

#endif
