package session

import (
	"slices"
	"sync"
	"time"
)

// keptFor is how long the line keeps a place whose caller is away after a time-out.
const keptFor = time.Second

// line holds the calls that want staging memory, first come, first served. Only the leader
// takes memory. It pushes an item for each region to the order before the next call leads.
// So regions are handed out in the order of the file, and smaller requests do not overtake a
// large one that waits until enough regions are free.
//
// A call that times out keeps its place for keptFor, also as the leader, because the host
// repeats the call. After that the place lapses, so that the calls behind it do not wait for
// a caller that gave up.
type line struct {
	mu      sync.Mutex
	led     bool                        // there is a leader
	leader  *place                      // place of the leader; nil: it led at once, or there is none
	waiting fifo[*place]                // behind the leader
	last    uint64                      // the newest id of a place
	after   func(time.Duration, func()) // time.AfterFunc; tests replace it
}

// place is where a call waits in the line.
type place struct {
	id       uint64        // Return finds the place by it; 0: the call never timed out
	leads    chan struct{} // closed when the place becomes the leader's
	away     bool          // the call timed out and was not repeated yet
	absences int           // how often the call timed out
}

// turn is a call's part in the line.
type turn struct {
	place *place // nil: the call has not waited
	leads bool
}

func newLine() *line {
	return &line{after: func(d time.Duration, f func()) { time.AfterFunc(d, f) }}
}

// TryLead makes the call the leader if the line has none. It reports whether the call leads.
func (l *line) TryLead(t *turn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.led || t.place != nil {
		return t.leads
	}
	l.led, t.leads = true, true
	return true
}

// Join gives the call a place behind all others. The call leads when place.leads is closed.
func (l *line) Join(t *turn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t.place = &place{leads: make(chan struct{})}
	l.waiting.push(t.place)
	if !l.led {
		l.advance()
	}
}

// Leave takes the call out of the line. If it led, the next place leads.
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

// Keep marks the place of a call that timed out, and returns its id. The line keeps the place
// for keptFor, or until Return. The id is 0 if the call is not in the line.
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

// Return gives a repeated call its place back. If the place has lapsed, it returns the zero
// turn, and the call joins the line anew.
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

// remove takes a place out of the line, if it is there. The caller holds the lock.
func (l *line) remove(p *place) {
	if l.leader == p {
		l.advance()
		return
	}
	if i := slices.Index(l.waiting.all(), p); i >= 0 {
		l.waiting.remove(i)
	}
}

// advance lets the next place lead. The caller holds the lock.
func (l *line) advance() {
	if l.leader, l.led = l.waiting.pop(); l.led {
		close(l.leader.leads)
	}
}
