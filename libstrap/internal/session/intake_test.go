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

// shelf is an Intake without C.
type shelf struct {
	mu      sync.Mutex
	tensors []Tensor
	at      int
	held    bool
	shut    bool
	layers  int
	settled uint64
	taken   uint64
	bytes   uint64
}

// put takes a tensor of float32, if it may.
func (f *shelf) put(x *Tensor) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.held || f.shut || int(x.Layer) >= f.layers {
		return false
	}
	f.tensors = append(f.tensors, *x)
	f.taken++
	f.bytes += uint64(4 * x.Shape[0])
	return true
}

func (f *shelf) locked(do func()) {
	f.mu.Lock()
	defer f.mu.Unlock()
	do()
}

func (f *shelf) Layers(n int)        { f.locked(func() { f.layers = n }) }
func (f *shelf) Requests(int)        {}
func (f *shelf) Waiting() (n int)    { f.locked(func() { n = len(f.tensors) - f.at }); return n }
func (f *shelf) Settled() (n uint64) { f.locked(func() { n = f.settled }); return n }
func (f *shelf) Taken() (n, bytes uint64) {
	f.locked(func() { n, bytes = f.taken, f.bytes })
	return n, bytes
}
func (f *shelf) Pop()   { f.locked(func() { f.at++ }) }
func (f *shelf) Hold()  { f.locked(func() { f.held = true }) }
func (f *shelf) Shut()  { f.locked(func() { f.shut = true }) }
func (f *shelf) Close() { f.Shut() }

func (f *shelf) First(t *Tensor) (some bool) {
	f.locked(func() {
		if some = f.at < len(f.tensors); some {
			f.held, *t = true, f.tensors[f.at]
		} else {
			f.held, f.tensors, f.at = false, nil, 0
			f.settled++
		}
	})
	return some
}

// shelved opens a session with an intake, and gives a function that has it take a
// tensor of n times i.
func shelved(t *testing.T, o Options) (s *Session, path string, small func(i, n int)) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "a.stream")
	f := &shelf{}
	o.Intake = f
	s = open(t, path, o)
	layer := mustLayer(t, s, "small")
	return s, path, func(i, n int) {
		t.Helper()
		x := numbered(layer, i, n)
		x.Thread, x.TimeNS = uint64(1000+i), int64(2000+i)
		if !f.put(x) {
			t.Fatalf("tensor %d was not taken", i)
		}
	}
}

// numbered is a tensor of n times i, whose step is i.
func numbered(layer uint32, i, n int) *Tensor {
	x := tensorOf(layer, wire.Float32, float32s(n, func(int) float32 { return float32(i) }))
	x.Step = int64(i)
	return x
}

// wantSteps checks that a capture has rows of the steps from 0 on.
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

