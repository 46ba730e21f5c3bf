package session

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// shelf is an IntakeBuffer in Go alone.
type shelf struct {
	mu       sync.Mutex
	tensors  []Tensor
	at       int // Next describes this one
	held     bool
	layers   uint32
	least    uint32
	requests uint32
	taken    uint64
	bytes    uint64
	onNext   func() // called once by Next
}

// put stores a tensor of float32. It reports false if the shelf is held, or does not admit the
// layer or the request.
func (f *shelf) put(x *Tensor) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.held || x.Layer >= f.layers || x.Request != 0 && (x.Request < f.least || x.Request > f.requests) {
		return false
	}
	f.tensors = append(f.tensors, *x)
	f.taken++
	f.bytes += uint64(4 * x.Shape[0])
	return true
}

func (f *shelf) Admit(layers, least, requests uint32) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.layers, f.least, f.requests = layers, least, requests
}

func (f *shelf) Taken() (tensors, bytes uint64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.taken, f.bytes
}

func (f *shelf) Hold() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.held = true
}

func (f *shelf) Next(t *Tensor) bool {
	if once := f.onNext; once != nil {
		f.onNext = nil
		once()
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.held = f.at < len(f.tensors); !f.held {
		f.tensors, f.at = nil, 0
		return false
	}
	*t = f.tensors[f.at]
	f.at++
	return true
}

func (f *shelf) Close() { f.Admit(0, 0, 0) }

// shelved opens a capture with a room f. small(i, n) puts a tensor of step i there, whose n elements
// are i.
func shelved(t *testing.T, o Options) (s *Session, path string, f *shelf, small func(i, n int)) {
	t.Helper()
	path, f = filepath.Join(t.TempDir(), "a.stream"), &shelf{}
	o.Intake = f
	s = open(t, path, o)
	layer := mustLayer(t, s, "small")
	return s, path, f, func(i, n int) {
		t.Helper()
		x := numbered(layer, i, n)
		x.Thread, x.TimeNS = uint64(1000+i), int64(2000+i)
		if !f.put(x) {
			t.Fatalf("tensor %d was not taken", i)
		}
	}
}

// wantSteps checks that a capture has n rows, of the steps from 0 in order, and returns the rows.
// The elements of step i have to be i.
func wantSteps(t *testing.T, path string, n int) []wire.Row {
	t.Helper()
	rows, payloads := read(t, path)
	if len(rows) != n {
		t.Fatalf("%d rows, not %d", len(rows), n)
	}
	for i, row := range rows {
		want := halves(float32s(int(row.Shape[0]), func(int) float32 { return float32(i) }))
		if row.Step != int64(i) || row.Error == "" && !slices.Equal(payloads[i], want) {
			t.Fatalf("row %d is step %d of %s, %s", i, row.Step, row.Layer, row.Error)
		}
	}
	return rows
}

// Enqueue, Note, Flush, Checkpoint and Close take the small tensors first, so the file has the order
// of the calls.
func TestEveryCallDrainsTheRoom(t *testing.T) {
	for _, k := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd} {
		t.Run(k.String(), func(t *testing.T) {
			s, path, _, small := shelved(t, options(k))
			large := mustLayer(t, s, "large")
			step := 0
			some := func() {
				for range 3 {
					small(step, 100)
					step++
				}
			}
			some()
			enqueue(t, s, numbered(large, step, 50000))
			step++
			some()
			note := numbered(large, step, 1)
			if err := s.Note(note, "why"); err != nil {
				t.Fatal(err)
			}
			step++
			some()
			if err := flush(s, forever); err != nil {
				t.Fatal(err)
			}
			if st := s.Stats(); st.Packets != uint64(step-1) || st.QueuedPackets != 0 {
				t.Fatalf("%d packets in the file and %d queued behind a flush of %d", st.Packets, st.QueuedPackets, step-1)
			}
			some()
			covered, err := checkpoint(s, forever)
			if err != nil {
				t.Fatal(err)
			}
			if st := s.Stats(); st.Packets != uint64(step-1) || st.FileBytes != uint64(covered) {
				t.Fatalf("%d packets and %d bytes behind a checkpoint of %d and %d", st.Packets, st.FileBytes, step-1, covered)
			}
			some()
			if st := s.Stats(); st.Tensors != uint64(step-1) || st.QueuedPackets != 3 || st.RawBytes != uint64(4*(50000+100*(step-2))) {
				t.Fatalf("%d tensors of %d bytes, %d queued", st.Tensors, st.RawBytes, st.QueuedPackets)
			}
			finish(t, s)
			for i, row := range wantSteps(t, path, step) {
				if row.Layer == "small" && (row.Thread != uint64(1000+i) || row.TimeNS != int64(2000+i)) {
					t.Errorf("row %d is of thread %d and time %d", i, row.Thread, row.TimeNS)
				}
			}
		})
	}
}

