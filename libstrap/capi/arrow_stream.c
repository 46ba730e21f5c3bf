/*
 * arrow_stream.c - the callbacks of an exported Arrow stream. Schemas and arrays are C memory,
 * and their release does not enter Go. So a consumer may keep and free them anywhere, also
 * in a child of fork(). The callbacks of the stream itself enter Go, unless this process is a
 * child of fork().
 */
#include "arrow_stream.h"

#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "floats.h"
#include "_cgo_export.h"

enum { ALIGNMENT = 64 }; /* of buffers and of their padding, as Arrow recommends */

/* ---- schema ------------------------------------------------------------- */

void arrow_schema_release(struct ArrowSchema *schema) {
  if (schema == NULL || schema->release == NULL) return;
  for (int64_t i = 0; i < schema->n_children; i++) {
    struct ArrowSchema *child = schema->children[i];
    if (child == NULL) continue;
    if (child->release != NULL) child->release(child);
    free(child);
  }
  if (schema->dictionary != NULL) {
    if (schema->dictionary->release != NULL) schema->dictionary->release(schema->dictionary);
    free(schema->dictionary);
  }
  free(schema->children);
  free((void *)schema->format);
  free((void *)schema->name);
  free((void *)schema->metadata);
  memset(schema, 0, sizeof *schema);
}

int arrow_schema_init(struct ArrowSchema *schema, size_t format, size_t name,
                      size_t metadata, int64_t flags, int64_t children) {
  memset(schema, 0, sizeof *schema);
  schema->release = arrow_schema_release;
  schema->flags = flags;
  schema->format = calloc(1, format + 1);
  schema->name = calloc(1, name + 1);
  schema->metadata = metadata > 0 ? calloc(1, metadata) : NULL;
  schema->children = children > 0 ? calloc((size_t)children, sizeof *schema->children) : NULL;
  int short_of = schema->format == NULL || schema->name == NULL ||
                 (metadata > 0 && schema->metadata == NULL) ||
                 (children > 0 && schema->children == NULL);
  for (int64_t i = 0; i < children && !short_of; i++) {
    schema->children[i] = calloc(1, sizeof *schema->children[i]);
    schema->n_children = i + 1;
    short_of = schema->children[i] == NULL;
  }
  if (!short_of) return 0;
  arrow_schema_release(schema);
  return ENOMEM;
}

struct ArrowSchema *arrow_schema_node(void) { return calloc(1, sizeof(struct ArrowSchema)); }

/* ---- array -------------------------------------------------------------- */

void arrow_array_release(struct ArrowArray *array) {
  if (array == NULL || array->release == NULL) return;
  for (int64_t i = 0; i < array->n_children; i++) {
    struct ArrowArray *child = array->children[i];
    if (child == NULL) continue;
    if (child->release != NULL) child->release(child);
    free(child);
  }
  if (array->dictionary != NULL) {
    if (array->dictionary->release != NULL) array->dictionary->release(array->dictionary);
    free(array->dictionary);
  }
  for (int64_t i = 0; i < array->n_buffers; i++) free((void *)array->buffers[i]);
  free(array->children);
  free(array->buffers);
  memset(array, 0, sizeof *array);
}

int arrow_array_init(struct ArrowArray *array, int64_t length, int64_t nulls,
                     int64_t buffers, int64_t children) {
  memset(array, 0, sizeof *array);
  array->release = arrow_array_release;
  array->length = length;
  array->null_count = nulls;
  array->buffers = buffers > 0 ? calloc((size_t)buffers, sizeof *array->buffers) : NULL;
  array->children = children > 0 ? calloc((size_t)children, sizeof *array->children) : NULL;
  int short_of = (buffers > 0 && array->buffers == NULL) ||
                 (children > 0 && array->children == NULL);
  if (!short_of) array->n_buffers = buffers;
  for (int64_t i = 0; i < children && !short_of; i++) {
    array->children[i] = calloc(1, sizeof *array->children[i]);
    array->n_children = i + 1;
    short_of = array->children[i] == NULL;
  }
  if (!short_of) return 0;
  arrow_array_release(array);
  return ENOMEM;
}

