// Tests of captures that go on in a new segment.

package session

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// segments returns functions that name the n-th segment in a new folder.
func segments(t testing.TB, suffix string) func(n int) string {
	folder := t.TempDir()
	return func(n int) string { return filepath.Join(folder, fmt.Sprintf("%05d.%s", n, suffix)) }
}

func roll(t testing.TB, s *Session, path string) string {
	t.Helper()
	id, err := s.Roll(path, false, forever)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// While threads capture, the session rolls. Each packet is in one segment, in the order of the calls.
func TestRollsKeepEachPacketOnceAndInOrder(t *testing.T) {
	const threads, each, rolls = 3, 60, 7
	values := noise(50_000+each, 1) // each step has another part of it
	for name, o := range map[string]Options{
		"raw": options(codec.None), "lz4": options(codec.LZ4), "zstd": options(codec.Zstd), "archive": options(codec.Archive),
	} {
		t.Run(name, func(t *testing.T) {
			o.KeepFloat32, o.ErrorBound = o.Codec != codec.Archive, 0
			path := segments(t, "capture")
			s := open(t, path(0), o)
			var calls, rolling sync.WaitGroup
			for i := range threads {
				layer := mustLayer(t, s, fmt.Sprint(i))
				calls.Go(func() {
					for step := range each {
						x := tensorOf(layer, wire.Float32, values[step:step+50_000])
						x.Step = int64(step)
						if err := s.Enqueue(x, forever); err != nil {
							t.Error(err)
						}
					}
				})
			}
			ids := []string{s.CaptureID()}
			rolling.Go(func() {
				for n := range rolls {
					ids = append(ids, roll(t, s, path(n+1)))
					if err := flush(s, forever); err != nil {
						t.Error(err)
					}
				}
			})
			calls.Wait()
			rolling.Wait()
			if got := s.CaptureID(); got != ids[rolls] {
				t.Errorf("the id is %s, not that of the last segment", got)
			}
			if st := s.Stats(); st.MemoryPeak > st.MemoryLimit {
				t.Errorf("%d bytes of memory, limit %d", st.MemoryPeak, st.MemoryLimit)
			}
			finish(t, s)
			next, last := [threads]int{}, ""
			for n := range rolls + 1 {
				rows, payloads := read(t, path(n))
				found, err := index.Find(index.PathOf(path(n)), mustOpen(t, path(n)), size(t, path(n)))
				if err != nil || found.CaptureID != ids[n] || found.CaptureID == last {
					t.Fatalf("segment %d has the id %s, not %s (%v)", n, found.CaptureID, ids[n], err)
				}
				last = found.CaptureID
				found.Close()
				for i, row := range rows {
					thread := int(row.Layer[0] - '0')
					if row.Sequence != uint64(i) || row.Step != int64(next[thread]) {
						t.Fatalf("segment %d: row %d is sequence %d, step %d of thread %d, not %d",
							n, i, row.Sequence, row.Step, thread, next[thread])
					}
					want := bytesOf(values[row.Step : row.Step+50_000])
					if o.KeepFloat32 && !bytes.Equal(payloads[i], want) {
						t.Fatalf("segment %d: row %d has other values", n, i)
					}
					next[thread]++
				}
			}
			if next != [threads]int{each, each, each} {
				t.Errorf("%d packets of %d of each thread", next, each)
			}
		})
	}
}

func mustOpen(t testing.TB, path string) *os.File {
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return f
}

func size(t testing.TB, path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Size()
}

// After a checkpoint the segment before is closed: its lock is free, and its index has its end mark.
func TestACheckpointWaitsUntilTheSegmentBeforeIsSealed(t *testing.T) {
	path := segments(t, "stream")
	s := open(t, path(0), options(codec.LZ4))
	layer := mustLayer(t, s, "a")
	for n := range 5 {
		enqueue(t, s, numbered(layer, n, 1000))
		roll(t, s, path(n+1))
		covered, err := checkpoint(s, forever)
		if err != nil || covered != 0 {
			t.Fatalf("%d bytes are durable, %v", covered, err)
		}
		o := options(codec.LZ4)
		o.Resume, o.Cut = true, KeepAll
		again, err := Open(path(n), o)
		if err != nil {
			t.Fatal(err)
		}
		finish(t, again)
	}
	if n := s.Stats().Packets; n != 5 {
		t.Errorf("%d packets are counted", n)
	}
	finish(t, s)
}

func TestASegmentThatIsRemovedWhileItIsWrittenFailsTheCapture(t *testing.T) {
	path := segments(t, "stream")
	s := open(t, path(0), options(codec.LZ4))
	enqueue(t, s, numbered(mustLayer(t, s, "a"), 0, 10))
	if err := os.Remove(path(0)); err != nil {
		t.Fatal(err)
	}
	roll(t, s, path(1))
	if _, err := checkpoint(s, forever); !errors.Is(err, status.NotFound) {
		t.Errorf("the checkpoint says %v", err)
	}
	if err := s.Close(forever); !errors.Is(err, status.NotFound) {
		t.Errorf("Close says %v", err)
	}
}

func TestARefusedRollChangesNothing(t *testing.T) {
	path := segments(t, "stream")
	s := open(t, path(0), options(codec.LZ4))
	layer := mustLayer(t, s, "a")
	enqueue(t, s, numbered(layer, 0, 10))
	other := open(t, path(5), options(codec.LZ4))
	if _, err := s.Roll(path(5), true, forever); !errors.Is(err, status.Busy) {
		t.Errorf("a segment of another session: %v", err)
	}
	finish(t, other)
	text := path(6)
	if err := os.WriteFile(text, []byte("a letter"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Roll(text, false, forever); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a file that is no stream: %v", err)
	}
	if _, err := s.Roll(filepath.Join(path(7), "x"), false, forever); !errors.Is(err, status.NotFound) {
		t.Errorf("a folder that is missing: %v", err)
	}
	enqueue(t, s, numbered(layer, 1, 10))
	finish(t, s)
	if rows, _ := read(t, path(0)); len(rows) != 2 {
		t.Errorf("%d packets of 2", len(rows))
	}
	if _, err := s.Roll(path(8), false, forever); !errors.Is(err, status.InvalidState) {
		t.Errorf("after the end: %v", err)
	}
	if _, err := os.Stat(path(8)); err == nil {
		t.Error("a refused roll left a file")
	}
}

// A segment that never began leaves no files.
func TestADiscardedRollLeavesNoFiles(t *testing.T) {
	path := segments(t, "stream")
	s := open(t, path(0), options(codec.LZ4))
	s.sink.mu.Lock()
	roll(t, s, path(1))
	s.Discard()
	s.sink.unlock(s.opts.helped())
	soon(t, s.life.finished)
	if _, err := os.Stat(path(1)); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the segment is there: %v", err)
	}
}

// The memory of the blocks goes from segment to segment, so a roll maps none.
func TestARollTakesNoFurtherBlocks(t *testing.T) {
	path := segments(t, "stream")
	s := open(t, path(0), options(codec.None))
	layer := mustLayer(t, s, "a")
	first := s.sink.place()
	for n := range 20 {
		enqueue(t, s, tensorOf(layer, wire.Float32, noise(400_000, uint64(n))))
		roll(t, s, path(n+1))
		if _, err := checkpoint(s, forever); err != nil {
			t.Fatal(err)
		}
		if s.sink.place() != first {
			t.Fatal("another ring")
		}
	}
	finish(t, s)
}

// place returns the address of the next byte of the stream.
func (k *sink) place() *byte {
	k.mu.Lock()
	defer k.mu.Unlock()
	return &k.stream.Place(1)[0]
}
