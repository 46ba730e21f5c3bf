package session

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// packet returns an entry that holds n staged bytes.
func packet(n int) *entry { return &entry{region: arena.Region{Buf: make([]byte, n)}} }

// worker takes packets until the backlog closes, and sends each to the channel that it returns.
func worker(b *backlog) <-chan *entry {
	taken := make(chan *entry, 100)
	go func() {
		defer close(taken)
		for it, ok := b.Pop(); ok; it, ok = b.Pop() {
			taken <- it
			b.Done(1, it.staged())
		}
	}()
	return taken
}

// restsFor fails the test if a worker takes a packet within d.
func restsFor(t *testing.T, d time.Duration, taken <-chan *entry) {
	t.Helper()
	select {
	case it := <-taken:
		t.Fatalf("a packet of %d bytes was taken", it.staged())
	case <-time.After(d):
	}
}

// soon receives a value from c, or its end. It fails the test after a minute.
func soon[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(time.Minute):
		t.Fatal("nothing happened")
	}
	return v
}

func TestEagerWorkersTakePacketsAtOnce(t *testing.T) {
	b := newBacklog(false, false, 100)
	defer b.Close()
	taken := worker(b)
	if b.Push(packet(1000)).much {
		t.Error("the caller was told to wait")
	}
	soon(t, taken)
}

func TestYieldingWorkersRestWhileThePacketsCome(t *testing.T) {
	b := newBacklog(true, false, 1000)
	defer b.Close()
	taken := worker(b)
	longest, before := time.Duration(0), time.Now()
	for began := before; time.Since(began) < 5*idleAfter; time.Sleep(time.Millisecond) {
		if b.Push(packet(1)).much {
			t.Fatal("the caller was told to wait")
		}
		now := time.Now()
		longest, before = max(longest, now.Sub(before)), now
	}
	n := len(taken)
	longest = max(longest, time.Since(before))
	if n > 0 && longest < idleAfter/2 { // after a longer pause the workers may have begun
		t.Errorf("%d packets were taken while more came", n)
	}
	soon(t, taken) // now no packet comes
}

// If the waiting packets reach the limit, Push tells the caller to wait until the workers have
// made them.
func TestYieldingWorkersGoFirstWhenMuchWaits(t *testing.T) {
	b := newBacklog(true, false, 1000)
	defer b.Close()
	if b.Push(packet(999)).much {
		t.Fatal("the caller was told to wait for 999 bytes")
	}
	told := b.Push(packet(1))
	if !told.much {
		t.Fatal("the caller was not told to wait for 1000 bytes")
	}
	taken := worker(b)
	soon(t, told.drained)
	if len(taken) != 2 {
		t.Errorf("the caller waited for %d packets", len(taken))
	}
}

// If callers help, the workers rest: Push tells the caller to make packets itself. Workers go on
// only for a call that waits for the packets.
func TestWorkersRestIfCallersHelp(t *testing.T) {
	b := newBacklog(true, true, 1000)
	defer b.Close()
	taken := worker(b)
	if b.Push(packet(2000)).much {
		t.Fatal("the caller was told to help with a packet that has no other beside it")
	}
	if !b.Push(packet(1)).much {
		t.Fatal("the caller was not told to help with 2000 bytes")
	}
	restsFor(t, 2*idleAfter, taken)
	for range 2 {
		it, ok := b.TryPop()
		if !ok {
			t.Fatal("nothing to help with")
		}
		b.Done(1, it.staged())
	}
	if _, ok := b.TryPop(); ok {
		t.Error("more than was pushed")
	}
	if b.Push(packet(1)).much {
		t.Error("what was helped with still counts")
	}
	defer b.Hurry()()
	soon(t, taken)
}

// Resting workers work from Hurry until its end is called.
func TestHurryLetsRestingWorkersWork(t *testing.T) {
	b := newBacklog(true, false, 1000)
	defer b.Close()
	b.timer, b.longest = time.NewTimer(time.Hour), time.Hour // no idle time is noticed
	taken := worker(b)
	b.Push(packet(1))
	restsFor(t, 2*idleAfter, taken)
	end := b.Hurry()
	soon(t, taken)
	b.Push(packet(1))
	soon(t, taken)
	end()
	b.Push(packet(1))
	restsFor(t, 2*idleAfter, taken)
}

