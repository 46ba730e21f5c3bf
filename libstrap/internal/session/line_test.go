package session

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// queue is a model of a line with three callers, first come, first served. It drives a line and
// checks it against the model.
type queue struct {
	line  *line
	clock time.Time
	turns [3]turn      // the turn of each caller
	ids   [3]uint64    // the id of its place while the caller is away; 0: it is not away
	since [3]time.Time // when the caller went away
	order []int        // the callers that have a place, the oldest first
}

func newQueue() *queue {
	q := &queue{line: newLine(), clock: time.Unix(1, 0)}
	q.line.now = func() time.Time { return q.clock }
	return q
}

// step is something that a caller may do next, or that may happen to its place.
type step struct {
	name string
	may  func(q *queue, i int) bool
	do   func(q *queue, i int)
}

// here reports whether caller i has a place and is not away.
func (q *queue) here(i int) bool { return slices.Contains(q.order, i) && q.ids[i] == 0 }

// leave takes caller i out of the model.
func (q *queue) leave(i int) {
	q.order = slices.DeleteFunc(q.order, func(k int) bool { return k == i })
}

// leads reports whether caller i has the lead, after it received a lead that the line gave it.
func (q *queue) leads(i int) bool {
	t := &q.turns[i]
	if t.place != nil && !t.leads {
		select {
		case <-t.place.leads:
			t.leads = true
		default:
		}
	}
	return t.leads
}

// need returns how many bytes caller i asks for.
func need(i int) int { return 1 << i }

var steps = []step{
	{
		"call", func(q *queue, i int) bool { return !slices.Contains(q.order, i) && q.ids[i] == 0 },
		func(q *queue, i int) {
			if !q.line.TryLead(&q.turns[i]) {
				q.line.Join(&q.turns[i])
			}
			q.order = append(q.order, i)
		},
	},
	{
		"leave", (*queue).here,
		func(q *queue, i int) { q.line.Leave(&q.turns[i]); q.leave(i) },
	},
	{
		"time out", (*queue).here,
		func(q *queue, i int) {
			q.ids[i], q.since[i] = q.line.Keep(&q.turns[i], need(i)), q.clock
		},
	},
	{
		"come back", func(q *queue, i int) bool { return q.ids[i] != 0 },
		func(q *queue, i int) {
			q.turns[i], q.ids[i] = q.line.Return(q.ids[i]), 0
			if q.clock.Sub(q.since[i]) >= keptFor {
				q.leave(i)
			}
		},
	},
	{
		"give up", func(q *queue, i int) bool { return q.ids[i] != 0 },
		func(q *queue, i int) { q.line.GiveUp(q.ids[i]); q.ids[i] = 0; q.leave(i) },
	},
	{
		"step back", func(q *queue, i int) bool { return q.leads(i) && q.turns[i].place != nil },
		func(q *queue, i int) {
			select {
			case <-q.turns[i].place.back:
				q.line.StepBack(&q.turns[i])
			default:
			}
		},
	},
	{
		"wait", func(q *queue, i int) bool { return i == 0 },
		func(q *queue, _ int) { q.clock = q.clock.Add(keptFor * 2 / 3) },
	},
}

// check compares the line with the model, and returns the first difference, or "".
func (q *queue) check() string {
	var leads, here []int
	for i := range q.turns {
		if q.leads(i) {
			leads = append(leads, i)
		}
	}
	for _, i := range q.order {
		if q.here(i) {
			here = append(here, i)
		}
	}
	if len(here) == 0 {
		if len(leads) > 0 {
			return fmt.Sprintf("%v lead, nobody is here", leads)
		}
		return ""
	}
	if len(leads) != 1 {
		return fmt.Sprintf("%v lead, of %v", leads, here)
	}
	leader := leads[0]
	if first := here[0]; first != leader {
		if t := q.turns[leader]; t.place == nil || len(t.place.back) == 0 {
			return fmt.Sprintf("%d leads before %d and does not know it", leader, first)
		}
	}
	// Room is reserved for the first caller before the leader whose place has not lapsed.
	want := 0
	for _, i := range q.order {
		if i == leader {
			break
		}
		if q.ids[i] == 0 || q.clock.Sub(q.since[i]) < keptFor {
			if want = need(i); q.turns[i].place != nil {
				want = q.turns[i].place.need // 0 if the caller never timed out
			}
			break
		}
	}
	got := 0 // for a leader without a place, which came when the line was empty
	if q.turns[leader].place != nil {
		got, _ = q.line.Reserved(&q.turns[leader])
	}
	if got != want {
		return fmt.Sprintf("%d bytes are reserved before %d, not %d", got, leader, want)
	}
	return ""
}

// Three callers take every sequence of up to seven steps. After each step the line is first come,
// first served, as the model says.
func TestTheLineIsFirstComeFirstServed(t *testing.T) {
	depth, least, checked := 7, 10_000, 0
	if testing.Short() {
		depth, least = 5, 500
	}
	var explore func(path []func(*queue), names []string)
	explore = func(path []func(*queue), names []string) {
		q := newQueue()
		for _, do := range path {
			do(q)
			for i := range q.turns {
				q.leads(i) // each caller notices at once
			}
		}
		if wrong := q.check(); wrong != "" { // the steps before were checked with the shorter sequences
			t.Fatalf("%v: %s", names, wrong)
		}
		checked++
		if len(path) == depth {
			return
		}
		for i := range q.turns {
			for _, s := range steps {
				if s.may(q, i) {
					explore(append(slices.Clip(path), func(q *queue) { s.do(q, i) }),
						append(slices.Clip(names), fmt.Sprint(i, " ", s.name)))
				}
			}
		}
	}
	explore(nil, nil)
	if checked < least {
		t.Errorf("%d states only", checked)
	}
}

// The line keeps the places of maxAway absent callers, and drops the oldest ones.
func TestTheLineKeepsAtMostMaxAwayPlaces(t *testing.T) {
	l := newLine()
	var ids []uint64
	for range maxAway + 10 {
		var gone turn
		if !l.TryLead(&gone) {
			t.Fatal("a caller that is away leads")
		}
		ids = append(ids, l.Keep(&gone, 1))
	}
	if len(l.places) != maxAway {
		t.Errorf("%d places are kept", len(l.places))
	}
	if again := l.Return(ids[0]); again != (turn{}) {
		t.Errorf("the oldest is kept: %+v", again)
	}
	if again := l.Return(ids[len(ids)-1]); again.place == nil {
		t.Error("the newest is not kept")
	}
}
