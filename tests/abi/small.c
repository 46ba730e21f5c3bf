/* Small tensors go through the intake, by strap_enqueue or strap_offer. The file keeps the order of
 * the calls, also among large tensors and notes. The statistics count a tensor as soon as a call
 * has taken it. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>

enum { MOST = 16 << 10, SMALL = 500, THREADS = 4, TENSORS = 2000, SESSIONS = 40 };

static int32_t values[2 * MOST];

static strap_tensor numbered(uint32_t layer, int64_t i, const int64_t *length) {
  for (int64_t v = 0; v < *length; v++) values[v] = (int32_t)i;
  strap_tensor t = tensor_of(layer, STRAP_INT32, 1, length, values);
  t.step = i;
  return t;
}

/* strap_offer declines all tensors but small contiguous ones without extras. strap_enqueue takes or
 * refuses the others. */
static void declines(const char *path) {
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "layer");
  const int64_t shape[] = {2, 2}, strides[] = {1, 2}, row_major[] = {2, 1}, none[] = {2, 0};
  const int64_t most[] = {MOST}, more[] = {MOST + 1}, negative[] = {-1, -1};
  const int64_t vast[] = {INT64_C(1) << 40, INT64_C(1) << 40};
  const strap_tensor good = tensor_of(layer, STRAP_INT32, 2, shape, values);
  strap_tensor t;
#define OFFER(want, ...)                                        \
  do {                                                          \
    t = good;                                                   \
    __VA_ARGS__;                                                \
    EXPECT(want, strap_offer(session, &t, &error));             \
    EXPECT(STRAP_OK, strap_flush(session, -1, &error));         \
  } while (0)
  OFFER(STRAP_OK, (void)t);
  OFFER(STRAP_OK, t.strides = row_major);
  OFFER(STRAP_OK, t.ndim = 0, t.shape = NULL);
  OFFER(STRAP_OK, t.dtype = STRAP_INT8, t.ndim = 1, t.shape = most);
  OFFER(STRAP_DECLINED, t.dtype = STRAP_INT8, t.ndim = 1, t.shape = more);
  OFFER(STRAP_DECLINED, t.ndim = 1, t.shape = most);
  OFFER(STRAP_DECLINED, t.strides = strides);
  OFFER(STRAP_DECLINED, t.shape = none);
  OFFER(STRAP_DECLINED, t.shape = negative);
  OFFER(STRAP_DECLINED, t.shape = vast);
  OFFER(STRAP_DECLINED, t.shape = NULL);
  OFFER(STRAP_DECLINED, t.data = NULL);
  OFFER(STRAP_DECLINED, t.ndim = -1);
  OFFER(STRAP_DECLINED, t.ndim = STRAP_MAX_DIMS + 1);
  OFFER(STRAP_DECLINED, t.dtype = 0);
  OFFER(STRAP_DECLINED, t.dtype = -1);
  OFFER(STRAP_DECLINED, t.dtype = STRAP_COMPLEX128 + 1);
  OFFER(STRAP_DECLINED, t.layer = layer + 1);
  OFFER(STRAP_DECLINED, t.transform = "x");
  OFFER(STRAP_DECLINED, t.parameters = "{}");
  OFFER(STRAP_DECLINED, t.request = 1); /* no request was registered */
  OFFER(STRAP_DECLINED, t.cursor = 1);
  OFFER(STRAP_DECLINED, t.struct_size = 8);
#undef OFFER
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_offer(session, NULL, &error));
  EXPECT(STRAP_DECLINED, strap_offer(0, &good, &error));
  EXPECT(STRAP_DECLINED, strap_offer(session + 2, &good, &error));
  strap_stats_t s = stats_of(session);
  CHECK(s.tensors == 4 && s.raw_bytes == 16 + 16 + 4 + MOST, "%llu tensors of %llu bytes",
        (unsigned long long)s.tensors, (unsigned long long)s.raw_bytes);
  close_stream(session);
  EXPECT(STRAP_DECLINED, strap_offer(session, &good, &error));

  options.on_full = STRAP_ON_FULL_DROP;
  session = open_stream(path, &options);
  layer = add_layer(session, "layer");
  EXPECT(STRAP_DECLINED, strap_offer(session, &good, &error));
  close_stream(session);
}

static void keeps_the_order(const char *path) {
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "layer");
  uint64_t bytes = 0;
  const int n = 300;
  for (int i = 0; i < n; i++) {
    if (i % 50 == 49) {
      EXPECT(STRAP_OK, strap_note(session, layer, i, -1, 0, "not captured", &error));
      continue;
    }
    const int64_t length = i % 20 == 19 ? 2 * MOST : 1 + i * 5;
    strap_tensor t = numbered(layer, i, &length);
    bytes += 4 * (uint64_t)length;
    if (i % 2 == 0 || strap_offer(session, &t, &error) == STRAP_DECLINED) enqueue(session, &t);
    memset(values, -1, sizeof values); /* the caller may overwrite its buffer */
    if (i % 70 == 0) {
      uint64_t covered;
      EXPECT(STRAP_OK, strap_checkpoint(session, -1, &covered, &error));
      strap_stats_t s = stats_of(session);
      CHECK(s.queued_packets == 0 && s.file_bytes == covered, "%llu packets behind a checkpoint",
            (unsigned long long)s.queued_packets);
    }
    strap_stats_t s = stats_of(session);
    CHECK(s.tensors == (uint64_t)(i + 1 - i / 50) && s.raw_bytes == bytes, "%llu tensors behind %d",
          (unsigned long long)s.tensors, i + 1);
  }
  close_stream(session);
  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.rows == (uint64_t)n, "%llu rows", (unsigned long long)info.rows);
  for (int i = 0; i < n; i++) {
    strap_packet p = packet_at(reader, (uint64_t)i);
    CHECK(p.step == i && p.present == (i % 50 != 49), "row %d is step %lld", i, (long long)p.step);
    if (!p.present) continue;
    int32_t *read = (int32_t *)read_row(reader, (uint64_t)i);
    for (uint64_t v = 0; v < p.decoded_bytes / 4; v++) CHECK(read[v] == i, "row %d holds %d", i, read[v]);
    free(read);
  }
  close_reader(reader);
}

