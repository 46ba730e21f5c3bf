/* Files that are closed in a child after fork(). So the lock of a capture ends with the process
 * that captures, and not with its last child. */
#ifndef STRAP_FILES_H
#define STRAP_FILES_H

/* open(2) with O_CLOEXEC. Returns a descriptor, or minus an errno. */
int files_open(const char *path, int flags, int mode);

/* Call before the descriptor is closed. */
void files_forget(int fd);

/* The handlers for pthread_atfork(). */
void files_before_fork(void);
void files_behind_fork(void);
void files_in_child(void);

#endif
