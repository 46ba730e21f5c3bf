// Tests of calls that wait, time out and are repeated.

package session

import (
	"errors"
	"fmt"
	"math"
	"path/filepath"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// busily starts threads that capture tensors of n values, faster than they can be written, until
// the test ends or the session refuses them. It returns once they wait for memory. captured counts
// the tensors.
func busily(t *testing.T, s *Session, threads, n int, timeout time.Duration) (captured *atomic.Int64) {
	t.Helper()
	captured = &atomic.Int64{}
	var running sync.WaitGroup
	var stop atomic.Bool
	t.Cleanup(func() { stop.Store(true); running.Wait() })
	layer := mustLayer(t, s, "busy")
	for i := range threads {
		v := noise(n, uint64(i))
		running.Go(func() {
			for x := tensorOf(layer, wire.Float32, v); !stop.Load(); {
				switch err := s.Enqueue(x, timeout); {
				case err == nil:
					captured.Add(1)
				case !errors.Is(err, status.Timeout):
					return
				}
			}
		})
	}
	for begin := time.Now(); s.Stats().Stalls < 3; time.Sleep(time.Millisecond) {
		if time.Since(begin) > time.Minute {
			t.Fatal("nobody waits for memory")
		}
	}
	return captured
}

// slow opens a session that writes more slowly than one thread captures.
func slow(t *testing.T, path string) *Session {
	o := options(codec.Zstd)
	o.Level, o.Workers, o.MaxMemory = 4, 1, 4<<20
	return open(t, path, o)
}

// A flush or checkpoint that is repeated with short time limits waits only for the packets that
// existed at its first call.
func TestARepeatedFlushEnds(t *testing.T) {
	for name, wait := range map[string]func(*Session, *uint64) error{
		"flush": func(s *Session, cursor *uint64) error { return s.Flush(cursor, time.Millisecond) },
		"checkpoint": func(s *Session, cursor *uint64) error {
			_, err := s.Checkpoint(cursor, time.Millisecond)
			return err
		},
	} {
		t.Run(name, func(t *testing.T) {
			s := slow(t, filepath.Join(t.TempDir(), "a.stream"))
			busily(t, s, 2, 50_000, forever)
			before := s.Stats()
			cursor, calls := uint64(0), 0
			for err := error(status.New(status.Timeout, "")); err != nil; calls++ {
				if err = wait(s, &cursor); err != nil && !errors.Is(err, status.Timeout) {
					t.Fatal(err)
				}
				if wrote := s.Stats().Packets - before.Packets; wrote > 4*before.QueuedPackets {
					t.Fatalf("%d packets were written since, %d waited then", wrote, before.QueuedPackets)
				}
			}
			if calls < 2 || cursor != 0 {
				t.Errorf("%d calls, cursor %d", calls, cursor)
			}
		})
	}
}

// An Enqueue that is repeated with short time limits keeps its place: only calls that waited before
// it get memory first.
func TestARepeatedEnqueueKeepsItsPlace(t *testing.T) {
	const threads = 4
	s := slow(t, filepath.Join(t.TempDir(), "a.stream"))
	captured := busily(t, s, threads, 50_000, time.Millisecond)
	x := tensorOf(mustLayer(t, s, "large"), wire.Float32, noise(500_000, 9))
	// Each other thread may have one tensor that waited before x, and one that it has not counted yet. Others
	// are taken behind x, and count too if this goroutine stands still then. So the least of three runs counts.
	least, told := int64(math.MaxInt64), ""
	for run := 0; run < 3 && least > 2*threads; {
		before := int64(-1)
		calls := 0
		for err := error(status.New(status.Timeout, "")); err != nil; calls++ {
			if err = s.Enqueue(x, time.Millisecond); err != nil && !errors.Is(err, status.Timeout) {
				t.Fatal(err)
			}
			if before < 0 {
				before = captured.Load()
			}
		}
		if calls < 2 { // the first call found room
			continue
		}
		run++
		if n := captured.Load() - before; n < least {
			least, told = n, fmt.Sprintf("%d calls, %d tensors of %d other threads were taken meanwhile", calls, n, threads)
		}
	}
	if least > 2*threads {
		t.Error(told)
	}
}

// Close ends a call that waits for memory behind the first packets of its tensor. The index says that
// the rest is missing.
func TestATensorThatCloseCutsShortIsNoted(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	o := options(codec.Zstd)
	o.split, o.MaxMemory = 150_000, 1<<20
	s := open(t, path, o)
	x := tensorOf(mustLayer(t, s, "x"), wire.Float32, noise(4_000_000, 1))
	s.sink.mu.Lock() // nothing is written, so the memory fills up
	refused, closed := make(chan error, 1), make(chan error, 1)
	go func() { refused <- s.Enqueue(x, forever) }()
	for s.Stats().Stalls == 0 {
		time.Sleep(time.Millisecond)
	}
	go func() { closed <- s.Close(forever) }()
	if err := soon(t, refused); !errors.Is(err, status.InvalidState) {
		t.Error(err)
	}
	s.sink.unlock(false)
	if err := soon(t, closed); err != nil {
		t.Fatal(err)
	}
	rows, _ := read(t, path)
	last := rows[len(rows)-1]
	if len(rows) < 2 || rows[0].Parts != 54 || last.Error != abandonedMessage || last.Offset != -1 {
		t.Errorf("%d rows, the last %+v", len(rows), last)
	}
	if st := s.Stats(); st.Tensors != 0 || st.Failed != 1 {
		t.Errorf("stats %+v", st)
	}
}

// Abandon takes a tensor that timed out out of the line. It may come late, twice or with cursor 0.
func TestATensorThatIsGivenUpLeavesTheLine(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, path := withLayer(t, o)
	n := fillMemory(t, s)
	keepPlaces(s)
	x := numbered(0, n, 50_000)
	if err := s.Enqueue(x, 0); !errors.Is(err, status.Timeout) || x.Cursor == 0 {
		t.Fatalf("cursor %d, %v", x.Cursor, err)
	}
	if err := s.Abandon(x.Cursor); err != nil || len(s.staging.line.places) > 0 {
		t.Fatalf("%d places are left, %v", len(s.staging.line.places), err)
	}
	s.sink.mu.Unlock()
	if err := errors.Join(s.Abandon(x.Cursor), s.Abandon(0), s.Enqueue(x, forever)); err != nil {
		t.Error(err)
	}
	if err := s.Abandon(emissionCursor(7)); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("of no tensor: %v", err)
	}
	finish(t, s)
	if rows, _ := read(t, path); len(rows) != n+1 {
		t.Errorf("%d rows, not %d", len(rows), n+1)
	}
}

