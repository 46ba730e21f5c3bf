/* A capture keeps its id from beginning to end, also when it is resumed. */
#define _XOPEN_SOURCE 700
#include "check.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

static void id_of(strap_session session, char *id) {
  memset(id, 0x5a, STRAP_CAPTURE_ID_BYTES);
  EXPECT(STRAP_OK, strap_capture_id(session, id, STRAP_CAPTURE_ID_BYTES, &error));
  CHECK(strlen(id) == 32 && strspn(id, "0123456789abcdef") == 32, "the id is \"%s\"", id);
}

static void capture(strap_session session) {
  const int64_t shape[] = {1000};
  int32_t values[1000] = {0};
  strap_tensor t = tensor_of(add_layer(session, "layer"), STRAP_INT32, 1, shape, values);
  enqueue(session, &t);
}

static off_t length_of(const char *path) {
  struct stat st;
  return stat(path, &st) == 0 ? st.st_size : -1;
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  char index[4096], tail[4096];
  snprintf(index, sizeof index, "%s.index", path);
  snprintf(tail, sizeof tail, "%s.tail-1", path);
  char first[STRAP_CAPTURE_ID_BYTES], id[STRAP_CAPTURE_ID_BYTES];
  strap_open_options create = open_options(), resume = open_options();
  resume.mode = STRAP_MODE_RESUME;
  resume.resume_offset = STRAP_KEEP_ALL;

  /* The index holds the id before the first packet. */
  strap_session session = open_stream(path, &create);
  id_of(session, first);
  off_t schema = length_of(index);
  CHECK(schema > 0, "the index has %lld bytes", (long long)schema);
  close_stream(session);
  resume.capture_id = first;
  session = open_stream(path, &resume); /* an empty stream */
  id_of(session, id);
  CHECK(strcmp(id, first) == 0, "%s became %s", first, id);
  capture(session);
  uint64_t offset;
  EXPECT(STRAP_OK, strap_checkpoint(session, -1, &offset, &error));
  capture(session);
  close_stream(session);

  /* Resuming with another id is refused, and leaves the files unchanged. */
  off_t stream = length_of(path), rows = length_of(index);
  resume.capture_id = "00112233445566778899aabbccddeeff";
  resume.resume_offset = offset;
  EXPECT(STRAP_ERR_CORRUPT, strap_open(path, &resume, &session, &error));
  CHECK(strstr(error.message, first) && strstr(error.message, resume.capture_id), "%s",
        error.message);
  CHECK(length_of(path) == stream && length_of(index) == rows && length_of(tail) == -1,
        "a refused resume left %lld bytes of %lld, and %lld of %lld in the index",
        (long long)length_of(path), (long long)stream, (long long)length_of(index),
        (long long)rows);

  /* Resuming is also refused, without changes, if the index cannot be opened. */
  char aside[4096];
  snprintf(aside, sizeof aside, "%s.aside", path);
  CHECK(rename(index, aside) == 0 && mkdir(index, 0700) == 0, "no folder %s", index);
  resume.capture_id = NULL;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_open(path, &resume, &session, &error));
  CHECK(length_of(path) == stream && length_of(tail) == -1, "the stream was cut to %lld bytes",
        (long long)length_of(path));

  /* If the index is missing or empty, the capture gets the id in the options; without one, a new
   * id. */
  CHECK(rmdir(index) == 0, "%s is there", index);
  resume.capture_id = first;
  resume.resume_offset = STRAP_KEEP_ALL;
  for (int lost = 0; lost < 2; lost++) {
    session = open_stream(path, &resume);
    id_of(session, id);
    CHECK(strcmp(id, first) == 0, "%s became %s", first, id);
    EXPECT(STRAP_OK, strap_discard(session, NULL, &error)); /* ends like a killed process */
    while (strap_open(path, &resume, &session, &error) == STRAP_ERR_BUSY) sched_yield();
    close_stream(session);
    CHECK(truncate(index, 0) == 0, "cannot empty %s", index);
  }
  resume.capture_id = NULL;
  session = open_stream(path, &resume);
  id_of(session, id);
  CHECK(strcmp(id, first) != 0, "a lost id came back");
  close_stream(session);

  /* A program built with an older header does not have the option, so it is not read. */
  resume.struct_size = offsetof(strap_open_options, capture_id);
  resume.capture_id = "no id";
  close_stream(open_stream(path, &resume));
  puts("a capture keeps its id");
  return 0;
}