// Resting workers begin when the oldest packet has waited for longestWait.
func TestNoPacketWaitsForLong(t *testing.T) {
	b := newBacklog(true, false, 1000)
	defer b.Close()
	b.timer = time.NewTimer(time.Hour)
	taken := worker(b)
	b.Push(packet(1))
	b.mu.Lock()
	b.waits[0].came = time.Since(b.began) - longestWait
	b.mu.Unlock()
	if b.Push(packet(1)).much {
		t.Error("the caller was told to wait")
	}
	soon(t, taken)
	soon(t, taken)
}

// Workers make the packets that wait when the backlog closes, and then end.
func TestABacklogThatClosesIsWorkedOff(t *testing.T) {
	b := newBacklog(true, false, 1000)
	b.Push(packet(1))
	b.Close()
	n := 0
	for range worker(b) {
		n++
	}
	if n != 1 {
		t.Errorf("%d packets were taken", n)
	}
}

// If several modules return the same tensor, it is compressed once, under whatever names it comes.
func TestRepeatedTensorsAreCompressedOnce(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	o := options(codec.Zstd)
	o.Yield, o.Workers = true, 1
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	var want [][]byte
	for i := range 60 {
		v := float32s(1+rng.IntN(5000), func(int) float32 { return float32(rng.NormFloat64()) })
		for j := range 1 + i%3 {
			enqueue(t, s, tensorOf(mustLayer(t, s, fmt.Sprintf("layer.%d.%s", i, "outer"[:j])), wire.Float32, v))
			want = append(want, halves(v))
		}
		// The first and last bytes are the same, which PopAlike compares, but the values differ.
		other := slices.Clone(v)
		other[len(v)/2] += 1
		enqueue(t, s, tensorOf(mustLayer(t, s, "other"), wire.Float32, other))
		want = append(want, halves(other))
	}
	finish(t, s)
	if n := s.Stats().Repeated; n == 0 || n > 60 { // 60 come again; some may have begun already
		t.Errorf("%d packets were found to be repeated", n)
	}
	rows, got := read(t, path)
	for i := range want {
		if string(got[i]) != string(want[i]) {
			t.Fatalf("packet %d, %q, differs", i, rows[i].Layer)
		}
	}
}

// A burst may be as large as the memory. The workers still begin before a call waits for room or
// drops a tensor.
func TestABurstLeavesRoom(t *testing.T) {
	for _, drops := range []bool{false, true} {
		o := options(codec.LZ4)
		o.Yield, o.DropOnFull, o.MaxMemory, o.BurstBytes = true, drops, 8<<20, 8<<20
		s := open(t, filepath.Join(t.TempDir(), "a.stream"), o)
		v := float32s(32<<10, func(i int) float32 { return float32(i) })
		layer := mustLayer(t, s, "x")
		for range 200 {
			if err := s.Enqueue(tensorOf(layer, wire.Float32, v), forever); err != nil && !drops {
				t.Fatal(err)
			}
		}
		st := s.Stats()
		if !drops && (st.YieldNS == 0 || st.MemoryPeak > uint64(o.MaxMemory)) {
			t.Errorf("%+v", st)
		}
		finish(t, s)
		if st = s.Stats(); st.Packets+st.Dropped != 200 || st.Packets < 60 {
			t.Errorf("%d packets, %d dropped", st.Packets, st.Dropped)
		}
	}
}

// If one wait uses up the time limit of a call, later waits of the same call end at once.
func TestTheDeadlineOutlivesAWait(t *testing.T) {
	c := call{limit: time.Millisecond}
	defer c.stop()
	soon(t, c.Done())
	soon(t, c.Done())
}

// The packets before a repeated one, and those behind it, keep their order.
func TestARepeatedPacketLeavesTheOthersInOrder(t *testing.T) {
	b := newBacklog(false, false, 100)
	defer b.Close()
	first := packet(1000)
	first.source = 10
	all := []*entry{packet(1000), packet(1000), packet(1000), packet(1000)}
	for i, it := range all {
		it.source, it.region.Buf[wire.HeaderSize] = 10, byte(i+1)
	}
	first.region.Buf[wire.HeaderSize] = 3 // as all[2]
	for _, it := range all {
		b.Push(it)
	}
	if again := b.PopAlike(first); again != all[2] {
		t.Fatal("the repeated packet is not found")
	}
	for _, want := range []*entry{all[0], all[1], all[3]} {
		if it, _ := b.TryPop(); it != want {
			t.Fatal("another packet comes next")
		}
	}
	b.Done(4, b.Waiting())
	if n := b.Packets(); n != 0 || b.queued != 0 {
		t.Errorf("%d packets of %d bytes are left", n, b.queued)
	}
}
