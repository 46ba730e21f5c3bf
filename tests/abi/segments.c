/* A session goes on in new streams while threads enqueue. Each tensor is in one of the streams. */
#define _XOPEN_SOURCE 700
#include "check.h"

#include <pthread.h>

enum { THREADS = 3, EACH = 300, ROLLS = 8, VALUES = 2000 };

static strap_session session;

static void *capture(void *number) {
  const int64_t shape[] = {VALUES};
  static __thread int32_t values[VALUES];
  char name[16];
  snprintf(name, sizeof name, "%d", *(int *)number);
  uint32_t layer = add_layer(session, name);
  for (int step = 0; step < EACH; step++) {
    for (int i = 0; i < VALUES; i++) values[i] = step;
    strap_tensor t = tensor_of(layer, STRAP_INT32, 1, shape, values);
    t.step = step;
    enqueue(session, &t);
  }
  return NULL;
}

int main(int argc, char **argv) {
  char path[ROLLS + 1][4096], ids[ROLLS + 1][STRAP_CAPTURE_ID_BYTES];
  for (int i = 0; i <= ROLLS; i++)
    snprintf(path[i], sizeof path[i], "%s.%d", stream_path(argc, argv), i);
  strap_open_options options = open_options();
  session = open_stream(path[0], &options);
  EXPECT(STRAP_OK, strap_capture_id(session, ids[0], sizeof ids[0], &error));

  pthread_t threads[THREADS];
  int numbers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[i], NULL, capture, &numbers[i]) == 0, "no thread");
  }
  for (int i = 1; i <= ROLLS; i++) {
    EXPECT(STRAP_OK, strap_roll(session, path[i], 0, -1, &error));
    EXPECT(STRAP_OK, strap_capture_id(session, ids[i], sizeof ids[i], &error));
    CHECK(strcmp(ids[i], ids[i - 1]) != 0, "two streams have the id %s", ids[i]);
    EXPECT(STRAP_OK, strap_checkpoint(session, -1, NULL, &error));
    /* The stream before is closed, so another session may have it. */
    strap_open_options resume = open_options();
    resume.mode = STRAP_MODE_RESUME;
    resume.resume_offset = STRAP_KEEP_ALL;
    resume.capture_id = ids[i - 1];
    close_stream(open_stream(path[i - 1], &resume));
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);

  /* A refused roll changes nothing: the stream is in use. */
  EXPECT(STRAP_ERR_BUSY, strap_roll(session, path[ROLLS], 1, -1, &error));
  strap_stats_t s = stats_of(session);
  CHECK(s.memory_peak <= s.memory_limit, "%llu bytes, limit %llu",
        (unsigned long long)s.memory_peak, (unsigned long long)s.memory_limit);
  close_stream(session);
  CHECK(s.tensors == THREADS * EACH, "%llu tensors", (unsigned long long)s.tensors);

  int next[THREADS] = {0};
  for (int i = 0; i <= ROLLS; i++) {
    strap_reader_info info;
    strap_reader reader = open_reader(path[i], &info);
    CHECK(!info.live && info.problem[0] == '\0', "%s: %s", path[i], info.problem);
    for (uint64_t row = 0; row < info.packets; row++) {
      strap_packet p = packet_at(reader, row);
      int thread = name_of(reader, row)[0] - '0';
      CHECK(thread >= 0 && thread < THREADS && p.step == next[thread], "%s, row %llu: step %lld",
            path[i], (unsigned long long)row, (long long)p.step);
      next[thread]++;
    }
    close_reader(reader);
  }
  for (int i = 0; i < THREADS; i++) CHECK(next[i] == EACH, "%d tensors of %d", next[i], EACH);
  puts("a session goes on in new streams");
  return 0;
}
