// The memory that packets wait in.

package session

import (
	"errors"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// ErrDropped is Enqueue's answer when DropOnFull left the tensor out, or a part of it.
var ErrDropped = errors.New("dropped: the staging memory has no room")

// staging is the memory that packets wait in, and the line of the calls that want some of it.
type staging struct {
	arena    *arena.Arena
	line     *line
	ring     *ring // nil: packets go to the order at once
	jobs     *backlog
	order    *order
	life     *lifecycle
	counters *counters
	drops    bool // no call waits for memory; see Options.DropOnFull
}

// briefly is the least time that a call waits for the leader to leave, also with the limit 0. A leader
// that need not wait for memory leaves within that time, so this wait is not a stall.
const briefly = time.Millisecond

// errBehind is internal: the leader has stepped back, because a call before it in the line has been
// repeated after its time-out.
var errBehind = errors.New("a call before this one is back")

// takeRoom waits until n bytes are free and takes them, and counts those beside them; see arena.TryAlloc. The
// call leads the line when it has them.
// After an error the call keeps its place in the line.
func (st *staging) takeRoom(c *call, n, beside int) (region arena.Region, err error) {
	c.need = n + beside
	for {
		if err := st.lead(c); err != nil {
			return region, err
		}
		region, err = st.roomOfLeader(c, n, beside)
		if !errors.Is(err, errBehind) {
			return region, err
		}
	}
}

// push adds a packet to the order and lets the next call lead the line. The call has taken the
// packet's region; after an error push has freed it.
func (st *staging) push(c *call, it *entry) error {
	if err := st.number(it); err != nil {
		st.arena.Free(it.region)
		return err
	}
	st.line.Leave(&c.turn)
	return nil
}

func (st *staging) number(it *entry) error {
	if st.ring != nil {
		return st.ring.push(it)
	}
	return st.order.PushPacket(it, st.counters)
}

// copied adds a packet whose elements are in its region to the backlog, unless the ring keeps it.
func (st *staging) copied(it *entry) pushed {
	if st.ring != nil {
		return st.ring.copied(it)
	}
	return st.jobs.Push(it)
}

// lead waits until the call is the leader of the line. With drops the limit of the call does not
// matter: a leader then never waits for memory, so the turn of the call comes soon.
func (st *staging) lead(c *call) error {
	if c.leads || st.line.TryLead(&c.turn) {
		return nil
	}
	began := time.Now()
	if c.place == nil {
		st.line.Join(&c.turn)
	}
	wait := func(over <-chan struct{}) (done bool, err error) {
		select { // also where no time is left
		case <-c.place.leads:
			c.leads = true
			return true, nil
		default:
		}
		select {
		case <-c.place.leads:
			c.leads = true
			return true, nil
		case <-st.life.failed:
			return true, st.life.failure
		case <-c.refuse:
			return true, st.refused(c)
		case <-over:
			return false, nil
		}
	}
	over := c.Done()
	if st.drops {
		_, err := wait(nil)
		return err
	}
	first := call{limit: briefly}
	defer first.stop()
	if done, err := wait(first.Done()); done {
		return err
	}
	defer st.stall(c, began)()
	if done, err := wait(over); done {
		return err
	}
	return st.timedOut()
}

// roomOfLeader waits until n bytes are free and takes them. The call must lead the line already. With
// drops it does not wait, and returns ErrDropped. It returns errBehind if the call must lead again.
func (st *staging) roomOfLeader(c *call, n, beside int) (region arena.Region, err error) {
	began := time.Now()
	for waited := false; ; waited = true {
		var reserved int
		var left time.Duration
		var back chan struct{}
		if c.place != nil { // else the call came first
			reserved, left = st.line.Reserved(&c.turn)
			back = c.place.back
		}
		region, ok, err := st.alloc(n, beside, reserved, c.step)
		if ok || err != nil {
			return region, err
		}
		if !waited {
			st.jobs.Open()
			if st.drops {
				return region, ErrDropped
			}
			defer st.stall(c, began)()
			defer st.jobs.Hurry()()
			st.order.Wake() // for packets that helpers left in the order while the stream had no room
		}
		var lapsed, soon <-chan time.Time
		if st.ring != nil { // a step may be able to give way then
			soon = time.After(briefly)
		}
		if reserved > 0 {
			lapsed = time.After(left)
		}
		select {
		case <-st.arena.Freed():
		case <-lapsed:
		case <-soon:
		case <-back:
			st.line.StepBack(&c.turn)
			return region, errBehind
		case <-st.life.failed:
			return region, st.life.failure
		case <-c.refuse:
			return region, st.refused(c)
		case <-c.Done():
			return region, st.timedOut()
		}
	}
}

// alloc takes n bytes for a tensor of a step if they are free. Other steps of the ring give way; if none
// can, and no bytes become free otherwise, alloc returns ErrDropped.
func (st *staging) alloc(n, beside, reserved int, step int64) (region arena.Region, ok bool, err error) {
	for {
		region, ok, err = st.arena.TryAlloc(n, beside, reserved)
		if ok || err != nil || st.ring == nil {
			return region, ok, err
		}
		gave, busy := st.ring.giveWay(step)
		if !gave && !busy {
			return region, false, ErrDropped
		}
		if !gave {
			return region, false, nil
		}
	}
}

// nextPiece waits until the writer has emptied a half of the feed's region, and returns that half
// for the call to fill.
func (st *staging) nextPiece(f *feed, c *call) ([]byte, error) {
	select {
	case piece := <-f.empty:
		return piece, nil
	default:
	}
	defer st.stall(c, time.Now())()
	defer st.jobs.Hurry()()
	select {
	case piece := <-f.empty:
		return piece, nil
	case <-st.life.failed:
		return nil, st.life.failure
	case <-c.refuse:
		return nil, st.refused(c)
	case <-c.Done():
		return nil, st.timedOut()
	}
}

// stall measures a wait for memory, from the time `since` on until the returned function runs. It counts
// one stall for a tensor, however often the tensor waits.
func (st *staging) stall(c *call, since time.Time) (end func()) {
	if !c.stalled {
		c.stalled = true
		st.counters.stalls.Add(1)
	}
	return st.counters.stalled.StartAt(since)
}

// refused returns the error of a call whose wait ends because the session ends. For a tensor from the
// intake, which took it before the end, it returns a Timeout: the intake repeats the call.
func (st *staging) refused(c *call) error {
	if c.fromIntake && !st.life.halted() {
		return st.timedOut()
	}
	return st.life.refused()
}

func (st *staging) timedOut() error {
	return status.New(status.Timeout,
		"%q: the staging memory of %d bytes is full and nothing was written in time",
		st.life.path, st.arena.Limit())
}
