// How far the writer has come, and which positions callers wait for.

package session

import (
	"sync/atomic"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// A stage is how far the writer has brought an entry of the order.
type stage int

const (
	appended stage = iota // given to the stream, which may hold it in a block
	written               // in the file
	durable               // in the file, with its row in the index; both survive a power loss
	stages
)

// progress holds how far the writer has come, as positions of the order, and the positions
// that callers wait for. A position does not move when other calls add entries behind it, so a
// caller can wait for the same one again after a time-out.
//
// The writer serves a wanted position when it has taken all entries up to it. It then serves all
// wanted positions that it has passed. So there is one flush or sync for each time that the
// writer passes a wanted position, however many callers wait.
type progress struct {
	mu      mutex[leafRank]
	reached [stages]uint64
	wanted  [stages]wanted
	idle    atomic.Bool   // no position is wanted; read without the lock
	offset  int64         // how much of the stream is durable, in bytes
	changed chan struct{} // closed by Reach and End; nil: no caller waits
	ended   bool          // the writer serves no more positions
	failed  error         // why a dump is not whole
}

// wanted holds the lowest and the highest position that a stage has to reach; both are 0 if
// there is none. Positions between the two are not kept. When the lowest is served, the highest
// stands for them: it is behind them, and later requests do not move it back.
type wanted struct{ lowest, highest uint64 }

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

// want asks the writer to bring a position to a stage. done reports that it has come there
// already. Otherwise the caller asks again when changed is closed. The error is InvalidState
// after End.
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

// Idle reports whether no position is wanted.
func (p *progress) Idle() bool { return p.idle.Load() }

// Due returns the highest stage that is wanted for a position up to this one.
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

// Reach records that all entries up to a position have come to a stage. For durable, offset is
// the length of the stream, in bytes.
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

// End records that the writer serves no more positions.
func (p *progress) End() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	p.wake()
}

// failDump records why a dump is not whole. The first cause stays.
func (p *progress) failDump(why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.failed == nil {
		p.failed = why
	}
}

// takeFailure returns why a dump is not whole, once.
func (p *progress) takeFailure() (why error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	why, p.failed = p.failed, nil
	return why
}

func (p *progress) wake() {
	if p.changed != nil {
		close(p.changed)
		p.changed = nil
	}
}

// Durable returns how much of the stream is durable, in bytes.
func (p *progress) Durable() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.offset
}
