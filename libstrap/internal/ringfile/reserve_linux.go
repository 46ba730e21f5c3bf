// Reserves the room of a file by a call of Linux.

package ringfile

import (
	"errors"
	"os"
	"syscall"
)

// reserve gives a file its length, and room on its file system for all of it.
func reserve(f *os.File, size int64) error {
	for {
		if err := syscall.Fallocate(int(f.Fd()), 0, 0, size); !errors.Is(err, syscall.EINTR) {
			return err
		}
	}
}
