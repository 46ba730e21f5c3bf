/* While a disk does not answer, calls time out and lose nothing, a full session drops tensors if
 * on_full says so, and strap_discard does not wait. The program freezes the file system at its
 * second argument, which needs root. */
#define _DEFAULT_SOURCE
#include "check.h"

#include <fcntl.h>
#include <linux/fs.h>
#include <pthread.h>
#include <sys/ioctl.h>
#include <unistd.h>

enum { VALUES = 16384, MOST = 10000 };

static int mount_fd = -1;

static void thaw(void) { ioctl(mount_fd, FITHAW, 0); }

static void freeze(void) { CHECK(ioctl(mount_fd, FIFREEZE, 0) == 0, "cannot freeze"); }

static int32_t values[VALUES];
static const int64_t shape[] = {VALUES};

static strap_status offer(strap_session session, uint32_t layer, int i, int32_t timeout_ms) {
  for (int v = 0; v < VALUES; v++) values[v] = i;
  strap_tensor t = tensor_of(layer, STRAP_INT32, 1, shape, values);
  t.step = i;
  strap_status status = strap_enqueue(session, &t, timeout_ms, &error);
  if (status == STRAP_ERR_TIMEOUT && t.cursor != 0)
    EXPECT(STRAP_OK, strap_abandon(session, t.cursor, &error));
  return status;
}

/* Enqueues until the arena is full. Returns the number of accepted tensors. */
static int fill(strap_session session, uint32_t layer) {
  for (int i = 0; i < MOST; i++) {
    strap_status status = offer(session, layer, i, 200);
    if (status == STRAP_ERR_TIMEOUT) return i;
    CHECK(status == STRAP_OK, "tensor %d: %d, %s", i, status, error.message);
  }
  CHECK(0, "%d tensors of %zu bytes went into the memory", MOST, sizeof values);
  return 0;
}