func TestEveryCallSettlesWhatTheIntakeTook(t *testing.T) {
	for _, k := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd} {
		t.Run(k.String(), func(t *testing.T) {
			s, path, small := shelved(t, options(k))
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

func TestWhatTheIntakeTookReachesTheFileWithoutBeingAskedFor(t *testing.T) {
	s, _, small := shelved(t, options(codec.LZ4))
	small(0, 10)
	for begin := time.Now(); s.Stats().Packets == 0; time.Sleep(5 * time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatal("the tensor is not in the file")
		}
	}
}

// fillMemory enqueues tensors until there is no room for another, and says how many went in.
// The writer takes nothing until its lock is given back, as if the disk did not answer.
func fillMemory(t *testing.T, s *Session) (n int) {
	t.Helper()
	large := mustLayer(t, s, "large")
	s.writer.mu.Lock()
	for ; ; n++ {
		x := numbered(large, n, 50000)
		err := s.Enqueue(x, 0)
		if errors.Is(err, status.Timeout) {
			err = s.Abandon(x.Cursor)
			if err == nil {
				return n
			}
		}
		if err != nil {
			t.Fatal(err)
		}
	}
}

func TestATimeoutLeavesToTheNextCallWhatIsNotSettled(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	o.Workers = 1
	s, path, small := shelved(t, o)
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
	s.writer.mu.Unlock()
	soon(t, s.finished) // whether or not it is waited for
	finish(t, s)
	wantSteps(t, path, step+1)
}

func TestWaitsForWhatTheIntakeTookAreCountedOnceACall(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, _, small := shelved(t, o)
	n := fillMemory(t, s)
	defer s.writer.mu.Unlock()
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
	stalls, ns := after.Stalls-before.Stalls, time.Duration(after.StallNS-before.StallNS)
	if stalls != 3 || ns < 150*time.Millisecond || ns > 50*time.Second {
		t.Errorf("%d stalls of %v, not 3 of 150 ms", stalls, ns)
	}
}

func TestOverflowOfWhatTheIntakeTook(t *testing.T) {
	s, path, _ := shelved(t, options(codec.None))
	layer := mustLayer(t, s, "wide")
	x := tensorOf(layer, wire.Float32, []float32{1, 1e30})
	if !s.opts.Intake.(*shelf).put(x) {
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

func TestAFailedCaptureCountsWhatItsIntakeHadTaken(t *testing.T) {
	s, _, small := shelved(t, options(codec.None))
	for i := range 5 {
		small(i, 10)
	}
	s.fail(status.New(status.IO, "a disk"))
	if s.opts.Intake.(*shelf).put(numbered(0, 5, 10)) {
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

func TestAFailureWhileTheEndWaitsForRoom(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, _, small := shelved(t, o)
	n := fillMemory(t, s)
	for i := range 40 {
		small(n+i, 4000)
	}
	ended := make(chan error)
	go func() { ended <- s.Close(forever) }()
	for !s.jobs.Hurried() { // it waits
		time.Sleep(time.Millisecond)
	}
	s.fail(status.New(status.IO, "a disk"))
	s.writer.mu.Unlock()
	if err, want := <-ended, fmt.Sprintf("%d packets are not in it", n+40); !errors.Is(err, status.IO) || !strings.Contains(err.Error(), want) {
		t.Errorf("the end says %v, not that %s", err, want)
	}
}

func TestATensorThatIsNoneStopsTheCapture(t *testing.T) {
	s, _, small := shelved(t, options(codec.None))
	for i := range 3 {
		small(i, 10)
	}
	s.opts.Intake.(*shelf).tensors[1].Shape = []int64{-1}
	for range 2 {
		if err := flush(s, forever); !errors.Is(err, status.Internal) {
			t.Errorf("a flush says %v", err)
		}
	}
	if err, want := s.Close(forever), "packets are not in it"; !errors.Is(err, status.Internal) || !strings.Contains(err.Error(), want) {
		t.Errorf("the end says %v, not that %s", err, want)
	}
}

func TestADiscardedCaptureCountsWhatItsIntakeHadTaken(t *testing.T) {
	s, _, small := shelved(t, options(codec.None))
	s.writer.mu.Lock()
	for i := range 5 {
		small(i, 10)
	}
	lost := s.Discard()
	if s.opts.Intake.(*shelf).put(numbered(0, 5, 10)) {
		t.Error("a discarded capture takes tensors")
	}
	s.writer.mu.Unlock()
	if lost != 5 {
		t.Errorf("%d packets were given up, not 5", lost)
	}
	<-s.finished
	if n := s.opts.Intake.Waiting(); n != 0 {
		t.Errorf("%d wait for ever", n)
	}
}

func TestNotesKeepTheirPlaceAmongSmallTensors(t *testing.T) {
	s, path, _ := shelved(t, options(codec.None))
	f := s.opts.Intake.(*shelf)
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

func TestWorkersRestWhileTheIntakeTakesTensors(t *testing.T) {
	o := options(codec.Zstd)
	o.Yield = true
	s, _, _ := shelved(t, o)
	f := s.opts.Intake.(*shelf)
	const idle = 10 * idleAfter
	resting(s, idle)
	began := time.Now()
	for i, last := 0, began; time.Since(began) < 50*idleAfter; i++ {
		if x := numbered(0, i, 10); !f.put(x) {
			enqueue(t, s, x)
		}
		time.Sleep(2 * time.Millisecond)
		made, now := s.Stats().Packets, time.Now()
		if now.Sub(last) > idle/2 { // this machine paused, as a model may
			break
		}
		if made > 0 {
			t.Fatalf("packets were made after %v, while tensors came", now.Sub(began))
		}
		last = now
	}
	finish(t, s)
}

// resting lets the workers of a session rest until no packet has come for so long, however long
// the oldest waits.
func resting(s *Session, idle time.Duration) {
	s.jobs.mu.Lock()
	defer s.jobs.mu.Unlock()
	s.jobs.idle, s.jobs.longest = idle, time.Hour
}

func TestThreadsKeepTheirOrderThroughTheIntake(t *testing.T) {
	o := options(codec.None)
	o.MaxMemory = 1 << 20
	s, path, _ := shelved(t, o)
	f := s.opts.Intake.(*shelf)
	checkThreads(t, s, path, 6, 200, func(layer uint32, i int) error {
		x := numbered(layer, i, 500+1000*(i%7))
		if i%7 <= 3 && f.put(x) {
			return nil
		}
		return s.Enqueue(x, forever)
	})
}
