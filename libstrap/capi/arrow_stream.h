/*
 * arrow_stream.h - the C half of the Arrow export: structs, memory and callbacks. C allocates
 * the memory here and Go fills it. No memory of Go's heap leaves the library.
 *
 * For use inside the library only.
 */
#ifndef STRAP_ARROW_STREAM_H
#define STRAP_ARROW_STREAM_H

#include <stddef.h>
#include <stdint.h>

#include "arrow_abi.h"

enum { STRAP_ARROW_MESSAGE = 1024 };

/* Reports whether this process is a child of fork(), in which Go must not be entered. It is hidden,
 * because the version script exports every other name with its prefix. */
__attribute__((visibility("hidden"))) int strap_is_forked(void);

/* Makes *stream a stream over the records that arrowStreams (arrow.go) has under ID. Returns 0 or
 * ENOMEM. */
int arrow_stream_init(struct ArrowArrayStream *stream, uint64_t id);

/* Makes *schema a node with CHILDREN empty children, and with zeroed memory for the format, name
 * and metadata. FORMAT, NAME and METADATA are their lengths in bytes. Format and name get one byte
 * more, for a zero. If METADATA is 0, metadata is NULL. Returns 0, or ENOMEM with nothing to
 * release. */
int arrow_schema_init(struct ArrowSchema *schema, size_t format, size_t name,
                      size_t metadata, int64_t flags, int64_t children);

/* Makes *array a node with BUFFERS absent buffers and CHILDREN empty children. Returns 0, or ENOMEM
 * with nothing to release. */
int arrow_array_init(struct ArrowArray *array, int64_t length, int64_t nulls,
                     int64_t buffers, int64_t children);

/* Allocates SIZE bytes for buffer INDEX of *array and returns them, or NULL if there is no memory.
 * The buffer is aligned to 64 bytes and padded with zeros to a multiple of 64. The array owns it. */
void *arrow_array_buffer(struct ArrowArray *array, int64_t index, size_t size);

/* Return an empty node for a dictionary, or NULL if there is no memory. The release of the schema
 * or array that the caller puts the node into frees it. */
struct ArrowSchema *arrow_schema_node(void);
struct ArrowArray *arrow_array_node(void);

/* Import. arrow_import_take moves *stream into memory of its own, marks *stream released, and
 * returns the copy. If there is no memory, it releases *stream and returns NULL.
 * arrow_import_release releases and frees the copy. The other functions call callbacks of the
 * caller, because Go cannot call pointers to C functions.
 * arrow_import_schema and arrow_import_next return 0 or an errno value. arrow_import_error returns
 * the message, or NULL if there is none. */
struct ArrowArrayStream *arrow_import_take(struct ArrowArrayStream *stream);
int arrow_import_schema(struct ArrowArrayStream *stream, struct ArrowSchema *out);
int arrow_import_next(struct ArrowArrayStream *stream, struct ArrowArray *out);
const char *arrow_import_error(struct ArrowArrayStream *stream);
void arrow_import_release(struct ArrowArrayStream *own);
void arrow_import_schema_release(struct ArrowSchema *schema);
void arrow_import_array_release(struct ArrowArray *array);

void arrow_schema_release(struct ArrowSchema *schema);
void arrow_array_release(struct ArrowArray *array);

#endif /* STRAP_ARROW_STREAM_H */
