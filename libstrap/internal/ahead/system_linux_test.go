package ahead

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// failing is no file.
const failing = direct(-1)

// forget lets the page cache forget a file.
func forget(t *testing.T, f *os.File) {
	t.Helper()
	if err := f.Sync(); err != nil {
		t.Fatal(err)
	}
	if err := unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		t.Fatal(err)
	}
}

func TestLongPartsAreReadPastThePageCache(t *testing.T) {
	f, want := opened(t, 8*mib)
	if cached(f.File, Part{2 * mib, 3 * mib}) {
		t.Skip("the file system keeps the file in memory")
	}
	f.Prefetch([]Part{{0, 8 * mib}})
	directly(t, f)
	check(t, f, want, 0, len(want))
	var have unix.Cachestat_t
	if err := unix.Cachestat(uint(f.Fd()), &unix.CachestatRange{Len: 8 * mib}, &have, 0); err != nil {
		t.Skipf("cachestat: %v", err)
	}
	if have.Cache > 0 {
		t.Errorf("%d pages are in the page cache", have.Cache)
	}
}
