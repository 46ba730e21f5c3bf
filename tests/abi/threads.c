/* Eight threads capture into one stream. No packet is lost, the packets of each thread keep their
 * order, and the packets of the file stand in the order of their sequence numbers. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>

enum { THREADS = 8, TENSORS = 400, VALUES = 500 };

static strap_session session;

static void *capture(void *argument) {
  int thread = *(const int *)argument;
  char name[32];
  snprintf(name, sizeof name, "thread.%d", thread);
  uint32_t layer = add_layer(session, name);
  const int64_t shape[] = {VALUES};
  int32_t values[VALUES];
  for (int i = 0; i < TENSORS; i++) {
    for (int v = 0; v < VALUES; v++) values[v] = thread << 20 | i;
    strap_tensor t = tensor_of(layer, STRAP_INT32, 1, shape, values);
    t.step = i;
    enqueue(session, &t);
    if (i % 100 == 50) EXPECT(STRAP_OK, strap_flush(session, -1, &error));
  }
  return NULL;
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  strap_open_options options = open_options();
  options.max_memory_bytes = 1 << 20; /* so small that threads wait for room in the arena */
  options.codec = STRAP_CODEC_LZ4;
  session = open_stream(path, &options);

  pthread_t threads[THREADS];
  int numbers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[i], NULL, capture, &numbers[i]) == 0, "no thread %d", i);
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  close_stream(session);

  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.packets == THREADS * TENSORS, "%llu packets", (unsigned long long)info.packets);
  int next[THREADS] = {0};
  uint64_t end = 0;
  for (uint64_t row = 0; row < info.rows; row++) {
    strap_packet p = packet_at(reader, row);
    CHECK(p.sequence == row, "row %llu has sequence %llu", (unsigned long long)row,
          (unsigned long long)p.sequence);
    CHECK(p.offset == end, "row %llu is at %llu, not %llu", (unsigned long long)row,
          (unsigned long long)p.offset, (unsigned long long)end);
    end = p.offset + 6 + p.name_bytes + p.payload_bytes;

    int thread;
    CHECK(sscanf(name_of(reader, row), "thread.%d", &thread) == 1 && thread < THREADS, "name %s",
          name_of(reader, row));
    CHECK(p.step == next[thread], "thread %d: step %lld stands where %d belongs", thread,
          (long long)p.step, next[thread]);
    int32_t *values = (int32_t *)read_row(reader, row);
    for (int v = 0; v < VALUES; v++)
      CHECK(values[v] == (thread << 20 | next[thread]), "row %llu holds %x",
            (unsigned long long)row, (unsigned)values[v]);
    free(values);
    next[thread]++;
  }
  close_reader(reader);
  printf("%d threads kept the order of their %d tensors\n", THREADS, TENSORS);
  return 0;
}
