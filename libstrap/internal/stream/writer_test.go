package stream

import (
	"bytes"
	"errors"
	"io"
	"math"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

func packet(name string, payload []byte) []byte {
	b := make([]byte, wire.HeaderSize)
	wire.PutHeader(b, len(name), uint32(len(payload)))
	return append(append(b, name...), payload...)
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func create(t *testing.T) (w *Writer, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "a.stream")
	w, err := Create(path, Options{}, nil)
	must(t, err)
	return w, path
}

func TestPacketsStandBackToBack(t *testing.T) {
	w, path := create(t)
	var want []byte
	for i := range 50 {
		p := packet("layer", bytes.Repeat([]byte{byte(i)}, i*i*i*20))
		if w.Offset() != int64(len(want)) {
			t.Fatalf("offset %d, %d bytes appended", w.Offset(), len(want))
		}
		must(t, w.Append(p))
		want = append(want, p...)
	}
	must(t, w.Close())
	got, err := os.ReadFile(path)
	must(t, err)
	if !bytes.Equal(got, want) {
		t.Fatal("the file differs from what was appended")
	}
}

func TestALongPacketIsTornUntilItIsFinished(t *testing.T) {
	w, path := create(t)
	must(t, w.Append(packet("first", []byte("abc"))))
	long, err := w.Begin([]byte("long"))
	must(t, err)
	_, err = long.Write(bytes.Repeat([]byte{7}, 3000))
	must(t, err)
	must(t, w.Flush())
	packets := func() (names []string) {
		f, err := os.Open(path)
		must(t, err)
		defer f.Close()
		info, err := f.Stat()
		must(t, err)
		_, err = scan.Packets(f, 0, info.Size(), func(p scan.Packet) error {
			names = append(names, p.Name)
			return nil
		})
		if len(names) == 1 && !errors.Is(err, status.Corrupt) {
			t.Fatalf("an unfinished packet is no tear: %v", err)
		}
		return names
	}
	if got := packets(); len(got) != 1 {
		t.Fatalf("during the long packet a reader sees %q", got)
	}
	n, err := long.Finish()
	must(t, err)
	if n != int64(wire.HeaderSize+4+3000) || w.Offset() != 14+n {
		t.Fatalf("length %d, offset %d", n, w.Offset())
	}
	must(t, w.Append(packet("last", nil)))
	must(t, w.Close())
	if got := packets(); len(got) != 3 || got[1] != "long" || got[2] != "last" {
		t.Fatalf("packets %q", got)
	}
}

func TestAnAbortedLongPacketLeavesNothing(t *testing.T) {
	w, path := create(t)
	first := packet("first", []byte("abc"))
	must(t, w.Append(first))
	long, err := w.Begin([]byte("long"))
	must(t, err)
	_, err = long.Write(make([]byte, 3000))
	must(t, err)
	must(t, long.Abort())
	must(t, w.Append(first))
	must(t, w.Close())
	got, err := os.ReadFile(path)
	must(t, err)
	if !bytes.Equal(got, append(bytes.Clone(first), first...)) {
		t.Fatalf("the file has %d bytes", len(got))
	}
}

func TestResumeMovesATornEndAside(t *testing.T) {
	w, path := create(t)
	whole := packet("x", []byte("payload"))
	must(t, w.Append(whole))
	must(t, w.Close())
	for n, torn := range [][]byte{whole[:3], whole[:8], make([]byte, 100)} {
		must(t, os.WriteFile(path, append(bytes.Clone(whole), torn...), 0o666))
		w, tail, err := Resume(path, KeepAll, Options{}, nil)
		must(t, err)
		if w.Offset() != int64(len(whole)) {
			t.Fatalf("resumed at %d", w.Offset())
		}
		must(t, w.Close())
		got, err := os.ReadFile(tail)
		must(t, err)
		if !bytes.Equal(got, torn) {
			t.Fatalf("tail %d holds %d bytes, the torn end had %d", n, len(got), len(torn))
		}
	}
}

func TestLocks(t *testing.T) {
	w, path := create(t)
	must(t, w.Append(packet("x", []byte("payload"))))
	must(t, w.Flush())
	if _, err := Create(path, Options{}, nil); !errors.Is(err, status.Busy) {
		t.Fatalf("a second writer: %v", err)
	}
	if _, _, err := Resume(path, KeepAll, Options{}, nil); !errors.Is(err, status.Busy) {
		t.Fatalf("a second writer that resumes: %v", err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() == 0 {
		t.Fatalf("the refused writer emptied the file: %v", err)
	}
	must(t, w.Close())
	again, err := Create(path, Options{}, nil)
	must(t, err)
	must(t, again.Close())
}

// If beginning a new stream fails, the old one stays as it was.
func TestTheOldStreamStaysUntilAllElseIsOpen(t *testing.T) {
	w, path := create(t)
	must(t, w.Append(packet("x", []byte("payload"))))
	must(t, w.Close())
	before, err := os.ReadFile(path)
	must(t, err)
	refused := errors.New("no index")
	if _, err := Create(path, Options{}, func() error { return refused }); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
		t.Errorf("it has %d bytes of %d, %v", len(after), len(before), err)
	}
	fresh := path + ".fresh"
	if _, err := Create(fresh, Options{}, func() error { return refused }); !errors.Is(err, refused) {
		t.Fatal(err)
	}
	if _, err := os.Lstat(fresh); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file is left that was not there: %v", err)
	}
	w, err = Create(path, Options{}, nil) // nothing is left locked
	must(t, err)
	must(t, w.Close())
}

// Between opening the file and locking it here, another session removes the file: it had created
// the file, and then its own start failed.
func TestAFileThatIsRemovedBeforeItsLock(t *testing.T) {
	t.Cleanup(func() { flock = syscall.Flock })
	path := filepath.Join(t.TempDir(), "a.stream")
	removals := 2
	flock = func(fd, how int) error {
		if removals > 0 && how != syscall.LOCK_UN {
			removals--
			must(t, os.Remove(path))
		}
		return syscall.Flock(fd, how)
	}
	w, err := Create(path, Options{}, nil)
	must(t, err)
	must(t, w.Append(packet("x", []byte("payload"))))
	must(t, w.Close())
	if info, err := os.Stat(path); err != nil || info.Size() == 0 {
		t.Fatalf("what was written is not at the path: %v", err)
	}

	removals = 1
	if _, _, err := Resume(path, KeepAll, Options{}, nil); !errors.Is(err, status.NotFound) {
		t.Errorf("a resume of a file that was removed: %v", err)
	}
	removals = math.MaxInt
	if _, err := Create(path, Options{}, nil); !errors.Is(err, status.Busy) {
		t.Errorf("a file that is always removed: %v", err)
	}
}

// If resuming a stream fails, the stream stays as it was.
func TestARefusedResumeCutsNothing(t *testing.T) {
	w, path := create(t)
	must(t, w.Append(packet("x", []byte("payload"))))
	cut := w.Offset()
	must(t, w.Append(packet("x", []byte("payload"))))
	must(t, w.Close())
	before, err := os.ReadFile(path)
	must(t, err)
	refused := errors.New("another capture")
	_, _, err = Resume(path, cut, Options{}, func(stream io.ReaderAt, end int64) error {
		if end != cut {
			t.Errorf("the stream is to have %d bytes, want %d", end, cut)
		}
		return refused
	})
	if !errors.Is(err, refused) {
		t.Fatal(err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
		t.Errorf("it has %d bytes of %d, %v", len(after), len(before), err)
	}
	if _, err := os.Lstat(path + ".tail-1"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a tail is left: %v", err)
	}
}

// On a file system without locks, only sessions of one process are kept apart.
func TestAFileSystemWithoutLocks(t *testing.T) {
	t.Cleanup(func() { flock = syscall.Flock })
	for _, errno := range []syscall.Errno{syscall.ENOSYS, syscall.EOPNOTSUPP, syscall.ENOLCK} {
		flock = func(int, int) error { return errno }
		TestLocks(t)
	}
	flock = func(int, int) error { return syscall.EIO }
	if _, err := Create(filepath.Join(t.TempDir(), "a.stream"), Options{}, nil); !errors.Is(err, status.IO) {
		t.Errorf("a lock that fails: %v", err)
	}
}
