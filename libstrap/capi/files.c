/*
 * files.c - opens files for stream.Files, and closes them in children.
 *
 * A lock by flock() belongs to the open file, which fork() shares with the child. So the
 * child closes it, before anything else runs there.
 */
#define _GNU_SOURCE
#include "files.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>

/* Held while the process forks, so that the child finds the list complete. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int *open_files; /* descriptors */
static int count, room;
static unsigned long forks;

enum { TRIES = 3 };

static int add(int fd) {
  if (count == room) {
    const int more = room == 0 ? 16 : 2 * room;
    int *larger = realloc(open_files, (size_t)more * sizeof *larger);
    if (larger == NULL) return 0;
    open_files = larger;
    room = more;
  }
  open_files[count++] = fd;
  return 1;
}

int files_open(const char *path, int flags, int mode) {
  for (int tries = 1;; tries++) {
    /* Open without the lock: a file system that does not answer must not block fork(). But a
     * process may fork more often than the file system answers. */
    const int locked = tries == TRIES;
    pthread_mutex_lock(&lock);
    const unsigned long before = forks;
    if (!locked) pthread_mutex_unlock(&lock);
    const int fd = open(path, flags | O_CLOEXEC, mode);
    const int failure = fd < 0 ? errno : 0;
    if (!locked) pthread_mutex_lock(&lock);
    const int forked = forks != before; /* the child may hold the file, unlisted */
    const int added = fd >= 0 && !forked && add(fd);
    pthread_mutex_unlock(&lock);
    if (added) return fd;
    if (fd < 0) return -failure;
    close(fd);
    if (!forked) return -ENOMEM;
    flags &= ~O_EXCL; /* the file is there now */
  }
}

void files_forget(int fd) {
  pthread_mutex_lock(&lock);
  for (int i = 0; i < count; i++)
    if (open_files[i] == fd) {
      open_files[i] = open_files[--count];
      break;
    }
  pthread_mutex_unlock(&lock);
}

void files_before_fork(void) {
  pthread_mutex_lock(&lock);
  forks++;
}

void files_behind_fork(void) { pthread_mutex_unlock(&lock); }

void files_in_child(void) {
  for (int i = 0; i < count; i++) close(open_files[i]);
  count = 0;
  pthread_mutex_unlock(&lock);
}
