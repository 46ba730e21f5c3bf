// Keeps the tensors of calls that timed out, for the repeated calls.

package session

import (
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Cursors name what a Timeout leaves for the repeated call. An odd cursor names an emission. An even
// one names a place in the line, of a call that put no packet of its tensor into the order.
func emissionCursor(id uint64) uint64 { return id<<1 | 1 }
func placeCursor(id uint64) uint64    { return id << 1 }

// pending keeps the emissions of calls that timed out.
type pending struct {
	mu      mutex[pendingRank]
	byID    map[uint64]*kept // by cursor
	last    uint64
	refuses bool // the session is closing: it keeps no more
}

// kept is an emission of a call that timed out.
type kept struct {
	running mutex[emissionRank] // held by the call that works on the emission, and by close
	emission
	about Tensor // what the index says of the tensor, without the elements
	place uint64 // in the line, while no call works on the emission
}

func newPending() *pending { return &pending{byID: map[uint64]*kept{}} }

// keep keeps an emission, and the place of its call in the line, under the Cursor of its tensor. keep
// sets the Cursor of a new emission. It returns false, and keeps nothing, if the session is closing and
// the host handed over the tensor itself.
func (p *pending) keep(e *emission, place uint64) bool {
	t := e.tensor
	p.mu.Lock()
	defer p.mu.Unlock()
	if k, repeated := p.byID[t.Cursor]; repeated {
		k.place = place
		return true
	}
	if p.refuses && !e.fromIntake {
		return false
	}
	k := &kept{emission: *e, about: *t, place: place}
	k.tensor, k.about.Data, k.about.Strides = nil, nil, nil
	k.about.Shape = append([]int64(nil), t.Shape...)
	p.last++
	t.Cursor = emissionCursor(p.last)
	p.byID[t.Cursor] = k
	return true
}

// take returns the emission of a cursor and locks it. It does not wait. Errors: InvalidArgument if there
// is no such emission, or the host names one of the intake; InvalidState if another call works on it.
func (p *pending) take(cursor uint64, fromIntake bool) (*kept, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	k, ok := p.byID[cursor]
	if !ok || k.fromIntake != fromIntake {
		return nil, status.New(status.InvalidArgument, "cursor = %d names no half-enqueued tensor", cursor)
	}
	if !k.running.TryLock() {
		return nil, status.New(status.InvalidState, "cursor = %d is in use by another thread", cursor)
	}
	return k, nil
}

// forget removes the emission of a cursor.
func (p *pending) forget(cursor uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.byID, cursor)
}

// close gives up the emissions that no call works on, and lets keep refuse new ones. A call that works on
// an emission sees that the session is closing. close leaves the emissions of the intake alone, because
// the intake goes on with them until the session has ended.
func (p *pending) close(giveUp func(*kept)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for cursor, k := range p.byID {
		if !k.fromIntake && k.running.TryLock() {
			giveUp(k)
			delete(p.byID, cursor)
			k.running.Unlock()
		}
	}
	p.refuses = true
}
