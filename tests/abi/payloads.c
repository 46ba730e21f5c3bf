/* strap_encode and strap_decode convert payloads without a stream, and refuse damaged payloads. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

static const strap_codec codecs[] = {STRAP_CODEC_NONE, STRAP_CODEC_LZ4, STRAP_CODEC_ZSTD};

/* Allocates exactly SIZE bytes, so that the sanitizer finds an access past the end. */
static unsigned char *exactly(size_t size) {
  unsigned char *block = (unsigned char *)malloc(size);
  CHECK(block != NULL, "no memory for %zu bytes", size);
  return block;
}

static void round_trip(strap_codec codec, size_t size, int noise) {
  unsigned char *source = exactly(size), *back = exactly(size);
  uint32_t random = 1;
  for (size_t i = 0; i < size; i++) {
    random = random * 1664525 + 1013904223;
    source[i] = (unsigned char)(noise ? random >> 24 : i / 100);
  }
  size_t room = strap_encode_bound(codec, size), length = 0;
  CHECK(room >= size, "a bound of %zu for %zu bytes", room, size);
  unsigned char *data = exactly(room);
  EXPECT(STRAP_OK, strap_encode(codec, 0, source, size, data, room, &length, &error));
  CHECK(length <= room && (codec == STRAP_CODEC_NONE || noise || size < 1000 || length < size / 4),
        "codec %d: %zu bytes became %zu", codec, size, length);
  unsigned char *payload = exactly(length);
  memcpy(payload, data, length);

  uint64_t decoded = 0;
  EXPECT(STRAP_OK, strap_decoded_size(codec, payload, length, &decoded, &error));
  CHECK(decoded == size, "codec %d: %zu bytes decode to %llu", codec, size,
        (unsigned long long)decoded);
  EXPECT(STRAP_OK, strap_decode(codec, payload, length, back, size, &error));
  CHECK(memcmp(source, back, size) == 0, "codec %d: %zu bytes came back changed", codec, size);

  if (codec != STRAP_CODEC_NONE && size > 0) {
    strap_status status = strap_decode(codec, payload, length - 1, back, size, &error);
    CHECK(status == STRAP_ERR_CORRUPT, "codec %d, cut payload: %d", codec, status);
    memset(payload, 0x5a, length);
    status = strap_decode(codec, payload, length, back, size, &error);
    CHECK(status == STRAP_ERR_CORRUPT, "codec %d, other bytes: %d", codec, status);
    EXPECT(STRAP_ERR_CORRUPT, strap_decoded_size(codec, payload, length, &decoded, &error));
  }
  if (size > 0) {
    EXPECT(STRAP_ERR_INVALID_ARGUMENT,
           strap_encode(codec, 0, source, size, data, size - 1, &length, &error));
    CHECK(length == 0, "a refused call gave the length %zu", length);
  }
  free(source), free(back), free(data), free(payload);
}

/* Decodes a hand-written archive of 64 equal float16 values: 120 times the step 1.0625 / 128. */
static void archived(void) {
  static const unsigned char payload[] = {
      'S', 'A', 'R', 'C', 1, STRAP_FLOAT16, 128, 0, 64, 0, 0, 0, /* header */
      11, 0, 0, 0, 10, 0, 0, 0, 0, 0, 0, 0,                      /* lengths of the frames */
      0x28, 0xB5, 0x2F, 0xFD, 0x20, 2, 0x11, 0, 0, 0x08, 0x3C,   /* the step as bfloat16 */
      0x28, 0xB5, 0x2F, 0xFD, 0x20, 64, 0x03, 2, 0, 120,         /* the code, 64 times */
  };
  uint16_t values[64];
  uint64_t decoded = 0;
  EXPECT(STRAP_OK,
         strap_decoded_size(STRAP_CODEC_ARCHIVE, payload, sizeof payload, &decoded, &error));
  CHECK(decoded == sizeof values, "64 float16 have %llu bytes", (unsigned long long)decoded);
  EXPECT(STRAP_OK, strap_decode(STRAP_CODEC_ARCHIVE, payload, sizeof payload, values, sizeof values,
                                &error));
  for (int i = 0; i < 64; i++)
    CHECK(values[i] == 0x3BF8 /* 0.99609375 */, "value %d is %04x", i, (unsigned)values[i]);
  EXPECT(STRAP_ERR_CORRUPT, strap_decode(STRAP_CODEC_ARCHIVE, payload, sizeof payload - 1, values,
                                         sizeof values, &error));
}