// A host may skip tensors that find no room, without Abandon. Their places hold up no later call.
func TestSkippedTensorsHoldUpNoLaterCall(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, _ := withLayer(t, o)
	keepPlaces(s)
	n := fillMemory(t, s)
	for range 10 {
		if err := s.Enqueue(numbered(0, n, 50_000), 0); !errors.Is(err, status.Timeout) {
			t.Fatal(err)
		}
	}
	s.sink.mu.Unlock()
	for range 10 {
		if err := flush(s, patience); err != nil { // after the flush there is room
			t.Fatal(err)
		}
		if err := s.Enqueue(numbered(0, n, 50_000), 0); err != nil {
			t.Error(err)
		}
	}
	finish(t, s)
}

// A tensor that timed out finds its memory when the call is repeated, even if other threads enqueued
// tensors meanwhile.
func TestLaterCallsLeaveRoomForATensorThatTimedOut(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, _ := withLayer(t, o)
	keepPlaces(s)
	n := fillMemory(t, s)
	x := numbered(0, n, 120_000)
	if err := s.Enqueue(x, 0); !errors.Is(err, status.Timeout) {
		t.Fatal(err)
	}
	s.sink.mu.Unlock()
	if err := flush(s, patience); err != nil {
		t.Fatal(err)
	}
	s.sink.mu.Lock()
	more := 0
	for ; s.Enqueue(numbered(0, n, 20_000), 0) == nil; more++ {
	}
	if err := s.Enqueue(x, 0); err != nil || more == 0 {
		t.Errorf("behind %d others: %v", more, err)
	}
	s.sink.mu.Unlock()
	finish(t, s)
}

