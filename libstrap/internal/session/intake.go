package session

import (
	"errors"
	"sync"

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
// First and Pop are for one caller at a time.
type Intake interface {
	// Layers tells that those below n are registered.
	Layers(n int)
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
	// Shut has it take none from now on.
	Shut()
	// Close ends it; Taken stays.
	Close()
}

type noIntake struct{}

func (noIntake) Layers(int)              {}
func (noIntake) Waiting() int            { return 0 }
func (noIntake) Settled() uint64         { return 0 }
func (noIntake) Taken() (uint64, uint64) { return 0, 0 }
func (noIntake) First(*Tensor) bool      { return false }
func (noIntake) Pop()                    {}
func (noIntake) Shut()                   {}
func (noIntake) Close()                  {}

// settling is how far what the intake took is settled.
type settling struct {
	mu       sync.Mutex // never held for long: who has it does not wait for room
	tensor   Tensor     // the first that waits
	emission emission
	begun    bool        // with it
	notes    fifo[*item] // behind all that wait
}

// settle makes packets of what the intake took, and waits for room for them on behalf of e, nil:
// of a call that is no enqueue. After an error the next call goes on.
func (s *Session) settle(e *emission, d *deadline) error {
	for s.unsettled() {
		err := s.settleNow()
		if !errors.Is(err, status.Timeout) {
			return err
		}
		if e == nil {
			e = &emission{quiet: true}
		}
		if err := s.awaitRoom(e, d); err != nil {
			return err
		}
	}
	return nil
}

// unsettled reports whether there is something to settle.
func (s *Session) unsettled() bool {
	if s.opts.Intake.Waiting() > 0 {
		return true
	}
	s.settling.mu.Lock()
	defer s.settling.mu.Unlock()
	return len(s.settling.notes.all()) > 0
}

// awaitRoom waits until there is room for the packet that settling came to.
func (s *Session) awaitRoom(e *emission, d *deadline) error {
	s.settling.mu.Lock()
	room := s.settling.emission.room
	s.settling.mu.Unlock()
	region, err := s.reserve(e, nil, d, room)
	if err != nil {
		return err
	}
	s.arena.Free(region)
	<-s.turn
	return nil
}

// settleNow is settle as far as there is room; a Timeout: there is none.
func (s *Session) settleNow() error {
	s.settling.mu.Lock()
	defer s.settling.mu.Unlock()
	return s.settleLocked()
}

func (s *Session) settleLocked() error {
	if s.writer.halted() {
		return s.refused()
	}
	own, d := &s.settling, newDeadline(0)
	for s.opts.Intake.First(&own.tensor) {
		if !own.begun {
			own.emission = emission{fromIntake: true, quiet: true}
			if err := s.begin(&own.emission, &own.tensor); err != nil {
				err = status.Wrap(status.Internal, err, "the intake took what is no tensor")
				s.fail(err)
				return err
			}
			own.begun = true
		}
		if err := s.emit(&own.emission, &own.tensor, d); err != nil {
			return err
		}
		own.begun = false
		s.opts.Intake.Pop()
	}
	for note, ok := own.notes.pop(); ok; note, ok = own.notes.pop() {
		if err := s.push(note); err != nil {
			return err
		}
	}
	return nil
}

// pushSettled pushes a note behind what the intake took; later, if there is no room for that.
func (s *Session) pushSettled(note *item) error {
	if !s.unsettled() {
		return s.push(note)
	}
	s.settling.mu.Lock()
	defer s.settling.mu.Unlock()
	if err := s.settleLocked(); errors.Is(err, status.Timeout) {
		s.settling.notes.push(note)
		return nil
	} else if err != nil {
		return err
	}
	return s.push(note)
}

// closeIntake ends the intake; what is left there is lost.
func (s *Session) closeIntake() {
	s.settling.mu.Lock()
	defer s.settling.mu.Unlock()
	for s.opts.Intake.First(&s.settling.tensor) {
		s.counters.lost.Add(1)
		s.opts.Intake.Pop()
	}
	s.settling.notes = fifo[*item]{}
	s.opts.Intake.Close()
}