func TestSmallTensorsReachTheFileWithoutBeingAskedFor(t *testing.T) {
	s, _, _, small := shelved(t, options(codec.LZ4))
	small(0, 10)
	for begin := time.Now(); s.Stats().Packets == 0; time.Sleep(5 * time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatal("the tensor is not in the file")
		}
	}
}

// A call that times out while it drains the room loses nothing: a later call drains the rest.
func TestATimeoutLeavesTheRestToTheNextCall(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	o.Workers = 1
	s, path, _, small := shelved(t, o)
	step := fillMemory(t, s)
	for range 20 {
		small(step, 4000)
		step++
	}
	for _, call := range []func() error{
		func() error { return s.Enqueue(numbered(0, step, 50000), time.Millisecond) },
		func() error { return flush(s, 0) },
		func() error { _, err := checkpoint(s, time.Millisecond); return err },
	} {
		if err := call(); !errors.Is(err, status.Timeout) {
			t.Fatalf("nothing was waited for: %v", err)
		}
	}
	if err := s.Note(numbered(0, step, 1), "does not wait"); err != nil {
		t.Fatal(err)
	}
	if st := s.Stats(); st.Tensors != uint64(step) || st.QueuedPackets < uint64(step) || st.QueuedPackets > uint64(step)+1 {
		t.Errorf("%d tensors, %d packets queued, of %d", st.Tensors, st.QueuedPackets, step)
	}
	if err := s.Close(0); !errors.Is(err, status.Timeout) {
		t.Fatalf("nothing was waited for: %v", err)
	}
	s.sink.unlock(s.opts.helped())
	soon(t, s.life.finished) // the session ends without another call
	finish(t, s)
	wantSteps(t, path, step+1)
}

// The wait of a small tensor counts as one stall, even if several calls try to drain the room.
func TestWaitsForSmallTensorsAreCountedOnce(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, _, _, small := shelved(t, o)
	n := fillMemory(t, s)
	defer s.sink.unlock(s.opts.helped())
	for i := range 60 {
		small(n+i, 4000)
	}
	before := s.Stats()
	var waiting sync.WaitGroup
	for range 3 {
		waiting.Go(func() {
			if err := s.Enqueue(numbered(0, n, 50000), 50*time.Millisecond); !errors.Is(err, status.Timeout) {
				t.Errorf("nothing was waited for: %v", err)
			}
		})
	}
	waiting.Wait()
	if err := flush(s, 50*time.Millisecond); !errors.Is(err, status.Timeout) {
		t.Errorf("nothing was waited for: %v", err)
	}
	after := s.Stats()
	// The tensors that fitted in before the memory was full did not wait.
	stalls, ns := after.Stalls-before.Stalls, time.Duration(after.StallNS-before.StallNS)
	if stalls != 1 || ns < 50*time.Millisecond || ns > 50*time.Second {
		t.Errorf("%d stalls of %v, not 1 of at least 50 ms", stalls, ns)
	}
}