// With DropOnFull, no call waits, even if many threads find the memory full at once.
func TestDropsOfManyThreadsDoNotWait(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory, o.DropOnFull = 1<<20, true
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), o)
	layer := mustLayer(t, s, "x")
	var taken, dropped atomic.Int64
	var all sync.WaitGroup
	for range 12 {
		all.Go(func() {
			x := numbered(layer, 0, 20_000)
			for range 200 {
				switch err := s.Enqueue(x, 0); {
				case err == nil:
					taken.Add(1)
				case errors.Is(err, ErrDropped):
					dropped.Add(1)
				default:
					t.Error(err)
				}
			}
		})
	}
	all.Wait()
	if st := s.Stats(); taken.Load()+dropped.Load() != 12*200 || st.Stalls > 0 || taken.Load() == 0 {
		t.Errorf("%d taken, %d dropped, %d stalls", taken.Load(), dropped.Load(), st.Stalls)
	}
	finish(t, s)
}

// A checkpoint beside Close covers the tensors of its thread, or is refused.
func TestACheckpointBesideCloseIsTrueOrRefused(t *testing.T) {
	for round := range 150 {
		path := filepath.Join(t.TempDir(), "a.stream")
		s := open(t, path, options(codec.None))
		layer := mustLayer(t, s, "x")
		var all sync.WaitGroup
		covered := make([]int64, 3)       // bytes that the last checkpoint of each thread covers
		rows := make([]int, len(covered)) // tensors of the thread up to that checkpoint
		for i := range covered {
			all.Go(func() {
				for n := 1; ; n++ {
					x := numbered(layer, n, 1000)
					x.Thread = uint64(i)
					if err := s.Enqueue(x, forever); err != nil {
						return
					}
					offset, err := checkpoint(s, forever)
					if err != nil {
						if !errors.Is(err, status.InvalidState) {
							t.Error(err)
						}
						return
					}
					covered[i], rows[i] = offset, n
				}
			})
		}
		time.Sleep(time.Duration(round%30) * 50 * time.Microsecond)
		finish(t, s)
		all.Wait()
		r, err := reader.Open(path, reader.Options{})
		if err != nil {
			t.Fatal(err)
		}
		found := make([]int, len(covered))
		for i := range r.NumRows() {
			row, err := r.Row(i)
			if err != nil {
				t.Fatal(err)
			}
			if row.Offset+int64(row.Length) <= covered[row.Thread] {
				found[row.Thread]++
			}
		}
		r.Close()
		for i := range covered {
			if found[i] < rows[i] {
				t.Fatalf("round %d: a checkpoint of %d tensors says %d bytes, which have %d", round, rows[i], covered[i], found[i])
			}
		}
	}
}

// While the caller of a half-enqueued streamed tensor is away, other calls may use the memory that
// is left.
func TestAStreamedTensorDoesNotHoldTheLine(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), o)
	layer := mustLayer(t, s, "x")
	large := numbered(layer, 0, 4_000_000)
	if err := s.Enqueue(large, 0); !errors.Is(err, status.Timeout) || large.Cursor&1 == 0 {
		t.Fatalf("cursor %d, %v", large.Cursor, err)
	}
	if err := s.Enqueue(numbered(layer, 1, 1000), 0); err != nil {
		t.Error(err)
	}
	enqueue(t, s, large)
	finish(t, s)
}

// A repeated call may find that the session has ended since it began. Then its cursor is not to blame.
func TestARepeatedCallMeetsTheEnd(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), o)
	large := numbered(mustLayer(t, s, "x"), 0, 4_000_000)
	if err := s.Enqueue(large, 0); !errors.Is(err, status.Timeout) || large.Cursor&1 == 0 {
		t.Fatalf("cursor %d, %v", large.Cursor, err)
	}
	finish(t, s)
	if err := s.enqueuer.enqueue(large, 0); !errors.Is(err, status.InvalidState) {
		t.Errorf("behind the check of Session.Enqueue: %v", err)
	}
}

