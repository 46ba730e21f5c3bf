/* Rows that are exchanged are those that stood in the buffer, in turn: rows of any length, with and
 * without others for their places, few and many, at any address. */
#include "check.h"

enum { ROWS = 300, MOST_BYTES = 4100, COUNT = 600 };

static unsigned char buffer[ROWS * MOST_BYTES], expected[ROWS * MOST_BYTES];
static unsigned char in[COUNT * MOST_BYTES], out[COUNT * MOST_BYTES + 32];

static void fill(unsigned char *bytes, size_t count, unsigned seed) {
  for (size_t i = 0; i < count; i++) bytes[i] = (unsigned char)((seed = seed * 1664525 + 1013904223) >> 24);
}

/* Exchanges COUNT rows, some of them twice, and compares with one copy after the other. */
static void exchange(size_t bytes, size_t count, size_t from, int refill) {
  uint64_t slots[COUNT];
  for (size_t k = 0; k < count; k++) slots[k] = k * 37 % ROWS;
  fill(buffer, ROWS * bytes, 1);
  fill(in, count * bytes, 2);
  memset(out, 0, sizeof out);
  memcpy(expected, buffer, ROWS * bytes);
  EXPECT(STRAP_OK, strap_exchange_rows(buffer, ROWS, bytes, slots, count, out + from, refill ? in : NULL, &error));
  for (size_t k = 0; k < count; k++) {
    unsigned char *row = expected + slots[k] * bytes;
    CHECK(memcmp(out + from + k * bytes, row, bytes) == 0, "row %zu of %zu with %zu bytes differs", k, count, bytes);
    if (refill) memcpy(row, in + k * bytes, bytes);
  }
  CHECK(memcmp(buffer, expected, ROWS * bytes) == 0, "the buffer of rows with %zu bytes differs", bytes);
  for (size_t i = 0; i < from; i++) CHECK(out[i] == 0, "byte %zu before the rows is written", i);
  for (size_t i = from + count * bytes; i < sizeof out; i++) CHECK(out[i] == 0, "byte %zu is written", i);
}

int main(void) {
  static const size_t widths[] = {0, 1, 8, 63, 64, 65, 80, 2048, 2050, 4096, MOST_BYTES};
  for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
    for (size_t from = 0; from <= 17; from += from == 0 ? 1 : 15)
      for (int refill = 0; refill <= 1; refill++) {
        exchange(widths[i], 1, from, refill);
        exchange(widths[i], COUNT, from, refill);
      }

  uint64_t slots[] = {3, 4, 5};
  memset(out, 0, sizeof out);
  memcpy(expected, buffer, sizeof buffer);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_exchange_rows(buffer, 5, 64, slots, 3, out, in, &error));
  CHECK(strcmp(error.message, "slots[2] = 5: the buffer has 5 rows") == 0, "%s", error.message);
  CHECK(memcmp(buffer, expected, sizeof buffer) == 0 && out[0] == 0, "a refused call copies rows");
  EXPECT(STRAP_OK, strap_exchange_rows(NULL, 0, 64, NULL, 0, NULL, NULL, &error));
  puts("exchanged rows are those of the buffer");
  return 0;
}
