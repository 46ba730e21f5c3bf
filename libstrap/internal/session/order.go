package session

import (
	"slices"
	"sync"
)

// fifo is a list whose first element is taken first. The zero value is empty. The staging
// memory that its elements hold bounds it.
type fifo[T any] struct {
	items []T // from head on
	head  int
}

// all returns the elements, the oldest first.
func (f *fifo[T]) all() []T { return f.items[f.head:] }

func (f *fifo[T]) push(v T) { f.items = append(f.items, v) }

// pop takes the first element, if there is one.
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

// remove takes element i of all.
func (f *fifo[T]) remove(i int) { f.items = slices.Delete(f.items, f.head+i, f.head+i+1) }

// order holds the packets and notes of a capture that wait for the writer, in the order of the
// file. It gives each two numbers: the sequence of its row in the index, and its position in
// this session. Position 1 is the opening of the files. Only the holder of writer.mu takes
// items.
type order struct {
	mu       sync.Mutex
	list     fifo[*item]
	sequence uint64 // of the next row
	added    uint64 // the position of the newest item
	taken    uint64 // the position of the last item that left the list
	ended    bool   // Push and Claim take no more items

	// Ready signals that the writer has something to do. A packet is pushed before it is
	// complete; the worker that completes it signals.
	Ready chan struct{}
}

func newOrder() *order { return &order{added: 1, taken: 1, Ready: make(chan struct{}, 1)} }

// Push numbers an item and adds it at the end. It reports false after End.
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

// Claim numbers an item that the caller appends to the stream at once. The caller holds
// writer.mu. It reports false, and does nothing, if other items wait or after End.
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

// End closes the order to further items if it is empty, and reports whether it was.
func (o *order) End() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.ended = len(o.list.all()) == 0
	return o.ended
}

// Wake signals Ready if the first item is complete. Call it after completing a packet.
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

// First returns the first item. It returns nil if there is none, or it is not complete yet.
func (o *order) First() *item {
	o.mu.Lock()
	defer o.mu.Unlock()
	if all := o.list.all(); len(all) > 0 && all[0].ready() {
		return all[0]
	}
	return nil
}

// Pop takes the item that First returned.
func (o *order) Pop() {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.list.pop()
	o.taken++
}

// Empty reports whether no item waits, complete or not.
func (o *order) Empty() bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return len(o.list.all()) == 0
}

// Added returns the position of the newest item.
func (o *order) Added() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.added
}

// Taken returns the position of the last item that left the list.
func (o *order) Taken() uint64 {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.taken
}
