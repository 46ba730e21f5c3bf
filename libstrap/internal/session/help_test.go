// Tests of packets that a team of the host's threads makes.

//go:build cgo

package session

import (
	"bytes"
	"fmt"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/team/teamtest"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

func init() { soakTeam = teamtest.New() }

func helped(k codec.Kind) Options {
	o := options(k)
	o.Yield, o.Team, o.MaxMemory = true, teamtest.New(), 16<<20
	return o
}

// fill captures n tensors of 100,000 float32, with steps from 0, and returns the float16 bytes
// of each.
func fill(t testing.TB, s *Session, layer uint32, n int) (want [][]byte) {
	for i := range n {
		v := float32s(100_000, func(k int) float32 { return float32((k*7 + i*13) % 1000) })
		x := tensorOf(layer, wire.Float32, v)
		x.Step = int64(i)
		if err := s.Enqueue(x, forever); err != nil {
			t.Error(err)
		}
		want = append(want, halves(v))
	}
	return want
}

// The team's threads make packets within Enqueue, and the capture reads back as it was sent.
func TestTheTeamMakesThePackets(t *testing.T) {
	for _, k := range []codec.Kind{codec.LZ4, codec.Zstd} { // raw elements need no help
		path := filepath.Join(t.TempDir(), "a.stream")
		s := open(t, path, helped(k))
		want := fill(t, s, mustLayer(t, s, "a"), 100)
		if st := s.Stats(); st.YieldNS == 0 {
			t.Errorf("%s: nobody helped", k)
		}
		finish(t, s)
		_, payloads := read(t, path)
		if len(payloads) != len(want) {
			t.Fatalf("%s: %d packets of %d", k, len(payloads), len(want))
		}
		for i := range want {
			if !bytes.Equal(payloads[i], want[i]) {
				t.Fatalf("%s: packet %d has other values", k, i)
			}
		}
	}
}

func TestThreadsMakePacketsAtOnceWithFlushesInBetween(t *testing.T) {
	for _, k := range []codec.Kind{codec.LZ4, codec.None} {
		t.Run(k.String(), func(t *testing.T) { captureInThreads(t, helped(k)) })
	}
}

// captureInThreads captures from several threads with checkpoints in between, and checks that the
// packets of each thread are complete, in order and without a gap in the file.
func captureInThreads(t *testing.T, o Options) {
	const threads, each = 4, 60
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	want := make([][][]byte, threads)
	var all sync.WaitGroup
	for i := range threads {
		layer := mustLayer(t, s, fmt.Sprint(i))
		all.Go(func() { want[i] = fill(t, s, layer, each) })
	}
	all.Go(func() {
		for range 10 {
			if _, err := checkpoint(s, forever); err != nil {
				t.Error(err)
			}
		}
	})
	all.Wait()
	finish(t, s)
	rows, payloads := read(t, path)
	if len(rows) != threads*each {
		t.Fatalf("%d packets of %d", len(rows), threads*each)
	}
	next, end := [threads]int{}, int64(0)
	for i, row := range rows {
		thread := int(row.Layer[0] - '0')
		if row.Step != int64(next[thread]) || row.Offset != end {
			t.Fatalf("row %d is step %d of thread %d at %d, not step %d at %d",
				i, row.Step, thread, row.Offset, next[thread], end)
		}
		if !bytes.Equal(payloads[i], want[thread][row.Step]) {
			t.Fatalf("step %d of thread %d has other values", row.Step, thread)
		}
		next[thread]++
		end = row.Offset + int64(row.Length)
	}
}

// While a session closes, only the writer appends packets. If a helper took the last packet, the
// writer would not learn that it was the last.
func TestHelpersLeaveTheEndToTheWriter(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), helped(codec.LZ4))
	region, _, err := s.arena.TryAlloc(wire.HeaderSize+1+4, 0, 0)
	if err != nil {
		t.Fatal(err)
	}
	last := &entry{name: "a", region: region, out: region.Buf}
	wire.PutHeader(last.out, 1, 4)
	last.row = wire.Row{Layer: "a", Length: uint64(len(last.out)), Codec: codec.None.String()}
	s.counters.queuedPackets.Add(1)
	if err := s.order.Push(last); err != nil {
		t.Fatal(err)
	}
	s.refuse()
	for !s.sink.isFinishing() { // until the writer has seen the refusal
		time.Sleep(time.Millisecond)
	}
	last.made.Store(true)
	s.sink.tryAppend()
	s.order.Wake()
	soon(t, s.life.finished)
	if n := s.Stats().Packets; n != 1 {
		t.Errorf("%d packets", n)
	}
}

func (k *sink) isFinishing() bool {
	k.mu.Lock()
	defer k.mu.Unlock()
	return k.finishing
}

// Discard closes the file at once, also while packets wait for workers that rest.
func TestADiscardedCaptureLetsGoOfItsFileAtOnce(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, helped(codec.LZ4))
	resting(s, time.Hour)
	fill(t, s, mustLayer(t, s, "a"), 5)
	s.Discard()
	soon(t, s.life.finished)
}

// If a flush waits for a packet that a helper appends, the helper wakes the writer.
func TestAFlushEndsWithAHelper(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), helped(codec.LZ4))
	stopTicks(s)
	layer := mustLayer(t, s, "x")
	var e emission
	x := numbered(layer, 0, 100)
	if err := s.enqueuer.begin(&e, x); err != nil {
		t.Fatal(err)
	}
	region, _, _ := s.arena.TryAlloc(2000, 0, 0)
	s.enqueuer.cut(&e)
	e.part.kind = codec.None
	it := e.newPacket(packetEntry, s.enqueuer.staged.entries)
	it.region = region
	if err := it.surround(&codec.Sum{}); err != nil {
		t.Fatal(err)
	}
	s.counters.queuedPackets.Add(1)
	if err := s.order.Push(it); err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- flush(s, patience) }()
	for s.progress.Idle() {
		runtime.Gosched()
	}
	time.Sleep(10 * time.Millisecond) // the writer has seen the flush and rests
	s.sink.mu.Lock()
	it.made.Store(true)
	s.sink.unlock(s.opts.helped())
	if err := soon(t, done); err != nil {
		t.Error(err)
	}
}

// A dump hands the whole ring to the workers. The host's calls must not make all of that first.
func TestADumpLeavesTheBacklogToTheWorkers(t *testing.T) {
	o := helped(codec.Zstd)
	o.Ring, o.KeepFloat32, o.MaxMemory = true, true, 16<<20
	s := openRing(t, o)
	layers := layersOf(t, s, 2)
	for number := range int64(50) {
		runStep(t, s, layers, number, 20_000)
	}
	path := filepath.Join(t.TempDir(), "dump")
	beginDump(t, s, path)
	runStep(t, s, layers, 50, 20_000)
	endDump(t, s)
	checkSteps(t, path, 0, 50, len(layers), 20_000)
	if st := s.Stats(); st.YieldNS != 0 {
		t.Errorf("the host's calls made packets for %d ns", st.YieldNS)
	}
}
