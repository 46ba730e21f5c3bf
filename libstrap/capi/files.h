/* Files that a child after fork() does not keep: the lock of a capture ends with the process
 * that captures, also where a child of it lives on. */
#ifndef STRAP_FILES_H
#define STRAP_FILES_H

/* open(2), close on exec; a descriptor, or minus an errno. */
int files_open(const char *path, int flags, int mode);

/* The descriptor is about to be closed. */
void files_forget(int fd);

/* To be called around each fork(). */
void files_before_fork(void);
void files_behind_fork(void);
void files_in_child(void);

#endif
