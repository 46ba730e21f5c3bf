/* A reader follows a running capture: each strap_reader_follow opens the rows added since. */
#include "check.h"

int main(int argc, char **argv) {
  const char *path = stream_path(argc, argv);
  strap_open_options options = open_options();
  strap_session session = open_stream(path, &options);
  uint32_t layer = add_layer(session, "layer");
  strap_reader_info info = {.struct_size = sizeof info};
  strap_reader reader = open_reader(path, &info), more;
  CHECK(info.live && info.rows == 0, "an empty capture that runs has %llu rows",
        (unsigned long long)info.rows);

  const int64_t shape[] = {2};
  for (float step = 0; step < 3; step++) {
    float values[] = {step, step}, found[2];
    strap_tensor t = tensor_of(layer, STRAP_INT32, 1, shape, values); /* int32 is stored as it is */
    enqueue(session, &t);
    EXPECT(STRAP_OK, strap_checkpoint(session, -1, NULL, &error));
    EXPECT(STRAP_OK, strap_reader_follow(reader, step > 0, &more, &info, &error));
    CHECK(more != 0 && info.rows == 1 && info.live, "step %g: %llu rows", step,
          (unsigned long long)info.rows);
    close_reader(reader);
    reader = more;
    EXPECT(STRAP_OK, strap_reader_read(reader, 0, found, sizeof found, &error));
    CHECK(found[0] == step && found[1] == step, "step %g has %g", step, found[0]);
    EXPECT(STRAP_OK, strap_reader_follow(reader, 1, &more, NULL, &error));
    CHECK(more == 0, "nothing came, and there is the reader %llu", (unsigned long long)more);
  }
  close_stream(session);
  EXPECT(STRAP_OK, strap_reader_follow(reader, 1, &more, &info, &error));
  CHECK(more != 0 && !info.live && info.rows == 0 && info.problem[0] == 0, "at the end: %s",
        info.problem);
  close_reader(more);
  close_reader(reader);
  puts("followed to the end");
  return 0;
}
