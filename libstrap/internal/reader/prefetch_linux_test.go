package reader_test

import (
	"os"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/reader"
)

// cached returns how many pages of a file the page cache has.
func cached(t *testing.T, path string) (pages int) {
	t.Helper()
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	info, err := f.Stat()
	check(t, err)
	data, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	check(t, err)
	defer unix.Munmap(data)
	here := make([]byte, (len(data)+os.Getpagesize()-1)/os.Getpagesize())
	check(t, unix.Madvise(data, unix.MADV_RANDOM))
	_, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)), uintptr(unsafe.Pointer(&here[0])))
	if errno != 0 {
		t.Skipf("mincore: %v", errno)
	}
	for _, one := range here {
		pages += int(one & 1)
	}
	return pages
}

func TestPrefetchedPacketsComeIntoThePageCache(t *testing.T) {
	c := &capture{}
	for range 4 {
		c.add(t, "layer", "none", ramp(3<<20))
	}
	path := save(t, c.stream, c.rows)
	r := open(t, path, reader.Options{}) // it reads some of the file
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	check(t, f.Sync())
	check(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	before := cached(t, path)
	if before > 2<<20/os.Getpagesize() {
		t.Skipf("the file system keeps %d pages", before)
	}
	check(t, r.Prefetch([]uint64{1, 2}))
	for range 100 {
		if cached(t, path)-before >= 5<<20/os.Getpagesize() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d pages before, %d after", before, cached(t, path))
}
