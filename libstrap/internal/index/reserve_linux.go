package index

import (
	"os"
	"syscall"
)

const keepSize = 1 // FALLOC_FL_KEEP_SIZE, linux/falloc.h

// reserve asks for disk blocks behind the file's end, so that the rows of the last
// packets that fit a disk still find room when the stream has filled it. File
// systems that cannot do it, or have no room for it, do without.
func reserve(f *os.File, at, n int64) {
	_ = syscall.Fallocate(int(f.Fd()), keepSize, at, n)
}