func TestOverflowOfASmallTensor(t *testing.T) {
	s, path, f, _ := shelved(t, options(codec.None))
	layer := mustLayer(t, s, "wide")
	x := tensorOf(layer, wire.Float32, []float32{1, 1e30})
	if !f.put(x) {
		t.Fatal("not taken")
	}
	finish(t, s)
	rows, payloads := read(t, path)
	if len(rows) != 2 || rows[1].Transform != wire.TransformOverflow || !slices.Equal(payloads[1], bytesOf([]float32{1, 1e30})) {
		t.Fatalf("%d rows", len(rows))
	}
	if st := s.Stats(); st.Overflowed != 1 || st.Tensors != 1 || st.RawBytes != 8 {
		t.Errorf("%d of %d tensors are beyond float16, %d bytes", st.Overflowed, st.Tensors, st.RawBytes)
	}
}

// The error of Close counts the small tensors that a failed capture did not write.
func TestAFailedCaptureCountsItsSmallTensors(t *testing.T) {
	s, _, f, small := shelved(t, options(codec.None))
	for i := range 5 {
		small(i, 10)
	}
	s.life.fail(status.New(status.IO, "a disk"))
	if f.put(numbered(0, 5, 10)) {
		t.Error("a failed capture takes tensors")
	}
	if err := s.Enqueue(numbered(0, 5, 10), forever); !errors.Is(err, status.IO) {
		t.Errorf("a failed capture says %v", err)
	}
	err := s.Close(forever)
	if want := "5 packets are not in it"; !errors.Is(err, status.IO) || !strings.Contains(err.Error(), want) {
		t.Errorf("the end says %v, not that %s", err, want)
	}
}

// If the capture fails while Close waits for memory, Close returns the error and counts all packets
// that are missing.
func TestAFailureWhileTheEndWaitsForRoom(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, _, _, small := shelved(t, o)
	n := fillMemory(t, s)
	for i := range 40 {
		small(n+i, 4000)
	}
	ended := make(chan error)
	go func() { ended <- s.Close(forever) }()
	for !s.jobs.Hurried() { // until Close waits
		time.Sleep(time.Millisecond)
	}
	s.life.fail(status.New(status.IO, "a disk"))
	s.sink.unlock(s.opts.helped())
	if err, want := <-ended, fmt.Sprintf("%d packets are not in it", n+40); !errors.Is(err, status.IO) || !strings.Contains(err.Error(), want) {
		t.Errorf("the end says %v, not that %s", err, want)
	}
}

// An invalid tensor in the room is an internal error, which ends the capture.
func TestAnInvalidSmallTensorStopsTheCapture(t *testing.T) {
	s, _, f, small := shelved(t, options(codec.None))
	for i := range 3 {
		small(i, 10)
	}
	f.tensors[1].Shape = []int64{-1}
	for range 2 {
		if err := flush(s, forever); !errors.Is(err, status.Internal) {
			t.Errorf("a flush says %v", err)
		}
	}
	if err, want := s.Close(forever), "packets are not in it"; !errors.Is(err, status.Internal) || !strings.Contains(err.Error(), want) {
		t.Errorf("the end says %v, not that %s", err, want)
	}
}

func TestADiscardedCaptureCountsItsSmallTensors(t *testing.T) {
	s, _, f, small := shelved(t, options(codec.None))
	s.sink.mu.Lock()
	for i := range 5 {
		small(i, 10)
	}
	lost := s.Discard()
	if f.put(numbered(0, 5, 10)) {
		t.Error("a discarded capture takes tensors")
	}
	s.sink.unlock(s.opts.helped())
	if lost != 5 {
		t.Errorf("%d packets were given up, not 5", lost)
	}
	<-s.life.finished
	if n := s.intake.waiting(); n != 0 {
		t.Errorf("%d wait for ever", n)
	}
}

func TestNotesKeepTheirPlaceAmongSmallTensors(t *testing.T) {
	s, path, f, _ := shelved(t, options(codec.None))
	checkThreads(t, s, path, 4, 2000, func(layer uint32, i int) error {
		x := numbered(layer, i, 10)
		if i%20 == 19 {
			return s.Note(x, "why")
		}
		if f.put(x) {
			return nil
		}
		return s.Enqueue(x, forever)
	})
}

