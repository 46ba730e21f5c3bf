/* Every call refuses bad arguments with a fitting status and a message. It returns the same
 * status if the caller passes no strap_error. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <math.h>
#include <sys/stat.h>
#include <unistd.h>

/* Makes the call twice: with a strap_error, which it must fill, and with NULL. */
#define REFUSED(want, call_with_error)                                              \
  do {                                                                              \
    strap_error *report = &error;                                                   \
    EXPECT(want, call_with_error);                                                  \
    report = NULL;                                                                  \
    strap_status bare_ = (call_with_error);                                         \
    CHECK(bare_ == (want), "%s without a report gave %d", #call_with_error, bare_); \
  } while (0)

#define INVALID STRAP_ERR_INVALID_ARGUMENT
#define ID "0123456789abcdef0123456789abcdef"

static void open_refuses(const char *path) {
  strap_session session = 7;
  strap_open_options good = open_options(), o;

  REFUSED(INVALID, strap_open(NULL, &good, &session, report));
  REFUSED(STRAP_ERR_NOT_FOUND, strap_open("", &good, &session, report));
  REFUSED(INVALID, strap_open(path, NULL, &session, report));
  REFUSED(INVALID, strap_open(path, &good, NULL, report));

#define BAD(field, value)                                     \
  do {                                                        \
    o = good;                                                 \
    o.field = (value);                                        \
    REFUSED(INVALID, strap_open(path, &o, &session, report)); \
  } while (0)
  BAD(struct_size, 0);
  BAD(struct_size, 3);
  BAD(codec, -1);
  BAD(codec, STRAP_CODEC_ARCHIVE); /* the path ends in .stream */
  BAD(codec, 4);
  BAD(workers, 0);
  BAD(workers, -1);
  BAD(workers, 257);
  BAD(max_memory_bytes, 0);
  BAD(max_memory_bytes, (1 << 20) - 1);
  BAD(on_full, -1);
  BAD(on_full, 2);
  BAD(mode, -1);
  BAD(mode, 2);
  BAD(keep_float32, 2);
  BAD(error_bound, 1);
  BAD(error_bound, -1e-4);
  BAD(error_bound, NAN);
  BAD(workers_yield, 2);
  BAD(overwrite, 2);
  BAD(ring, 2);
  BAD(ring, -1);
  BAD(ring_steps, 1); /* without a ring */
  BAD(ring_seconds, 1);
  BAD(ring_file, "ring"); /* likewise */
  BAD(ring_outlier, 100);
  BAD(burst_bytes, good.max_memory_bytes + 1);
  BAD(capture_id, ID); /* a new capture draws its id itself */
  good.mode = STRAP_MODE_RESUME;
  BAD(capture_id, "");
  BAD(capture_id, "0123456789abcdef0123456789ABCDEF");
  BAD(capture_id, ID "0");
  BAD(overwrite, 1);
  good.mode = STRAP_MODE_CREATE;
#undef BAD
  CHECK(access(path, F_OK) != 0, "a refused strap_open has made %s", path);

  char other[4096];
  snprintf(other, sizeof other, "%s/none/x.stream", path);
  REFUSED(STRAP_ERR_NOT_FOUND, strap_open(other, &good, &session, report));
  snprintf(other, sizeof other, "%s.directory", path);
  CHECK(mkdir(other, 0700) == 0, "cannot make %s", other);
  REFUSED(INVALID, strap_open(other, &good, &session, report));
  snprintf(other, sizeof other, "%s.fifo", path);
  CHECK(mkfifo(other, 0600) == 0, "cannot make %s", other);
  REFUSED(INVALID, strap_open(other, &good, &session, report));

  session = open_stream(path, &good);
  strap_session second = 7;
  REFUSED(STRAP_ERR_BUSY, strap_open(path, &good, &second, report));
  CHECK(second == 0, "a refused strap_open left the handle %llu", (unsigned long long)second);
  char id[STRAP_CAPTURE_ID_BYTES];
  REFUSED(INVALID, strap_capture_id(session, NULL, sizeof id, report));
  REFUSED(INVALID, strap_capture_id(session, id, sizeof id - 1, report));
  REFUSED(INVALID, strap_capture_id(session, id, 0, report));
  close_stream(session);
  REFUSED(STRAP_ERR_INVALID_STATE, strap_capture_id(session, id, sizeof id, report));
}

/* The library accepts the shorter structs of older headers and the longer ones of newer headers. */
static void sizes(const char *path) {
  strap_session session;
  union {
    strap_open_options options;
    unsigned char bytes[sizeof(strap_open_options) + 16];
  } o;
  memset(&o, 0, sizeof o);
  o.options = open_options();
  o.options.struct_size = offsetof(strap_open_options, keep_float32);
  memset(o.bytes + o.options.struct_size, 0xff, sizeof o - o.options.struct_size);
  session = open_stream(path, &o.options); /* the 0xff bytes lie outside the struct */
  close_stream(session);

  memset(&o, 0, sizeof o);
  o.options = open_options();
  o.options.struct_size = sizeof o;
  session = open_stream(path, &o.options);
  close_stream(session);
  o.bytes[sizeof o - 1] = 1;
  REFUSED(INVALID, strap_open(path, &o.options, &session, report));

  /* The library writes an out struct up to its struct_size, and no byte beyond. */
  strap_open_options good = open_options();
  session = open_stream(path, &good);
  union {
    strap_stats_t stats;
    unsigned char bytes[sizeof(strap_stats_t) + 16];
  } s;
  memset(&s, 0xa5, sizeof s);
  s.stats.struct_size = offsetof(strap_stats_t, tensors);
  EXPECT(STRAP_OK, strap_stats(session, &s.stats, &error));
  CHECK(s.stats.packets == 0 && s.stats.workers == 2, "a short struct was not filled");
  for (size_t i = offsetof(strap_stats_t, tensors); i < sizeof s; i++)
    CHECK(s.bytes[i] == 0xa5, "byte %zu behind a short struct was written", i);
  memset(&s, 0xa5, sizeof s);
  s.stats.struct_size = sizeof s;
  EXPECT(STRAP_OK, strap_stats(session, &s.stats, &error));
  CHECK(s.stats.struct_size == sizeof s, "struct_size became %u", s.stats.struct_size);
  for (size_t i = sizeof s.stats; i < sizeof s; i++)
    CHECK(s.bytes[i] == 0, "byte %zu of a longer struct was not zeroed", i);
  close_stream(session);
}

static void layer_refuses(strap_session session) {
  uint32_t layer;
  static char name[65537];
  memset(name, 'n', sizeof name);
  REFUSED(INVALID, strap_layer(session, NULL, NULL, 4, NULL, &layer, report));
  REFUSED(INVALID, strap_layer(session, NULL, "name", 4, NULL, NULL, report));
  REFUSED(INVALID, strap_layer(session, NULL, name, 65536, NULL, &layer, report));
  REFUSED(INVALID, strap_layer(session, NULL, name, 65535, "[1]", &layer, report));
  REFUSED(INVALID, strap_layer(session, NULL, name, SIZE_MAX, NULL, &layer, report));
  REFUSED(INVALID, strap_layer(session, NULL, "\xff\xfe", 2, NULL, &layer, report));
  EXPECT(STRAP_OK, strap_layer(session, NULL, "", 0, NULL, &layer, &error)); /* the root */
  uint32_t request;
  REFUSED(INVALID, strap_request(session, NULL, 4, &request, report));
  REFUSED(INVALID, strap_request(session, "name", 4, NULL, report));
  REFUSED(INVALID, strap_request(session, "", 0, &request, report));
  REFUSED(INVALID, strap_request(session, name, 65537, &request, report));
  REFUSED(INVALID, strap_request(session, "\xff\xfe", 2, &request, report));
  EXPECT(STRAP_OK, strap_layer(session, NULL, name, 65535, NULL, &layer, &error));
}

/* strap_enqueue refuses bad values in strap_conversion, which describes a conversion that the host
 * made. Each message names the value. */
static void conversion_refuses(strap_session session, uint32_t layer) {
  const int64_t shape[] = {4};
  const uint16_t halves[4] = {0};
  const strap_conversion fine = {sizeof fine, STRAP_FLOAT32, 4, 1e-9, 1, 1e-5};
  strap_conversion c;
  strap_tensor good = tensor_of(layer, STRAP_FLOAT16, 1, shape, halves), t;
  good.conversion = &c;
#define BAD(name, ...)                                                                     \
  do {                                                                                     \
    t = good;                                                                              \
    c = fine;                                                                              \
    __VA_ARGS__;                                                                           \
    REFUSED(INVALID, strap_enqueue(session, &t, 0, report));                               \
    CHECK(strstr(error.message, name) != NULL, "%s is not in \"%s\"", name, error.message); \
  } while (0)
  BAD("dtype = 3", t.dtype = STRAP_BFLOAT16);
  BAD("dtype = 1", t.dtype = STRAP_FLOAT32, t.ndim = 0);
  BAD("source = 0", c.source = 0);
  BAD("source = -1", c.source = -1);
  BAD("source = 4", c.source = STRAP_FLOAT64);
  BAD("source = 257", c.source = 256 + STRAP_FLOAT32);
  BAD("values = 5", c.values = 5);
  BAD("values", c.values = UINT64_MAX);
  BAD("square_error", c.square_error = NAN);
  BAD("square_error = -1", c.square_error = -1);
  BAD("square_sum", c.square_sum = INFINITY);
  BAD("square_sum", c.square_sum = -INFINITY);
  BAD("max_error", c.max_error = NAN);
  BAD("max_error = -1e-05", c.max_error = -1e-5);
  BAD("values is 0", c.values = 0);
  BAD("strap_conversion.struct_size = 0", c.struct_size = 0);
  BAD("strap_conversion.struct_size", c.struct_size = UINT32_MAX);
  BAD("source = 0", c.struct_size = sizeof c.struct_size); /* missing fields count as 0 */
#undef BAD
}

static void enqueue_refuses(strap_session session) {
  uint32_t layer = add_layer(session, "layer");
  static const int64_t shape[STRAP_MAX_DIMS + 1] = {4}, strides[] = {INT64_MAX, INT64_MAX};
  const float values[4] = {1, 2, 3, 4};
  strap_tensor good = tensor_of(layer, STRAP_FLOAT32, 1, shape, values), t;

  REFUSED(INVALID, strap_enqueue(session, NULL, 0, report));
#define BAD(...)                                             \
  do {                                                       \
    t = good;                                                \
    __VA_ARGS__;                                             \
    REFUSED(INVALID, strap_enqueue(session, &t, 0, report)); \
  } while (0)
  static const int64_t negative[] = {4, -1}, empty_negative[] = {0, -1},
                       vast[] = {INT64_MAX, INT64_MAX}, huge[] = {INT64_MAX / 4 + 1};
  BAD(t.struct_size = 0);
  BAD(t.struct_size = 40);
  BAD(t.layer = layer + 1000);
  BAD(t.dtype = 0);
  BAD(t.dtype = -1);
  BAD(t.dtype = STRAP_COMPLEX128 + 1);
  BAD(t.ndim = -1);
  BAD(t.ndim = STRAP_MAX_DIMS + 1);
  BAD(t.ndim = INT32_MAX);
  BAD(t.shape = NULL);
  BAD(t.data = NULL);
  BAD(t.ndim = 0, t.data = NULL);
  BAD(t.shape = negative, t.ndim = 2);
  BAD(t.shape = empty_negative, t.ndim = 2);
  BAD(t.shape = vast, t.ndim = 2);
  BAD(t.shape = huge);
  BAD(t.shape = (const int64_t[]){4, 4}, t.ndim = 2, t.strides = strides);
  BAD(t.request = 1); /* no request was registered */
  BAD(t.cursor = 12345);
#undef BAD
  conversion_refuses(session, layer);
  REFUSED(INVALID, strap_abandon(session, 12345, report));
  REFUSED(INVALID, strap_note(session, layer, 0, 0, 0, NULL, report));
  REFUSED(INVALID, strap_note(session, layer + 1000, 0, 0, 0, "why", report));
  REFUSED(INVALID, strap_roll(session, NULL, 0, -1, report));
  REFUSED(INVALID, strap_roll(session, "next.stream", 2, -1, report));
  REFUSED(INVALID, strap_dump(session, NULL, 0, -1, report));
  REFUSED(INVALID, strap_dump(session, "next.stream", 2, -1, report));
  REFUSED(STRAP_ERR_INVALID_STATE, strap_dump(session, "next.stream", 0, -1, report)); /* no ring */
  REFUSED(STRAP_ERR_INVALID_STATE, strap_step_end(session, 0, -1, report));
  REFUSED(STRAP_ERR_INVALID_STATE, strap_dump_end(session, -1, report));
  REFUSED(INVALID, strap_alarm(session, NULL, -1, report));
  strap_alarm_t alarm = {.struct_size = 0};
  REFUSED(INVALID, strap_alarm(session, &alarm, -1, report));
  alarm.struct_size = sizeof alarm;
  REFUSED(STRAP_ERR_INVALID_STATE, strap_alarm(session, &alarm, -1, report));
  REFUSED(INVALID, strap_stats(session, NULL, report));
  strap_stats_t s = {.struct_size = 0};
  REFUSED(INVALID, strap_stats(session, &s, report));

  s = stats_of(session);
  CHECK(s.tensors == 0 && s.packets == 0, "a refused tensor was counted");
  enqueue(session, &good); /* the session still works */
  EXPECT(STRAP_OK, strap_checkpoint(session, -1, NULL, &error));
}

static void reader_refuses(const char *path) {
  strap_reader reader = 7;
  strap_reader_info info = {.struct_size = sizeof info};
  strap_reader_options options = {sizeof options, 0};
  REFUSED(INVALID, strap_reader_open(NULL, NULL, &reader, &info, report));
  REFUSED(INVALID, strap_reader_open(path, NULL, NULL, &info, report));
  CHECK(strap_reader_open(path, NULL, &reader, NULL, NULL) == STRAP_OK, "info may be NULL");
  close_reader(reader);

  options.struct_size = 0;
  REFUSED(INVALID, strap_reader_open(path, &options, &reader, &info, report));
  options = (strap_reader_options){sizeof options, 2};
  REFUSED(INVALID, strap_reader_open(path, &options, &reader, &info, report));
  info.struct_size = 0;
  REFUSED(INVALID, strap_reader_open(path, NULL, &reader, &info, report));
  info.struct_size = sizeof info;
  char other[4096];
  snprintf(other, sizeof other, "%s.none", path);
  REFUSED(STRAP_ERR_NOT_FOUND, strap_reader_open(other, NULL, &reader, &info, report));
  snprintf(other, sizeof other, "%s.directory", path);
  REFUSED(INVALID, strap_reader_open(other, NULL, &reader, &info, report));
  snprintf(other, sizeof other, "%s.foreign", path);
  FILE *f = fopen(other, "w");
  CHECK(f != NULL && fputs("PK\3\4 is no packet", f) >= 0 && fclose(f) == 0, "cannot write");
  REFUSED(STRAP_ERR_CORRUPT, strap_reader_open(other, NULL, &reader, &info, report));
  CHECK(reader == 0, "a refused strap_reader_open left the handle %llu",
        (unsigned long long)reader);

  reader = open_reader(path, &info);
  strap_packet p = {.struct_size = sizeof p};
  char name[8];
  REFUSED(INVALID, strap_reader_follow(reader, 0, NULL, NULL, report));
  strap_reader more;
  REFUSED(INVALID, strap_reader_follow(reader, 1 << 20, &more, NULL, report));
  CHECK(more == 0, "a refused call left the handle %llu", (unsigned long long)more);
  REFUSED(INVALID, strap_reader_next(reader, NULL, report));
  REFUSED(INVALID, strap_reader_at(reader, 0, NULL, report));
  p.struct_size = 0;
  REFUSED(INVALID, strap_reader_next(reader, &p, report));
  REFUSED(INVALID, strap_reader_at(reader, 0, &p, report));
  REFUSED(INVALID, strap_reader_name(reader, 0, NULL, 8, report));
  REFUSED(INVALID, strap_reader_name(reader, 0, name, 0, report));
  REFUSED(INVALID, strap_reader_read(reader, 0, NULL, 8, report));
  uint64_t row = 0, end;
  size_t done;
  REFUSED(INVALID, strap_reader_read_many(reader, NULL, 1, 1, name, 8, &end, &done, report));
  REFUSED(INVALID, strap_reader_read_many(reader, &row, 1, 1, NULL, 8, &end, &done, report));
  REFUSED(INVALID, strap_reader_read_many(reader, &row, 1, 1, name, 8, NULL, &done, report));
  REFUSED(INVALID, strap_reader_read_many(reader, &row, 1, 1, name, 8, &end, NULL, report));
  REFUSED(INVALID, strap_reader_read_many(reader, &row, 1, 0, name, 8, &end, &done, report));
  REFUSED(INVALID, strap_reader_read_many(reader, &row, 1, 12, name, 8, &end, &done, report));
  strap_range range = {0, 0, 1, 0};
  REFUSED(INVALID, strap_reader_read_ranges(reader, NULL, 1, name, 8, &done, report));
  REFUSED(INVALID, strap_reader_read_ranges(reader, &range, 1, NULL, 8, &done, report));
  REFUSED(INVALID, strap_reader_read_ranges(reader, &range, 1, name, 8, NULL, report));
  range.first = UINT64_MAX;
  REFUSED(INVALID, strap_reader_read_ranges(reader, &range, 1, name, 8, &done, report));
  REFUSED(INVALID, strap_reader_prefetch(reader, NULL, 1, report));
  row = UINT64_MAX;
  REFUSED(STRAP_ERR_NOT_FOUND, strap_reader_prefetch(reader, &row, 1, report));
  uint64_t slots[2] = {1, 2};
  REFUSED(INVALID, strap_exchange_rows(NULL, 3, 1, slots, 2, name, NULL, report));
  REFUSED(INVALID, strap_exchange_rows(name, 3, 1, NULL, 2, name + 4, NULL, report));
  REFUSED(INVALID, strap_exchange_rows(name, 3, 1, slots, 2, NULL, NULL, report));
  REFUSED(INVALID, strap_exchange_rows(name, 2, 1, slots, 2, name + 4, NULL, report));
  REFUSED(INVALID, strap_index_export(reader, NULL, report));
  uint64_t some[5]; /* as large as struct ArrowArrayStream */
  REFUSED(INVALID, strap_index_columns(reader, NULL, (struct ArrowArrayStream *)some, report));
  REFUSED(INVALID, strap_index_columns(reader, "step", NULL, report));
  REFUSED(INVALID, strap_index_columns(reader, "step,,layer", (struct ArrowArrayStream *)some, report));
  p.struct_size = sizeof p;
  EXPECT(STRAP_OK, strap_reader_next(reader, &p, &error));
  CHECK(p.row == 0, "a refused call has moved strap_reader_next to row %llu",
        (unsigned long long)p.row);
  close_reader(reader);
}

/* Handles are refused that never existed, are closed, or belong to another kind of object. */
static void handles(const char *path) {
  strap_open_options options = open_options();
  strap_session closed = open_stream(path, &options), open;
  uint32_t layer = add_layer(closed, "layer");
  const int64_t shape[] = {1};
  const float value = 1;
  strap_tensor t = tensor_of(layer, STRAP_FLOAT32, 1, shape, &value);
  enqueue(closed, &t);
  close_stream(closed);
  strap_reader reader = open_reader(path, NULL), closed_reader = open_reader(path, NULL);
  close_reader(closed_reader);
  CHECK(reader != closed_reader, "a handle was given out twice");

  char second[4096];
  snprintf(second, sizeof second, "%s.second", path);
  open = open_stream(second, &options);
  CHECK(open != closed, "a handle was given out twice");

  const uint64_t no_session[] = {0, closed, reader, open + 1000, UINT64_MAX};
  const uint64_t no_reader[] = {0, closed_reader, open, open + 1000, UINT64_MAX};
  for (size_t i = 0; i < 5; i++) {
    uint64_t h = no_session[i], lost;
    strap_stats_t stats = {.struct_size = sizeof stats};
    REFUSED(STRAP_ERR_INVALID_STATE, strap_layer(h, NULL, "x", 1, NULL, &layer, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_request(h, "x", 1, &layer, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_enqueue(h, &t, 0, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_abandon(h, 1, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_note(h, 0, 0, 0, 0, "why", report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_flush(h, 0, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_checkpoint(h, 0, &lost, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_roll(h, "next.stream", 0, -1, report));
    strap_alarm_t alarm = {.struct_size = sizeof alarm};
    REFUSED(STRAP_ERR_INVALID_STATE, strap_dump(h, "next.stream", 0, -1, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_dump_end(h, -1, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_alarm(h, &alarm, -1, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_stats(h, &stats, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_close(h, 0, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_discard(h, &lost, report));

    h = no_reader[i];
    strap_packet p = {.struct_size = sizeof p};
    char byte[1];
    uint64_t stream[5] = {0}; /* as large as struct ArrowArrayStream */
    REFUSED(STRAP_ERR_INVALID_STATE, strap_reader_next(h, &p, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_reader_at(h, 0, &p, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_reader_name(h, 0, byte, 1, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_reader_read(h, 0, byte, 1, report));
    REFUSED(STRAP_ERR_INVALID_STATE,
            strap_index_export(h, (struct ArrowArrayStream *)stream, report));
    REFUSED(STRAP_ERR_INVALID_STATE, strap_reader_close(h, report));
  }
  close_stream(open);
  close_reader(reader);
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  open_refuses(path);
  sizes(path);
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  layer_refuses(session);
  enqueue_refuses(session);
  close_stream(session);
  reader_refuses(path);
  handles(path);
  puts("what cannot be used is refused by name");
  return 0;
}
