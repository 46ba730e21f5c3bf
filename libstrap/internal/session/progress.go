package session

import (
	"sync"
	"sync/atomic"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// A stage is how far the writer has brought an item of the order.
type stage int

const (
	appended stage = iota // given to the stream, which may hold it in a block
	written               // in the file
	durable               // in the file, as its row is in the index, and both survive a power loss
	stages
)

// progress is how far the writer has come, as positions of the order, and how far callers
// want it to come. A caller waits for a position, which it can wait for again after a
// time-out: the position does not move when others add items behind it.
//
// The writer serves a wanted position when it has taken all items up to it, and then serves
// all that are reached at once. So requests cost one flush or sync for each time that the
// writer passes a wanted position, however many callers ask.
type progress struct {
	mu      sync.Mutex
	reached [stages]uint64
	wanted  [stages]wanted
	idle    atomic.Bool   // nothing is wanted; read without the lock
	offset  int64         // of the stream, which is durable up to there
	changed chan struct{} // closed when a stage reaches more, or the end; nil: nobody waits
	ended   bool          // the writer serves nothing any more
}

// wanted are the positions that a stage is to reach. They are kept as the lowest and the
// highest: when the lowest is served, what is left is at most the highest, which no later
// request moves away from those that wait already.
type wanted struct{ lowest, highest uint64 } // 0, 0: none

func (w *wanted) add(position uint64) {
	if w.lowest == 0 {
		w.lowest = position
	}
	w.lowest, w.highest = min(w.lowest, position), max(w.highest, position)
}

// serve removes the positions up to one that is reached.
func (w *wanted) serve(position uint64) {
	switch {
	case w.highest <= position:
		*w = wanted{}
	case w.lowest <= position:
		w.lowest = w.highest
	}
}

func newProgress() *progress {
	p := &progress{}
	p.idle.Store(true)
	return p
}

// want asks for a position to come to a stage. done reports that it has; else it may have
// when changed is closed. The error is InvalidState behind the end.
func (p *progress) want(s stage, position uint64) (done bool, changed <-chan struct{}, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	switch {
	case p.reached[s] >= position:
		return true, nil, nil
	case p.ended:
		return false, nil, status.New(status.InvalidState, "the capture has ended")
	}
	p.wanted[s].add(position)
	p.idle.Store(false)
	if p.changed == nil {
		p.changed = make(chan struct{})
	}
	return false, p.changed, nil
}

// Idle reports whether nothing is wanted.
func (p *progress) Idle() bool { return p.idle.Load() }

// Due is the highest stage that is wanted of a position up to this one.
func (p *progress) Due(position uint64) (s stage, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for s = stages - 1; s >= 0; s-- {
		if at := p.wanted[s].lowest; at > 0 && at <= position {
			return s, true
		}
	}
	return 0, false
}

// Reach says that all items up to a position have come to a stage. With durable, offset is
// the length of the stream then.
func (p *progress) Reach(s stage, position uint64, offset int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i := appended; i <= s; i++ {
		p.reached[i] = max(p.reached[i], position)
		p.wanted[i].serve(position)
	}
	if s == durable {
		p.offset = offset
	}
	p.idle.Store(p.wanted == [stages]wanted{})
	p.wake()
}

// End says that the writer serves nothing any more.
func (p *progress) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.wake()
}

func (p *progress) wake() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// Durable is how much of the stream is durable, in bytes.
func (p *progress) Durable() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.offset
}