// Flush and Close wake the writer, and do not wait for its tick.
func TestTheWriterIsWoken(t *testing.T) {
	for what, call := range map[string]func(*Session) error{
		"flush": func(s *Session) error { return flush(s, patience) },
		"close": func(s *Session) error { return s.Close(patience) },
	} {
		s := open(t, filepath.Join(t.TempDir(), "a.stream"), options(codec.Zstd))
		stopTicks(s)
		enqueue(t, s, numbered(mustLayer(t, s, "x"), 0, 10))
		time.Sleep(10 * time.Millisecond) // the packet is in a block
		if err := call(s); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// stopTicks stops the writer's tick, so that the writer only works when another thread wakes it.
func stopTicks(s *Session) {
	for stopped := false; !stopped; time.Sleep(time.Millisecond) {
		s.sink.mu.Lock()
		if stopped = s.writer.tick != nil; stopped {
			s.writer.tick.Stop()
		}
		s.sink.mu.Unlock()
	}
}

// keepPlaces stops the line's clock, so that no place in it lapses.
func keepPlaces(s *Session) {
	s.staging.line.mu.Lock()
	defer s.staging.line.mu.Unlock()
	s.staging.line.now = func() time.Time { return time.Unix(0, 0) }
}

// Empty tensors without a name have rows in the index alone, and hold no memory while they wait for
// it.
func TestEmptyTensorsDoNotFillTheMemory(t *testing.T) {
	o := options(codec.None)
	o.MaxMemory = 1 << 20
	s, path := withLayer(t, o)
	root := mustLayer(t, s, "")
	s.sink.mu.Lock() // without this lock no packet can be made inline, so all are staged
	n := int(o.MaxMemory/(rowCost+64)) - 3
	for range n {
		enqueue(t, s, &Tensor{Layer: root, DType: wire.Float16, Shape: []int64{0}})
	}
	for it := s.order.First(); len(s.sink.unpublished) < n; it = s.order.First() {
		if it == nil {
			time.Sleep(time.Millisecond) // the first packet is not complete yet
			continue
		}
		s.order.Pop()
		if err := s.sink.append(it); err != nil {
			t.Fatal(err)
		}
	}
	if held := s.Stats().QueuedBytes; held != 0 {
		t.Errorf("they hold %d bytes", held)
	}
	s.sink.mu.Unlock()
	if err := s.Enqueue(numbered(0, 0, 4000), patience); err != nil {
		t.Error(err)
	}
	if err := s.Close(time.Minute); err != nil {
		t.Fatal(err)
	}
	if rows, _ := read(t, path); len(rows) != n+1 {
		t.Errorf("%d rows, not %d", len(rows), n+1)
	}
}

// With DropOnFull, Enqueue never waits, neither for the float32 twin of a float16 packet nor for a
// tensor that would be streamed otherwise.
func TestDropsDoNotWait(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory, o.DropOnFull = 1<<20, true
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	layer := mustLayer(t, s, "x")
	drops := func(x *Tensor) error {
		t.Helper()
		done := make(chan error)
		go func() { done <- s.Enqueue(x, forever) }()
		return soon(t, done)
	}
	fitting := numbered(layer, 0, 300_000) // 600 KB of float16: more than a quarter
	if err := drops(fitting); err != nil {
		t.Fatal(err)
	}
	if err := flush(s, forever); err != nil {
		t.Fatal(err)
	}
	s.sink.mu.Lock()
	for err := error(nil); !errors.Is(err, ErrDropped); {
		if err = drops(numbered(layer, 1, 50_000)); err != nil && !errors.Is(err, ErrDropped) {
			t.Fatal(err)
		}
	}
	if err := drops(fitting); !errors.Is(err, ErrDropped) {
		t.Errorf("a large tensor: %v", err)
	}
	if err := drops(numbered(layer, 1, 10_000_000)); !errors.Is(err, ErrDropped) {
		t.Errorf("a tensor larger than the memory: %v", err)
	}
	// Find the largest tensor whose float16 packet has room. Its float32 twin then has none.
	wide := float32s(50_000, func(int) float32 { return 1e30 })
	err, before := error(ErrDropped), s.Stats()
	for n := len(wide); err != nil && s.Stats().Overflowed == before.Overflowed; n -= 500 {
		if err = drops(tensorOf(layer, wire.Float32, wide[:n])); err != nil && !errors.Is(err, ErrDropped) {
			t.Fatal(err)
		}
	}
	after := s.Stats()
	if !errors.Is(err, ErrDropped) || after.Overflowed != before.Overflowed+1 || after.Tensors != before.Tensors+1 {
		t.Errorf("%v; %+v after %+v", err, after, before)
	}
	s.sink.mu.Unlock()
	finish(t, s)
	rows, _ := read(t, path)
	if last := rows[len(rows)-1]; !strings.Contains(last.Error, "stored as infinities") {
		t.Errorf("the last row says %q", last.Error)
	}
	dropped := 0
	for _, row := range rows {
		if strings.Contains(row.Error, "dropped") {
			dropped++
		}
	}
	if st := s.Stats(); st.Dropped != uint64(dropped) || st.Stalls != 0 || st.Packets != uint64(len(rows)-dropped) {
		t.Errorf("%d notes of dropped tensors, %+v", dropped, st)
	}
}

// If a part of a split tensor finds no room, that part and the later ones are dropped.
func TestPartsThatHaveNoRoomAreDropped(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory, o.DropOnFull, o.split = 1<<20, true, 300_000
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	s.sink.mu.Lock()
	if err := s.Enqueue(numbered(mustLayer(t, s, "x"), 1, 1_000_000), forever); !errors.Is(err, ErrDropped) {
		t.Error(err)
	}
	s.sink.mu.Unlock()
	finish(t, s)
	rows, _ := read(t, path)
	last := rows[len(rows)-1]
	if n := len(rows) - 1; n < 1 || n > 3 || rows[n-1].Part != uint32(n-1) || rows[0].Parts != 7 ||
		!strings.Contains(last.Error, fmt.Sprintf("part %d and those behind it were dropped", n)) {
		t.Errorf("%d rows, the last one says %q", len(rows), last.Error)
	}
	if st := s.Stats(); st.Dropped != 1 || st.Tensors != 0 {
		t.Errorf("%+v", st)
	}
}

// The texts of a tensor and of a note have a largest size, count as memory, and are bounded in the
// rows that wait.
func TestTextIsBounded(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s, path := withLayer(t, o)
	x := numbered(0, 0, 1)
	x.Transform, x.Parameters = "t", strings.Repeat("p", MaxText)
	if err := s.Enqueue(x, forever); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("parameters of %d bytes: %v", len(x.Parameters), err)
	}
	x.Parameters = x.Parameters[1:]
	s.sink.mu.Lock()
	n := 0
	for err := error(nil); err == nil; n++ {
		x.Step = int64(n)
		err = s.Enqueue(x, 0)
	}
	if n > int(o.MaxMemory)/MaxText {
		t.Errorf("%d tensors with %d bytes of text each are in a memory of %d", n, MaxText, o.MaxMemory)
	}
	s.sink.mu.Unlock()
	x.Cursor = 0
	for i := n - 1; i < 150; i++ {
		x.Step = int64(i)
		x.Data = numbered(0, 0, 1).Data
		enqueue(t, s, x)
		s.sink.mu.Lock()
		text := 0
		for _, it := range s.sink.unpublished {
			text += it.text()
		}
		if text > maxUnpublishedText+MaxText {
			t.Errorf("rows with %d bytes of text wait", text)
		}
		s.sink.mu.Unlock()
	}
	if err := s.Note(x, strings.Repeat("ü", 1<<20)); err != nil {
		t.Error(err)
	}
	finish(t, s)
	rows, _ := read(t, path)
	last := rows[len(rows)-1].Error
	if len(rows) != 151 || rows[149].Parameters != x.Parameters || len(last) > maxMessage || !strings.HasSuffix(last, "ü...") {
		t.Errorf("%d rows, the last with a message of %d bytes that ends in %q", len(rows), len(last), last[max(0, len(last)-5):])
	}
}

// The names of all layers together have a largest size. Known layers are still found beyond it.
func TestNamesOfLayersAreBounded(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), options(codec.None))
	if _, err := s.Layer(strings.Repeat("m", MaxText+1), "x", ""); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a model's name of %d bytes: %v", MaxText+1, err)
	}
	name, n := strings.Repeat("n", 60_000), 0
	for err := error(nil); err == nil; n++ {
		if _, err = s.Layer("", name, fmt.Sprint(n)); err != nil && !errors.Is(err, status.NoMemory) {
			t.Error(err)
		}
	}
	if n < 500 || n > 600 {
		t.Errorf("%d layers with names of 60,000 bytes", n)
	}
	if _, err := s.Layer("", name, "0"); err != nil {
		t.Errorf("a layer that is known: %v", err)
	}
}

