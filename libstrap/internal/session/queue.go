package session

import "sync"

// queue is an unbounded first-in, first-out queue; what bounds it is the staging
// memory that its items hold.
type queue[T any] struct {
	mu     sync.Mutex
	items  []T
	head   int
	closed bool
	wake   sync.Cond
	// Arrived receives a value after a Push, for a consumer that waits for
	// other things too.
	Arrived chan struct{}
}

func newQueue[T any]() *queue[T] {
	q := &queue[T]{Arrived: make(chan struct{}, 1)}
	q.wake.L = &q.mu
	return q
}

// Push adds v at the end.
func (q *queue[T]) Push(v T) {
	q.mu.Lock()
	if q.head > 64 && q.head*2 > len(q.items) {
		n := copy(q.items, q.items[q.head:])
		clear(q.items[n:])
		q.items, q.head = q.items[:n], 0
	}
	q.items = append(q.items, v)
	q.mu.Unlock()
	q.wake.Signal()
	select {
	case q.Arrived <- struct{}{}:
	default:
	}
}

// TryPop takes the first item, if there is one.
func (q *queue[T]) TryPop() (v T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.pop()
}

// Pop waits for an item; ok is false once the queue is closed and empty.
func (q *queue[T]) Pop() (v T, ok bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.head == len(q.items) && !q.closed {
		q.wake.Wait()
	}
	return q.pop()
}

func (q *queue[T]) pop() (v T, ok bool) {
	if q.head == len(q.items) {
		return v, false
	}
	var none T
	v, q.items[q.head] = q.items[q.head], none
	q.head++
	return v, true
}

// Close wakes all that wait in Pop once the queue is empty.
func (q *queue[T]) Close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	q.wake.Broadcast()
}
