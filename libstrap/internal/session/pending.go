package session

import (
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Cursors name what a Timeout leaves for the repeated call: odd ones an emission, even ones a place
// in the line, of a tensor of which nothing is taken.
func emissionCursor(id uint64) uint64 { return id<<1 | 1 }
func placeCursor(id uint64) uint64    { return id << 1 }

// pending holds the emissions of calls that timed out.
type pending struct {
	mu      mutex[pendingRank]
	byID    map[uint64]*emission // by cursor
	last    uint64
	refuses bool // the session is closing: it keeps no more
}

func newPending() *pending { return &pending{byID: map[uint64]*emission{}} }

// keep keeps the progress of a call under a new cursor, which it puts into t. It returns false if
// the session is closing.
func (p *pending) keep(e *emission, t *Tensor) bool {
	kept := &emission{
		layer: e.layer, elems: e.elems, stored: e.stored, twin: e.twin, part: e.part,
		fed: e.fed, feed: e.feed, begun: true, stats: e.stats, own: e.own, bits: e.bits, tiny: e.tiny,
		about: *t, conversion: e.conversion, fromIntake: e.fromIntake, place: e.place,
	}
	kept.about.Data = nil
	kept.about.Shape = append([]int64(nil), t.Shape...)
	kept.about.Strides = nil
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.refuses && !e.fromIntake {
		return false
	}
	p.last++
	t.Cursor = emissionCursor(p.last)
	p.byID[t.Cursor] = kept
	return true
}

// take finds the emission of a cursor and locks it. The intake's cursors are not the host's.
func (p *pending) take(cursor uint64, fromIntake bool) (*emission, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	e, ok := p.byID[cursor]
	if !ok || e.fromIntake != fromIntake {
		return nil, status.New(status.InvalidArgument, "cursor = %d names no half-enqueued tensor", cursor)
	}
	if !e.running.TryLock() {
		return nil, status.New(status.InvalidState, "cursor = %d is in use by another thread", cursor)
	}
	return e, nil
}

// forget removes the emission of t's cursor, if there is one.
func (p *pending) forget(t *Tensor) {
	if t.Cursor == 0 {
		return
	}
	p.mu.Lock()
	delete(p.byID, t.Cursor)
	p.mu.Unlock()
	t.Cursor = 0
}

// close gives up the emissions that no call works on, and keeps no more. A call that runs sees that
// the session is closing. The intake hands over the rest of its own tensors.
func (p *pending) close(giveUp func(*emission)) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for cursor, e := range p.byID {
		if !e.fromIntake && e.running.TryLock() {
			giveUp(e)
			delete(p.byID, cursor)
			e.running.Unlock()
		}
	}
	p.refuses = true
}
