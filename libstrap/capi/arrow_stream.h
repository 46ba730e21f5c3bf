/*
 * arrow_stream.h - the C half of the Arrow export: structs, memory and
 * callbacks. Go fills what is allocated here and never hands out its own heap.
 *
 * Inside the library only.
 */
#ifndef STRAP_ARROW_STREAM_H
#define STRAP_ARROW_STREAM_H

#include <stddef.h>
#include <stdint.h>

#include "arrow_abi.h"

enum { STRAP_ARROW_MESSAGE = 1024 };

/* Whether this process is a child after fork(), where Go must not be entered.
 * Hidden: the version script would let it out, by its prefix. */
__attribute__((visibility("hidden"))) int strap_is_forked(void);

/* Makes *stream a stream over the records that Go's table has under ID.
 * Gives 0, or ENOMEM. */
int arrow_stream_init(struct ArrowArrayStream *stream, uint64_t id);

/* Makes *schema a node with room for FORMAT, NAME and METADATA of the given
 * lengths, zeroed, and with CHILDREN empty nodes. The strings have one byte
 * more, for their zero; a metadata length of 0 leaves metadata NULL. Gives 0,
 * or ENOMEM with nothing to release. */
int arrow_schema_init(struct ArrowSchema *schema, size_t format, size_t name,
                      size_t metadata, int64_t flags, int64_t children);

/* Makes *array a node with BUFFERS absent buffers and CHILDREN empty nodes.
 * Gives 0, or ENOMEM with nothing to release. */
int arrow_array_init(struct ArrowArray *array, int64_t length, int64_t nulls,
                     int64_t buffers, int64_t children);

/* Gives buffer INDEX of *array SIZE bytes, aligned and padded with zeros to 64,
 * or NULL when there is no memory. */
void *arrow_array_buffer(struct ArrowArray *array, int64_t index, size_t size);

/* An empty node for a dictionary, which its owner's release frees; or NULL. */
struct ArrowSchema *arrow_schema_node(void);
struct ArrowArray *arrow_array_node(void);

/* Import: a stream moved into memory of our own, and calls of its callbacks,
 * which Go cannot make. Gives what they give, an errno value; NULL where there is
 * no memory or no message. */
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
