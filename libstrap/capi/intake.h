/* Intakes hold small tensors before Go is entered; intake.go has Go's side. */
#ifndef STRAP_INTAKE_H
#define STRAP_INTAKE_H

#include <pthread.h>

#include "strap.h"

/* Bytes of the largest tensor, of an intake, and of its alignment; the number of intakes. A larger
 * tensor, or one that finds no room, goes into Go at once. */
enum { INTAKE_SMALL = 16 << 10, INTAKE_ROOM = 64 << 10, INTAKE_LINE = 64, INTAKE_COUNT = 16 };

/* A tensor that waits. Its shape follows, and from the next multiple of INTAKE_LINE on its elements,
 * row-major. */
struct intake_tensor {
  uint64_t thread;
  int64_t time_ns, step, token;
  uint32_t layer, call, request;
  int32_t dtype, ndim;
  uint32_t data, next; /* offsets in the room of its elements, and of the next tensor */
};

struct intake {
  pthread_mutex_t lock;
  strap_session session; /* 0: none */
  uint32_t layers;       /* the session has the layers below this id */
  uint32_t requests;     /* the session has the requests up to this id */
  int held;              /* takes no tensor until intake_resume */
  int shut;              /* takes no tensor any more */
  char *room;            /* INTAKE_ROOM bytes. While held, Go reads it without the lock */
  uint32_t used;         /* bytes of the room */
  /* These are read without the lock. They change under it, except that Go lowers waiting. */
  uint32_t waiting;        /* tensors in the room that Go has not taken out */
  uint64_t tensors, bytes; /* taken so far */
};

/* Copies a tensor aside. Returns 0 if the tensor is not small, or finds no room. */
int intake_take(strap_session session, const strap_tensor *tensor, uint64_t thread,
                int64_t time_ns);

/* Gives a session its intake; NULL: another session has it. The functions below do nothing for a
 * session without an intake. */
struct intake *intake_open(strap_session session);
void intake_close(strap_session session);
void intake_layers(strap_session session, uint32_t layers);
void intake_requests(strap_session session, uint32_t requests);
void intake_hold(strap_session session);   /* take no tensor, so that Go can read the room */
void intake_resume(strap_session session); /* the room is empty: take tensors again */
void intake_shut(strap_session session);

#endif
