// The line of the calls that want staging memory.

package session

import (
	"slices"
	"time"
)

const (
	// keptFor is how long the line keeps a place whose caller is away after a time-out.
	keptFor = time.Second
	// maxAway bounds the places that are kept for callers that are away.
	maxAway = 256
)

// line holds the calls that want staging memory, first come, first served. Only the leader
// takes memory. It pushes an entry for each region to the order before another call leads. So
// regions are handed out in the order of the file, and smaller requests do not overtake a
// large one that waits until enough regions are free.
//
// A call that times out keeps its place for keptFor, because the host repeats the call. While
// its caller is away, a call behind it may lead, but takes memory only where the room that the
// absent call asked for stays free. When the absent caller is back, the calls behind it step
// back. So a repeated call loses nothing to others, and a caller that gave up holds up no other call.
type line struct {
	mu     mutex[leafRank]
	led    bool     // there is a leader
	leader *place   // its place; nil where it has none, for it came when the line was empty
	places []*place // of the leader, and of calls that wait or are away; the oldest first
	last   uint64   // the newest id of a place
	now    func() time.Time
}

// place is where a call stands in the line.
type place struct {
	id    uint64        // Return finds the place by it; 0: the call never timed out
	leads chan struct{} // receives a value when the place becomes the leader's
	back  chan struct{} // receives a value when a call before the leader is back
	need  int           // bytes that the call asked for when it timed out
	until time.Time     // when the absent call's place lapses; zero: its caller is here
}

func (p *place) away() bool { return !p.until.IsZero() }

// turn is a call's part in the line.
type turn struct {
	place *place // nil: the call has not waited
	leads bool
}

func newLine() *line { return &line{now: time.Now} }

// TryLead makes the call the leader if the line has none. It reports whether the call leads.
func (l *line) TryLead(t *turn) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.led || t.place != nil {
		return t.leads
	}
	if len(l.places) > 0 { // of calls that are away
		t.place = l.add(len(l.places))
		l.leader = t.place
	}
	l.led, t.leads = true, true
	return true
}

// Join gives the call a place behind all others. The call leads when place.leads has a value.
func (l *line) Join(t *turn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	t.place = l.add(len(l.places))
	l.advance()
}

// Leave takes the call out of the line. If it led, the next call leads.
func (l *line) Leave(t *turn) {
	if *t == (turn{}) {
		return
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.places = slices.DeleteFunc(l.places, func(p *place) bool { return p == t.place })
	l.release(t)
	*t = turn{}
}

// Keep marks the place of a call that timed out when it asked for need bytes, and returns the
// id of the place. The line keeps the place for keptFor, or until Return. The id is 0 if the
// call is not in the line.
func (l *line) Keep(t *turn, need int) (id uint64) {
	if *t == (turn{}) {
		return 0
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	p := t.place
	if p == nil { // no call is before it
		p = l.add(0)
	}
	if p.id == 0 {
		l.last++
		p.id = l.last
	}
	l.dropLapsed(maxAway - 1)
	p.need, p.until = need, l.now().Add(keptFor)
	p.leads, p.back = make(chan struct{}, 1), make(chan struct{}, 1)
	l.release(t)
	*t = turn{}
	return p.id
}

// Return gives a repeated call its place back. If the place has lapsed, it returns the zero
// turn, and the call joins the line anew.
func (l *line) Return(id uint64) turn {
	if id == 0 {
		return turn{}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropLapsed(maxAway)
	at := slices.IndexFunc(l.places, func(p *place) bool { return p.id == id && p.away() })
	if at < 0 {
		return turn{}
	}
	p := l.places[at]
	p.until = time.Time{}
	if !l.advance() && slices.Contains(l.places[at:], l.leader) {
		select {
		case l.leader.back <- struct{}{}:
		default:
		}
	}
	return turn{place: p}
}

// GiveUp removes a place that Keep left.
func (l *line) GiveUp(id uint64) {
	t := l.Return(id)
	l.Leave(&t)
}

// StepBack ends the lead of a call that keeps its place, for one that stands before it.
func (l *line) StepBack(t *turn) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.release(t)
	t.leads = false
}

// Reserved returns how many bytes the leader, which has a place, must leave free for the first call in
// the line, and for how long. It returns 0 if the leader is the first call. Otherwise the first call is
// away, or is back and the leader is about to step back.
func (l *line) Reserved(t *turn) (need int, left time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.dropLapsed(maxAway)
	switch p := l.places[0]; {
	case p == t.place:
		return 0, 0
	case p.away():
		return p.need, p.until.Sub(l.now())
	default: // the leader is about to step back
		return p.need, keptFor
	}
}

// add inserts a new place. The caller holds the lock, as for all that follow.
func (l *line) add(at int) *place {
	p := &place{leads: make(chan struct{}, 1), back: make(chan struct{}, 1)}
	l.places = slices.Insert(l.places, at, p)
	return p
}

// release ends the call's lead, if it has it.
func (l *line) release(t *turn) {
	// A place may have been given the lead without its caller having noticed.
	if t.leads || t.place != nil && l.leader == t.place {
		l.led, l.leader = false, nil
		l.advance()
	}
}

// advance lets the first call lead that is not away, if no other leads. It reports whether it
// did.
func (l *line) advance() bool {
	if l.led {
		return false
	}
	at := slices.IndexFunc(l.places, func(p *place) bool { return !p.away() })
	if at < 0 {
		return false
	}
	l.led, l.leader = true, l.places[at]
	l.leader.leads <- struct{}{}
	return true
}

// dropLapsed removes the places that have lapsed. If more than most absent calls keep a place, it
// removes the oldest of these places.
func (l *line) dropLapsed(most int) {
	now, away := l.now(), 0
	for _, p := range l.places {
		if p.away() {
			away++
		}
	}
	l.places = slices.DeleteFunc(l.places, func(p *place) bool {
		drop := p.away() && (away > most || !p.until.After(now))
		if drop {
			away--
		}
		return drop
	})
}
