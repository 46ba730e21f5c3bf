package session

import (
	"slices"
	"sync"
	"time"
)

// keptFor is how long the line keeps a place whose caller is away after a time-out.
const keptFor = time.Second

// line is the calls that want staging memory, first come, first served. Its leader alone
// takes memory, and pushes an item for each region to the order before the next one leads.
// So regions are handed out in the order of the file, and a large request, which waits until
// enough regions are freed, is not overtaken for ever.
//
// A call that times out keeps its place for a while, also as the leader: the host repeats
// such calls. What its caller does not come back for lapses, so that nobody waits for ever
// for a caller that gave up.
type line struct {
	mu      sync.Mutex
	led     bool                        // somebody leads
	leader  *place                      // who leads; nil: a call that did not wait, or nobody
	waiting fifo[*place]                // behind the leader
	last    uint64                      // id of a place
	after   func(time.Duration, func()) // time.AfterFunc but in tests
}

// place is where a call waits in the line.
type place struct {
	id       uint64        // for the caller to come back to; 0: it never left
	leads    chan struct{} // closed when the place is the first
	away     bool          // the call timed out, and was not repeated yet
	absences int
}

// turn is a call's part in the line.
type turn struct {
	place *place // nil: it does not wait, and never did
	leads bool
}

func newLine() *line {
	return &line{after: func(d time.Duration, f func()) { time.AfterFunc(d, f) }}
}

// TryLead makes the call the leader if it need not wait for that.
func (l *line) TryLead(t *turn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.led || t.place != nil {
		return t.leads
	}
	l.led, t.leads = true, true
	return true
}

// Join gives the call a place behind all others. It leads when place.leads is closed.
func (l *line) Join(t *turn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t.place = &place{leads: make(chan struct{})}
	l.waiting.push(t.place)
	if !l.led {
		l.advance()
	}
}

// Leave ends the call's part, if it has one: the next place leads.
func (l *line) Leave(t *turn) {
	if *t == (turn{}) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.place != nil {
		l.remove(t.place)
	} else if t.leads {
		l.advance()
	}
	*t = turn{}
}

// Keep is Leave for a call that timed out. It returns the id of the place, which the line
// keeps until Return or until it lapses; 0 where the call has none.
func (l *line) Keep(t *turn) (id uint64) {
	if *t == (turn{}) {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if t.place == nil && t.leads {
		t.place = &place{leads: make(chan struct{})}
		close(t.place.leads)
		l.leader = t.place
	}
	p := t.place
	*t = turn{}
	if p.id == 0 {
		l.last++
		p.id = l.last
	}
	p.away = true
	p.absences++
	absence := p.absences
	l.after(keptFor, func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		if p.away && p.absences == absence {
			l.remove(p)
		}
	})
	return p.id
}

// Return gives a repeated call its place back. Without one, because it lapsed, the call
// begins anew.
func (l *line) Return(id uint64) turn {
	l.mu.Lock()
	defer l.mu.Unlock()
	if p := l.leader; p != nil && p.id == id && p.away {
		p.away = false
		return turn{p, true}
	}
	for _, p := range l.waiting.all() {
		if p.id == id && p.away {
			p.away = false
			return turn{place: p}
		}
	}
	return turn{}
}

// Clear removes the places whose callers are away.
func (l *line) Clear() {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, p := range append([]*place{l.leader}, l.waiting.all()...) {
		if p != nil && p.away {
			l.remove(p)
		}
	}
}

// remove takes a place out of the line, if it is there; the caller holds the lock.
func (l *line) remove(p *place) {
	if l.leader == p {
		l.advance()
		return
	}
	if i := slices.Index(l.waiting.all(), p); i >= 0 {
		l.waiting.remove(i)
	}
}

// advance lets the next place lead; the caller holds the lock.
func (l *line) advance() {
	if l.leader, l.led = l.waiting.pop(); l.led {
		close(l.leader.leads)
	}
}