struct ArrowArray *arrow_array_node(void) { return calloc(1, sizeof(struct ArrowArray)); }

void *arrow_array_buffer(struct ArrowArray *array, int64_t index, size_t size) {
  if (size > SIZE_MAX - ALIGNMENT) return NULL;
  size_t padded = size == 0 ? ALIGNMENT : (size + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
  char *buffer = aligned_alloc(ALIGNMENT, padded);
  if (buffer == NULL) return NULL;
  memset(buffer + size, 0, padded - size);
  array->buffers[index] = buffer;
  return buffer;
}

/* ---- stream ------------------------------------------------------------- */

typedef struct state {
  uint64_t id; /* in arrowStreams, arrow.go */
  char message[STRAP_ARROW_MESSAGE];
} state;

/* Returns the state of a stream whose callback may enter Go. Otherwise returns NULL and sets
 * *refused to an errno value: EINVAL for a released stream, EPERM in a child of fork(). */
static state *enter(struct ArrowArrayStream *stream, int *refused) {
  *refused = EINVAL;
  if (stream == NULL || stream->private_data == NULL) return NULL;
  state *s = stream->private_data;
  s->message[0] = 0;
  if (!strap_is_forked()) return s;
  strncpy(s->message, "the stream belongs to the parent process: read it before fork()",
          sizeof s->message - 1);
  *refused = EPERM;
  return NULL;
}

static int get_schema(struct ArrowArrayStream *stream, struct ArrowSchema *out) {
  OWN_FLOATS;
  int refused;
  memset(out, 0, sizeof *out);
  state *s = enter(stream, &refused);
  return s == NULL ? refused : strapgoArrowSchema(s->id, out, s->message);
}

static int get_next(struct ArrowArrayStream *stream, struct ArrowArray *out) {
  OWN_FLOATS;
  int refused;
  memset(out, 0, sizeof *out);
  state *s = enter(stream, &refused);
  return s == NULL ? refused : strapgoArrowNext(s->id, out, s->message);
}

static const char *get_last_error(struct ArrowArrayStream *stream) {
  if (stream == NULL || stream->private_data == NULL) return NULL;
  state *s = stream->private_data;
  return s->message[0] != 0 ? s->message : NULL;
}

static void release(struct ArrowArrayStream *stream) {
  OWN_FLOATS;
  if (stream == NULL || stream->release == NULL) return;
  state *s = stream->private_data;
  memset(stream, 0, sizeof *stream);
  if (!strap_is_forked()) strapgoArrowRelease(s->id);
  free(s);
}

int arrow_stream_init(struct ArrowArrayStream *stream, uint64_t id) {
  memset(stream, 0, sizeof *stream);
  state *s = calloc(1, sizeof *s);
  if (s == NULL) return ENOMEM;
  s->id = id;
  *stream = (struct ArrowArrayStream){get_schema, get_next, get_last_error, release, s};
  return 0;
}

/* ---- import ------------------------------------------------------------- */

int arrow_import_schema(struct ArrowArrayStream *stream, struct ArrowSchema *out) {
  memset(out, 0, sizeof *out);
  return stream->get_schema(stream, out);
}

int arrow_import_next(struct ArrowArrayStream *stream, struct ArrowArray *out) {
  memset(out, 0, sizeof *out);
  return stream->get_next(stream, out);
}

const char *arrow_import_error(struct ArrowArrayStream *stream) {
  return stream->get_last_error == NULL ? NULL : stream->get_last_error(stream);
}

struct ArrowArrayStream *arrow_import_take(struct ArrowArrayStream *stream) {
  struct ArrowArrayStream *own = malloc(sizeof *own);
  if (own == NULL) {
    stream->release(stream);
    return NULL;
  }
  *own = *stream;
  memset(stream, 0, sizeof *stream);
  return own;
}

void arrow_import_release(struct ArrowArrayStream *own) {
  if (own->release != NULL) own->release(own);
  free(own);
}

void arrow_import_schema_release(struct ArrowSchema *schema) {
  if (schema->release != NULL) schema->release(schema);
}

void arrow_import_array_release(struct ArrowArray *array) {
  if (array->release != NULL) array->release(array);
}
