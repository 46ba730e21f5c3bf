package reader

import (
	"os"

	"golang.org/x/sys/unix"
)

// adviceBytes is how much the kernel is asked for at once. It reads no more for one advice than the larger
// of the read-ahead and the largest request of the device, and says nothing about the rest.
const adviceBytes = 1 << 20

// willNeed asks the kernel to read a part of a file into the page cache.
func willNeed(f *os.File, at, length int64) {
	for end := at + length; at < end; at += adviceBytes {
		// The error is no failure: the file system may take no advice.
		_ = unix.Fadvise(int(f.Fd()), at, min(adviceBytes, end-at), unix.FADV_WILLNEED)
	}
}
