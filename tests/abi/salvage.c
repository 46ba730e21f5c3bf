/* strap_salvage copies the intact packets of a damaged stream to a new stream. Its callbacks report
 * the progress and the losses. */
#include "check.h"

enum { TENSORS = 60, COUNT = 50000 };

static float value_of(int tensor, int i) { return (float)((tensor * 31 + i * 7) % 1000); }

static void capture(const char *path) {
  static float values[COUNT];
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  const int64_t shape[] = {COUNT};
  for (int k = 0; k < TENSORS; k++) {
    char name[16];
    snprintf(name, sizeof name, "h.%d", k % 4);
    strap_tensor t = tensor_of(add_layer(session, name), STRAP_FLOAT32, 1, shape, values);
    t.step = k / 4;
    for (int i = 0; i < COUNT; i++) values[i] = value_of(k, i);
    enqueue(session, &t);
  }
  close_stream(session);
}

/* Flips a bit in the payload of tensor 5, zeroes the header of tensor 10 and cuts the last packet.
 * Returns the new length of the stream. */
static long damage(const char *path) {
  strap_reader reader = open_reader(path, NULL);
  strap_packet flipped = packet_at(reader, 5), headless = packet_at(reader, 10),
               last = packet_at(reader, TENSORS - 1);
  close_reader(reader);
  FILE *f = fopen(path, "r+b");
  CHECK(f != NULL, "cannot open %s", path);
  fseek(f, (long)flipped.offset + 1000, SEEK_SET);
  int byte = fgetc(f);
  fseek(f, (long)flipped.offset + 1000, SEEK_SET);
  fputc(byte ^ 4, f);
  fseek(f, (long)headless.offset, SEEK_SET);
  for (int i = 0; i < 6; i++) fputc(0, f);
  fseek(f, 0, SEEK_SET);
  static char copy[TENSORS * (COUNT * 2 + 100)];
  long length = (long)last.offset + 100;
  CHECK(fread(copy, 1, (size_t)length, f) == (size_t)length, "the stream is short");
  fclose(f);
  f = fopen(path, "wb");
  CHECK(f != NULL && fwrite(copy, 1, (size_t)length, f) == (size_t)length, "cannot cut %s", path);
  fclose(f);
  return length;
}

typedef struct {
  int calls, stop_at, packets, ranges;
  uint64_t bytes, done;
  char names[64];
} told;

static int32_t progress(void *context, uint64_t done, uint64_t total) {
  told *t = context;
  CHECK(done > t->done && done <= total, "%llu of %llu", (unsigned long long)done,
        (unsigned long long)total);
  t->done = done;
  return ++t->calls == t->stop_at;
}

static void lost(void *context, const strap_lost *lost) {
  told *t = context;
  if (lost->name == NULL) {
    CHECK(lost->reason == NULL && t->packets == 2, "a stretch has a reason");
    t->ranges++;
    t->bytes += lost->length;
    return;
  }
  CHECK(strlen(lost->name) == lost->name_bytes && lost->reason[0] != 0, "no name or reason");
  t->packets++;
  strcat(strcat(t->names, lost->name), " ");
}

static strap_salvage_options options_for(told *t) {
  strap_salvage_options o;
  memset(&o, 0, sizeof o);
  memset(t, 0, sizeof *t);
  o.struct_size = sizeof o;
  o.progress = progress;
  o.lost = lost;
  o.context = t;
  return o;
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  char out[4096];
  snprintf(out, sizeof out, "%s.salvaged", path);
  capture(path);
  uint64_t length = (uint64_t)damage(path);

  told t;
  strap_salvage_options options = options_for(&t);
  strap_salvage_report report;
  memset(&report, 0x5a, sizeof report);
  report.struct_size = sizeof report;
  EXPECT(STRAP_OK, strap_salvage(path, out, &options, &report, &error));
  CHECK(report.packets == TENSORS - 2 && report.verified == TENSORS - 2 && report.repaired == 1,
        "%llu packets", (unsigned long long)report.packets);
  CHECK(report.unlisted == 0 && report.lost_packets == 2 && report.lost_ranges == 2 &&
            report.problem[0] == 0, "lost %llu", (unsigned long long)report.lost_packets);
  CHECK(report.bytes + report.lost_bytes == length && t.bytes == report.lost_bytes,
        "%llu bytes lost", (unsigned long long)report.lost_bytes);
  CHECK(t.packets == 2 && t.ranges == 2 && strcmp(t.names, "h.1 h.3 ") == 0, "lost %s", t.names);

  strap_reader_info info;
  strap_reader reader = open_reader(out, &info);
  CHECK(info.indexed && info.rows == TENSORS && info.packets == TENSORS - 2 &&
            info.problem[0] == 0, "%s", info.problem);
  for (int k = 0; k < TENSORS; k++) {
    strap_packet p = packet_at(reader, (uint64_t)k);
    CHECK(p.step == k / 4 && p.present == (k != 5 && k != TENSORS - 1), "row %d", k);
    if (!p.present) continue;
    uint16_t *values = read_row(reader, (uint64_t)k);
    for (int i = 0; i < COUNT; i++)
      CHECK(half_value(values[i]) == value_of(k, i), "row %d, element %d", k, i);
    free(values);
  }
  close_reader(reader);

  /* The target is replaced only with `force`, and the source is never replaced. */
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_salvage(path, out, NULL, NULL, &error));
  options = options_for(&t);
  options.force = 1;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_salvage(path, path, &options, NULL, &error));
  EXPECT(STRAP_OK, strap_salvage(path, out, &options, NULL, &error));
  options = options_for(&t);
  options.force = 2;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_salvage(path, out, &options, NULL, &error));

  /* If the progress callback stops the salvage, no file remains. */
  snprintf(out, sizeof out, "%s.given-up", path);
  options = options_for(&t);
  t.stop_at = 1;
  CHECK(length * 2 > 8 << 20, "too short for a call of progress");
  EXPECT(STRAP_ERR_INVALID_STATE, strap_salvage(path, out, &options, NULL, &error));
  CHECK(t.calls == 1 && fopen(out, "rb") == NULL, "it left a file");

  EXPECT(STRAP_ERR_NOT_FOUND, strap_salvage("/nowhere/a.stream", out, NULL, NULL, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_salvage(NULL, out, NULL, NULL, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_salvage(path, NULL, NULL, NULL, &error));
  report.struct_size = 0;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_salvage(path, out, NULL, &report, &error));
  puts("salvaged");
  return 0;
}
