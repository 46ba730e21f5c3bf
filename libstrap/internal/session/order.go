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

// order is what goes to the file, in the order of the file, for one writer. A packet
// that waits for its worker wakes nobody.
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
	o.tell(it)
}

// Made says that a packet's worker is through with it: it is the writer's now.
func (o *order) Made(it *item) {
	it.made.Store(true)
	o.tell(it)
}

// tell wakes the writer if it waits for this item.
func (o *order) tell(it *item) {
	o.mu.Lock()
	all := o.list.all()
	first := len(all) > 0 && all[0] == it && it.ready()
	o.mu.Unlock()
	if first {
		select {
		case o.Ready <- struct{}{}:
		default:
		}
	}
}

// TryPop takes the first item, if it is ready.
func (o *order) TryPop() (it *item, ok bool) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if all := o.list.all(); len(all) == 0 || !all[0].ready() {
		return nil, false
	}
	return o.list.pop()
}

// Empty reports whether there is no item, ready or not.
func (o *order) Empty() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.list.all()) == 0
}
