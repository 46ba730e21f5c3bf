// Lets small tensors wait before they become packets.

package session

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// intake lets small tensors wait before they become packets.
//
// Between two operators of a model, the code and data that make a packet leave the processor's
// caches. So the host only copies a small tensor into the buffer. The next call that does more drains
// the intake first: it enqueues the tensors that wait, oldest first. Only the first of them finds the
// caches cold. If no call comes, the writer's tick drains the intake.
//
// The file has the order of the calls, because a note waits behind the tensors too.
type intake struct {
	buffer   IntakeBuffer // nil: the session has none, and the intake stays empty
	life     *lifecycle
	enqueuer *enqueuer
	notes    *notes

	draining chan struct{} // holds a value while a call drains; guards tensor and begun
	tensor   Tensor        // the oldest one, with the cursor of its enqueue
	begun    bool          // tensor is set

	passed atomic.Uint64 // tensors that were taken and no longer wait

	mu              mutex[intakeRank] // guards what follows, and all calls of buffer except Taken
	kept            []*entry          // notes behind all tensors that wait
	layers          uint32            // that the buffer admits, as below
	least, requests uint32
	isShut          bool
	drained         bool // the intake was emptied since the last tick
}

func newIntake(buffer IntakeBuffer) *intake {
	return &intake{buffer: buffer, draining: make(chan struct{}, 1)}
}

// admit lets tensors of the layers below one id wait here, and of no request or of those from one id
// to another.
func (in *intake) admit(layers, least, requests uint32) {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.layers = max(in.layers, layers)
	in.least, in.requests = max(in.least, least), max(in.requests, requests)
	if in.buffer != nil && !in.isShut {
		in.buffer.Admit(in.layers, in.least, in.requests)
	}
}

// shut lets no more tensors in. Those that wait are still drained.
func (in *intake) shut() {
	in.mu.Lock()
	defer in.mu.Unlock()
	in.isShut = true
	if in.buffer != nil {
		in.buffer.Admit(0, 0, 0)
	}
}

// taken returns how many tensors ever waited here, and the bytes of their elements.
func (in *intake) taken() (tensors, bytes uint64) {
	if in.buffer == nil {
		return 0, 0
	}
	return in.buffer.Taken()
}

// waiting returns how many tensors wait. It takes no lock of this package.
func (in *intake) waiting() uint64 {
	passed := in.passed.Load() // first: a tensor is taken before it passes
	tensors, _ := in.taken()
	return tensors - passed
}

// empty reports whether neither a tensor nor a note waits.
func (in *intake) empty() bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	return in.isEmpty()
}

func (in *intake) isEmpty() bool { return in.waiting() == 0 && len(in.kept) == 0 }

// note puts a note behind the tensors and notes that wait. It waits for nothing.
func (in *intake) note(from *origin, t *Tensor, message string) error {
	if !in.keep(from, t, message) {
		return in.notes.add(from, t, message)
	}
	_ = in.drainNow() // the note is kept, and the next call meets the error too
	return nil
}

// keep keeps a note until the tensors that wait are enqueued. It returns false if nothing waits.
func (in *intake) keep(from *origin, t *Tensor, message string) bool {
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.isEmpty() {
		return false
	}
	in.notes.counters.noted.Add(1)
	if it := in.notes.entry(from, t, message); it != nil {
		in.buffer.Hold() // tensors to come belong behind the note
		in.kept = append(in.kept, it)
	}
	return true
}

// drain enqueues the tensors that wait, oldest first, and the notes behind them. It waits for memory
// until limit has passed or the session is closing, and returns what is left of limit. After a
// Timeout the next call goes on where this one stopped.
func (in *intake) drain(limit time.Duration) (left time.Duration, err error) {
	if in.empty() {
		return limit, nil
	}
	remaining := func() time.Duration { return limit }
	if limit > 0 {
		until := time.Now().Add(limit)
		remaining = func() time.Duration { return max(time.Until(until), 0) }
	}
	if !in.acquire(limit) {
		if err := in.life.refused(); err != nil {
			return 0, err
		}
		return 0, status.New(status.Timeout, "%q: %d small tensors wait for staging memory, and another call "+
			"that brings them there found none in time", in.life.path, in.waiting())
	}
	defer in.release()
	err = in.enqueueAll(remaining)
	if refused := in.life.refused(); refused != nil && errors.Is(err, status.Timeout) {
		err = refused // the end of the session cut the wait short
	}
	return remaining(), err
}

// drainNow drains the intake as far as that needs no wait. It returns nil if tensors are left because
// memory is missing or another call drains.
func (in *intake) drainNow() error {
	if in.empty() || !in.tryAcquire() {
		return nil
	}
	defer in.release()
	err := in.enqueueAll(func() time.Duration { return 0 })
	if errors.Is(err, status.Timeout) {
		return nil
	}
	return err
}

// tick drains the intake as drainNow does, if nothing has drained it since the last tick or the
// session is closing. The writer alone calls it.
func (in *intake) tick() error {
	in.mu.Lock()
	drained := in.drained
	in.drained = false
	in.mu.Unlock()
	if drained && !in.life.isClosing() {
		return nil
	}
	return in.drainNow()
}

// tryAcquire gets the turn to drain, if no call has it.
func (in *intake) tryAcquire() bool {
	select {
	case in.draining <- struct{}{}:
		return true
	default:
		return false
	}
}

// acquire gets the turn to drain. It waits until limit has passed, but at least briefly, or until the
// session is closing.
func (in *intake) acquire(limit time.Duration) bool {
	if in.tryAcquire() {
		return true
	}
	var over <-chan time.Time
	if limit >= 0 {
		timer := time.NewTimer(max(limit, briefly))
		defer timer.Stop()
		over = timer.C
	}
	select {
	case in.draining <- struct{}{}:
		return true
	case <-over:
		return false
	case <-in.life.closing:
		return false
	}
}

func (in *intake) release() { <-in.draining }

// enqueueAll empties the intake. The caller has acquired the turn.
func (in *intake) enqueueAll(remaining func() time.Duration) error {
	for {
		more, err := in.next()
		if !more {
			return err
		}
		err = in.enqueuer.enqueue(&in.tensor, remaining())
		if errors.Is(err, status.InvalidArgument) {
			err = status.Wrap(status.Internal, err, "the intake took an invalid tensor")
			in.life.fail(err)
		}
		if err != nil && !errors.Is(err, ErrDropped) { // the ring has noted what it left out
			return err
		}
		in.begun = false
		in.passed.Add(1)
	}
}

// next fetches the oldest tensor. If none waits, it passes on the notes and returns false. The caller
// has acquired the turn.
func (in *intake) next() (more bool, err error) {
	if in.begun {
		return true, nil
	}
	in.mu.Lock()
	defer in.mu.Unlock()
	if in.buffer.Next(&in.tensor) {
		in.tensor.fromIntake, in.begun = true, true
		return true, nil
	}
	for len(in.kept) > 0 {
		if err := in.notes.push(in.kept[0]); err != nil {
			return false, err
		}
		in.kept = in.kept[1:]
	}
	in.kept, in.drained = nil, true
	return false, nil
}

// close gives up the tensors that wait and returns their number. It waits for a call that drains,
// which ends because the session has ended.
func (in *intake) close() (lost uint64) {
	if in.buffer == nil {
		return 0
	}
	in.draining <- struct{}{}
	defer in.release()
	in.mu.Lock()
	defer in.mu.Unlock()
	lost = in.waiting()
	in.passed.Add(lost)
	in.begun = false
	in.buffer.Close()
	return lost
}
