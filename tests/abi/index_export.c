/* The index as an Arrow C stream has the documented columns and the values of strap_reader_at.
 * Streams outlive their readers, and batches outlive their streams. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include "arrow_abi.h"

enum { TENSORS = 1000 };

static void capture(const char *path) {
  strap_open_options options = open_options();
  options.rank = 3;
  strap_session session = open_stream(path, &options);
  uint32_t layer;
  EXPECT(STRAP_OK, strap_layer(session, "net", "h.0", 3, "[1]", &layer, &error));
  const int64_t shape[] = {2, 3};
  int16_t values[6] = {0};
  uint32_t request, again;
  EXPECT(STRAP_OK, strap_request(session, "chat-17 and more", 7, &request, &error));
  EXPECT(STRAP_OK, strap_request(session, "chat-17", 7, &again, &error));
  CHECK(request == again && request > 0, "one request has the ids %u and %u", request, again);
  for (int i = 0; i < TENSORS; i++) {
    strap_tensor t = tensor_of(layer, STRAP_INT16, 2, shape, values);
    t.step = i;
    t.token = i % 2 ? i : -1;
    t.transform = i % 2 ? "keep" : NULL;
    t.request = i % 4 < 2 ? request : 0; /* tensors of the intake and others have a request */
    values[0] = (int16_t)i;
    enqueue(session, &t);
  }
  strap_tensor unknown = tensor_of(layer, STRAP_INT16, 2, shape, values);
  unknown.request = request + 1;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_enqueue(session, &unknown, -1, &error));
  CHECK(strstr(error.message, "request = 2 was not registered") != NULL, "%s", error.message);
  EXPECT(STRAP_OK, strap_note(session, layer, TENSORS, -1, 0, "too late", &error));
  close_stream(session);
}

/* Returns the position of a column, and checks that its Arrow format is FORMAT. */
static int64_t column(const struct ArrowSchema *schema, const char *name, const char *format) {
  for (int64_t i = 0; i < schema->n_children; i++) {
    const struct ArrowSchema *c = schema->children[i];
    if (strcmp(c->name, name) != 0) continue;
    CHECK(strcmp(c->format, format) == 0, "column %s has the type %s, not %s", name, c->format,
          format);
    return i;
  }
  CHECK(0, "the index has no column %s", name);
  return -1;
}

static int is_null(const struct ArrowArray *a, int64_t row) {
  const uint8_t *valid = (const uint8_t *)a->buffers[0];
  return valid != NULL && !(valid[row / 8] >> row % 8 & 1);
}

static int text_is(const struct ArrowArray *a, int64_t row, const char *want) {
  const int32_t *offsets = (const int32_t *)a->buffers[1];
  size_t length = (size_t)(offsets[row + 1] - offsets[row]);
  return length == strlen(want) &&
         memcmp((const char *)a->buffers[2] + offsets[row], want, length) == 0;
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  capture(path);
  strap_reader reader = open_reader(path, NULL), second = open_reader(path, NULL);
  struct ArrowArrayStream stream, unread;
  EXPECT(STRAP_OK, strap_index_export(reader, &stream, &error));
  EXPECT(STRAP_OK, strap_index_export(second, &unread, &error));
  close_reader(second); /* the streams outlive their readers */
  unread.release(&unread);
  CHECK(unread.release == NULL, "a released stream is not marked so");

  struct ArrowSchema schema, again;
  CHECK(stream.get_schema(&stream, &schema) == 0, "%s", stream.get_last_error(&stream));
  CHECK(stream.get_schema(&stream, &again) == 0, "%s", stream.get_last_error(&stream));
  CHECK(stream.get_last_error(&stream) == NULL, "an error without one");
  CHECK(strcmp(schema.format, "+s") == 0 && schema.n_children == again.n_children, "a struct");
  again.release(&again);
  CHECK(again.release == NULL, "a released schema is not marked so");
  int64_t sequence = column(&schema, "sequence", "L"), offset = column(&schema, "offset", "L"),
          layer = column(&schema, "layer", "u"), step = column(&schema, "step", "l"),
          shape = column(&schema, "shape", "+l"), token = column(&schema, "token", "l"),
          rank = column(&schema, "rank", "i"), note = column(&schema, "error", "u");
  CHECK(strcmp(schema.children[shape]->children[0]->format, "l") == 0, "shape is no list<int64>");

  uint64_t rows = 0;
  struct ArrowArray batch, kept = {0};
  for (;;) {
    CHECK(stream.get_next(&stream, &batch) == 0, "%s", stream.get_last_error(&stream));
    if (batch.release == NULL) break;
    CHECK(batch.n_children == schema.n_children && batch.offset == 0 && batch.null_count == 0,
          "a batch of %lld columns", (long long)batch.n_children);
    for (int64_t c = 0; c < batch.n_children; c++)
      CHECK(batch.children[c]->length == batch.length && batch.children[c]->offset == 0,
            "column %s has %lld of %lld rows", schema.children[c]->name,
            (long long)batch.children[c]->length, (long long)batch.length);
    struct ArrowArray **columns = batch.children;
    for (int64_t i = 0; i < batch.length; i++, rows++) {
      strap_packet p = packet_at(reader, rows);
      CHECK(((const uint64_t *)columns[sequence]->buffers[1])[i] == p.sequence, "sequence");
      CHECK(((const int64_t *)columns[step]->buffers[1])[i] == p.step, "step");
      CHECK(((const int32_t *)columns[rank]->buffers[1])[i] == 3, "rank");
      CHECK(text_is(columns[layer], i, "h.0"), "layer of row %llu", (unsigned long long)rows);
      int64_t t = ((const int64_t *)columns[token]->buffers[1])[i];
      CHECK(is_null(columns[token], i) ? p.token == -1 : t == p.token, "token %lld", (long long)t);
      if (rows == TENSORS) {
        CHECK(text_is(columns[note], i, "too late"), "the note");
        continue;
      }
      CHECK(is_null(columns[note], i) || text_is(columns[note], i, ""), "a note");
      CHECK(((const uint64_t *)columns[offset]->buffers[1])[i] == p.offset, "offset");
      const int32_t *dims = (const int32_t *)columns[shape]->buffers[1];
      const int64_t *lengths = (const int64_t *)columns[shape]->children[0]->buffers[1];
      CHECK(dims[i + 1] - dims[i] == 2 && lengths[dims[i]] == 2 && lengths[dims[i] + 1] == 3,
            "shape of row %llu", (unsigned long long)rows);
    }
    if (kept.release == NULL) kept = batch; /* keep one, to check that it outlives the stream */
    else batch.release(&batch);
  }
  CHECK(rows == TENSORS + 1, "%llu rows", (unsigned long long)rows);
  CHECK(stream.get_next(&stream, &batch) == 0 && batch.release == NULL, "a batch behind the end");
  close_reader(reader);

  /* A second call of a release callback that the consumer kept does nothing. */
  void (*release)(struct ArrowArrayStream *) = stream.release;
  stream.release(&stream);
  CHECK(stream.release == NULL, "a released stream is not marked so");
  release(&stream);
  void (*release_batch)(struct ArrowArray *) = kept.release;
  CHECK(((const uint64_t *)kept.children[sequence]->buffers[1])[1] == 1, "a batch died early");
  kept.release(&kept);
  release_batch(&kept);
  schema.release(&schema);
  printf("%llu rows of the index, in Arrow\n", (unsigned long long)rows);
  return 0;
}