/* Sizes above PTRDIFF_MAX are refused, because no object in C is larger. */
static void sizes_that_no_object_has(void) {
  unsigned char bytes[64] = {0};
  static const size_t sizes[] = {PTRDIFF_MAX, (size_t)PTRDIFF_MAX + 1, SIZE_MAX - 8, SIZE_MAX};
  for (strap_codec codec = STRAP_CODEC_NONE; codec <= STRAP_CODEC_ZSTD; codec++) {
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++) {
      const size_t size = sizes[s], bound = strap_encode_bound(codec, size);
      size_t length;
      uint64_t decoded;
      const int fits = codec == STRAP_CODEC_NONE && size == PTRDIFF_MAX;
      CHECK(bound == (fits ? size : 0), "codec %d: a bound of %zu for %zu bytes", codec, bound,
            size);
      EXPECT(STRAP_ERR_INVALID_ARGUMENT,
             strap_encode(codec, 0, bytes, size, bytes, sizeof bytes, &length, &error));
      if (fits) continue;
      EXPECT(STRAP_ERR_INVALID_ARGUMENT,
             strap_encode(codec, 0, bytes, size, bytes, SIZE_MAX, &length, &error));
      CHECK(strstr(error.message, "size") != NULL, "%s", error.message);
      if (size == PTRDIFF_MAX) continue;
      EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_decode(codec, bytes, size, bytes, 8, &error));
      EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_decode(codec, bytes, 8, bytes, size, &error));
      if (codec != STRAP_CODEC_NONE) /* with no codec the payload's size is the answer */
        EXPECT(STRAP_ERR_INVALID_ARGUMENT,
               strap_decoded_size(codec, bytes, size, &decoded, &error));
    }
  }
}

int main(void) {
  static const size_t sizes[] = {0, 1, 7, 255, 256, 4096, 100003, 5 << 20};
  for (size_t c = 0; c < sizeof codecs / sizeof *codecs; c++)
    for (size_t s = 0; s < sizeof sizes / sizeof *sizes; s++)
      for (int noise = 0; noise <= 1; noise++) round_trip(codecs[c], sizes[s], noise);

  unsigned char bytes[64] = {0};
  size_t length;
  uint64_t decoded;
  for (strap_codec unknown = -1; unknown <= 4; unknown += 5) {
    CHECK(strap_encode_bound(unknown, 8) == 0, "a bound for codec %d", unknown);
    EXPECT(STRAP_ERR_INVALID_ARGUMENT,
           strap_encode(unknown, 0, bytes, 8, bytes, 64, &length, &error));
    EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_decoded_size(unknown, bytes, 8, &decoded, &error));
    EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_decode(unknown, bytes, 8, bytes, 8, &error));
  }
  archived();
  sizes_that_no_object_has();
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_encode(STRAP_CODEC_ARCHIVE, 0, bytes, 8, bytes, 64, &length, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_encode(STRAP_CODEC_LZ4, 99, bytes, 8, bytes + 8, 56, &length, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_encode(STRAP_CODEC_LZ4, 0, NULL, 8, bytes, 64, &length, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_encode(STRAP_CODEC_LZ4, 0, bytes, 8, NULL, 64, &length, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_encode(STRAP_CODEC_LZ4, 0, bytes, 8, bytes, 64, NULL, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT,
         strap_decoded_size(STRAP_CODEC_LZ4, NULL, 8, &decoded, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_decoded_size(STRAP_CODEC_LZ4, bytes, 8, NULL, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_decode(STRAP_CODEC_LZ4, NULL, 8, bytes, 8, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_decode(STRAP_CODEC_LZ4, bytes, 8, NULL, 8, &error));
  puts("each codec decodes what it encoded");
  return 0;
}
