/* A session keeps its last steps in memory and dumps them, because a tensor had a value that is NaN. */
#include "check.h"

#include <math.h>

enum { VALUES = 4096, BAD_STEP = 200, AFTER = 3 };

static void check_dump(const char *path, int64_t first, int64_t last) {
  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(!info.live && info.problem[0] == '\0', "%s: %s", path, info.problem);
  CHECK(info.packets == (uint64_t)(last - first + 1) * 2, "%llu packets",
        (unsigned long long)info.packets);
  static float values[VALUES];
  for (uint64_t row = 0; row < info.packets; row++) {
    strap_packet p = packet_at(reader, row);
    CHECK(p.step == first + (int64_t)row / 2, "row %llu: step %lld", (unsigned long long)row,
          (long long)p.step);
    EXPECT(STRAP_OK, strap_reader_read(reader, row, values, sizeof values, &error));
    CHECK(values[1] == (float)p.step, "step %lld has other values", (long long)p.step);
  }
  close_reader(reader);
}

int main(int argc, char **argv) {
  char path[2][4096];
  for (int i = 0; i < 2; i++)
    snprintf(path[i], sizeof path[i], "%s.%d", stream_path(argc, argv), i);
  strap_open_options options = open_options();
  options.ring = 1;
  options.keep_float32 = 1;
  options.max_memory_bytes = 2 << 20;
  strap_session session = open_stream("the flight recorder", &options);
  const uint32_t layers[] = {add_layer(session, "first"), add_layer(session, "second")};

  const int64_t shape[] = {VALUES};
  static float values[VALUES];
  strap_alarm_t alarm = {.struct_size = sizeof alarm};
  int64_t last = -1, oldest = -1;
  for (int64_t step = 0; last < 0 || step <= last; step++) {
    for (int i = 0; i < VALUES; i++) values[i] = (float)step;
    if (step == BAD_STEP) values[77] = NAN;
    for (int i = 0; i < 2; i++) {
      strap_tensor t = tensor_of(layers[i], STRAP_FLOAT32, 1, shape, values);
      t.step = step;
      enqueue(session, &t);
    }
    if (last >= 0) continue;
    strap_status status = strap_alarm(session, &alarm, -1, &error);
    CHECK((status == STRAP_OK) == (step == BAD_STEP), "step %lld: alarm %d", (long long)step, status);
    if (status != STRAP_OK) continue;
    CHECK(alarm.layer == layers[0] && alarm.step == BAD_STEP && alarm.element == 77 &&
              isnan(alarm.value) && alarm.time_ns > 0 && alarm.thread > 0,
          "the alarm names layer %u, step %lld, element %lld", alarm.layer, (long long)alarm.step,
          (long long)alarm.element);
    strap_stats_t s = stats_of(session);
    CHECK(s.ring_steps > 40 && s.ring_packets == 2 * s.ring_steps && s.ring_oldest_ns > 0 &&
              s.ring_oldest_step == BAD_STEP + 1 - (int64_t)s.ring_steps &&
              s.ring_gone_steps + s.ring_steps == BAD_STEP + 1 && s.packets == 0,
          "%llu steps are kept from step %lld on", (unsigned long long)s.ring_steps,
          (long long)s.ring_oldest_step);
    EXPECT(STRAP_OK, strap_dump(session, path[0], 0, -1, &error));
    EXPECT(STRAP_ERR_INVALID_STATE, strap_dump(session, path[1], 0, -1, &error));
    last = step + AFTER;
    oldest = s.ring_oldest_step;
  }
  EXPECT(STRAP_OK, strap_dump_end(session, -1, &error));
  EXPECT(STRAP_OK, strap_checkpoint(session, -1, NULL, &error));
  check_dump(path[0], oldest, last);
  EXPECT(STRAP_OK, strap_dump(session, path[1], 0, -1, &error)); /* nothing came since */
  EXPECT(STRAP_OK, strap_dump_end(session, -1, &error));
  close_stream(session);
  check_dump(path[1], 0, -1);
  puts("a ring keeps the last steps for a dump");
  return 0;
}
