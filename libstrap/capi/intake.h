/* What takes small tensors before Go is entered; intake.go has the session's side. */
#ifndef STRAP_INTAKE_H
#define STRAP_INTAKE_H

#include <pthread.h>

#include "strap.h"

/* A larger tensor goes into Go at once, and so does one for which there is no room. */
enum { INTAKE_SMALL = 16 << 10, INTAKE_ROOM = 64 << 10, INTAKE_LINE = 64, INTAKE_COUNT = 16 };

/* A tensor that waits: its shape follows, and in the next line its elements, row-major. */
struct intake_tensor {
  uint64_t thread;
  int64_t time_ns, step, token;
  uint32_t layer, call, request;
  int32_t dtype, ndim;
  uint32_t data, next; /* where in the room its elements are, and the next one */
};

struct intake {
  pthread_mutex_t lock;
  strap_session session; /* 0: none */
  uint32_t layers;       /* of it: the first ids */
  uint32_t requests;     /* of it: the last id */
  int held;              /* what waits is being taken out */
  int shut;
  char *room;            /* while held, Go reads it without the lock */
  uint32_t used;         /* of it */
  /* These change under the lock, but for what Go takes from waiting, and are read without it. */
  uint32_t waiting;        /* tensors */
  uint64_t tensors, bytes; /* taken so far */
};

/* Takes a tensor of a session, if that is one for it. */
int intake_take(strap_session session, const strap_tensor *tensor, uint64_t thread,
                int64_t time_ns);

/* One for a session; NULL: another session has it. The others do nothing for a session that has
 * none. */
struct intake *intake_open(strap_session session);
void intake_close(strap_session session);
void intake_layers(strap_session session, uint32_t layers);
void intake_requests(strap_session session, uint32_t requests);
void intake_hold(strap_session session);   /* what is there stays, and is all */
void intake_resume(strap_session session); /* nothing is there */
void intake_shut(strap_session session);

#endif
