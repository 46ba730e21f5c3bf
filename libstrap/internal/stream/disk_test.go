package stream

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// small makes blocks small, so that a test fills many of them.
var small = Options{Memory: 1}

// inBothWays runs a test with writes past the page cache and with writes through it.
func inBothWays(t *testing.T, test func(t *testing.T, create func(*testing.T) (*Writer, string))) {
	for _, way := range []string{"direct", "buffered"} {
		t.Run(way, func(t *testing.T) {
			test(t, func(t *testing.T) (*Writer, string) {
				path := filepath.Join(t.TempDir(), "a.stream")
				w, err := Create(path, small, nil)
				must(t, err)
				if way == "buffered" {
					w.disk.direct = nil
				} else if w.disk.direct == nil {
					must(t, w.Close())
					t.Skip("no direct I/O in TMPDIR")
				}
				return w, path
			})
		})
	}
}

// noise returns two blocks of random bytes without a zero.
var noise = sync.OnceValue(func() []byte {
	r := rand.New(rand.NewPCG(0, 0))
	b := make([]byte, 2*minBlock)
	for i := range b {
		b[i] = byte(1 + r.IntN(255))
	}
	return b
})

// sizeOf returns a random payload size: mostly small, sometimes larger than a block.
func sizeOf(r *rand.Rand) int {
	switch r.IntN(10) {
	case 0:
		return 0
	case 1:
		return r.IntN(2 * minBlock)
	case 2:
		return r.IntN(1<<16) &^ 4095
	default:
		return r.IntN(1 << r.IntN(15))
	}
}

// model holds the bytes that a Writer's file should have.
type model struct {
	t    *testing.T
	w    *Writer
	path string
	r    *rand.Rand
	want []byte
}

func newModel(t *testing.T, w *Writer, path string, seed uint64) *model {
	return &model{t: t, w: w, path: path, r: rand.New(rand.NewPCG(seed, 0))}
}

// step makes one random call of the Writer.
func (m *model) step() error {
	payload := noise()[:sizeOf(m.r)]
	switch m.r.IntN(20) {
	case 0:
		return m.w.Flush()
	case 1:
		return m.w.Sync()
	case 2, 3:
		return m.long(payload)
	default:
		if m.w.Offset() != int64(len(m.want)) {
			m.t.Fatalf("offset %d, %d bytes appended", m.w.Offset(), len(m.want))
		}
		p := packet("layer", payload)
		m.want = append(m.want, p...)
		return m.w.Append(p)
	}
}

func (m *model) long(payload []byte) error {
	l, err := m.w.Begin([]byte("long"))
	if err != nil {
		return err
	}
	for rest := payload; len(rest) > 0; {
		n := 1 + m.r.IntN(len(rest))
		if _, err := l.Write(rest[:n]); err != nil {
			return err
		}
		rest = rest[n:]
		if m.r.IntN(4) == 0 {
			if err := m.w.Flush(); err != nil {
				return err
			}
		}
	}
	if m.r.IntN(3) == 0 {
		return l.Abort()
	}
	n, err := l.Finish()
	if err != nil {
		return err
	}
	p := packet("long", payload)
	m.want = append(m.want, p...)
	if n != int64(len(p)) {
		m.t.Fatalf("a long packet of %d bytes has %d", len(p), n)
	}
	return nil
}

// check compares the file with the model. Call it after a Flush.
func (m *model) check() {
	m.t.Helper()
	got, err := os.ReadFile(m.path)
	must(m.t, err)
	if !bytes.Equal(got, m.want) {
		m.t.Fatalf("the file of %d bytes is not what was appended, %d bytes", len(got), len(m.want))
	}
	if m.w.Written() != int64(len(m.want)) {
		m.t.Fatalf("%d bytes written of %d", m.w.Written(), len(m.want))
	}
}

func TestTheFileIsWhatWasAppended(t *testing.T) {
	inBothWays(t, func(t *testing.T, create func(*testing.T) (*Writer, string)) {
		for seed := range uint64(4) {
			w, path := create(t)
			m := newModel(t, w, path, seed)
			for i := range 400 {
				must(t, m.step())
				if i%100 == 0 {
					must(t, w.Flush())
					m.check()
				}
			}
			must(t, w.Close())
			m.check()
		}
	})
}

func TestResumedWhereverItEnds(t *testing.T) {
	inBothWays(t, func(t *testing.T, create func(*testing.T) (*Writer, string)) {
		w, path := create(t)
		direct := w.disk.direct != nil
		m := newModel(t, w, path, 1)
		for range 20 {
			for range 10 {
				must(t, m.step())
			}
			must(t, m.w.Close())
			m.check()
			var err error
			m.w, _, err = Resume(path, KeepAll, small, nil)
			must(t, err)
			if !direct {
				m.w.disk.direct = nil
			}
			m.check()
		}
		must(t, m.w.Close())
	})
}