func TestWorkersRestWhileSmallTensorsCome(t *testing.T) {
	o := options(codec.Zstd)
	o.Yield = true
	s, _, f, _ := shelved(t, o)
	const idle = 10 * idleAfter
	resting(s, idle)
	began := time.Now()
	for i, last := 0, began; time.Since(began) < 50*idleAfter; i++ {
		if x := numbered(0, i, 10); !f.put(x) {
			enqueue(t, s, x)
		}
		time.Sleep(2 * time.Millisecond)
		made, now := s.Stats().Packets, time.Now()
		if now.Sub(last) > idle/2 { // after a longer pause the workers may have begun
			break
		}
		if made > 0 {
			t.Fatalf("packets were made after %v, while tensors came", now.Sub(began))
		}
		last = now
	}
	finish(t, s)
}

func TestThreadsKeepTheirOrderThroughTheRoom(t *testing.T) {
	o := options(codec.None)
	o.MaxMemory = 1 << 20
	s, path, f, _ := shelved(t, o)
	checkThreads(t, s, path, 6, 200, func(layer uint32, i int) error {
		x := numbered(layer, i, 500+1000*(i%7))
		if i%7 <= 3 && f.put(x) {
			return nil
		}
		return s.Enqueue(x, forever)
	})
}

// takeMemory takes all free staging memory. Call give to free it again.
func takeMemory(s *Session) (give func(), err error) {
	var taken []func()
	give = func() {
		for _, free := range taken {
			free()
		}
	}
	for {
		region, ok, err := s.arena.TryAlloc(64, 0, 0)
		if !ok || err != nil {
			return give, err
		}
		taken = append(taken, func() { s.arena.Free(region) })
	}
}

// A flush that times out while small tensors wait for memory does not block later calls.
func TestATimedOutFlushBlocksNoOtherCall(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, path, _, small := shelved(t, o)
	keepPlaces(s)
	n := fillMemory(t, s)
	give, err := takeMemory(s)
	if err != nil {
		t.Fatal(err)
	}
	small(n, 100)
	var cursor uint64
	for range 3 {
		if err := s.Flush(&cursor, time.Millisecond); !errors.Is(err, status.Timeout) || cursor != 0 {
			t.Fatalf("cursor %d, %v", cursor, err)
		}
	}
	give()
	s.sink.unlock(s.opts.helped())
	enqueue(t, s, numbered(0, n+1, 50_000))
	if err := s.Flush(&cursor, patience); err != nil || cursor != 0 {
		t.Errorf("cursor %d, %v", cursor, err)
	}
	finish(t, s)
	if rows, _ := read(t, path); len(rows) != n+2 {
		t.Errorf("%d rows, not %d", len(rows), n+2)
	}
}

// Close with small tensors in the room waits neither for a caller that gave up nor for the writer's
// tick.
func TestCloseEndsWithoutTheTick(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, _, _, small := shelved(t, o)
	stopTicks(s)
	keepPlaces(s)
	n := fillMemory(t, s)
	if err := s.Enqueue(numbered(0, n, 50_000), 0); !errors.Is(err, status.Timeout) {
		t.Fatal(err)
	}
	small(n, 10)
	s.sink.unlock(s.opts.helped())
	if err := s.Close(patience); err != nil {
		t.Error(err)
	}
}

// A panic while a call drains the room fails that call and the session.
func TestAPanicOfADrainEndsTheSession(t *testing.T) {
	s, _, f, small := shelved(t, options(codec.Zstd))
	stopTicks(s)
	small(0, 10)
	f.onNext = func() { panic("a bug") }
	err := s.Guard(func() error { return s.Enqueue(numbered(0, 1, 10), forever) })
	if !errors.Is(err, status.Internal) {
		t.Errorf("the call: %v", err)
	}
	if err := s.Close(patience); !errors.Is(err, status.Internal) {
		t.Errorf("the end: %v", err)
	}
}