// If the writer panics within a streamed tensor, the Enqueue that feeds the tensor returns an
// internal error.
func TestAPanicOfTheWriterWakesTheFeedingCall(t *testing.T) {
	o := options(codec.LZ4)
	o.MaxMemory = 1 << 20
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), o)
	s.sink.mu.Lock()
	s.writer.frames = nil
	s.sink.mu.Unlock()
	done := make(chan error)
	go func() { done <- s.Enqueue(numbered(mustLayer(t, s, "x"), 1, 10_000_000), forever) }()
	if err := soon(t, done); !errors.Is(err, status.Internal) {
		t.Error(err)
	}
	if err, want := s.Close(forever), "1 packets are not in it"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the end says %v, not that %s", err, want)
	}
}

// Close ends although an Enqueue of a streamed tensor is repeated beside it: the writer does not
// wait for the rest of the tensor.
func TestCloseBesideARepeatedEnqueueEnds(t *testing.T) {
	values := make([]int8, 64<<20)
	for range 20 {
		o := options(codec.LZ4)
		o.MaxMemory = 1 << 20
		s, _ := withLayer(t, o)
		x := tensorOf(0, wire.Int8, values)
		for x.Cursor&1 == 0 { // until a part of x is taken
			if err := s.Enqueue(x, 0); !errors.Is(err, status.Timeout) {
				t.Fatal(err)
			}
		}
		var repeats sync.WaitGroup
		repeats.Go(func() {
			for errors.Is(s.Enqueue(x, 0), status.Timeout) {
			}
		})
		ended := make(chan error)
		go func() { ended <- s.Close(forever) }()
		if err := soon(t, ended); err != nil {
			t.Error(err)
		}
		repeats.Wait()
	}
}

