package session

import (
	"errors"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Callers ask for positions at random while the writer goes on. A request may come while another one
// waits. It is served at the latest when the writer has taken the entries that existed when the
// other request was served.
func TestEveryRequestIsServedInTime(t *testing.T) {
	type request struct {
		stage    stage
		position uint64
		other    uint64 // the lowest position that another request waited for; 0: none waited
		latest   uint64 // the latest position at which to serve it; 0 until the other is served
	}
	seeds := uint64(200)
	if testing.Short() {
		seeds = 20
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 1))
		p, added := newProgress(), uint64(1)
		var waiting []request
		for taken := uint64(0); taken < 300; taken++ {
			for range rng.IntN(4) {
				added = max(added, taken) + uint64(rng.IntN(3))
				s := stage(rng.IntN(int(stages)))
				other := p.wanted[s].lowest
				if done, _, err := p.want(s, added); done != (p.reached[s] >= added) || err != nil {
					t.Fatalf("position %d: done %v, %v", added, done, err)
				}
				waiting = append(waiting, request{stage: s, position: added, other: other})
			}
			if s, ok := p.Due(taken); ok {
				p.Reach(s, taken, int64(taken))
			}
			waiting = slices.DeleteFunc(waiting, func(r request) bool { return p.reached[r.stage] >= r.position })
			for i := range waiting {
				switch r := &waiting[i]; {
				case r.latest > 0 && r.latest <= taken:
					t.Fatalf("position %d was to be served at %d, %d are taken", r.position, r.latest, taken)
				case r.latest == 0 && p.reached[r.stage] >= r.other:
					r.latest = max(added, r.position)
				}
			}
		}
	}
}

// The writer serves 1000 requests for flushes and checkpoints with at most four.
func TestManyRequestsCostFewFlushes(t *testing.T) {
	p := newProgress()
	for position := uint64(1); position <= 1000; position++ { // flush and checkpoint in turns
		_, _, _ = p.want(written+stage(position%2), position)
	}
	served := 0
	for taken := uint64(0); taken <= 1000; taken++ {
		if s, ok := p.Due(taken); ok {
			p.Reach(s, taken, int64(taken))
			served++
		}
	}
	if served > 4 || !p.Idle() {
		t.Errorf("1000 requests were served in %d pieces, all: %v", served, p.Idle())
	}
	if p.Durable() < 999 {
		t.Errorf("durable up to %d", p.Durable())
	}
}

// End wakes the callers that wait, and refuses their positions.
func TestNothingIsServedAfterTheEnd(t *testing.T) {
	p := newProgress()
	_, changed, _ := p.want(durable, 1)
	p.End()
	soon(t, changed)
	if done, _, err := p.want(durable, 1); done || !errors.Is(err, status.InvalidState) {
		t.Errorf("done %v, %v", done, err)
	}
}
