// Allocates disk blocks behind the end of an index, by a call of Linux.

package index

import (
	"os"
	"syscall"
)

const keepSize = 1 // FALLOC_FL_KEEP_SIZE, linux/falloc.h

// reserve allocates disk blocks behind the file's end. So when the stream has filled the disk, there is still
// room for the rows of its last packets. An error of the file system is ignored.
func reserve(f *os.File, at, n int64) {
	_ = syscall.Fallocate(int(f.Fd()), keepSize, at, n)
}
