/* A process that keeps its last steps in a ring file is killed, and another one salvages them. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

/* Tensors of up to 16 KiB of a step that has not ended may wait outside of the file. */
enum { VALUES = 8192, STEPS = 300 };

static strap_open_options ring_options(const char *ring) {
  strap_open_options options = open_options();
  options.ring = 1;
  options.keep_float32 = 1;
  options.max_memory_bytes = 2 << 20;
  options.ring_file = ring;
  return options;
}

/* Runs STEPS steps and one more that does not end, in a process that is killed then. */
static void record(const char *ring) {
  strap_open_options options = ring_options(ring);
  strap_session session = open_stream("the flight recorder", &options);
  strap_session other = 0;
  EXPECT(STRAP_ERR_BUSY, strap_open("another one", &options, &other, &error));
  const uint32_t layers[] = {add_layer(session, "first"), add_layer(session, "second")};
  const int64_t shape[] = {VALUES};
  static float values[VALUES];
  for (int64_t step = 0; step <= STEPS; step++) {
    for (int layer = 0; layer < 2; layer++) {
      for (int i = 0; i < VALUES; i++) values[i] = (float)(step * 10 + layer);
      strap_tensor t = tensor_of(layers[layer], STRAP_FLOAT32, 1, shape, values);
      t.step = step;
      enqueue(session, &t);
    }
    if (step < STEPS) EXPECT(STRAP_OK, strap_step_end(session, step, -1, &error));
  }
  kill(getpid(), SIGKILL);
}

struct seen {
  int64_t first, last, running;
  uint64_t whole;
};

static void see(void *context, const strap_ring_step *step) {
  struct seen *seen = context;
  CHECK(step->packets == 2 && step->missing == 0 && step->not_captured == 0, "step %lld has %llu packets",
        (long long)step->step, (unsigned long long)step->packets);
  CHECK(step->whole == step->ended, "step %lld", (long long)step->step);
  if (!step->whole) {
    seen->running = step->step;
    return;
  }
  if (seen->whole++ == 0) seen->first = step->step;
  CHECK(step->step == seen->first + (int64_t)seen->whole - 1, "step %lld comes out of order",
        (long long)step->step);
  seen->last = step->step;
}

int main(int argc, char **argv) {
  char ring[4096], out[4096];
  if (argc == 3) record(argv[2]);
  snprintf(ring, sizeof ring, "%s.ring", stream_path(argc, argv));
  snprintf(out, sizeof out, "%s.salvaged", stream_path(argc, argv));
  pid_t child = fork();
  if (child == 0) { /* where the library cannot be used */
    execl(argv[0], argv[0], argv[1], ring, (char *)NULL);
    _exit(127);
  }
  int status = 0;
  CHECK(waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL,
        "the child ended with %d", status);

  strap_open_options options = ring_options(ring);
  strap_session session = 0;
  EXPECT(STRAP_ERR_INVALID_STATE, strap_open("the next one", &options, &session, &error));
  CHECK(strstr(error.message, "strap salvage ring") != NULL, "%s", error.message);

  struct seen seen = {0};
  strap_salvage_ring_options salvage = {.struct_size = sizeof salvage, .step = see, .context = &seen};
  strap_salvage_ring_report report = {.struct_size = sizeof report};
  EXPECT(STRAP_OK, strap_salvage_ring(ring, out, &salvage, &report, &error));
  CHECK(report.pid == child && report.steps == seen.whole + 1 && report.whole_steps == seen.whole &&
            report.packets == 2 * report.steps && report.damaged == 0 && report.problem[0] == '\0',
        "%llu steps, %llu packets: %s", (unsigned long long)report.steps,
        (unsigned long long)report.packets, report.problem);
  CHECK(seen.whole > 20 && seen.last == STEPS - 1 && seen.running == STEPS, "steps %lld to %lld",
        (long long)seen.first, (long long)seen.last);
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_salvage_ring(ring, out, NULL, NULL, &error)); /* exists */
  salvage.force = 1;
  salvage.step = NULL;
  EXPECT(STRAP_OK, strap_salvage_ring(ring, out, &salvage, NULL, &error));
  EXPECT(STRAP_ERR_CORRUPT, strap_salvage_ring(out, ring, &salvage, NULL, &error)); /* is no ring file */
  EXPECT(STRAP_ERR_NOT_FOUND, strap_salvage_ring("no such file", out, NULL, NULL, &error));

  strap_reader_info info;
  strap_reader reader = open_reader(out, &info);
  CHECK(info.packets == report.packets && info.problem[0] == '\0', "%s", info.problem);
  static float values[VALUES];
  for (uint64_t row = 0; row < info.packets; row++) {
    strap_packet p = packet_at(reader, row);
    EXPECT(STRAP_OK, strap_reader_read(reader, row, values, sizeof values, &error));
    for (int i = 0; i < VALUES; i++)
      CHECK(values[i] == (float)(p.step * 10 + (int64_t)(row % 2)), "step %lld has other values",
            (long long)p.step);
  }
  close_reader(reader);

  CHECK(unlink(ring) == 0, "the ring file cannot be removed");
  session = open_stream("the next one", &options);
  EXPECT(STRAP_ERR_BUSY, strap_salvage_ring(ring, out, &salvage, NULL, &error));
  CHECK(access(ring, F_OK) == 0, "there is no ring file");
  close_stream(session);
  CHECK(access(ring, F_OK) != 0, "the end left the ring file");
  options.ring_file = "";
  EXPECT(STRAP_ERR_INVALID_ARGUMENT, strap_open("an empty path", &options, &session, &error));
  puts("the last steps of a killed process are salvaged");
  return 0;
}
