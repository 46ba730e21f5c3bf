/* A stream can be opened again as soon as its capture has ended or its process has died, although
 * children of that process still run. */
#define _POSIX_C_SOURCE 200809L
#include "check.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <unistd.h>

enum { ROUNDS = 200 };

static strap_open_options options;
static atomic_int stop;

/* Starts a child that waits until it is killed. */
static pid_t idle_child(void) {
  pid_t pid = fork();
  CHECK(pid >= 0, "no child");
  if (pid == 0)
    for (;;) pause();
  return pid;
}

static void end(pid_t pid) {
  kill(pid, SIGKILL);
  CHECK(waitpid(pid, NULL, 0) == pid, "the child is lost");
}

static void behind_the_end(const char *path) {
  strap_session session = open_stream(path, &options), other = 0;
  pid_t child = idle_child();
  EXPECT(STRAP_ERR_BUSY, strap_open(path, &options, &other, &error));
  close_stream(session);
  close_stream(open_stream(path, &options));
  end(child);
}

static void behind_a_killed_one(const char *path) {
  int told[2];
  CHECK(pipe(told) == 0, "no pipe");
  pid_t capturing = fork(), child;
  CHECK(capturing >= 0, "no child");
  if (capturing == 0) { /* exec makes a new process image, which may use the library */
    char *const arguments[] = {"locks", (char *)path, "capture", NULL};
    dup2(told[1], STDOUT_FILENO);
    execv("/proc/self/exe", arguments);
    _Exit(1);
  }
  CHECK(read(told[0], &child, sizeof child) == sizeof child, "the program says nothing");
  strap_session session = 0;
  EXPECT(STRAP_ERR_BUSY, strap_open(path, &options, &session, &error));
  end(capturing);
  CHECK(kill(child, 0) == 0, "its child is gone too");
  close_stream(open_stream(path, &options));
  kill(child, SIGKILL);
}

/* Runs in the program that behind_a_killed_one starts: opens a capture and starts a child. */
static void capture(const char *path) {
  open_stream(path, &options);
  pid_t child = idle_child();
  CHECK(write(STDOUT_FILENO, &child, sizeof child) == sizeof child, "no pipe");
  for (;;) pause();
}

static void *fork_often(void *unused) {
  (void)unused;
  pid_t last = 0;
  while (!stop) {
    pid_t next = idle_child();
    if (last != 0) end(last);
    last = next;
  }
  end(last);
  return NULL;
}

/* A child does not inherit the lock, also if the fork happens while the stream is opened. */
static void while_others_fork(const char *path) {
  pthread_t thread;
  CHECK(pthread_create(&thread, NULL, fork_often, NULL) == 0, "no thread");
  for (int i = 0; i < ROUNDS; i++) close_stream(open_stream(path, &options));
  stop = 1;
  pthread_join(thread, NULL);
}

int main(int argc, char **argv) {
  CHECK(argc >= 2, "usage: %s STREAM", argv[0]);
  options = open_options();
  if (argc == 3) capture(argv[1]);
  behind_a_killed_one(argv[1]);
  behind_the_end(argv[1]);
  while_others_fork(argv[1]);
  puts("no child keeps a lock");
  return 0;
}
