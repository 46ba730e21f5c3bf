package index

import (
	"errors"
	"os"
	"syscall"
)

// Where lseek goes, linux/fs.h.
const (
	seekData = 3
	seekHole = 4
)

// written counts the bytes of a file of size bytes that are no holes, up to about enough
// of them. Holes take no room on the disk and read as zeros. A file system that does not
// tell its holes has none.
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
