/*
 * Records accesses through strap.h: libstrap-access hands its blocks to libstrap, which writes
 * them to a Parquet file. The program is instrumented and links both libraries.
 *
 *     record PATH
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "strap_access.h"

#define EXPECT(want, call)                                                              \
  do {                                                                                  \
    strap_status status_ = (call);                                                      \
    if (status_ != (want)) {                                                            \
      fprintf(stderr, "%s:%d: %s gave %d: %s\n", __FILE__, __LINE__, #call, status_, error.message); \
      _Exit(1);                                                                         \
    }                                                                                   \
  } while (0)

enum { N = 100000 };
static strap_error error;
static int *values;

static int to_libstrap(void *context, const void *blocks, size_t size) {
  strap_error problem;
  if (strap_access_write(*(strap_access *)context, blocks, size, &problem) == STRAP_OK) return 0;
  return problem.sys_errno != 0 ? problem.sys_errno : EIO;
}

static void *fill(void *unused) {
  for (int i = 0; i < N; i++) values[i] = i;
  return unused;
}

static void bad_calls(const char *path) {
  strap_access access = 5;
  uint64_t rows = 5;
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_open(NULL, NULL, &access, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_open(path, NULL, NULL, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_open(path, "{\"colour\": 1}", &access, &error));
  EXPECT(STRAP_ERR_NOT_FOUND, strap_access_open("/no/such/folder/x", NULL, &access, &error));
  if (access != 0) _Exit(2);
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_write(77, "x", 1, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_close(77, 0, &rows, &error));
  if (rows != 0) _Exit(2);
  EXPECT(STRAP_OK, strap_access_open(path, NULL, &access, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_write(access, NULL, 1, &error));
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_access_write(access, "no block", 8, &error));
  EXPECT(STRAP_OK, strap_access_write(access, NULL, 0, &error));
  EXPECT(STRAP_ERR_CORRUPT, strap_access_close(access, -1, &rows, &error)); /* no block was written */
  EXPECT(STRAP_ERR_INVALID_STATE, strap_access_close(access, -1, NULL, &error));
  pid_t child = fork();
  if (child == 0) {
    EXPECT(STRAP_ERR_FORKED, strap_access_open(path, NULL, &access, &error));
    EXPECT(STRAP_ERR_FORKED, strap_access_write(1, NULL, 0, &error));
    EXPECT(STRAP_ERR_FORKED, strap_access_close(1, 0, NULL, &error));
    _Exit(0);
  }
  int status;
  if (waitpid(child, &status, 0) != child || status != 0) _Exit(3);
}

int main(int argc, char **argv) {
  if (argc != 2) return 2;
  bad_calls(argv[1]);
  values = malloc(N * sizeof *values);
  strap_access access;
  EXPECT(STRAP_OK, strap_access_open(argv[1], "{\"run_id\": \"r\", \"source\": true}", &access, &error));
  strap_access_options options = {
      .struct_size = sizeof options, .sink = to_libstrap, .context = &access};
  EXPECT(STRAP_OK, strap_access_start(&options, &error));
  uint64_t id, rows = 0;
  EXPECT(STRAP_OK, strap_range_add(values, N * sizeof *values, STRAP_REGION_KV_CACHE, "values", &id, &error));
  pthread_t threads[3];
  for (int i = 0; i < 3; i++) pthread_create(&threads[i], NULL, fill, NULL);
  for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
  EXPECT(STRAP_OK, strap_access_stop(&error));
  strap_status status;
  int calls = 0;
  while ((status = strap_access_close(access, 0, &rows, &error)) == STRAP_ERR_TIMEOUT) calls++;
  EXPECT(STRAP_OK, status);
  if (calls == 0) return 3;
  printf("%llu rows\n", (unsigned long long)rows);
  return 0;
}
