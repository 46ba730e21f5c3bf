package session

import (
	"fmt"
	"slices"
	"testing"
	"time"
)

// queue is what a line is to be: the callers, first come, first served.
type queue struct {
	line   *line
	turns  [3]turn   // of the callers
	ids    [3]uint64 // of their places, while they are away
	order  []int     // the callers with a place, the leader first
	lapses map[int]func()
}

func newQueue() *queue {
	q := &queue{line: newLine(), lapses: map[int]func(){}}
	return q
}

// A step is what a caller may do next, or what may happen to its place.
type step struct {
	name string
	may  func(q *queue, i int) bool
	do   func(q *queue, i int)
}

func (q *queue) has(i int) bool { return slices.Contains(q.order, i) }

func (q *queue) leave(i int) {
	q.order = slices.DeleteFunc(q.order, func(k int) bool { return k == i })
	delete(q.lapses, i)
}

var steps = []step{
	{
		"call", func(q *queue, i int) bool { return !q.has(i) && q.ids[i] == 0 },
		func(q *queue, i int) {
			if !q.line.TryLead(&q.turns[i]) {
				q.line.Join(&q.turns[i])
			}
			q.order = append(q.order, i)
		},
	},
	{
		"leave", func(q *queue, i int) bool { return q.has(i) && q.ids[i] == 0 },
		func(q *queue, i int) { q.line.Leave(&q.turns[i]); q.leave(i) },
	},
	{
		"time out", func(q *queue, i int) bool { return q.has(i) && q.ids[i] == 0 },
		func(q *queue, i int) {
			q.line.after = func(_ time.Duration, lapse func()) { q.lapses[i] = lapse }
			q.ids[i] = q.line.Keep(&q.turns[i])
		},
	},
	{
		"come back", func(q *queue, i int) bool { return q.ids[i] != 0 },
		func(q *queue, i int) { q.turns[i], q.ids[i] = q.line.Return(q.ids[i]), 0 },
	},
	{ // also of a place to which the caller came back
		"lapse", func(q *queue, i int) bool { return q.lapses[i] != nil },
		func(q *queue, i int) {
			q.lapses[i]()
			if delete(q.lapses, i); q.ids[i] != 0 {
				q.leave(i)
			}
		},
	},
	{
		"all lapse", func(q *queue, i int) bool { return i == 0 },
		func(q *queue, _ int) {
			q.line.Clear()
			for i, id := range q.ids {
				if id != 0 {
					q.leave(i)
				}
			}
		},
	},
}

// check compares the line with what it is to be.
func (q *queue) check() string {
	if q.line.led != (len(q.order) > 0) {
		return fmt.Sprintf("somebody leads: %v, of %v", q.line.led, q.order)
	}
	for i, t := range q.turns {
		leads := t.leads
		if t.place != nil {
			select {
			case <-t.place.leads:
				leads = true
			default:
			}
		}
		if here := q.has(i) && q.ids[i] == 0; leads != (here && q.order[0] == i) {
			return fmt.Sprintf("caller %d leads: %v, of %v", i, leads, q.order)
		}
	}
	return ""
}

// Three callers do all that callers can do, in every order, and the line stays what it is to be:
// one leads while there is any, in the order in which they came, and a place is kept until it
// lapses.
func TestTheLineIsFirstComeFirstServed(t *testing.T) {
	const depth = 7
	checked := 0
	var explore func(path []func(*queue), names []string)
	explore = func(path []func(*queue), names []string) {
		q := newQueue()
		for _, do := range path {
			do(q)
		}
		checked++
		if wrong := q.check(); wrong != "" {
			t.Fatalf("%v: %s", names, wrong)
		}
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
	if checked < 10_000 {
		t.Errorf("%d states only", checked)
	}
}

func TestAPlaceLapsesByItself(t *testing.T) {
	l := newLine()
	var gone, next turn
	l.TryLead(&gone)
	id := l.Keep(&gone)
	l.Join(&next)
	soon(t, next.place.leads)
	if again := l.Return(id); again != (turn{}) {
		t.Errorf("a place that lapsed is given back: %+v", again)
	}
}
