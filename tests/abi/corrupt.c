/* A reader reports a damaged packet by name and goes on with the next row. */
#include "check.h"

enum { ROWS = 4, COUNT = 5000 };

static void capture(const char *path) {
  static int32_t values[COUNT];
  for (int i = 0; i < COUNT; i++) values[i] = i;
  strap_open_options options = open_options();
  options.codec = STRAP_CODEC_LZ4;
  strap_session session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "layer");
  const int64_t shape[] = {COUNT};
  for (int row = 0; row < ROWS; row++) {
    strap_tensor t = tensor_of(layer, STRAP_INT32, 1, shape, values);
    t.step = row;
    enqueue(session, &t);
  }
  close_stream(session);
}

static void overwrite(const char *path, uint64_t offset, int byte) {
  FILE *f = fopen(path, "r+b");
  CHECK(f != NULL && fseek(f, (long)offset, SEEK_SET) == 0 && fputc(byte, f) == byte &&
            fclose(f) == 0,
        "cannot write to %s", path);
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  capture(path);
  strap_reader reader = open_reader(path, NULL);
  uint64_t frame = packet_at(reader, 1).offset + 6 + 5, header = packet_at(reader, 2).offset;
  close_reader(reader);
  overwrite(path, frame + 4, 0xff); /* the flags of the LZ4 frame of row 1 */
  overwrite(path, header, 0xff);    /* the length of the name of row 2 */

  reader = open_reader(path, NULL);
  for (int row = 0; row < ROWS; row++) {
    strap_packet p = {.struct_size = sizeof p};
    int damaged = row == 1 || row == 2;
    EXPECT(damaged ? STRAP_ERR_CORRUPT : STRAP_OK, strap_reader_next(reader, &p, &error));
    CHECK(p.row == (uint64_t)row && p.step == row && p.ndim == 1 && p.shape[0] == COUNT,
          "row %d is row %llu of step %lld", row, (unsigned long long)p.row, (long long)p.step);
    CHECK(p.decoded_bytes == (damaged ? 0 : sizeof(int32_t) * COUNT), "row %d has %llu bytes", row,
          (unsigned long long)p.decoded_bytes);
    if (damaged) CHECK(strstr(error.message, "layer") != NULL, "row %d: %s", row, error.message);
    memset(&p, 0, sizeof p);
    p.struct_size = sizeof p;
    EXPECT(damaged ? STRAP_ERR_CORRUPT : STRAP_OK, strap_reader_at(reader, (uint64_t)row, &p, &error));
    CHECK(p.row == (uint64_t)row, "row %d is row %llu", row, (unsigned long long)p.row);
  }
  strap_packet p = {.struct_size = sizeof p};
  EXPECT(STRAP_END, strap_reader_next(reader, &p, &error));

  /* strap_reader_read_many stops before a damaged row, and the next call reports it. */
  static int32_t values[ROWS][COUNT];
  uint64_t rows[ROWS] = {0, 3, 1, 2}, ends[ROWS];
  size_t done = 7;
  EXPECT(STRAP_OK, strap_reader_read_many(reader, rows, ROWS, 64, values, sizeof values, ends, &done,
                                          &error));
  CHECK(done == 2 && ends[0] == sizeof values[0] && ends[1] == 2 * sizeof values[0] + 32,
        "%zu rows, which end at %llu and %llu", done, (unsigned long long)ends[0],
        (unsigned long long)ends[1]);
  EXPECT(STRAP_ERR_CORRUPT, strap_reader_read_many(reader, rows + done, ROWS - done, 64, values,
                                                   sizeof values, ends, &done, &error));
  CHECK(done == 0 && strstr(error.message, "layer") != NULL, "%zu rows: %s", done, error.message);

  /* strap_reader_read_ranges does the same. Ranges of one packet may stand anywhere in the call. */
  const strap_range ranges[] = {{0, 8, 4, 24},  {3, 0, 12, 0}, {0, 4, 8, 12},
                                {3, 16, 0, 28}, {1, 0, 4, 0},  {0, 0, 4, 0}};
  int32_t parts[8];
  memset(parts, 0xff, sizeof parts);
  EXPECT(STRAP_OK, strap_reader_read_ranges(reader, ranges, 6, parts, sizeof parts, &done, &error));
  CHECK(done == 4, "%zu ranges", done);
  const int32_t expected[8] = {0, 1, 2, 1, 2, -1, 2, -1};
  CHECK(memcmp(parts, expected, sizeof parts) == 0, "wrong bytes");
  EXPECT(STRAP_ERR_CORRUPT,
         strap_reader_read_ranges(reader, ranges + done, 2, parts, sizeof parts, &done, &error));
  CHECK(done == 0 && strstr(error.message, "layer") != NULL, "%zu ranges: %s", done, error.message);

  /* A range outside its packet is the caller's error, which names the range and the packet's size. */
  const strap_range outside[] = {{0, sizeof values[0], 0, 0}, {3, sizeof values[0] - 4, 5, 0}};
  EXPECT(STRAP_OK, strap_reader_read_ranges(reader, outside, 2, parts, sizeof parts, &done, &error));
  CHECK(done == 1, "%zu ranges", done);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_reader_read_ranges(reader, outside + 1, 1, parts, sizeof parts, &done, &error));
  CHECK(strstr(error.message, "row = 3, first = 19996, bytes = 5: the packet has 20000") != NULL, "%s",
        error.message);
  const strap_range no_room = {0, 0, 4, sizeof parts - 3};
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_reader_read_ranges(reader, &no_room, 1, parts, sizeof parts, &done, &error));
  CHECK(strstr(error.message, "to = 29, bytes = 4: there is room for 32 bytes") != NULL, "%s",
        error.message);
  close_reader(reader);
  puts("the rows behind a damaged one are read");
  return 0;
}
