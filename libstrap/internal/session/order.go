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

// order is the packets and notes of a capture in the order of the file. It numbers them:
// each has a sequence, its row's number in the index, and a position, its number in this
// session; position 1 is the opening of the files. One goroutine at a time takes items: the
// holder of writer.mu.
type order struct {
	mu       sync.Mutex
	list     fifo[*item]
	sequence uint64 // of the next row
	added    uint64 // the position of the newest item
	taken    uint64 // the position of the last item that left the list
	ended    bool   // nothing is added any more

	// Ready signals that the writer has something to do. A packet that is not made yet
	// does not signal: who makes it does.
	Ready chan struct{}
}

func newOrder() *order { return &order{added: 1, taken: 1, Ready: make(chan struct{}, 1)} }

// Push numbers an item and adds it at the end. It reports whether the order still takes
// items.
func (o *order) Push(it *item) bool {
	o.mu.Lock()
	if o.ended {
		o.mu.Unlock()
		return false
	}
	o.number(it)
	o.list.push(it)
	o.mu.Unlock()
	if it.ready() {
		o.Wake()
	}
	return true
}

// Claim numbers an item that its caller, the holder of writer.mu, appends at once. It
// reports whether it may: the list is empty, and the order still takes items.
func (o *order) Claim(it *item) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	if o.ended || len(o.list.all()) > 0 {
		return false
	}
	o.number(it)
	o.taken = o.added
	return true
}

func (o *order) number(it *item) {
	it.row.Sequence = o.sequence
	o.sequence++
	o.added++
}

// End lets the order take no more items, if the list is empty, and reports whether it was.
func (o *order) End() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = len(o.list.all()) == 0
	return o.ended
}

// Wake signals Ready if the first item can be taken: after a packet is made.
func (o *order) Wake() {
	if o.First() != nil {
		o.Signal()
	}
}

// Signal signals Ready.
func (o *order) Signal() {
	select {
	case o.Ready <- struct{}{}:
	default:
	}
}

// First is the first item, nil if there is none or it is not made yet.
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
	o.taken++
}

// Empty reports whether there is no item, made or not.
func (o *order) Empty() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.list.all()) == 0
}

// Added is the position of the newest item.
func (o *order) Added() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.added
}

// Taken is the position of the last item that left the list.
func (o *order) Taken() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.taken
}