// failBehind makes writes that reach beyond offset limit fail. As on a full disk, the part before
// limit is written, in whole pages for direct writes.
func failBehind(w *Writer, limit int64) {
	direct := w.disk.direct
	w.disk.writeAt = func(f *os.File, b []byte, at int64) (int, error) {
		room := max(limit-at, 0)
		if f == direct {
			room = room / 4096 * 4096
		}
		if int64(len(b)) <= room {
			return f.WriteAt(b, at)
		}
		n, err := f.WriteAt(b[:room], at)
		return n, errors.Join(syscall.ENOSPC, err)
	}
}

func TestAFailedWriteLeavesWholePackets(t *testing.T) {
	inBothWays(t, func(t *testing.T, create func(*testing.T) (*Writer, string)) {
		for seed := range uint64(20) {
			w, path := create(t)
			m := newModel(t, w, path, seed)
			limit := int64(m.r.IntN(8 * minBlock))
			failBehind(w, limit)
			var err error
			for err == nil {
				err = m.step()
			}
			if !errors.Is(err, status.NoSpace) {
				t.Fatalf("seed %d: %v", seed, err)
			}
			for _, again := range []error{w.Append(packet("x", nil)), w.Flush(), w.Sync(), w.Close()} {
				if !errors.Is(again, status.NoSpace) {
					t.Fatalf("seed %d, after the failure: %v", seed, again)
				}
			}
			got, err := os.ReadFile(path)
			must(t, err)
			if !bytes.HasPrefix(m.want, got) && !bytes.HasPrefix(got, m.want) || int64(len(got)) != w.Written() {
				t.Fatalf("seed %d: %d bytes in the file, %d written, %d appended", seed, len(got), w.Written(), len(m.want))
			}
			// All packets that had room are in the file.
			end, _ := scan.Packets(bytes.NewReader(m.want), 0, min(limit/4096*4096, int64(len(m.want))),
				func(scan.Packet) error { return nil })
			if int64(len(got)) < end {
				t.Fatalf("seed %d: %d bytes in the file, whole packets of %d had room", seed, len(got), end)
			}
		}
	})
}

func TestDirectWritesThatAreRefused(t *testing.T) {
	for seed := range uint64(10) {
		path := filepath.Join(t.TempDir(), "a.stream")
		w, err := Create(path, small, nil)
		must(t, err)
		if w.disk.direct == nil {
			t.Skip("no direct I/O in TMPDIR")
		}
		m := newModel(t, w, path, seed)
		direct, left := w.disk.direct, m.r.IntN(10)
		w.disk.writeAt = func(f *os.File, b []byte, at int64) (int, error) {
			if f != direct {
				return f.WriteAt(b, at)
			}
			if left--; left >= 0 {
				return f.WriteAt(b, at)
			}
			n, err := f.WriteAt(b[:len(b)/2/4096*4096], at)
			return n, errors.Join(syscall.EINVAL, err)
		}
		for range 200 {
			must(t, m.step())
		}
		must(t, w.Close())
		m.check()
		if w.disk.direct != nil {
			t.Fatal("no write was refused")
		}
	}
}

// TestReadersSeeNothingButPackets reads the file while it grows, also beyond its end: the page
// cache may keep what was read there.
func TestReadersSeeNothingButPackets(t *testing.T) {
	inBothWays(t, func(t *testing.T, create func(*testing.T) (*Writer, string)) {
		w, path := create(t)
		r := rand.New(rand.NewPCG(1, 1))
		var packets [][]byte
		for range 2000 {
			packets = append(packets, packet("layer", noise()[:sizeOf(r)]))
		}
		want := bytes.Join(packets, nil)
		stop := make(chan struct{})
		var readers sync.WaitGroup
		for range 2 {
			readers.Go(func() { follow(t, path, want, stop) })
		}
		for i, p := range packets {
			must(t, w.Append(p))
			if i%17 == 0 {
				must(t, w.Flush())
			}
		}
		must(t, w.Close())
		close(stop)
		readers.Wait()
	})
}

