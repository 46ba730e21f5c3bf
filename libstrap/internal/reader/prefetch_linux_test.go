package reader_test

import (
	"bytes"
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

// forget lets the page cache forget a file. It skips the test if too many pages stay.
func forget(t *testing.T, path string) (pages int) {
	t.Helper()
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	check(t, f.Sync())
	check(t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
	if pages = cached(t, path); pages > 1<<20/os.Getpagesize() {
		t.Skipf("the file system keeps %d pages", pages)
	}
	return pages
}

func TestPrefetchedShortPacketsComeIntoThePageCache(t *testing.T) {
	c := &capture{}
	var rows []uint64
	for k := range uint64(60) {
		c.add(t, "layer", "none", ramp(100<<10))
		if k%2 > 0 {
			rows = append(rows, k)
		}
	}
	path := save(t, c.stream, c.rows)
	r := open(t, path, reader.Options{}) // it reads some of the file
	before := forget(t, path)
	check(t, r.Prefetch(rows))
	for range 100 {
		if cached(t, path)-before >= 2<<20/os.Getpagesize() {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
	t.Errorf("%d pages before, %d after", before, cached(t, path))
}

func TestPrefetchedLongPacketsAreReadPastThePageCache(t *testing.T) {
	c := large(t)
	path := save(t, c.stream, c.rows)
	r := open(t, path, reader.Options{})
	before := forget(t, path)
	for row, want := range c.values {
		check(t, r.Prefetch([]uint64{uint64(row), uint64(min(row+1, 3))}))
		if got := many(t, r, []uint64{uint64(row)}, 1, len(want)); !bytes.Equal(got[0], want) {
			t.Errorf("row %d has other bytes", row)
		}
	}
	if after := cached(t, path); after-before > 1<<20/os.Getpagesize() {
		t.Errorf("%d pages before, %d after", before, after)
	}
	check(t, r.Prefetch(nil))
}