// A panic while a streamed tensor is copied ends the session: the writer does not wait for the rest
// of the tensor.
func TestAPanicOfACopyEndsTheSession(t *testing.T) {
	o := options(codec.LZ4)
	o.MaxMemory = 1 << 20
	s, _ := withLayer(t, o)
	const n = 4 << 20
	values, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ, syscall.MAP_ANON|syscall.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	defer syscall.Munmap(values)
	if err := syscall.Mprotect(values[n/2:], syscall.PROT_NONE); err != nil {
		t.Fatal(err)
	}
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	err = s.Guard(func() error { return s.Enqueue(tensorOf(0, wire.Int8, values), forever) })
	if !errors.Is(err, status.Internal) {
		t.Errorf("the call: %v", err)
	}
	ended := make(chan error)
	go func() { ended <- s.Close(forever) }()
	if err, want := soon(t, ended), "1 packets are not in it"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("the end says %v, not that %s", err, want)
	}
}

// withLayer opens a session with a layer, whose id is 0.
func withLayer(t *testing.T, o Options) (s *Session, path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "a.stream")
	s = open(t, path, o)
	mustLayer(t, s, "small")
	return s, path
}

// fillMemory enqueues tensors until there is no room for another, and returns how many it enqueued.
// It leaves the sink locked, so the writer takes nothing until the caller unlocks it, as if the disk
// did not answer.
func fillMemory(t *testing.T, s *Session) (n int) {
	t.Helper()
	large := mustLayer(t, s, "large")
	s.sink.mu.Lock()
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

// numbered returns a float32 tensor of step i with n elements, which are all i.
func numbered(layer uint32, i, n int) *Tensor {
	x := tensorOf(layer, wire.Float32, float32s(n, func(int) float32 { return float32(i) }))
	x.Step = int64(i)
	return x
}

// resting lets the workers of a session rest until no packet has come for idle. It switches off the
// bound on the wait of the oldest packet, in effect, by setting it to an hour.
func resting(s *Session, idle time.Duration) {
	s.jobs.mu.Lock()
	defer s.jobs.mu.Unlock()
	s.jobs.idle, s.jobs.longest = idle, time.Hour
}
