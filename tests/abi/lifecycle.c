/* With each codec, a capture from open to close is read back with all values and metadata. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <sys/stat.h>

enum { STEPS = 5, ROWS = 7, COLUMNS = 33, VALUES = ROWS * COLUMNS };

/* Multiples of 1/8 up to 128: float16 holds them exactly. */
static float value(int step, int i) { return (float)((step * 31 + i) % 1024) / 8; }

static uint64_t length_of(const char *path) {
  struct stat st;
  CHECK(stat(path, &st) == 0, "no file %s", path);
  return (uint64_t)st.st_size;
}

static void capture(const char *path, strap_codec codec) {
  strap_open_options options = open_options();
  options.codec = codec;
  strap_session session = open_stream(path, &options);

  uint32_t halves = add_layer(session, "encoder.0"), bytes, again;
  EXPECT(STRAP_OK, strap_layer(session, "net", "encoder.1 and more", 9, "['mask']", &bytes, &error));
  EXPECT(STRAP_OK, strap_layer(session, "net", "encoder.1", 9, "['mask']", &again, &error));
  CHECK(bytes == again, "one source has the ids %u and %u", bytes, again);
  CHECK(bytes != halves, "two sources share the id %u", bytes);

  const int64_t matrix[] = {ROWS, COLUMNS}, row[] = {VALUES};
  float floats[VALUES];
  int8_t mask[VALUES];
  uint64_t offset = 0;
  for (int step = 0; step < STEPS; step++) {
    for (int i = 0; i < VALUES; i++) {
      floats[i] = value(step, i);
      mask[i] = (int8_t)(step - i);
    }
    strap_tensor t = tensor_of(halves, STRAP_FLOAT32, 2, matrix, floats);
    t.step = step;
    t.token = 10 + step;
    enqueue(session, &t);
    t = tensor_of(bytes, STRAP_INT8, 1, row, mask);
    t.step = step;
    t.call = 3;
    t.transform = "clip";
    t.parameters = "{\"bits\": 7}";
    enqueue(session, &t);

    EXPECT(STRAP_OK, strap_flush(session, -1, &error));
    strap_stats_t s = stats_of(session);
    CHECK(s.packets == (uint64_t)(2 * step + 2), "%llu packets after the flush of step %d",
          (unsigned long long)s.packets, step);
    CHECK(s.queued_packets == 0, "a flush left %llu packets", (unsigned long long)s.queued_packets);
    CHECK(s.file_bytes == length_of(path), "stats say %llu bytes, the file has %llu",
          (unsigned long long)s.file_bytes, (unsigned long long)length_of(path));
    if (step == STEPS / 2) {
      EXPECT(STRAP_OK, strap_checkpoint(session, -1, &offset, &error));
      CHECK(offset == s.file_bytes, "a checkpoint covers %llu of %llu bytes",
            (unsigned long long)offset, (unsigned long long)s.file_bytes);
    }
  }
  EXPECT(STRAP_OK, strap_note(session, halves, STEPS, -1, 0, "out of device memory", &error));

  strap_stats_t s = stats_of(session);
  CHECK(s.struct_size == sizeof s, "struct_size became %u", s.struct_size);
  CHECK(s.tensors == 2 * STEPS && s.failed == 1 && s.dropped == 0, "%llu tensors, %llu failed",
        (unsigned long long)s.tensors, (unsigned long long)s.failed);
  CHECK(s.raw_bytes == STEPS * VALUES * 5, "%llu raw bytes", (unsigned long long)s.raw_bytes);
  CHECK(s.converted == STEPS * VALUES && s.square_error == 0 && s.max_error == 0,
        "exact values have the error %g", s.max_error);
  CHECK(s.square_sum > 0, "the sum of squares is %g", s.square_sum);
  CHECK(s.workers == 2 && s.memory_limit > 0 && s.memory_limit <= options.max_memory_bytes,
        "%u workers in %llu bytes", s.workers, (unsigned long long)s.memory_limit);
  CHECK(s.memory_bytes <= s.memory_peak && s.memory_peak <= s.memory_limit, "peak of %llu bytes",
        (unsigned long long)s.memory_peak);
  CHECK(s.failure == STRAP_OK, "failure %d", s.failure);
  close_stream(session);
  EXPECT(STRAP_ERR_INVALID_STATE, strap_close(session, -1, &error));
}

