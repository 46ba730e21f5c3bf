/* If the file cannot grow, every later call fails at once with the errno of the write, and so does
 * strap_close. The packets that are already in the file stay readable. */
#define _XOPEN_SOURCE 700
#include "check.h"

#include <errno.h>
#include <signal.h>
#include <sys/resource.h>

enum { LIMIT = 3 << 20, VALUES = 8192, MOST = 100000 };

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  signal(SIGXFSZ, SIG_IGN);
  struct rlimit limit = {LIMIT, LIMIT};
  CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0, "cannot limit the size of files");

  strap_open_options options = open_options();
  options.max_memory_bytes = 2 << 20;
  strap_session session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "layer");
  static int64_t values[VALUES];
  const int64_t shape[] = {VALUES};
  strap_tensor t;
  strap_status status = STRAP_OK;
  int accepted = 0;
  double begin = seconds();
  for (; status == STRAP_OK; accepted++) {
    CHECK(accepted < MOST, "%d tensors went into %d bytes", accepted, LIMIT);
    for (int i = 0; i < VALUES; i++) values[i] = accepted;
    t = tensor_of(layer, STRAP_INT64, 1, shape, values);
    t.step = accepted;
    status = strap_enqueue(session, &t, 10000, &error);
  }
  accepted--;
  CHECK(status == STRAP_ERR_IO && error.sys_errno == EFBIG, "enqueue gave %d, errno %d: %s", status,
        error.sys_errno, error.message);

  t = tensor_of(layer, STRAP_INT64, 1, shape, values);
  EXPECT(STRAP_ERR_IO, strap_enqueue(session, &t, -1, &error));
  EXPECT(STRAP_ERR_IO, strap_flush(session, -1, &error));
  CHECK(error.sys_errno == EFBIG, "errno %d", error.sys_errno);
  EXPECT(STRAP_ERR_IO, strap_checkpoint(session, -1, NULL, &error));
  strap_stats_t s = stats_of(session);
  CHECK(s.failure == STRAP_ERR_IO && s.packets <= (uint64_t)accepted, "failure %d", s.failure);
  EXPECT(STRAP_ERR_IO, strap_close(session, -1, &error));
  EXPECT(STRAP_ERR_INVALID_STATE, strap_close(session, -1, &error));
  CHECK(seconds() - begin < 120, "%g seconds to fail", seconds() - begin);

  strap_reader_info info;
  strap_reader reader = open_reader(path, &info);
  CHECK(info.packets > 0 && info.packets <= (uint64_t)accepted, "%llu packets of %d",
        (unsigned long long)info.packets, accepted);
  for (uint64_t row = 0; row < info.packets; row++) {
    int64_t *read = (int64_t *)read_row(reader, row);
    for (int i = 0; i < VALUES; i++)
      CHECK(read[i] == (int64_t)row, "packet %llu holds %lld", (unsigned long long)row,
            (long long)read[i]);
    free(read);
  }
  close_reader(reader);
  printf("%llu of %d tensors stand in the file\n", (unsigned long long)info.packets, accepted);
  return 0;
}
