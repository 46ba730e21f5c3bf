package session

import (
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// worker takes packets until the backlog closes, and says which.
func worker(b *backlog) <-chan *item {
	taken := make(chan *item, 100)
	go func() {
		defer close(taken)
		for it, ok := b.Pop(); ok; it, ok = b.Pop() {
			taken <- it
			b.Done(1, int64(it.source))
		}
	}()
	return taken
}

func restsFor(t *testing.T, d time.Duration, taken <-chan *item) {
	t.Helper()
	select {
	case it := <-taken:
		t.Fatalf("a packet of %d bytes was taken", it.source)
	case <-time.After(d):
	}
}

func soon[T any](t *testing.T, c <-chan T) (v T) {
	t.Helper()
	select {
	case v = <-c:
	case <-time.After(10 * time.Second):
		t.Fatal("nothing happened")
	}
	return v
}

func TestEagerWorkersTakeWhatComes(t *testing.T) {
	b := newBacklog(false, 100)
	defer b.Close()
	taken := worker(b)
	if b.Push(&item{source: 1000}) != nil {
		t.Error("the caller was told to wait")
	}
	soon(t, taken)
}

func TestYieldingWorkersRestWhileThePacketsCome(t *testing.T) {
	b := newBacklog(true, 1000)
	defer b.Close()
	taken := worker(b)
	longest, before := time.Duration(0), time.Now()
	for began := before; time.Since(began) < 5*idleAfter; time.Sleep(time.Millisecond) {
		if b.Push(&item{source: 1}) != nil {
			t.Fatal("the caller was told to wait")
		}
		now := time.Now()
		longest, before = max(longest, now.Sub(before)), now
	}
	if n := len(taken); n > 0 && longest < idleAfter/2 { // else this machine paused, as a model may
		t.Errorf("%d packets were taken while more came", n)
	}
	soon(t, taken) // now that none comes
}

func TestYieldingWorkersGoFirstWhenMuchWaits(t *testing.T) {
	b := newBacklog(true, 1000)
	defer b.Close()
	if b.Push(&item{source: 999}) != nil {
		t.Fatal("the caller was told to wait for 999 bytes")
	}
	drained := b.Push(&item{source: 1})
	if drained == nil {
		t.Fatal("the caller was not told to wait for 1000 bytes")
	}
	taken := worker(b)
	soon(t, drained)
	if len(taken) != 2 {
		t.Errorf("the caller waited for %d packets", len(taken))
	}
}

func TestSomeoneInAHurry(t *testing.T) {
	b := newBacklog(true, 1000)
	defer b.Close()
	b.timer = time.NewTimer(time.Hour) // no idle time is noticed
	taken := worker(b)
	b.Push(&item{source: 1})
	restsFor(t, 2*idleAfter, taken)
	end := b.Hurry()
	soon(t, taken)
	b.Push(&item{source: 1})
	soon(t, taken)
	end()
	b.Push(&item{source: 1})
	restsFor(t, 2*idleAfter, taken)
}

func TestNoPacketWaitsForLong(t *testing.T) {
	b := newBacklog(true, 1000)
	defer b.Close()
	b.timer = time.NewTimer(time.Hour)
	taken := worker(b)
	b.Push(&item{source: 1})
	b.mu.Lock()
	b.first = b.first.Add(-longestWait)
	b.mu.Unlock()
	if b.Push(&item{source: 1}) != nil {
		t.Error("the caller was told to wait")
	}
	soon(t, taken)
	soon(t, taken)
}

func TestABacklogThatClosesIsWorkedOff(t *testing.T) {
	b := newBacklog(true, 1000)
	b.Push(&item{source: 1})
	b.Close()
	n := 0
	for range worker(b) {
		n++
	}
	if n != 1 {
		t.Errorf("%d packets were taken", n)
	}
}

// A tensor that an outer module returns again is compressed once, whatever name and
// place it has.
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
		// Alike at both ends, and not the same.
		other := slices.Clone(v)
		other[len(v)/2] += 1
		enqueue(t, s, tensorOf(mustLayer(t, s, "other"), wire.Float32, other))
		want = append(want, halves(other))
	}
	finish(t, s)
	if n := s.Stats().Repeated; n == 0 || n > 60 { // as many as the worker had not begun
		t.Errorf("%d packets were found to be repeated", n)
	}
	rows, got := read(t, path)
	for i := range want {
		if string(got[i]) != string(want[i]) {
			t.Fatalf("packet %d, %q, differs", i, rows[i].Layer)
		}
	}
}
