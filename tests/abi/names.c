/* Packet names of 0 to 65,535 bytes come back. A packet with an empty name and an empty payload is
 * not written: it would be six zero bytes, which readers of the format take for a hole. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);

  static char longest[65536];
  memset(longest, 'n', sizeof longest - 1);
  const char *names[] = {"", longest, "décodeur.層.0", "a\tb\"c\\d", "after"};
  enum { NAMES = sizeof names / sizeof *names };
  const int64_t none[] = {0}, one[] = {1};
  const int64_t value = 42;
  for (int i = 0; i < NAMES; i++) {
    strap_tensor t = tensor_of(add_layer(session, names[i]), STRAP_INT64, 1, one, &value);
    t.step = i;
    enqueue(session, &t);
    t = tensor_of(t.layer, STRAP_INT64, 1, none, NULL);
    t.step = i;
    enqueue(session, &t);
  }
  close_stream(session);

  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.rows == 2 * NAMES && info.packets == 2 * NAMES - 1, "%llu rows, %llu packets",
        (unsigned long long)info.rows, (unsigned long long)info.packets);
  for (uint64_t row = 0; row < info.rows; row++) {
    strap_packet p = packet_at(reader, row);
    CHECK(p.step == (int64_t)row / 2, "row %llu", (unsigned long long)row);
    CHECK(strcmp(name_of(reader, row), names[row / 2]) == 0, "name %s", name_of(reader, row));
    CHECK(p.present, "row %llu is missing", (unsigned long long)row);
    CHECK(p.decoded_bytes == (row % 2 == 0 ? sizeof value : 0), "row %llu has %llu bytes",
          (unsigned long long)row, (unsigned long long)p.decoded_bytes);
    int64_t *read = (int64_t *)read_row(reader, row);
    CHECK(p.decoded_bytes == 0 || *read == value, "row %llu", (unsigned long long)row);
    free(read);
    CHECK(p.shape[0] == (row % 2 == 0), "row %llu: length %lld", (unsigned long long)row,
          (long long)p.shape[0]);
  }
  close_reader(reader);

  strap_reader_options scan = {sizeof scan, STRAP_READ_IGNORE_INDEX};
  EXPECT(STRAP_OK, strap_reader_open(path, &scan, &reader, &info, &error));
  CHECK(info.packets == 2 * NAMES - 1 && info.valid_bytes == info.file_bytes,
        "a scan finds %llu packets: %s", (unsigned long long)info.packets, info.problem);
  close_reader(reader);
  puts("names of 0 to 65,535 bytes come back");
  return 0;
}