/* Checks that CALL takes about MS milliseconds. A busy machine may add up to 20 seconds. */
#define TIMED(ms, want, call)                                                      \
  do {                                                                             \
    double begin_ = seconds();                                                     \
    EXPECT(want, call);                                                            \
    double took_ = (seconds() - begin_) * 1e3;                                     \
    CHECK(took_ >= (ms) * 0.9 && took_ < (ms) + 20000, "%s took %g ms, not %d", #call, took_, ms); \
  } while (0)

static void expect_values(const char *path, int tensors) {
  strap_reader reader = open_reader(path, NULL);
  strap_packet p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  int next = 0;
  while (strap_reader_next(reader, &p, &error) == STRAP_OK) {
    if (!p.present) continue;
    CHECK(p.step == next, "step %lld stands where %d belongs", (long long)p.step, next);
    int32_t *read = (int32_t *)read_row(reader, p.row);
    const int length = (int)(p.decoded_bytes / sizeof *read);
    for (int v = 0; v < length; v++) CHECK(read[v] == next, "tensor %d holds %d", next, read[v]);
    free(read);
    next++;
  }
  CHECK(next == tensors, "%d tensors were accepted, %d came back", tensors, next);
  close_reader(reader);
}

static strap_session start(const char *path, int on_full, uint32_t *layer) {
  strap_open_options options = open_options();
  options.max_memory_bytes = 1 << 20;
  options.on_full = on_full;
  strap_session session = open_stream(path, &options);
  *layer = add_layer(session, "layer");
  return session;
}

static void waits(const char *path) {
  uint32_t layer;
  strap_session session = start(path, STRAP_ON_FULL_BLOCK, &layer);
  freeze();
  int accepted = fill(session, layer);
  strap_tensor t = tensor_of(layer, STRAP_INT32, 1, shape, values);
  TIMED(0, STRAP_ERR_TIMEOUT, strap_enqueue(session, &t, 0, &error));
  if (t.cursor != 0) EXPECT(STRAP_OK, strap_abandon(session, t.cursor, &error));
  TIMED(0, STRAP_ERR_TIMEOUT, strap_flush(session, 0, &error));
  TIMED(100, STRAP_ERR_TIMEOUT, strap_flush(session, 100, &error));
  uint64_t offset = 7;
  TIMED(100, STRAP_ERR_TIMEOUT, strap_checkpoint(session, 100, &offset, &error));
  strap_stats_t s = stats_of(session);
  CHECK(s.tensors == (uint64_t)accepted && s.queued_packets > 0 && s.stalls > 0 &&
            s.stall_ns >= 100 * 1000 * 1000,
        "%llu tensors, %llu queued, %llu stalls of %llu ns", (unsigned long long)s.tensors,
        (unsigned long long)s.queued_packets, (unsigned long long)s.stalls,
        (unsigned long long)s.stall_ns);
  CHECK(s.memory_peak <= 1 << 20, "%llu bytes of memory", (unsigned long long)s.memory_peak);
  CHECK(s.failure == STRAP_OK, "a slow disk counts as the failure %d", s.failure);

  TIMED(100, STRAP_ERR_TIMEOUT, strap_close(session, 100, &error));
  t = tensor_of(layer, STRAP_INT32, 1, shape, values);
  TIMED(0, STRAP_ERR_INVALID_STATE, strap_enqueue(session, &t, 1000, &error));
  TIMED(0, STRAP_ERR_TIMEOUT, strap_close(session, 0, &error));
  s = stats_of(session); /* works while the session is closing */
  CHECK(s.queued_packets > 0, "nothing is queued");
  thaw();
  close_stream(session);
  expect_values(path, accepted);
}

/* The enqueue of a tensor larger than the arena times out half way. Repeated, it goes on from
 * there; abandoned, the tensor becomes a note. */
static void resumes(const char *path) {
  enum { LARGE = 1 << 20 };
  uint32_t layer;
  strap_session session = start(path, STRAP_ON_FULL_BLOCK, &layer);
  int32_t *large = (int32_t *)malloc(LARGE * sizeof *large);
  CHECK(large != NULL, "no memory");
  for (int i = 0; i < LARGE; i++) large[i] = i * 7;
  const int64_t length[] = {LARGE};
  strap_tensor kept = tensor_of(layer, STRAP_INT32, 1, length, large), given_up = kept;
  freeze();
  TIMED(100, STRAP_ERR_TIMEOUT, strap_enqueue(session, &kept, 100, &error));
  CHECK(kept.cursor != 0, "nothing of the tensor was taken");
  thaw();
  enqueue(session, &kept);
  freeze();
  TIMED(100, STRAP_ERR_TIMEOUT, strap_enqueue(session, &given_up, 100, &error));
  EXPECT(STRAP_OK, strap_abandon(session, given_up.cursor, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_abandon(session, given_up.cursor, &error));
  thaw();
  kept.cursor = 0;
  enqueue(session, &kept);
  strap_stats_t s = stats_of(session);
  CHECK(s.tensors == 2 && s.failed == 1, "%llu tensors, %llu failed",
        (unsigned long long)s.tensors, (unsigned long long)s.failed);
  close_stream(session);

  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.packets == 2 && info.rows == 3 && info.problem[0] == 0, "%llu packets, %llu rows: %s",
        (unsigned long long)info.packets, (unsigned long long)info.rows, info.problem);
  for (uint64_t row = 0; row < info.rows; row++) {
    strap_packet p = packet_at(reader, row);
    CHECK(p.present == (row != 1), "row %llu", (unsigned long long)row);
    if (!p.present) continue;
    int32_t *read = (int32_t *)read_row(reader, row);
    CHECK(memcmp(read, large, LARGE * sizeof *large) == 0, "row %llu", (unsigned long long)row);
    free(read);
  }
  close_reader(reader);
  free(large);
}

/* While the arena is full, the intake still accepts small tensors until it is full too. */
static void keeps_small_ones(const char *path) {
  uint32_t layer;
  strap_session session = start(path, STRAP_ON_FULL_BLOCK, &layer);
  freeze();
  int accepted = fill(session, layer);
  const int64_t length = 1000;
  for (int full = accepted;; accepted++) {
    for (int v = 0; v < VALUES; v++) values[v] = accepted;
    strap_tensor t = tensor_of(layer, STRAP_INT32, 1, &length, values);
    t.step = accepted;
    strap_status status = strap_enqueue(session, &t, 50, &error);
    if (status == STRAP_ERR_TIMEOUT) {
      CHECK(accepted > full, "no small tensor went in");
      CHECK(t.cursor == 0, "it waited behind small tensors, with the cursor %llu",
            (unsigned long long)t.cursor);
      EXPECT(STRAP_DECLINED, strap_offer(session, &t, &error));
      break;
    }
    CHECK(status == STRAP_OK && accepted < MOST, "tensor %d: %d, %s", accepted, status,
          error.message);
  }
  TIMED(100, STRAP_ERR_TIMEOUT, strap_flush(session, 100, &error));
  EXPECT(STRAP_OK, strap_note(session, layer, -1, -1, 0, "does not wait", &error));
  strap_stats_t s = stats_of(session);
  CHECK(s.tensors == (uint64_t)accepted && s.memory_peak <= 1 << 20 && s.failure == STRAP_OK,
        "%llu of %d tensors, failure %d", (unsigned long long)s.tensors, accepted, s.failure);
  TIMED(100, STRAP_ERR_TIMEOUT, strap_close(session, 100, &error));
  thaw();
  close_stream(session);
  expect_values(path, accepted);
}

/* A flush that timed out goes on with the next flush. If its thread captures in between, the next
 * flush covers the new tensor too. */
static void flushes_anew(const char *path) {
  for (int captures = 0; captures < 2; captures++) {
    uint32_t layer;
    strap_session session = start(path, STRAP_ON_FULL_BLOCK, &layer);
    freeze();
    CHECK(offer(session, layer, 0, -1) == STRAP_OK, "%s", error.message);
    TIMED(50, STRAP_ERR_TIMEOUT, strap_flush(session, 50, &error));
    if (captures) CHECK(offer(session, layer, 1, -1) == STRAP_OK, "%s", error.message);
    thaw();
    EXPECT(STRAP_OK, strap_flush(session, -1, &error));
    strap_stats_t s = stats_of(session);
    CHECK(s.packets == (uint64_t)captures + 1, "%llu packets behind a flush of %d",
          (unsigned long long)s.packets, captures + 1);
    close_stream(session);
  }
}

enum { WIDE = 4 << 20 };
static float *wide;
static strap_session closing;

/* Enqueues a tensor that becomes a float16 and a float32 packet, while another thread closes. */
static void *enqueue_wide(void *layer) {
  const int64_t length = WIDE;
  strap_tensor t = tensor_of(*(uint32_t *)layer, STRAP_FLOAT32, 1, &length, wide);
  strap_status status = strap_enqueue(closing, &t, -1, &error);
  CHECK(status == STRAP_OK || status == STRAP_ERR_INVALID_STATE, "%d, %s", status, error.message);
  return NULL;
}

static void closes(const char *path) {
  strap_open_options options = open_options();
  options.max_memory_bytes = 256 << 20;
  options.codec = STRAP_CODEC_ZSTD;
  options.level = 3;
  closing = open_stream(path, &options);
  uint32_t layer = add_layer(closing, "layer");
  wide = malloc(WIDE * sizeof *wide);
  CHECK(wide != NULL, "no memory");
  for (int i = 0; i < WIDE; i++) wide[i] = (float)(i % 100);
  wide[5] = 1e6f;
  freeze();
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, enqueue_wide, &layer) == 0, "no thread");
  while (stats_of(closing).queued_packets == 0) usleep(100);
  TIMED(0, STRAP_ERR_TIMEOUT, strap_close(closing, 0, &error));
  pthread_join(thread, NULL);
  for (int i = 0; i < 10; i++) TIMED(100, STRAP_ERR_TIMEOUT, strap_close(closing, 100, &error));
  thaw();
  close_stream(closing);
  free(wide);
}

