package ahead

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"
)

const mib = 1 << 20

// opened writes a file of n random bytes, and opens it. The page cache does not have it, if the system lets
// it go.
func opened(t *testing.T, n int) (*File, []byte) {
	t.Helper()
	want := make([]byte, n)
	rng := rand.NewChaCha8([32]byte{byte(n)})
	rng.Read(want)
	path := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(path, want, 0o600); err != nil {
		t.Fatal(err)
	}
	plain, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	forget(t, plain)
	f := &File{File: plain}
	t.Cleanup(func() { f.Close() })
	return f, want
}

// directly returns how f reads ahead. It skips the test if that is not directly.
func directly(t *testing.T, f *File) *ahead {
	t.Helper()
	a := f.ahead.Load()
	if a == nil {
		t.Skip("the system does no direct reads of files in the folder for tests")
	}
	return a
}

// check reads n bytes from at.
func check(t *testing.T, f *File, want []byte, at, n int) {
	t.Helper()
	b := make([]byte, n)
	got, err := f.ReadAt(b, int64(at))
	have := want[min(at, len(want)):min(at+n, len(want))]
	if !bytes.Equal(b[:got], have) {
		t.Fatalf("%d bytes from %d on: %d bytes, or other bytes", n, at, got)
	}
	if short := len(have) < n; short != errors.Is(err, io.EOF) || !short && err != nil {
		t.Fatalf("%d bytes from %d on: %v", n, at, err)
	}
}

func TestAnyReadGivesTheBytesOfTheFile(t *testing.T) {
	f, want := opened(t, 12*mib+777)
	rng := rand.New(rand.NewPCG(1, 2))
	var all sync.WaitGroup
	for range 200 {
		at, n := rng.IntN(len(want)), rng.IntN(4*mib)
		switch rng.IntN(4) {
		case 0:
			f.Prefetch([]Part{{int64(at), int64(min(at+n, len(want)))}, {0, int64(rng.IntN(2 * mib))}})
		case 1:
			f.Used()
		default:
			all.Go(func() { check(t, f, want, at, n) })
		}
	}
	all.Wait()
	check(t, f, want, 0, len(want)+1)
	check(t, f, want, len(want)+5*mib, 1)
	if _, err := f.ReadAt(make([]byte, 1), -1); err == nil {
		t.Error("an offset below 0 is no error")
	}
}

func TestWhatWasReadAheadIsNotReadAgain(t *testing.T) {
	f, want := opened(t, 8*mib)
	f.Prefetch([]Part{{1000, 6 * mib}})
	a := directly(t, f)
	check(t, f, want, 1000, 6*mib-1000)
	check(t, f, want, 6*mib, 2*mib)
	a.reads.Wait()
	if a.bytes != 6*mib || len(a.chunks) != 0 || len(a.free) != a.mapped {
		t.Errorf("%d bytes read, %d chunks left, %d of %d memories free", a.bytes, len(a.chunks), len(a.free), a.mapped)
	}
}

func TestWhatTheSystemHasIsNotReadAhead(t *testing.T) {
	f, want := opened(t, 8*mib)
	f.Prefetch([]Part{{0, 2 * mib}})
	a := directly(t, f)
	a.reads.Wait()
	if _, err := f.File.ReadAt(make([]byte, 4*mib), 2*mib); err != nil {
		t.Fatal(err)
	}
	if !cached(f.File, Part{3 * mib, 5 * mib}) {
		t.Skip("the system does not say what the page cache has")
	}
	f.Prefetch([]Part{{2 * mib, 6 * mib}, {7 * mib, 7*mib + longBytes - 1}})
	a.reads.Wait()
	if a.bytes != 2*mib {
		t.Errorf("%d bytes read directly", a.bytes)
	}
	check(t, f, want, 0, len(want))
}

// A window is asked for while the one before is decoded.
func TestWindowsNeedNoMoreMemoryThanThereIs(t *testing.T) {
	const window = 7 * mib / 2
	f, want := opened(t, 60*mib)
	part := func(k int) []Part { return []Part{{int64(k * window), int64(min((k+1)*window, len(want)))}} }
	f.Prefetch(part(0))
	a := directly(t, f)
	for k := range len(want) / window {
		f.Prefetch(part(k + 1))
		check(t, f, want, k*window, window/2) // the rest is not used
		f.Used()
	}
	a.reads.Wait()
	if a.mapped > mostChunks || a.bytes < 59*mib || a.bytes > 61*mib {
		t.Errorf("%d memories of at most %d; %d bytes of %d read", a.mapped, mostChunks, a.bytes, len(want))
	}
	f.Prefetch(nil)
	if a.mapped != 0 || len(a.chunks) != 0 {
		t.Errorf("%d memories and %d chunks at the end", a.mapped, len(a.chunks))
	}
	check(t, f, want, 0, len(want))
}

