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

// order is what goes to the file, in the order of the file. A packet that waits to be
// made wakes nobody. One caller at a time takes items.
type order struct {
	mu   sync.Mutex
	list fifo[*item]
	// Ready receives a value when the first item can be taken, for a writer that found it
	// could not.
	Ready chan struct{}
}

func newOrder() *order { return &order{Ready: make(chan struct{}, 1)} }

// Push adds an item at the end.
func (o *order) Push(it *item) {
	o.mu.Lock()
	o.list.push(it)
	o.mu.Unlock()
	if it.ready() {
		o.Wake()
	}
}

// Wake wakes the writer if there is something for it: after a packet is made.
func (o *order) Wake() {
	if o.First() != nil {
		select {
		case o.Ready <- struct{}{}:
		default:
		}
	}
}

// First is the first item, nil if it is not ready.
func (o *order) First() *item {
	o.mu.Lock()
	defer o.mu.Unlock()
	if all := o.list.all(); len(all) > 0 && all[0].ready() {
		return all[0]
	}
	return nil
}

// Pop takes what First gave.
func (o *order) Pop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.list.pop()
}

// Empty reports whether there is no item, ready or not.
func (o *order) Empty() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.list.all()) == 0
}
