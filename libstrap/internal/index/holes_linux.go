// Counts the bytes of a file that are not in holes, by calls of Linux.

package index

import (
	"errors"
	"os"
	"syscall"
)

// Arguments of lseek, linux/fs.h.
const (
	seekData = 3
	seekHole = 4
)

// written counts the bytes of a file that are not in holes, and stops at about enough. size is the length of
// the file. Holes take no disk space and read as zeros. If the file system does not report holes, written
// counts all bytes.
func written(f *os.File, size, enough int64) (n int64) {
	for at := int64(0); at < size && n < enough; {
		from, err := f.Seek(at, seekData)
		if errors.Is(err, syscall.ENXIO) { // a hole up to the end
			return n
		}
		if err != nil {
			return size
		}
		to, err := f.Seek(from, seekHole)
		if err != nil {
			return size
		}
		n += min(to, size) - min(from, size)
		at = to
	}
	return n
}