static void drops(const char *path) {
  uint32_t layer;
  strap_session session = start(path, STRAP_ON_FULL_DROP, &layer);
  freeze();
  /* On a busy machine the writer may still free a region after the first drop. */
  int accepted = 0;
  uint64_t dropped = 0;
  for (int in_a_row = 0; in_a_row < 4; in_a_row++) {
    strap_status status = offer(session, layer, accepted, -1);
    CHECK(status == STRAP_OK || status == STRAP_DROPPED, "%d, %s", status, error.message);
    if (status == STRAP_OK) {
      in_a_row = -1;
      CHECK(++accepted < MOST, "%d tensors went into the memory", accepted);
    } else {
      dropped++;
      usleep(100000);
    }
  }
  strap_stats_t s = stats_of(session);
  CHECK(s.dropped == dropped && s.dropped_bytes == dropped * sizeof values,
        "%llu dropped, %llu bytes", (unsigned long long)s.dropped,
        (unsigned long long)s.dropped_bytes);
  CHECK(s.failed == 0, "dropped tensors count as %llu failed", (unsigned long long)s.failed);
  thaw();
  close_stream(session);
  expect_values(path, accepted);
}

static void discards(const char *path) {
  uint32_t layer;
  strap_session session = start(path, STRAP_ON_FULL_BLOCK, &layer);
  for (int i = 0; i < 10; i++) CHECK(offer(session, layer, i, -1) == STRAP_OK, "tensor %d", i);
  EXPECT(STRAP_OK, strap_checkpoint(session, -1, NULL, &error));
  freeze();
  int accepted = fill(session, layer);
  uint64_t lost = 0;
  TIMED(0, STRAP_OK, strap_discard(session, &lost, &error));
  CHECK(lost > 0 && lost <= (uint64_t)accepted, "%llu of %d packets lost",
        (unsigned long long)lost, accepted);
  strap_stats_t s = {.struct_size = sizeof s};
  EXPECT(STRAP_ERR_INVALID_STATE, strap_stats(session, &s, &error));
  thaw();

  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.packets >= 10, "%llu packets of the checkpoint", (unsigned long long)info.packets);
  for (uint64_t row = 0; row < 10; row++) free(read_row(reader, row));
  close_reader(reader);
}

int main(int argc, char **argv) {
  CHECK(argc == 3, "usage: %s STREAM MOUNT", argv[0]);
  mount_fd = open(argv[2], O_RDONLY);
  CHECK(mount_fd >= 0, "cannot open %s", argv[2]);
  char path[4096];
  static const struct {
    const char *name;
    void (*run)(const char *path);
  } parts[] = {{"waits", waits},
               {"resumes", resumes},
               {"keeps_small_ones", keeps_small_ones},
               {"flushes_anew", flushes_anew},
               {"closes", closes},
               {"drops", drops},
               {"discards", discards}};
  for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
    snprintf(path, sizeof path, "%s.%s", argv[1], parts[i].name);
    parts[i].run(path);
    printf("%s: ok\n", parts[i].name);
    fflush(stdout);
  }
  return 0;
}