// What is asked for and never read keeps no later part from being read.
func TestPartsThatNobodyReadsMakeRoom(t *testing.T) {
	size := mostChunks * mib * 3
	f, want := opened(t, size)
	for k := range 3 {
		f.Prefetch([]Part{{int64(k * size / 3), int64((k + 1) * size / 3)}})
	}
	a := directly(t, f)
	done := make(chan struct{})
	go func() {
		defer close(done)
		check(t, f, want, size/3*2, size/3)
	}()
	select {
	case <-done:
	case <-time.After(time.Minute):
		t.Fatal("the reading waits for ever")
	}
	a.reads.Wait()
	if len(a.chunks) != 0 {
		t.Errorf("%d chunks left", len(a.chunks))
	}
}

func TestMoreThanThereIsMemoryForIsLeftToTheSystem(t *testing.T) {
	f, want := opened(t, 2*mib)
	f.Prefetch([]Part{{0, 1}, {0, mib}})
	a := directly(t, f)
	most := int64(mostChunks * mib)
	rest := a.start([]Part{{mib, 2 * mib}, {0, most}, {0, 10}})
	if len(rest) != 2 || rest[0].End != most || rest[1].End != 10 {
		t.Errorf("%v are left to the system", rest)
	}
	check(t, f, want, 0, len(want))
}

// A second pass finds the file in the page cache, if the disk is slow and the file fits.
func TestASlowDiskIsReadThroughThePageCache(t *testing.T) {
	for _, c := range []struct {
		fits bool
		rate float64
		off  bool
	}{{true, 0.9 * slowRate, true}, {true, 1.1 * slowRate, false}, {false, 0.1 * slowRate, false}} {
		f, want := opened(t, 2*mib)
		f.Prefetch([]Part{{0, mib}})
		a := directly(t, f)
		a.reads.Wait()
		a.fits, a.bytes = c.fits, measuredBytes
		a.busy = time.Duration(measuredBytes / c.rate * float64(time.Second))
		part := []Part{{mib, 2 * mib}}
		if rest := a.start(part); (len(rest) == 1) != c.off || a.off != c.off {
			t.Errorf("%+v: %v left to the system, off: %v", c, rest, a.off)
		}
		check(t, f, want, 0, len(want))
	}
}

// A file can become shorter, or a disk can fail.
func TestAFailedReadIsTriedAgain(t *testing.T) {
	f, want := opened(t, 4*mib)
	f.Prefetch([]Part{{0, mib}})
	a := directly(t, f)
	a.reads.Wait()
	a.direct.close()
	a.direct = failing
	f.Prefetch([]Part{{mib, 3 * mib}})
	check(t, f, want, 0, len(want))
	a.reads.Wait()
	if !a.off {
		t.Error("direct reads go on")
	}
}

func TestTheEndOfAFileIsRead(t *testing.T) {
	f, want := opened(t, 3*mib+5)
	f.Prefetch([]Part{{0, 9 * mib}})
	check(t, f, want, 2*mib, mib+6)
	if err := os.Truncate(f.Name(), mib); err != nil {
		t.Fatal(err)
	}
	f.Prefetch(nil)
	f.Prefetch([]Part{{0, 3 * mib}})
	check(t, f, want[:mib], mib/2, mib)
}

// A data set reads many files in turn.
func TestAFileThatIsNotReadAnyMoreGivesItsMemoryBack(t *testing.T) {
	first, want := opened(t, 4*mib)
	first.Prefetch([]Part{{0, 4 * mib}})
	a := directly(t, first)
	a.reads.Wait()
	other, _ := opened(t, mib)
	for k := range staleCalls + 1 {
		if a.mapped == 0 {
			t.Errorf("no memory after %d calls for another file", k)
		}
		other.Prefetch([]Part{{0, mib}})
	}
	if a.mapped != 0 {
		t.Errorf("%d memories after %d calls for another file", a.mapped, staleCalls+1)
	}
	check(t, first, want, 0, len(want))
	first.Prefetch([]Part{{0, 4 * mib}})
	check(t, first, want, 0, len(want))
}
