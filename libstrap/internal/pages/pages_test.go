package pages_test

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"syscall"
	"testing"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/pages"
)

const mib = 1 << 20

func mapped(t *testing.T, n int) *pages.Memory {
	t.Helper()
	m, err := pages.Map(n)
	if err != nil {
		t.Fatal(err)
	}
	if len(m.Bytes) != n {
		t.Fatalf("%d bytes, not the %d asked for", len(m.Bytes), n)
	}
	return m
}

func at(m *pages.Memory) uintptr { return uintptr(unsafe.Pointer(unsafe.SliceData(m.Bytes))) }

// needsKeeping skips the test if the system keeps no released memory.
func needsKeeping(t *testing.T) {
	t.Helper()
	var most syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_AS, &most); err != nil {
		t.Fatal(err)
	}
	overcommit, _ := os.ReadFile("/proc/sys/vm/overcommit_memory")
	if runtime.GOOS != "linux" || most.Cur < 1<<62 || bytes.HasPrefix(overcommit, []byte("2")) {
		t.Skip("pages are kept on Linux alone, where addresses are not limited")
	}
}

func TestMemoryIsWritableAndAligned(t *testing.T) {
	for _, n := range []int{1, 5000, 2 * mib, 2*mib + 1, 9*mib + 777} {
		m := mapped(t, n)
		m.Touch(n)
		m.Bytes[0], m.Bytes[n-1] = 1, 2
		if n >= 2*mib && runtime.GOOS == "linux" && at(m)%(2*mib) != 0 {
			t.Errorf("%d bytes at %#x, which no huge page begins at", n, at(m))
		}
		m.Release(n)
	}
}

func TestReleasedMemoryComesBackWarm(t *testing.T) {
	needsKeeping(t)
	m := mapped(t, 24*mib)
	where := at(m)
	m.Release(24 * mib)
	if again := mapped(t, 24*mib); at(again) != where {
		t.Error("other memory was mapped")
	} else {
		again.Release(24 * mib)
	}
	if less := mapped(t, 20*mib); at(less) != where {
		t.Error("other memory was mapped for a little less")
	} else {
		less.Release(20 * mib)
	}
	if more := mapped(t, 24*mib); at(more) != where {
		t.Error("what was used for less is not there in whole any more")
	}
	few := mapped(t, 5*mib)
	if at(few) >= where && at(few) < where+24*mib {
		t.Error("memory that is in use was handed out")
	}
	few.Release(0)
}

func TestLittleIsKept(t *testing.T) {
	needsKeeping(t)
	const n, keep = 200 * mib, 64 * mib
	m := mapped(t, n)
	where := at(m)
	for i := 0; i < n; i += 4096 {
		m.Bytes[i] = 7
	}
	m.Release(n)
	again := mapped(t, n)
	defer again.Release(0)
	if at(again) != where {
		t.Fatal("other memory was mapped")
	}
	stayed := 0
	for i := 0; i < n; i += 4096 {
		if again.Bytes[i] != 0 && i >= keep {
			t.Fatalf("byte %d MiB stayed", i/mib)
		}
		stayed += 4096 * int(again.Bytes[i]/7)
	}
	if stayed < keep/2 {
		t.Errorf("%d MiB stayed, on a machine that can hardly be short of %d", stayed/mib, keep/mib)
	}
}

func TestOnlyTheLastStay(t *testing.T) {
	needsKeeping(t)
	const n = 32 * mib
	var held []*pages.Memory
	for range 5 {
		held = append(held, mapped(t, n))
	}
	for _, m := range held {
		m.Bytes[0] = 7
		m.Release(mib)
	}
	stayed := 0
	for range held {
		m := mapped(t, n)
		defer m.Release(0)
		stayed += int(m.Bytes[0] / 7)
	}
	if stayed != 2 {
		t.Errorf("%d of 5 stayed, not the last two", stayed)
	}
}

// A limit on mapped memory counts kept memory too, even without pages. So nothing is kept.
func TestNothingIsKeptWhereAddressesAreScarce(t *testing.T) {
	needsKeeping(t)
	var before syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_AS, &before); err != nil {
		t.Fatal(err)
	}
	limited := before
	limited.Cur = 1 << 50 // a limit that no test reaches
	if err := syscall.Setrlimit(syscall.RLIMIT_AS, &limited); err != nil {
		t.Skipf("no limit of addresses here: %v", err)
	}
	defer func() {
		if err := syscall.Setrlimit(syscall.RLIMIT_AS, &before); err != nil {
			t.Fatal(err)
		}
	}()
	m := mapped(t, 48*mib)
	m.Bytes[0] = 7
	m.Release(mib)
	again := mapped(t, 48*mib)
	defer again.Release(0)
	if again.Bytes[0] != 0 {
		t.Error("it was kept")
	}
}

func TestThreadsMapAndRelease(t *testing.T) {
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for range 50 {
				m, err := pages.Map(3 * mib)
				if err != nil {
					t.Error(err)
					return
				}
				m.Bytes[0] = byte(i)
				runtime.Gosched()
				if m.Bytes[0] != byte(i) {
					t.Error("two have the same memory")
				}
				m.Release(mib)
			}
		})
	}
	wg.Wait()
}

// What is stored in the pages of a file is in the file, and the pages are not kept.
func TestThePagesOfAFile(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("files are mapped on Linux alone")
	}
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, make([]byte, 3*mib), 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	m, err := pages.MapFile(f, 3*mib)
	if err != nil {
		t.Fatal(err)
	}
	m.Touch(3 * mib)
	m.Bytes[3*mib-1] = 7
	where := at(m)
	m.Release(3 * mib)
	if b, err := os.ReadFile(path); err != nil || b[3*mib-1] != 7 {
		t.Errorf("the file has other bytes: %v", err)
	}
	other := mapped(t, 3*mib)
	defer other.Release(0)
	if at(other) == where && other.Bytes[3*mib-1] == 7 {
		t.Error("the pages of the file are used for something else")
	}
}