/* Tensors in the intake are written after a short time, also if no further call follows. */
static void does_not_keep_them(const char *path) {
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  const int64_t length = 10;
  strap_tensor t = numbered(add_layer(session, "layer"), 0, &length);
  EXPECT(STRAP_OK, strap_offer(session, &t, &error));
  const struct timespec little = {0, 5000000};
  for (double begin = seconds(); stats_of(session).packets == 0; nanosleep(&little, NULL))
    CHECK(seconds() - begin < 60, "the tensor is not in the file");
  close_stream(session);
}

static strap_session shared;

static void *offer_many(void *argument) {
  int thread = *(const int *)argument;
  char name[32];
  snprintf(name, sizeof name, "%d", thread);
  uint32_t layer = add_layer(shared, name);
  int32_t own[SMALL];
  for (int i = 0; i < TENSORS; i++) {
    const int64_t length = 1 + i % SMALL;
    for (int v = 0; v < SMALL; v++) own[v] = thread << 20 | i;
    strap_tensor t = tensor_of(layer, STRAP_INT32, 1, &length, own);
    t.step = i;
    if (strap_offer(shared, &t, &error) == STRAP_DECLINED) enqueue(shared, &t);
    if (i % 500 == thread) EXPECT(STRAP_OK, strap_flush(shared, -1, &error));
  }
  return NULL;
}

static void of_threads(const char *path) {
  strap_open_options options = open_options();
  options.max_memory_bytes = 1 << 20;
  shared = open_stream(path, &options);
  pthread_t threads[THREADS];
  int numbers[THREADS];
  for (int i = 0; i < THREADS; i++) {
    numbers[i] = i;
    CHECK(pthread_create(&threads[i], NULL, offer_many, &numbers[i]) == 0, "no thread %d", i);
  }
  for (int i = 0; i < THREADS; i++) pthread_join(threads[i], NULL);
  close_stream(shared);
  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.packets == THREADS * TENSORS, "%llu packets", (unsigned long long)info.packets);
  int next[THREADS] = {0};
  for (uint64_t row = 0; row < info.rows; row++) {
    strap_packet p = packet_at(reader, row);
    int thread = atoi(name_of(reader, row));
    CHECK(p.step == next[thread], "thread %d: step %lld stands where %d belongs", thread,
          (long long)p.step, next[thread]);
    int32_t *read = (int32_t *)read_row(reader, row);
    for (uint64_t v = 0; v < p.decoded_bytes / 4; v++)
      CHECK(read[v] == (thread << 20 | next[thread]), "row %llu", (unsigned long long)row);
    free(read);
    next[thread]++;
  }
  close_reader(reader);
}

/* More sessions are open than can have an intake. Each still receives exactly its own tensors. */
static void of_many_sessions(const char *path) {
  strap_open_options options = open_options();
  options.workers = 1;
  options.max_memory_bytes = 1 << 20;
  static char paths[SESSIONS][4096];
  strap_session sessions[SESSIONS];
  const int64_t length = 100;
  snprintf(paths[0], sizeof paths[0], "%s.0", path);
  snprintf(paths[1], sizeof paths[1], "%s.1", path);
  sessions[0] = open_stream(paths[0], &options);
  for (int i = 0; i < SESSIONS; i++) { /* two are open at a time, so each gets an intake */
    sessions[1] = open_stream(paths[1], &options);
    strap_tensor t = numbered(add_layer(sessions[1], "layer"), i, &length);
    EXPECT(STRAP_OK, strap_offer(sessions[1], &t, &error));
    close_stream(sessions[1]);
  }
  close_stream(sessions[0]);
  for (int s = 0; s < SESSIONS; s++) {
    snprintf(paths[s], sizeof paths[s], "%s.%d", path, s);
    sessions[s] = open_stream(paths[s], &options);
    CHECK(add_layer(sessions[s], "layer") == 0, "not the first layer");
  }
  int taken = 0;
  for (int i = 0; i < 10; i++) {
    for (int s = 0; s < SESSIONS; s++) {
      strap_tensor t = numbered(0, 100 * s + i, &length);
      if (strap_offer(sessions[s], &t, &error) == STRAP_OK) taken++;
      else enqueue(sessions[s], &t);
    }
  }
  CHECK(taken > 0 && taken < 10 * SESSIONS, "%d tensors were taken", taken);
  for (int s = 0; s < SESSIONS; s++) {
    if (s % 3 == 0) { /* discarding loses the tensors of this session only */
      uint64_t lost;
      EXPECT(STRAP_OK, strap_discard(sessions[s], &lost, &error));
      continue;
    }
    close_stream(sessions[s]);
    strap_reader_info info;
    strap_reader reader = open_reader(paths[s], &info);
    CHECK(info.packets == 10, "%llu packets", (unsigned long long)info.packets);
    for (int i = 0; i < 10; i++)
      CHECK(packet_at(reader, (uint64_t)i).step == 100 * s + i, "session %d has another's", s);
    close_reader(reader);
  }
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  char own[4000];
  static void (*const parts[])(const char *) = {
      declines, keeps_the_order, does_not_keep_them, of_threads, of_many_sessions};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    snprintf(own, sizeof own, "%s.%zu", path, i);
    parts[i](own);
  }
  printf("small tensors keep their place\n");
  return 0;
}
