/* Rows of a buffer that are exchanged. */
#ifndef STRAP_ROWS_H
#define STRAP_ROWS_H

#include <stddef.h>
#include <stdint.h>

/* Copies COUNT rows of a buffer to OUT, one after the other, and the rows at IN to their places, unless IN
 * is NULL. The buffer, OUT and IN must not overlap. */
void rows_exchange(char *buffer, size_t row_bytes, const uint64_t *slots, size_t count, char *out,
                   const char *in);

#endif
