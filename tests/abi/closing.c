/* Calls that run while two other threads close the session end: they succeed, or they return
 * STRAP_ERR_INVALID_STATE. The file holds every tensor that was accepted. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <unistd.h>

enum { ROUNDS = 60, VALUES = 300 };

static strap_session session;
static atomic_int accepted, closed;

/* Returns whether the call succeeded. The only other status allowed is that of a closed session. */
static int done(const char *call, strap_status status) {
  CHECK(status == STRAP_OK || status == STRAP_ERR_INVALID_STATE, "%s: %d, %s", call, status,
        error.message);
  return status == STRAP_OK;
}

static void *enqueues(void *argument) {
  (void)argument;
  const int64_t shape[] = {VALUES};
  static const int32_t values[VALUES];
  strap_tensor t = tensor_of(0, STRAP_INT32, 1, shape, values);
  while (done("enqueue", strap_enqueue(session, &t, -1, &error))) atomic_fetch_add(&accepted, 1);
  return NULL;
}

static void *flushes(void *argument) {
  (void)argument;
  while (done("flush", strap_flush(session, -1, &error))) {}
  return NULL;
}

static void *checkpoints(void *argument) {
  (void)argument;
  while (done("checkpoint", strap_checkpoint(session, -1, NULL, &error))) {}
  return NULL;
}

static void *watches(void *argument) {
  (void)argument;
  strap_stats_t s;
  do {
    memset(&s, 0, sizeof s);
    s.struct_size = sizeof s;
  } while (done("stats", strap_stats(session, &s, &error)));
  return NULL;
}

static void *closes(void *argument) {
  (void)argument;
  if (done("close", strap_close(session, -1, &error))) atomic_fetch_add(&closed, 1);
  return NULL;
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  alarm(120); /* ends the program if a call hangs */
  strap_open_options options = open_options();
  options.max_memory_bytes = 1 << 20;
  for (int round = 0; round < ROUNDS; round++) {
    session = open_stream(path, &options);
    add_layer(session, "layer");
    atomic_store(&accepted, 0);
    atomic_store(&closed, 0);
    void *(*const tasks[])(void *) = {enqueues, enqueues, flushes, checkpoints,
                                      watches,  closes,   closes};
    enum { TASKS = sizeof tasks / sizeof *tasks };
    pthread_t threads[TASKS];
    for (int i = 0; i < TASKS; i++) {
      struct timespec moment = {0, round * 50000};
      if (tasks[i] == closes) nanosleep(&moment, NULL);
      CHECK(pthread_create(&threads[i], NULL, tasks[i], NULL) == 0, "no thread");
    }
    for (int i = 0; i < TASKS; i++) pthread_join(threads[i], NULL);
    CHECK(closed >= 1, "nobody has closed the session");

    strap_reader_info info;
    strap_reader reader = open_reader(path, &info);
    CHECK(info.packets == (uint64_t)accepted && info.problem[0] == 0,
          "round %d: %d tensors were accepted, %llu packets are there: %s", round, (int)accepted,
          (unsigned long long)info.packets, info.problem);
    close_reader(reader);
  }
  printf("%d sessions were closed while in use\n", ROUNDS);
  return 0;
}