static void read_back(const char *path, strap_codec codec) {
  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.indexed == 1 && info.rows == 2 * STEPS + 1 && info.packets == 2 * STEPS,
        "%llu rows, %llu packets, indexed %d", (unsigned long long)info.rows,
        (unsigned long long)info.packets, info.indexed);
  CHECK(info.valid_bytes == info.file_bytes && info.scanned == 0 && info.problem[0] == 0,
        "problem: %s", info.problem);

  strap_packet p;
  memset(&p, 0, sizeof p);
  p.struct_size = sizeof p;
  uint64_t end = 0;
  for (uint64_t row = 0; row < 2 * STEPS; row++) {
    int step = (int)row / 2, floats = row % 2 == 0;
    EXPECT(STRAP_OK, strap_reader_next(reader, &p, &error));
    CHECK(p.row == row && p.sequence == row && p.step == step && p.present == 1,
          "row %llu is row %llu, step %lld", (unsigned long long)row, (unsigned long long)p.row,
          (long long)p.step);
    CHECK(p.offset == end, "packet %llu begins at %llu, not %llu", (unsigned long long)row,
          (unsigned long long)p.offset, (unsigned long long)end);
    end = p.offset + 6 + p.name_bytes + p.payload_bytes;
    CHECK(p.codec == codec && p.part == 0 && p.parts == 1, "codec %d", p.codec);

    const char *name = floats ? "encoder.0" : "encoder.1['mask']";
    CHECK(strcmp(name_of(reader, row), name) == 0, "name %s", name_of(reader, row));
    CHECK(p.name_bytes == strlen(name), "a name of %llu bytes", (unsigned long long)p.name_bytes);
    char cut[4];
    EXPECT(STRAP_OK, strap_reader_name(reader, row, cut, sizeof cut, &error));
    CHECK(strcmp(cut, "enc") == 0, "cut to \"%s\"", cut);

    if (floats) {
      CHECK(p.dtype == STRAP_FLOAT16 && p.source_dtype == STRAP_FLOAT32, "dtype %d", p.dtype);
      CHECK(p.ndim == 2 && p.shape[0] == ROWS && p.shape[1] == COLUMNS, "shape");
      CHECK(p.decoded_bytes == VALUES * 2 && p.token == 10 + step && p.call == 0, "sizes");
      uint16_t *halves = (uint16_t *)read_row(reader, row);
      for (int i = 0; i < VALUES; i++)
        CHECK(half_value(halves[i]) == value(step, i), "value %d of step %d is %g", i, step,
              half_value(halves[i]));
      free(halves);
    } else {
      CHECK(p.dtype == STRAP_INT8 && p.source_dtype == STRAP_INT8, "dtype %d", p.dtype);
      CHECK(p.ndim == 1 && p.shape[0] == VALUES && p.decoded_bytes == VALUES, "shape");
      CHECK(p.token == -1 && p.call == 3, "call %u", p.call);
      int8_t *mask = (int8_t *)read_row(reader, row);
      for (int i = 0; i < VALUES; i++)
        CHECK(mask[i] == (int8_t)(step - i), "value %d of step %d is %d", i, step, mask[i]);
      free(mask);
    }
  }
  CHECK(end == info.file_bytes, "packets end at %llu of %llu", (unsigned long long)end,
        (unsigned long long)info.file_bytes);

  EXPECT(STRAP_OK, strap_reader_next(reader, &p, &error));
  CHECK(p.present == 0 && p.step == STEPS, "the note of step %d has step %lld", STEPS,
        (long long)p.step);
  char none[1];
  EXPECT(STRAP_ERR_NOT_FOUND, strap_reader_read(reader, p.row, none, 0, &error));
  EXPECT(STRAP_END, strap_reader_next(reader, &p, &error));
  EXPECT(STRAP_END, strap_reader_next(reader, &p, &error));
  EXPECT(STRAP_ERR_NOT_FOUND, strap_reader_at(reader, info.rows, &p, &error));
  EXPECT(STRAP_ERR_NOT_FOUND, strap_reader_name(reader, info.rows, none, sizeof none, &error));

  uint16_t wrong[VALUES + 1];
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_reader_read(reader, 0, wrong, VALUES * 2 - 1, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_reader_read(reader, 0, wrong, VALUES * 2 + 1, &error));
  close_reader(reader);
  EXPECT(STRAP_ERR_INVALID_STATE, strap_reader_close(reader, &error));

  /* Without the index, the reader finds names and payloads, but no types, shapes or steps. */
  strap_reader_options scan = {sizeof scan, STRAP_READ_IGNORE_INDEX};
  memset(&info, 0, sizeof info);
  info.struct_size = sizeof info;
  EXPECT(STRAP_OK, strap_reader_open(path, &scan, &reader, &info, &error));
  CHECK(info.indexed == 0 && info.rows == 2 * STEPS && info.packets == 2 * STEPS,
        "a scan finds %llu packets", (unsigned long long)info.packets);
  p = packet_at(reader, 1);
  CHECK(p.dtype == 0 && p.ndim == -1 && p.step == -1 && p.present == 1, "a scan knows dtype %d",
        p.dtype);
  CHECK(strcmp(name_of(reader, 1), "encoder.1['mask']") == 0, "name %s", name_of(reader, 1));
  close_reader(reader);
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  static const strap_codec codecs[] = {STRAP_CODEC_NONE, STRAP_CODEC_LZ4, STRAP_CODEC_ZSTD};
  for (size_t i = 0; i < sizeof codecs / sizeof *codecs; i++) {
    capture(path, codecs[i]);
    read_back(path, codecs[i]);
  }
  puts("each codec gives back what was captured");
  return 0;
}