// follow compares the bytes of a growing file with want, until stop is closed.
func follow(t *testing.T, path string, want []byte, stop chan struct{}) {
	f, err := os.Open(path)
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Close()
	buf, looks, from := make([]byte, 1<<20), 0, int64(0)
	for {
		select {
		case <-stop:
			t.Logf("%d looks", looks)
			return
		default:
		}
		info, err := f.Stat()
		if err != nil {
			t.Error(err)
			return
		}
		size := info.Size()
		at := max(min(from, size-1<<16), 0)
		n, _ := f.ReadAt(buf[:min(size-at, int64(len(buf)))], at)
		if got := buf[:n]; !bytes.Equal(got, want[at:][:n]) {
			t.Errorf("of %d bytes, those behind %d are not what was appended", size, at)
			return
		}
		f.ReadAt(make([]byte, 1), size)
		from, looks = at+int64(n), looks+1
	}
}

func TestNothingIsTakenBehindTheEnd(t *testing.T) {
	w, path := create(t)
	taken := func() int64 {
		info, err := os.Stat(path)
		must(t, err)
		return info.Sys().(*syscall.Stat_t).Blocks * 512
	}
	p := packet("layer", bytes.Repeat([]byte{1}, 1<<20))
	for range 40 {
		must(t, w.Append(p))
	}
	must(t, w.Flush())
	if now := taken(); now > 2*w.Offset()+minBlock {
		t.Errorf("%d bytes of disk for a file of %d", now, w.Offset())
	}
	must(t, w.Close())
	if now := taken(); now > w.Offset()+minBlock {
		t.Errorf("%d bytes of disk for a closed file of %d", now, w.Offset())
	}
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	must(t, err)
	defer f.Close()
	if err := preallocate(f, w.Offset(), 8<<20); err != nil {
		t.Skip(err)
	}
	if taken() < w.Offset()+4<<20 {
		t.Fatal("nothing was taken")
	}
	// The writer was not closed, as in a killed process.
	w, _, err = Resume(path, KeepAll, Options{}, nil)
	must(t, err)
	if now := taken(); now > w.Offset()+minBlock {
		t.Errorf("%d bytes of disk for a resumed file of %d", now, w.Offset())
	}
	must(t, w.Close())
}

func TestAFewBytesTakeNoBlockButOne(t *testing.T) {
	w, _ := create(t)
	if len(w.blocks) != 0 {
		t.Fatalf("%d blocks for nothing", len(w.blocks))
	}
	for range 100 {
		must(t, w.Append(packet("layer", nil)))
		must(t, w.Flush())
	}
	if len(w.blocks) != 1 {
		t.Fatalf("%d blocks", len(w.blocks))
	}
	must(t, w.Close())
}

func TestThePageCacheWhereThereIsNothingElse(t *testing.T) {
	const folder = "/dev/shm"
	if _, err := os.Stat(folder); err != nil {
		t.Skip(err)
	}
	dir, err := os.MkdirTemp(folder, "stream")
	must(t, err)
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "a.stream")
	w, err := Create(path, small, nil)
	must(t, err)
	if w.disk.direct != nil {
		t.Skip(folder, " is on a disk")
	}
	m := newModel(t, w, path, 0)
	for range 200 {
		must(t, m.step())
	}
	must(t, w.Close())
	m.check()
}

func TestAPanicInTheDiskIsAFailure(t *testing.T) {
	w, _ := create(t)
	w.disk.writeAt = func(*os.File, []byte, int64) (int, error) { panic("test") }
	must(t, w.Append(packet("layer", []byte("x"))))
	if err := w.Flush(); !errors.Is(err, status.Internal) {
		t.Fatalf("flush: %v", err)
	}
	if err := w.Close(); !errors.Is(err, status.Internal) {
		t.Fatalf("close: %v", err)
	}
}

func TestABlockIsPatchedWhereItHasTheBytes(t *testing.T) {
	for at := range int64(30) {
		b := block{mem: make([]byte, 16), at: 10, n: 8}
		b.patch([]byte{1, 2, 3, 4, 5, 6}, at)
		var want [16]byte
		for i := range int64(6) {
			if to := at + i - b.at; to >= 0 && to < 8 {
				want[to] = byte(i + 1)
			}
		}
		if !slices.Equal(b.mem, want[:]) {
			t.Fatalf("patched at %d: %v", at, b.mem)
		}
	}
}

func TestBlocksFitTheirMemory(t *testing.T) {
	for memory, want := range map[int64]int{
		0: maxBlock, 1: minBlock, 3 * minBlock: minBlock, 6*minBlock - 1: minBlock,
		6 * minBlock: 2 * minBlock, 1 << 40: maxBlock,
	} {
		if got := (Options{Memory: memory}).block(); got != want {
			t.Errorf("blocks of %d bytes of %d", got, memory)
		}
	}
}
