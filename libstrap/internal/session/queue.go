package session

import (
	"slices"
	"sync"
)

// fifo is a list that is taken from at its beginning; the zero value is empty. What
// bounds it is the staging memory that its items hold.
type fifo[T any] struct {
	items []T // from head on
	head  int
}

// all are the items, the oldest first.
func (f *fifo[T]) all() []T { return f.items[f.head:] }

func (f *fifo[T]) push(v T) { f.items = append(f.items, v) }

// pop takes the first item, if there is one.
func (f *fifo[T]) pop() (v T, ok bool) {
	if f.head == len(f.items) {
		return v, false
	}
	var none T
	v, f.items[f.head] = f.items[f.head], none
	if f.head++; f.head*2 > len(f.items) {
		n := copy(f.items, f.all())
		clear(f.items[n:])
		f.items, f.head = f.items[:n], 0
	}
	return v, true
}

// remove takes item i of all.
func (f *fifo[T]) remove(i int) { f.items = slices.Delete(f.items, f.head+i, f.head+i+1) }

// queue is a fifo for several goroutines.
type queue[T any] struct {
	mu   sync.Mutex
	list fifo[T]
	// Arrived receives a value after a Push, for a consumer that waits for
	// other things too.
	Arrived chan struct{}
}

func newQueue[T any]() *queue[T] { return &queue[T]{Arrived: make(chan struct{}, 1)} }

// Push adds v at the end.
func (q *queue[T]) Push(v T) {
	q.mu.Lock()
	q.list.push(v)
	q.mu.Unlock()
	select {
	case q.Arrived <- struct{}{}:
	default:
	}
}

// TryPop takes the first item, if there is one.
func (q *queue[T]) TryPop() (v T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.list.pop()
}
