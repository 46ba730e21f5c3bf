package session

import (
	"errors"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// call is one call of the host: how long it may wait, and its turn in the line.
type call struct {
	turn
	need    int           // bytes that it asks for; see line.Keep
	settles bool          // it makes packets of what the intake took, which others may go on with
	limit   time.Duration // negative: none
	timer   *time.Timer   // runs from the first wait on
	over    chan struct{} // closed when the limit has passed
	quiet   bool          // its waits do not count as stalls: the call is not an Enqueue
	stalled bool          // it counts as a stall already
}

// past is the Done of a call with the limit 0.
var past = func() chan struct{} {
	over := make(chan struct{})
	close(over)
	return over
}()

// Done returns a channel that closes when the limit has passed, counted from the first Done.
// Without a limit it returns nil, which never closes.
func (c *call) Done() <-chan struct{} {
	if c.limit == 0 {
		return past
	}
	if c.limit > 0 && c.timer == nil {
		over := make(chan struct{})
		c.over, c.timer = over, time.AfterFunc(c.limit, func() { close(over) })
	}
	return c.over
}

// stop ends the clock.
func (c *call) stop() {
	if c.timer != nil {
		c.timer.Stop()
	}
}

// briefly is how long any call waits for the leader to leave, also one with the limit 0. A
// leader that need not wait for room leaves within that time, so this wait is not a stall.
const briefly = time.Millisecond

// errBehind is the error of a settling call that has stepped back in the line.
var errBehind = errors.New("a call before this one is back")

// lead makes the call the leader of the line. With DropOnFull the leader never waits for room,
// so all others wait for it whatever their limit is.
func (s *Session) lead(c *call) error {
	if c.leads || s.line.TryLead(&c.turn) {
		return nil
	}
	began := time.Now()
	if c.place == nil {
		s.line.Join(&c.turn)
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
		case <-s.failed:
			return true, s.failure
		case <-s.closing:
			return true, s.refused()
		case <-over:
			return false, nil
		}
	}
	over := c.Done()
	if s.opts.DropOnFull {
		_, err := wait(nil)
		return err
	}
	first := call{limit: briefly}
	defer first.stop()
	if done, err := wait(first.Done()); done {
		return err
	}
	defer s.stalls(c, began)()
	if done, err := wait(over); done {
		return err
	}
	return s.timedOut()
}

// stalls counts a call's wait for room, from since until end is called.
func (s *Session) stalls(c *call, since time.Time) (end func()) {
	if c.quiet {
		return func() {}
	}
	if !c.stalled {
		c.stalled = true
		s.counters.stalls.Add(1)
	}
	return s.counters.stalled.StartAt(since)
}

func (s *Session) timedOut() error {
	return status.New(status.Timeout,
		"%q: the staging memory of %d bytes is full and nothing was written in time",
		s.path, s.arena.Limit())
}

// takeRoom waits until n bytes of staging memory are free and takes them. The call leads when
// it has them. After an error it keeps its place in the line.
func (s *Session) takeRoom(c *call, n int) (region arena.Region, err error) {
	c.need = n
	for {
		if err := s.lead(c); err != nil {
			return region, err
		}
		region, err = s.roomOfLeader(c, n)
		if c.settles || !errors.Is(err, errBehind) {
			return region, err
		}
	}
}

func (s *Session) roomOfLeader(c *call, n int) (region arena.Region, err error) {
	began := time.Now()
	reserved, left := s.line.Reserved(&c.turn)
	region, ok, err := s.arena.TryAlloc(n, reserved)
	if ok || err != nil {
		return region, err
	}
	s.jobs.Open()
	if s.opts.DropOnFull {
		return region, ErrDropped
	}
	defer s.stalls(c, began)()
	defer s.jobs.Hurry()()
	s.order.Wake() // for packets that helpers left in the order while the stream had no room
	for {
		var back chan struct{}
		if c.place != nil {
			back = c.place.back
		}
		var lapsed <-chan time.Time
		if reserved > 0 {
			lapsed = time.After(left)
		}
		select {
		case <-s.arena.Freed():
		case <-lapsed:
		case <-back:
			s.line.StepBack(&c.turn)
			return region, errBehind
		case <-s.failed:
			return region, s.failure
		case <-s.closing:
			return region, s.refused()
		case <-c.Done():
			return region, s.timedOut()
		}
		reserved, left = s.line.Reserved(&c.turn)
		if region, ok, err = s.arena.TryAlloc(n, reserved); ok || err != nil {
			return region, err
		}
	}
}
