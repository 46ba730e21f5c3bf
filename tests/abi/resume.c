/* A resumed capture goes on after a checkpoint, or after the last complete packet. Bytes behind
 * that point are moved to a file of their own. */
#define _XOPEN_SOURCE 700
#include "check.h"

#include <sys/stat.h>
#include <unistd.h>

enum { VALUES = 1000 };

static void capture(strap_session session, int from, int to) {
  uint32_t layer = add_layer(session, "layer");
  const int64_t shape[] = {VALUES};
  int32_t values[VALUES];
  for (int step = from; step < to; step++) {
    for (int i = 0; i < VALUES; i++) values[i] = step;
    strap_tensor t = tensor_of(layer, STRAP_INT32, 1, shape, values);
    t.step = step;
    enqueue(session, &t);
  }
}

/* Checks that the stream holds the steps 0 to STEPS - 1, in order. */
static void expect_steps(const char *path, int steps) {
  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.packets == (uint64_t)steps && info.rows == info.packets && info.indexed &&
            info.scanned == 0 && info.problem[0] == 0,
        "%llu packets of %d in %llu rows, %llu scanned: %s", (unsigned long long)info.packets,
        steps, (unsigned long long)info.rows, (unsigned long long)info.scanned, info.problem);
  for (int step = 0; step < steps; step++) {
    strap_packet p = packet_at(reader, (uint64_t)step);
    CHECK(p.step == step && p.sequence == (uint64_t)step, "row %d: step %lld, sequence %llu", step,
          (long long)p.step, (unsigned long long)p.sequence);
    int32_t *read = (int32_t *)read_row(reader, (uint64_t)step);
    CHECK(read[0] == step && read[VALUES - 1] == step, "row %d holds %d", step, read[0]);
    free(read);
  }
  close_reader(reader);
}

static off_t length_of(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 ? st.st_size : -1;
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  char tail[4096];
  strap_open_options create = open_options(), resume = open_options();
  resume.mode = STRAP_MODE_RESUME;
  resume.resume_offset = STRAP_KEEP_ALL;
  strap_session session;
  EXPECT(STRAP_ERR_NOT_FOUND, strap_open(path, &resume, &session, &error));

  session = open_stream(path, &create);
  capture(session, 0, 3);
  uint64_t offset;
  EXPECT(STRAP_OK, strap_checkpoint(session, -1, &offset, &error));
  capture(session, 3, 5);
  close_stream(session);
  expect_steps(path, 5);
  off_t full = length_of(path);

  /* Keep all packets: nothing is cut. */
  session = open_stream(path, &resume);
  capture(session, 5, 6);
  close_stream(session);
  expect_steps(path, 6);
  snprintf(tail, sizeof tail, "%s.tail-1", path);
  CHECK(length_of(tail) == -1, "a tail without a cut");

  /* Resume at the checkpoint: the packets behind it are moved to a tail file. */
  off_t before = length_of(path);
  resume.resume_offset = offset;
  session = open_stream(path, &resume);
  capture(session, 3, 5);
  close_stream(session);
  expect_steps(path, 5);
  CHECK(length_of(path) == full, "the same packets take another length");
  CHECK(length_of(tail) == before - (off_t)offset, "%lld bytes were cut, %lld are in the tail",
        (long long)(before - (off_t)offset), (long long)length_of(tail));

  /* An incomplete last packet, as a crash leaves it, is moved to a tail file. */
  CHECK(truncate(path, full - 7) == 0, "cannot cut %s", path);
  resume.resume_offset = STRAP_KEEP_ALL;
  session = open_stream(path, &resume);
  capture(session, 4, 7);
  close_stream(session);
  expect_steps(path, 7);
  snprintf(tail, sizeof tail, "%s.tail-2", path);
  CHECK(length_of(tail) == full - 7 - (full - (off_t)offset) / 2 - (off_t)offset,
        "the torn packet of %lld bytes", (long long)length_of(tail));

  /* Offsets that are no packet boundary, or lie beyond the end, are refused. */
  full = length_of(path);
  resume.resume_offset = offset - 1;
  EXPECT(STRAP_ERR_CORRUPT, strap_open(path, &resume, &session, &error));
  resume.resume_offset = (uint64_t)full + 1;
  EXPECT(STRAP_ERR_CORRUPT, strap_open(path, &resume, &session, &error));
  CHECK(length_of(path) == full, "a refused resume has changed the stream");
  expect_steps(path, 7);

  /* Resume at 0: all packets are cut off. */
  resume.resume_offset = 0;
  session = open_stream(path, &resume);
  capture(session, 0, 2);
  close_stream(session);
  expect_steps(path, 2);
  puts("captures go on where they were left");
  return 0;
}