// fullWith fills the memory and then puts 60 small tensors into the room; not all of them will find
// memory. n is the number of tensors so far, with steps from 0.
func fullWith(t *testing.T) (s *Session, path string, n int) {
	t.Helper()
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, path, _, small := shelved(t, o)
	n = fillMemory(t, s)
	for range 60 {
		small(n, 4000)
		n++
	}
	return s, path, n
}

// Close ends the calls that wait for small tensors, also calls without a time limit and while the
// disk does not answer.
func TestCallsThatWaitForSmallTensorsEndWithTheSession(t *testing.T) {
	s, path, n := fullWith(t)
	calls := []func() error{
		func() error { return s.Enqueue(numbered(0, n, 50000), forever) },
		func() error { return flush(s, forever) },
		func() error { _, err := checkpoint(s, forever); return err },
	}
	ended := make(chan error)
	for _, call := range calls {
		go func() { ended <- call() }()
	}
	for !s.jobs.Hurried() { // until one call waits for memory
		time.Sleep(time.Millisecond)
	}
	time.Sleep(10 * time.Millisecond) // and the other calls wait for that one
	if err := s.Close(0); !errors.Is(err, status.Timeout) {
		t.Errorf("nothing was waited for: %v", err)
	}
	for range calls {
		select {
		case err := <-ended:
			if !errors.Is(err, status.InvalidState) {
				t.Error(err)
			}
		case <-time.After(patience):
			t.Error("a call goes on waiting")
		}
	}
	s.sink.unlock(s.opts.helped())
	finish(t, s)
	wantSteps(t, path, n)
}

// A note that a failed capture did not write still counts as a failed tensor.
func TestNotesThatWereLostStayCounted(t *testing.T) {
	s, _, n := fullWith(t)
	if err := s.Note(numbered(0, n, 1), "why"); err != nil {
		t.Fatal(err)
	}
	s.life.fail(status.New(status.IO, "a disk"))
	s.sink.unlock(s.opts.helped())
	if err := s.Close(patience); !errors.Is(err, status.IO) {
		t.Error(err)
	}
	if failed := s.Stats().Failed; failed != 1 {
		t.Errorf("%d tensors failed, not 1", failed)
	}
}

// At most MaxNotes notes wait behind small tensors. Further notes are counted, but get no row. No note
// overtakes a small tensor.
func TestNotesBehindSmallTensorsAreBounded(t *testing.T) {
	s, path, n := fullWith(t)
	const notes = maxNotes + 100
	for i := range notes {
		if err := s.Note(numbered(0, n+i, 1), "why"); err != nil {
			t.Fatal(err)
		}
	}
	if failed := s.Stats().Failed; failed != notes {
		t.Errorf("%d tensors failed, not %d", failed, notes)
	}
	s.sink.unlock(s.opts.helped())
	finish(t, s)
	wantSteps(t, path, n+maxNotes)
	if failed := s.Stats().Failed; failed != notes {
		t.Errorf("%d tensors failed at the end, not %d", failed, notes)
	}
}

// Enqueue lets the team help with the small tensors that it drains. A flush does not.
func TestTheTeamHelpsWithinEnqueueAlone(t *testing.T) {
	if !soakTeam.Present() {
		t.Skip("the team is in C, and this build has none")
	}
	for _, enqueues := range []bool{false, true} {
		o := options(codec.Zstd)
		o.Yield, o.Team, o.MaxMemory = true, soakTeam, 1<<20
		s, _, _, small := shelved(t, o)
		for i := range 60 {
			small(i, 4000)
		}
		if enqueues {
			enqueue(t, s, numbered(0, 60, 4000))
		} else if err := flush(s, forever); err != nil {
			t.Fatal(err)
		}
		if helps := s.Stats().YieldNS > 0; helps != enqueues {
			t.Errorf("the team helped: %v; within Enqueue: %v", helps, enqueues)
		}
		finish(t, s)
	}
}
