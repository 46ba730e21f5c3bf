package session

import (
	"errors"
	"sync"
	"time"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Intake takes small tensors from the host at what it costs to copy them, for the session to
// make packets of them some at a time: between two operators of a model all that makes a
// packet has left the caches, and the second one finds it there again.
//
// Tensors are contiguous, have elements, and are not converted. The session settles those
// that wait before all else that is asked of it but to go on with a tensor, so that
// everything has its place in one order.
//
// First and Pop are for the leader of the line, or who has it to itself.
type Intake interface {
	// Layers tells that those below n are registered.
	Layers(n int)
	// Requests tells that those up to n are.
	Requests(n int)
	// Waiting is how many tensors were taken and not popped.
	Waiting() int
	// Settled changes when all that waited was taken out.
	Settled() uint64
	// Taken is how many tensors were taken, and the bytes of their elements.
	Taken() (tensors, bytes uint64)
	// First gives the oldest that waits; its shape and elements stay until none does, and none
	// is taken until then. false: none waits.
	First(t *Tensor) bool
	// Pop ends the waiting of what First gave.
	Pop()
	// Hold has it take none until First has found that none waits.
	Hold()
	// Shut has it take none from now on.
	Shut()
	// Close ends it; Taken stays.
	Close()
}

// settleAgain is how long a flush waits before it tries again to settle what found no room.
const settleAgain = 5 * time.Millisecond

type noIntake struct{}

func (noIntake) Layers(int)              {}
func (noIntake) Requests(int)            {}
func (noIntake) Waiting() int            { return 0 }
func (noIntake) Settled() uint64         { return 0 }
func (noIntake) Taken() (uint64, uint64) { return 0, 0 }
func (noIntake) First(*Tensor) bool      { return false }
func (noIntake) Pop()                    {}
func (noIntake) Hold()                   {}
func (noIntake) Shut()                   {}
func (noIntake) Close()                  {}

// settling is how far what the intake took is settled. All but the notes is for the leader
// of the line.
type settling struct {
	tensor   Tensor // the first that waits
	emission emission
	begun    bool // with it

	mu      sync.Mutex    // what follows, and whether the intake is empty
	notes   fifo[*item]   // behind all tensors that wait
	rounds  uint64        // how often all that waited was settled
	changed chan struct{} // closed with the next round
}

// settleBefore makes packets of what the intake took before a tensor has its place in the
// order. A call that goes on with a tensor has that already.
func (s *Session) settleBefore(e *emission, c *call) error {
	if e.begun {
		return nil
	}
	if err := s.settleAll(c); err != nil {
		return err
	}
	if c.place == nil { // nothing was waited for, so others need not wait for this tensor's copy
		s.line.Leave(&c.turn)
	}
	return nil
}

// settleAll makes packets of what the intake took, if there is something.
func (s *Session) settleAll(c *call) error {
	if round, _ := s.nextRound(); round == 0 {
		return nil
	}
	c.settles = true
	defer func() { c.settles = false }()
	for {
		if err := s.lead(c); err != nil {
			return err
		}
		if err := s.settle(c); !errors.Is(err, errBehind) {
			return err
		}
	}
}

// nextRound returns the number of the round in which all that waits now will be settled, and a
// channel that is closed with the next round. The number is 0 if nothing waits.
func (s *Session) nextRound() (round uint64, changed <-chan struct{}) {
	own := &s.settling
	own.mu.Lock()
	defer own.mu.Unlock()
	if s.opts.Intake.Waiting() == 0 && len(own.notes.all()) == 0 {
		return 0, nil
	}
	if own.changed == nil {
		own.changed = make(chan struct{})
	}
	return own.rounds + 1, own.changed
}

// awaitRound waits until all is settled that waited when nextRound returned round. It leaves the
// line to the calls that want room for tensors of their own, for these settle first.
func (s *Session) awaitRound(round uint64, c *call) error {
	for {
		if err := s.settleAtOnce(); err != nil {
			return err
		}
		next, changed := s.nextRound()
		if next == 0 || next > round {
			return nil
		}
		again := time.NewTimer(settleAgain)
		select {
		case <-changed:
		case <-again.C:
		case <-s.failed:
			return s.failure
		case <-s.closing:
			return s.refused()
		case <-c.Done():
			return s.timedOut()
		}
		again.Stop()
	}
}

// settle makes packets of what the intake took, and waits for room for them. Its caller leads
// the line. After an error the next one goes on.
func (s *Session) settle(c *call) error {
	own := &s.settling
	for {
		if s.writer.halted() {
			return s.refused()
		}
		more, err := s.nextToSettle()
		if !more {
			return err
		}
		if !own.begun {
			own.emission = emission{fromIntake: true}
			if err := s.begin(&own.emission, &own.tensor); err != nil {
				err = status.Wrap(status.Internal, err, "the intake took what is no tensor")
				s.fail(err)
				return err
			}
			own.begun = true
		}
		if err := s.emit(&own.emission, &own.tensor, c); err != nil {
			return err
		}
		own.begun = false
		s.opts.Intake.Pop()
	}
}

// nextToSettle takes the next tensor of the intake. Behind the last one it pushes the notes
// that waited for it.
func (s *Session) nextToSettle() (more bool, err error) {
	own := &s.settling
	own.mu.Lock()
	defer own.mu.Unlock()
	if s.opts.Intake.First(&own.tensor) {
		return true, nil
	}
	for note, ok := own.notes.pop(); ok; note, ok = own.notes.pop() {
		if err := s.push(note); err != nil {
			return false, err
		}
	}
	own.rounds++
	if own.changed != nil {
		close(own.changed)
		own.changed = nil
	}
	return false, nil
}

// settleAtOnce settles as far as nothing has to be waited for.
func (s *Session) settleAtOnce() error {
	c := call{quiet: true, settles: true}
	if !s.line.TryLead(&c.turn) {
		return nil // the leader has settled, or is about to
	}
	defer s.line.Leave(&c.turn)
	if err := s.settle(&c); !errors.Is(err, status.Timeout) && !errors.Is(err, errBehind) {
		return err
	}
	return nil
}

// push adds an item to the order.
func (s *Session) push(it *item) error {
	if !s.order.Push(it) {
		return s.refused()
	}
	return nil
}

// pushSettled pushes a note behind what the intake took, without waiting for that: a note that
// finds tensors there is pushed when these are.
func (s *Session) pushSettled(note *item) error {
	own := &s.settling
	own.mu.Lock()
	if s.opts.Intake.Waiting() == 0 && len(own.notes.all()) == 0 {
		defer own.mu.Unlock()
		return s.push(note)
	}
	s.opts.Intake.Hold() // for what comes behind the note
	own.notes.push(note)
	own.mu.Unlock()
	_ = s.settleAtOnce() // what is in the way, the next call meets too
	return nil
}

// end lets nothing more into the order, if all is settled and taken, and reports whether it is.
func (s *Session) end() bool {
	s.settling.mu.Lock()
	defer s.settling.mu.Unlock()
	settled := s.opts.Intake.Waiting() == 0 && len(s.settling.notes.all()) == 0
	return (settled || s.writer.halted()) && s.order.End()
}

// closeIntake ends the intake; what is left there is lost.
func (s *Session) closeIntake() {
	c := call{quiet: true}
	if !s.line.TryLead(&c.turn) {
		s.line.Join(&c.turn)
		<-c.place.leads // all others leave, for the session is closing
	}
	defer s.line.Leave(&c.turn)
	for s.opts.Intake.First(&s.settling.tensor) {
		s.counters.lost.Add(1)
		s.opts.Intake.Pop()
	}
	s.settling.mu.Lock()
	defer s.settling.mu.Unlock()
	for _, ok := s.settling.notes.pop(); ok; _, ok = s.settling.notes.pop() {
		s.counters.queuedNotes.Add(-1)
	}
	s.opts.Intake.Close()
}
