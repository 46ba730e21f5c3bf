/* After a flush, the file holds every tensor that the thread enqueued before, although another
 * thread flushes at the same time. The statistics then agree with the file. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/stat.h>

enum { ROUNDS = 3000, VALUES = 64 };

static strap_session session;
static atomic_int finished;

static void *flushes(void *argument) {
  (void)argument;
  while (!finished) EXPECT(STRAP_OK, strap_flush(session, -1, &error));
  return NULL;
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  strap_open_options options = open_options();
  session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "layer");
  pthread_t other;
  CHECK(pthread_create(&other, NULL, flushes, NULL) == 0, "no thread");

  /* The values are too large for float16, so each tensor becomes two packets. */
  float values[VALUES];
  for (int i = 0; i < VALUES; i++) values[i] = 1e6f;
  const int64_t shape[] = {VALUES};
  for (uint64_t round = 1; round <= ROUNDS; round++) {
    strap_tensor t = tensor_of(layer, STRAP_FLOAT32, 1, shape, values);
    enqueue(session, &t);
    EXPECT(STRAP_OK, strap_flush(session, -1, &error));
    struct stat st;
    CHECK(stat(path, &st) == 0, "no file %s", path);
    strap_stats_t s = stats_of(session);
    CHECK(s.packets == 2 * round && s.queued_packets == 0,
          "round %llu: a flush left %llu packets in the file and %llu queued",
          (unsigned long long)round, (unsigned long long)s.packets,
          (unsigned long long)s.queued_packets);
    CHECK(s.file_bytes == (uint64_t)st.st_size, "round %llu: stats say %llu bytes, not %llu",
          (unsigned long long)round, (unsigned long long)s.file_bytes,
          (unsigned long long)st.st_size);
  }
  finished = 1;
  pthread_join(other, NULL);
  close_stream(session);
  printf("%d flushes were complete\n", ROUNDS);
  return 0;
}
