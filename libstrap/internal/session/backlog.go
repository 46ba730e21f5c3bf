package session

import (
	"sync"
	"time"
)

const (
	// A caller that nobody calls for this long is not computing tensors.
	idleAfter = 20 * time.Millisecond
	// No packet waits longer than this for workers that yield.
	longestWait = time.Second
	// What waits for workers that yield, at most, before they are given the CPUs.
	yieldBytes = 32 << 20
	// What waits for a team, which costs nothing to wake: as much as stays in caches.
	helpBytes = 4 << 20
)

// backlog is the packets that wait for a worker.
//
// Eager workers take a packet as soon as it is there. Beside a model that uses every
// CPU that is the slowest way: a team of threads waits for its last one, so each
// moment that a worker takes from one of them is lost to all. Workers that yield
// rest until
//
//   - so much waits that the call which adds to it waits for them (the team sleeps
//     then, and all CPUs work on the backlog),
//   - no packet came for idleAfter,
//   - the oldest waits for longestWait, unless a burst was asked for, or
//   - someone is in a hurry: a flush, a full arena, the end;
//
// and then work until nothing is left. Where the caller helps, it makes the packets
// itself, with threads that have nothing else to do, when one comes behind so much or the
// oldest waits for longestWait; the workers rest on.
type backlog struct {
	yields  bool
	helped  bool          // who makes it full has other threads work, the workers rest on
	high    int64         // bytes
	longest time.Duration // that a packet may wait
	idle    time.Duration // without a packet
	more    func() bool   // tensors came of which no packet is here yet: that is not idle

	mu      sync.Mutex
	work    sync.Cond // there is something for a worker, or nothing ever more
	items   fifo[*item]
	bytes   int64 // staged, of items and of what is being worked on
	queued  int64 // of items alone
	active  int   // packets that are being worked on
	open    bool  // yielding workers may work, until nothing is left
	hurried int   // Hurry without its end
	closed  bool
	last    time.Time // when the newest of them came, where the workers yield
	timer   *time.Timer
	drained chan struct{} // closed when nothing is left, for those who wait for it
}

func newBacklog(yields, helped bool, high int64) *backlog {
	b := &backlog{
		yields: yields, helped: helped, high: high, longest: longestWait, idle: idleAfter,
		drained: make(chan struct{}), more: func() bool { return false },
	}
	if helped {
		// What little waits is in nobody's way, and a packet that a worker has begun and
		// gets no CPU for holds up those behind it.
		b.idle = longestWait
	}
	b.work.L = &b.mu
	return b
}

// full tells whether the caller is to help, or where it does not, to let the workers go
// first until the channel is closed.
type full struct {
	is      bool
	drained <-chan struct{}
}

// Push adds a packet.
func (b *backlog) Push(it *item) full {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.queued
	b.items.push(it)
	b.bytes += it.staged()
	b.queued += it.staged()
	if !b.yields {
		b.work.Signal()
		return full{}
	}
	b.last = time.Now()
	it.came = b.last
	if b.timer == nil {
		b.timer = time.AfterFunc(b.idle, b.tick)
	}
	late := b.last.Sub(b.oldest()) >= b.longest
	if b.helped {
		if b.opened() {
			b.work.Broadcast()
		}
		// Not at once for one that is much by itself: the next may hold the same, or be made
		// beside it.
		return full{is: before >= b.high || late}
	}
	much := b.bytes >= b.high
	b.open = b.open || much || late
	if b.opened() {
		b.work.Broadcast()
	}
	return full{is: much, drained: b.drained}
}

// tick gives the workers their turn when no packet came for a while.
func (b *backlog) tick() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.waiting() == 0 {
		b.timer = nil // until the next Push
		return
	}
	if b.more() {
		b.last = time.Now()
	}
	left := min(b.idle-time.Since(b.last), b.longest-time.Since(b.oldest()))
	if left <= 0 {
		b.open = true
		b.work.Broadcast()
		left = b.idle
	}
	b.timer.Reset(left)
}

// Open gives the workers their turn now.
func (b *backlog) Open() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.waiting() > 0 {
		b.open = true
		b.work.Broadcast()
	}
}

// Hurry lets the workers work until end is called.
func (b *backlog) Hurry() (end func()) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.hurried++
	b.work.Broadcast()
	return func() {
		b.mu.Lock()
		defer b.mu.Unlock()
		b.hurried--
	}
}

// Hurried reports whether someone waits for what is queued.
func (b *backlog) Hurried() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.hurried > 0
}

// Pop waits for a packet; ok is false once the backlog is closed and empty. The
// worker calls Done for each when it is through with it.
func (b *backlog) Pop() (it *item, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for (b.waiting() == 0 || !b.opened()) && !b.closed {
		b.work.Wait()
	}
	return b.pop()
}

// TryPop takes a packet for a helper, who calls Done as a worker does.
func (b *backlog) TryPop() (it *item, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pop()
}

func (b *backlog) pop() (it *item, ok bool) {
	if it, ok = b.items.pop(); ok {
		b.active++
		b.queued -= it.staged()
	}
	return it, ok
}

// How many packets behind one are looked at for its like.
const alikeWithin = 32

// PopAlike takes a packet that seems to hold the same as another one, nil if none of
// the next ones does. It needs Done too.
func (b *backlog) PopAlike(of *item) *item {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, it := range b.items.all()[:min(b.waiting(), alikeWithin)] {
		if it.alike(of) {
			b.items.remove(i)
			b.active++
			b.queued -= it.staged()
			return it
		}
	}
	return nil
}

// Done says that a worker is through with n packets of so many staged bytes.
func (b *backlog) Done(n int, bytes int64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.active -= n
	b.bytes -= bytes
	if b.yields && b.waiting() == 0 && b.active == 0 {
		b.open = false
		close(b.drained)
		b.drained = make(chan struct{})
	}
}

// Close lets the workers end once nothing is left.
func (b *backlog) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	if b.timer != nil {
		b.timer.Stop()
	}
	b.work.Broadcast()
}

// Packets is how many wait that nobody has begun.
func (b *backlog) Packets() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting()
}

// Waiting is how many staged bytes wait for a worker, or are being worked on.
func (b *backlog) Waiting() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bytes
}

// staged is the memory that the packet holds.
func (it *item) staged() int64 { return int64(len(it.region.Buf)) }

// oldest is when the first of the packets that wait came.
func (b *backlog) oldest() time.Time { return b.items.all()[0].came }

func (b *backlog) waiting() int { return len(b.items.all()) }

func (b *backlog) opened() bool { return !b.yields || b.open || b.hurried > 0 }
