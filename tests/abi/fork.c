/* After fork() every call in the child returns STRAP_ERR_FORKED at once. The child can release the
 * Arrow objects that it inherited, and the capture of the parent goes on. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <sys/wait.h>
#include <unistd.h>

#include "arrow_abi.h"

enum { TENSORS = 50 };

static void child(const char *path, strap_session session, strap_reader reader, uint32_t layer,
                  struct ArrowArrayStream *stream, struct ArrowArray *batch) {
  alarm(120); /* a call that hangs ends the child with SIGALRM */
  strap_open_options options = open_options();
  strap_session other;
  strap_reader other_reader;
  strap_stats_t stats = {.struct_size = sizeof stats};
  strap_packet packet = {.struct_size = sizeof packet};
  struct ArrowArrayStream other_stream;
  uint64_t number;
  uint32_t other_layer;
  char byte[1];
  const int64_t shape[] = {1};
  const float value = 1;
  strap_tensor t = tensor_of(layer, STRAP_FLOAT32, 1, shape, &value);

  CHECK(strap_abi_version() == STRAP_ABI_VERSION, "strap_abi_version needs Go");
  CHECK(strap_version()[0] != 0, "strap_version needs Go");
  EXPECT(STRAP_ERR_FORKED, strap_open(path, &options, &other, &error));
  EXPECT(STRAP_ERR_FORKED, strap_layer(session, NULL, "x", 1, NULL, &other_layer, &error));
  EXPECT(STRAP_ERR_FORKED, strap_request(session, "x", 1, &other_layer, &error));
  EXPECT(STRAP_ERR_FORKED, strap_enqueue(session, &t, -1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_offer(session, &t, &error));
  EXPECT(STRAP_ERR_FORKED, strap_abandon(session, 1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_note(session, layer, 0, 0, 0, "why", &error));
  EXPECT(STRAP_ERR_FORKED, strap_flush(session, -1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_checkpoint(session, -1, &number, &error));
  EXPECT(STRAP_ERR_FORKED, strap_roll(session, "next.stream", 0, -1, &error));
  strap_alarm_t alarm = {.struct_size = sizeof alarm};
  EXPECT(STRAP_ERR_FORKED, strap_dump(session, "next.stream", 0, -1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_dump_end(session, -1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_alarm(session, &alarm, -1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_stats(session, &stats, &error));
  EXPECT(STRAP_ERR_FORKED, strap_close(session, -1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_discard(session, &number, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_open(path, NULL, &other_reader, NULL, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_follow(reader, 0, &other_reader, NULL, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_next(reader, &packet, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_at(reader, 0, &packet, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_name(reader, 0, byte, 1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_read(reader, 0, byte, 1, &error));
  size_t done;
  EXPECT(STRAP_ERR_FORKED, strap_reader_read_many(reader, NULL, 0, 1, byte, 1, NULL, &done, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_read_ranges(reader, NULL, 0, byte, 1, &done, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_prefetch(reader, NULL, 0, &error));
  EXPECT(STRAP_ERR_FORKED, strap_exchange_rows(byte, 1, 1, NULL, 0, byte, NULL, &error));
  EXPECT(STRAP_ERR_FORKED, strap_index_export(reader, &other_stream, &error));
  EXPECT(STRAP_ERR_FORKED, strap_index_columns(reader, "step", &other_stream, &error));
  EXPECT(STRAP_ERR_FORKED, strap_reader_close(reader, &error));
  size_t length;
  EXPECT(STRAP_ERR_FORKED, strap_encode(STRAP_CODEC_NONE, 0, byte, 1, byte, 1, &length, &error));
  EXPECT(STRAP_ERR_FORKED, strap_decoded_size(STRAP_CODEC_NONE, byte, 1, &number, &error));
  EXPECT(STRAP_ERR_FORKED, strap_decode(STRAP_CODEC_NONE, byte, 1, byte, 1, &error));
  strap_trace trace;
  strap_trace_counts_t counts = {.struct_size = sizeof counts};
  EXPECT(STRAP_ERR_FORKED, strap_trace_parse("lackey", path, NULL, &other_stream, &trace, &error));
  EXPECT(STRAP_ERR_FORKED, strap_trace_run(1, -1, &error));
  EXPECT(STRAP_ERR_FORKED, strap_trace_counts(1, &counts, &error));
  EXPECT(STRAP_ERR_FORKED, strap_trace_table(1, "iai", &other_stream, &error));
  EXPECT(STRAP_ERR_FORKED, strap_trace_close(1, &error));
  CHECK(strap_encode_bound(STRAP_CODEC_NONE, 1) == 0, "a bound");
  CHECK(strap_enqueue(session, &t, -1, NULL) == STRAP_ERR_FORKED, "without a report");

  struct ArrowSchema schema;
  struct ArrowArray array;
  CHECK(stream->get_schema(stream, &schema) != 0 && schema.release == NULL, "a schema");
  CHECK(stream->get_next(stream, &array) != 0 && array.release == NULL, "a batch");
  CHECK(strstr(stream->get_last_error(stream), "fork") != NULL, "%s",
        stream->get_last_error(stream));
  batch->release(batch);
  stream->release(stream);

  pid_t grandchild = fork();
  CHECK(grandchild >= 0, "no grandchild");
  if (grandchild == 0) {
    EXPECT(STRAP_ERR_FORKED, strap_flush(session, -1, &error));
    _Exit(0);
  }
  int status;
  CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0, "grandchild: %d", status);
  _Exit(0);
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  strap_open_options options = open_options();
  const int64_t shape[] = {1};

  /* The child inherits a reader of a finished stream and its exported index. */
  char other[4096];
  snprintf(other, sizeof other, "%s.finished", path);
  strap_session session = open_stream(other, &options);
  float value = 1;
  strap_tensor t = tensor_of(add_layer(session, "layer"), STRAP_FLOAT32, 1, shape, &value);
  enqueue(session, &t);
  close_stream(session);
  strap_reader reader = open_reader(other, NULL);
  struct ArrowArrayStream stream;
  EXPECT(STRAP_OK, strap_index_export(reader, &stream, &error));
  struct ArrowArray batch;
  CHECK(stream.get_next(&stream, &batch) == 0 && batch.length == 1, "one row in the index");

  session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "layer");
  for (int i = 0; i < TENSORS; i++) {
    value = (float)i;
    t = tensor_of(layer, STRAP_FLOAT32, 1, shape, &value);
    t.step = i;
    enqueue(session, &t);
    if (i % 10 != 5) continue;
    fflush(NULL);
    pid_t pid = fork();
    CHECK(pid >= 0, "no child");
    if (pid == 0) child(path, session, reader, layer, &stream, &batch);
    int status;
    CHECK(waitpid(pid, &status, 0) == pid, "the child is lost");
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the child ended with status %x",
          (unsigned)status);
  }
  close_stream(session);
  batch.release(&batch);
  CHECK(stream.get_next(&stream, &batch) == 0 && batch.release == NULL, "the end of the index");
  stream.release(&stream);
  close_reader(reader);

  strap_reader_info info;
  reader = open_reader(path, &info);
  CHECK(info.packets == TENSORS, "%llu packets", (unsigned long long)info.packets);
  for (int i = 0; i < TENSORS; i++) {
    uint16_t *half = (uint16_t *)read_row(reader, (uint64_t)i);
    CHECK(half_value(*half) == (float)i, "value %d is %g", i, half_value(*half));
    free(half);
  }
  close_reader(reader);
  puts("children are refused, the parent goes on");
  return 0;
}
