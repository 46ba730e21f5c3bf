// Advice on read-ahead, a look into the page cache, and reads past it, by calls of Linux.

package ahead

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// adviceBytes is how much the kernel is asked for at once. It reads no more for one advice than the larger
// of the read-ahead and the largest request of the device, and says nothing about the rest.
const adviceBytes = 1 << 20

// willNeed asks the kernel to read a part of a file into the page cache.
func willNeed(f *os.File, p Part) {
	for at := p.From; at < p.End; at += adviceBytes {
		// The error is no failure: the file system may take no advice.
		_ = unix.Fadvise(int(f.Fd()), at, min(adviceBytes, p.End-at), unix.FADV_WILLNEED)
	}
}

// adviseRandom stops the kernel's own read-ahead, or lets it go on. Read-ahead behind what the page cache has
// would fill it, so that the next parts would be cached too.
func adviseRandom(f *os.File, random bool) {
	advice := unix.FADV_NORMAL
	if random {
		advice = unix.FADV_RANDOM
	}
	_ = unix.Fadvise(int(f.Fd()), 0, 0, advice)
}

// cached reports whether the page cache has a part of a file. The answer is false where the system does not
// tell: before Linux 6.5, and perhaps for a file of another user.
func cached(f *os.File, p Part) bool {
	page := int64(os.Getpagesize())
	first, end := p.From/page, (p.End+page-1)/page
	var have unix.Cachestat_t
	err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{Off: uint64(first * page), Len: uint64((end - first) * page)}, &have, 0)
	return err == nil && have.Cache >= uint64(end-first)
}

// direct is a file descriptor for reads past the page cache.
type direct int

// openDirect opens the file of f again, even if its name is gone.
func openDirect(f *os.File) (direct, error) {
	fd, err := unix.Open(fmt.Sprintf("/proc/self/fd/%d", f.Fd()), unix.O_RDONLY|unix.O_DIRECT|unix.O_CLOEXEC, 0)
	return direct(fd), err
}

// read reads once: behind the end of a file a second read would not begin at a whole block.
func (d direct) read(b []byte, at int64) (n int, err error) {
	for {
		n, err = unix.Pread(int(d), b, at)
		if err != unix.EINTR {
			return max(n, 0), err
		}
	}
}

func (d direct) close() { _ = unix.Close(int(d)) }
