// Runs sessions with random calls at a disk that pauses, and checks that every wait ends.

package session

import (
	"errors"
	"flag"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"sync"
	"testing"
	"time"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

var soak = flag.Duration("soak", 3*time.Second, "how long TestEveryWaitEnds goes on")

// untilDone is how long a call may be repeated until it has finished, while the disk answers.
const untilDone = 60 * time.Second

// TestEveryWaitEnds runs sessions whose threads make random calls with random time limits, at a
// disk that pauses now and then, until the session is closed, is discarded or fails. Every call
// keeps its time limit, every repeated call ends, and the file agrees with the results of the
// calls. docs/INTERNALS.md has the argument. To run it for longer:
//
//	go test -run TestEveryWaitEnds -soak 10m ./libstrap/internal/session
func TestEveryWaitEnds(t *testing.T) {
	seed := uint64(time.Now().UnixNano())
	if v := os.Getenv("STRAP_SOAK_SEED"); v != "" {
		if _, err := fmt.Sscan(v, &seed); err != nil {
			t.Fatal(err)
		}
	}
	before := runtime.NumGoroutine()
	rounds := 0
	for began := time.Now(); time.Since(began) < *soak; rounds++ {
		h := newHost(t, rand.New(rand.NewPCG(seed, uint64(rounds))))
		h.run()
		if t.Failed() {
			t.Fatalf("STRAP_SOAK_SEED=%d, round %d: %+v", seed, rounds, h.opts)
		}
	}
	for began := time.Now(); runtime.NumGoroutine() > before; time.Sleep(10 * time.Millisecond) {
		if time.Since(began) > 2*keptFor+patience {
			t.Fatalf("%d goroutines are left of %d rounds", runtime.NumGoroutine()-before, rounds)
		}
	}
	t.Logf("%d rounds", rounds)
}

// soakTeam is a host's team of threads. Without cgo it is the zero Team.
var soakTeam team.Team

// host is a program that captures in several threads.
type host struct {
	*testing.T
	opts    Options
	capture *Session
	path    string
	shelf   *shelf
	ended   chan struct{} // closed to end its threads
	threads []*thread
}

// thread is one thread of a host, with a layer of its own.
type thread struct {
	*host
	rng     *rand.Rand
	layer   uint32
	next    int64          // step of its next tensor
	outcome map[int64]bool // the steps that need a row; true: with a packet, false: a note
	skips   bool           // it leaves out tensors that find no room at once
	covered int64          // bytes that its last checkpoint covers
	up      int64          // that checkpoint covers all steps below this one
}

// pick returns a random one of the values.
func pick[T any](rng *rand.Rand, of ...T) T { return of[rng.IntN(len(of))] }

// newHost opens a capture with random options, and starts the goroutine that pauses its disk.
func newHost(t *testing.T, rng *rand.Rand) *host {
	o := Options{
		Codec:     pick(rng, codec.None, codec.LZ4, codec.Zstd),
		Workers:   1 + rng.IntN(2),
		MaxMemory: pick[int64](rng, 1<<20, 2<<20, 8<<20),
		Yield:     rng.IntN(3) == 0,
	}
	o.split = pick[int64](rng, 0, 200_000)
	h := &host{T: t, path: filepath.Join(t.TempDir(), "a.stream"), ended: make(chan struct{})}
	if o.DropOnFull = rng.IntN(4) == 0; !o.DropOnFull {
		h.shelf = &shelf{}
		o.Intake = h.shelf
	}
	if rng.IntN(3) == 0 {
		o.Yield, o.Team = true, soakTeam
	}
	h.opts = o
	h.capture = open(t, h.path, o)
	if rng.IntN(3) == 0 {
		stopTicks(h.capture) // without ticks, a call that nothing wakes never ends
	}
	for i := range 2 + rng.IntN(5) {
		h.threads = append(h.threads, &thread{
			host: h, rng: rand.New(rand.NewPCG(rng.Uint64(), 0)),
			layer: mustLayer(t, h.capture, fmt.Sprint(i)), outcome: map[int64]bool{},
			skips: rng.IntN(5) == 0,
		})
	}
	go h.stopDisk(rand.New(rand.NewPCG(rng.Uint64(), 0)))
	return h
}

// stopDisk holds up the writer at random, for at most 8 ms each time, until the capture has ended.
func (h *host) stopDisk(rng *rand.Rand) {
	for {
		select {
		case <-h.capture.life.finished:
			return
		case <-time.After(time.Duration(rng.IntN(3000)) * time.Microsecond):
		}
		if h.capture.sink.mu.TryLock() {
			time.Sleep(time.Duration(rng.IntN(8000)) * time.Microsecond)
			h.capture.sink.unlock(h.capture.opts.helped())
		}
	}
}

// run starts the threads, ends the capture in a random way at a random time, and checks the file.
func (h *host) run() {
	rng := rand.New(rand.NewPCG(h.threads[0].rng.Uint64(), 0))
	var all sync.WaitGroup
	for _, thread := range h.threads {
		all.Go(thread.run)
	}
	time.Sleep(time.Duration(rng.IntN(150)) * time.Millisecond)
	var lost bool
	switch rng.IntN(6) {
	case 0:
		h.capture.Discard()
		lost = true
	case 1:
		h.capture.life.fail(status.New(status.IO, "a disk"))
		lost = true
		fallthrough
	default:
		if rng.IntN(2) == 0 { // the threads end before the capture
			close(h.ended)
			all.Wait()
		}
		h.until("close", func() error {
			limit := time.Duration(rng.IntN(20)) * time.Millisecond
			began := time.Now()
			err := h.capture.Close(limit)
			h.inTime("close", began, limit)
			return err
		})
	}
	all.Wait()
	soon(h.T, h.capture.life.finished)
	h.check(lost)
}

// until repeats a call as long as it times out.
func (h *host) until(what string, call func() error) error {
	for began := time.Now(); ; {
		err := call()
		if !errors.Is(err, status.Timeout) {
			return err
		}
		if time.Since(began) > untilDone {
			h.Errorf("%s does not end: %v", what, err)
			return err
		}
	}
}

// inTime checks that a call took at most patience longer than its limit.
func (h *host) inTime(what string, began time.Time, limit time.Duration) {
	if took := time.Since(began); took > limit+patience {
		h.Errorf("%s with %v took %v", what, limit, took)
	}
}

// run makes random calls until the host ends the threads or a call returns an error.
func (th *thread) run() {
	for {
		select {
		case <-th.ended:
			return
		default:
		}
		var err error
		switch th.rng.IntN(12) {
		case 0:
			err = th.flush()
		case 1:
			err = th.checkpoint()
		case 2:
			if err = th.capture.Note(numbered(th.layer, int(th.next), 1), "why"); err == nil {
				th.outcome[th.next] = false
			}
			th.next++
		default:
			err = th.enqueue()
		}
		if err != nil {
			if !errors.Is(err, status.InvalidState) && !errors.Is(err, status.IO) {
				th.Error(err)
			}
			return
		}
	}
}

// limit returns a random time limit for one call.
func (th *thread) limit() time.Duration {
	return pick(th.rng, 0, 0, time.Millisecond, 5*time.Millisecond)
}

func (th *thread) flush() error {
	var cursor uint64
	return th.repeat("flush", func(limit time.Duration) error { return th.capture.Flush(&cursor, limit) })
}

func (th *thread) checkpoint() error {
	var cursor uint64
	step := th.next
	return th.repeat("checkpoint", func(limit time.Duration) error {
		offset, err := th.capture.Checkpoint(&cursor, limit)
		if err == nil {
			th.covered, th.up = offset, step
		}
		return err
	})
}

// repeat makes a call until it no longer times out. An impatient thread may give up before.
func (th *thread) repeat(what string, call func(time.Duration) error) error {
	patient := th.rng.IntN(4) > 0
	err := th.until(what, func() error {
		limit := th.limit()
		began := time.Now()
		err := call(limit)
		th.inTime(what, began, limit)
		if errors.Is(err, status.Timeout) && !patient && th.rng.IntN(3) == 0 {
			return errGivenUp
		}
		return err
	})
	if errors.Is(err, errGivenUp) {
		return nil
	}
	return err
}

var errGivenUp = errors.New("given up")

// enqueue captures a tensor, or gives up after a time-out.
func (th *thread) enqueue() error {
	n := 1 + th.rng.IntN(1<<th.rng.IntN(20))
	x := numbered(th.layer, int(th.next), n)
	if th.rng.IntN(10) == 0 {
		x.Data = unsafe.Pointer(unsafe.SliceData(float32s(n, func(int) float32 { return 1e9 })))
	}
	step := th.next
	th.next++
	th.outcome[step] = true
	if th.shelf != nil && n < 1000 && th.rng.IntN(2) == 0 && th.shelf.put(x) {
		return nil
	}
	patient := th.rng.IntN(4) > 0
	err := th.until("enqueue", func() error {
		limit := th.limit()
		if th.skips {
			limit = 0
		}
		began := time.Now()
		err := th.capture.Enqueue(x, limit)
		th.inTime("enqueue", began, limit)
		if errors.Is(err, status.Timeout) && th.opts.DropOnFull {
			th.Errorf("a session that drops: %v", err)
		}
		if !errors.Is(err, status.Timeout) || !th.skips && (patient || th.rng.IntN(3) > 0) {
			return err
		}
		delete(th.outcome, step) // the step may leave a note, or float16 without its float32 twin
		if x.Cursor&1 != 0 || !th.skips && th.rng.IntN(2) == 0 {
			if err := th.capture.Abandon(x.Cursor); err != nil && !errors.Is(err, status.InvalidState) &&
				!errors.Is(err, status.InvalidArgument) && !errors.Is(err, status.IO) {
				th.Error(err)
			}
		}
		return errGivenUp
	})
	switch {
	case errors.Is(err, errGivenUp):
		return nil
	case errors.Is(err, ErrDropped):
		delete(th.outcome, step)
		return nil
	case err != nil:
		delete(th.outcome, step)
	}
	return err
}

// check compares the file with the results of the calls. lost tells that the capture failed or was
// discarded, so that packets may be missing.
func (h *host) check(lost bool) {
	r, err := reader.Open(h.path, reader.Options{})
	if err != nil {
		h.Fatal(err)
	}
	defer r.Close()
	if p := r.Info().Problem; p != "" {
		h.Errorf("the capture has a problem: %s", p)
	}
	type of struct {
		layer string
		step  int64
	}
	last, seen, ends := map[string]int64{}, map[of]bool{}, map[of]int64{}
	for i := range r.NumRows() {
		row, err := r.Row(i)
		if err != nil {
			h.Fatal(err)
		}
		if lost && !row.Stored.Valid() && row.Error == "" {
			continue // the reader found this packet by scanning, because the index does not list it
		}
		if step, some := last[row.Layer]; some && row.Step < step {
			h.Errorf("layer %s: step %d behind %d", row.Layer, row.Step, step)
		}
		last[row.Layer] = row.Step
		key := of{row.Layer, row.Step}
		seen[key] = true
		if row.Offset >= 0 {
			ends[key] = max(ends[key], row.Offset+int64(row.Length))
			h.checkValues(r, i, &row)
		}
	}
	for i, th := range h.threads {
		for step, stored := range th.outcome {
			key := of{fmt.Sprint(i), step}
			if !lost && !seen[key] {
				h.Errorf("thread %d: nothing of step %d, stored: %v", i, step, stored)
			}
			if step < th.up && stored && (ends[key] == 0 || ends[key] > th.covered) {
				h.Errorf("thread %d: step %d ends at %d, its checkpoint of %d steps covers %d",
					i, step, ends[key], th.up, th.covered)
			}
		}
	}
}

// checkValues checks that all elements of a packet are the same.
func (h *host) checkValues(r *reader.Reader, i int, row *wire.Row) {
	n, err := r.DecodedLen(i)
	if err != nil {
		h.Fatal(err)
	}
	data := make([]byte, n)
	if err := r.ReadInto(i, data); err != nil {
		h.Fatal(err)
	}
	size := row.Stored.Size()
	for at := size; at < len(data); at += size {
		if string(data[at:at+size]) != string(data[:size]) {
			h.Fatalf("layer %s, step %d: element %d differs from the first", row.Layer, row.Step, at/size)
		}
	}
}
