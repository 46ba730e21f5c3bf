/* A new capture overwrites no foreign file, and does not disturb readers of the old capture. */
#define _XOPEN_SOURCE 700
#include "check.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

static const char weights[] = "the weights of somebody, years of work";

static void put(const char *path) {
  FILE *file = fopen(path, "wb");
  CHECK(file && fwrite(weights, 1, sizeof weights, file) == sizeof weights && fclose(file) == 0,
        "cannot write %s", path);
}

static void stays(const char *path) {
  char read[sizeof weights + 1];
  FILE *file = fopen(path, "rb");
  CHECK(file && fread(read, 1, sizeof read, file) == sizeof weights, "%s has another length", path);
  CHECK(memcmp(read, weights, sizeof weights) == 0, "%s has changed", path);
  fclose(file);
}

static void capture(strap_session session, int n) {
  const int64_t shape[] = {1000};
  int32_t values[1000];
  for (int i = 0; i < 1000; i++) values[i] = n;
  strap_tensor t = tensor_of(add_layer(session, "layer"), STRAP_INT32, 1, shape, values);
  enqueue(session, &t);
}

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  char index[4096], moved[4096], moved_index[4200];
  snprintf(index, sizeof index, "%s.index", path);
  snprintf(moved, sizeof moved, "%s.moved", path);
  snprintf(moved_index, sizeof moved_index, "%s.index", moved);
  strap_open_options options = open_options();
  strap_session session;

  /* strap_open refuses a path if a foreign file has the name of the stream or of the index. */
  put(path);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_open(path, &options, &session, &error));
  CHECK(strstr(error.message, path) && strstr(error.message, "overwrite"), "%s", error.message);
  stays(path);
  CHECK(access(index, F_OK) != 0, "%s is left", index);
  CHECK(unlink(path) == 0, "%s is gone", path);
  put(index);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_open(path, &options, &session, &error));
  CHECK(strstr(error.message, index) && strstr(error.message, "overwrite"), "%s", error.message);
  stays(index);
  CHECK(access(path, F_OK) != 0, "%s is left", path);

  /* With `overwrite` it replaces the files. */
  put(path);
  options.overwrite = 1;
  session = open_stream(path, &options);
  capture(session, 1);
  close_stream(session);
  options.overwrite = 0;

  /* A descriptor, a mapping and a reader of the old stream keep its content. */
  CHECK(chmod(path, 0600) == 0, "cannot chmod %s", path);
  strap_reader reader = open_reader(path, NULL);
  int fd = open(path, O_RDONLY);
  struct stat before, after;
  CHECK(fd >= 0 && fstat(fd, &before) == 0, "cannot open %s", path);
  const size_t size = (size_t)before.st_size;
  const unsigned char *mapped = (const unsigned char *)mmap(NULL, size, PROT_READ, MAP_SHARED, fd, 0);
  unsigned char *copy = (unsigned char *)malloc(size);
  CHECK(mapped != MAP_FAILED && copy != NULL, "cannot map %s", path);
  memcpy(copy, mapped, size);
  session = open_stream(path, &options);
  capture(session, 2);
  capture(session, 3);
  CHECK(memcmp(copy, mapped, size) == 0, "the old stream changed under its reader");
  int32_t *values = (int32_t *)read_row(reader, 0);
  CHECK(values[999] == 1, "the reader of the old stream has %d", values[999]);
  free(values);
  free(copy);
  close_reader(reader);
  CHECK(munmap((void *)mapped, size) == 0 && close(fd) == 0, "cannot unmap %s", path);
  CHECK(stat(path, &after) == 0 && (after.st_mode & 0777) == 0600, "the mode is %o",
        (unsigned)after.st_mode);
  close_stream(session);
  reader = open_reader(path, NULL);
  CHECK(packet_at(reader, 1).ndim == 1, "the new stream has no index");
  close_reader(reader);

  /* A stream that is renamed during its capture is complete, and strap_close moves the index. */
  session = open_stream(path, &options);
  capture(session, 4);
  CHECK(rename(path, moved) == 0, "cannot rename %s", path);
  EXPECT(STRAP_ERR_NOT_FOUND, strap_close(session, -1, &error));
  CHECK(strstr(error.message, moved), "%s", error.message);
  CHECK(access(index, F_OK) != 0 && access(moved_index, F_OK) == 0, "%s was left behind", index);
  reader = open_reader(moved, NULL);
  CHECK(packet_at(reader, 0).ndim == 1, "the renamed stream has no index");
  close_reader(reader);
  EXPECT(STRAP_ERR_INVALID_STATE, strap_close(session, -1, &error)); /* the handle is gone */
  puts("files of others stay");
  return 0;
}
