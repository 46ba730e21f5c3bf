// The packets that wait for a worker.

package session

import (
	"sync"
	"time"
)

const (
	// A host that captures nothing for this long is not computing tensors.
	idleAfter = 20 * time.Millisecond
	// No packet waits longer than this for workers that yield.
	longestWait = time.Second
	// yieldBytes is how many bytes wait until the call that adds to them leaves the CPUs to the
	// workers that yield.
	yieldBytes = 32 << 20
	// helpBytes is how many bytes wait until a call makes packets with the team. It is small, because
	// to wake a team costs little and because so few bytes are still in the caches.
	helpBytes = 4 << 20
)

// backlogBytes returns how many bytes wait at most for workers that yield, or for a team that makes
// packets.
func (o *Options) backlogBytes() int64 {
	if o.helped() {
		return helpBytes
	}
	return yieldBytes
}

// backlog holds the packets that wait for a worker.
//
// Eager workers take a packet as soon as it is there. Beside a model that uses every CPU that is
// the slowest way: a team of threads waits for its last one, so each moment that a worker takes
// from one of them is lost to all. Workers that yield rest until
//
//   - so much waits that the call which adds to it waits for them: the team sleeps then, and all
//     CPUs work on the backlog,
//   - no packet came for idleAfter,
//   - the oldest waits for longestWait, unless a burst was asked for, or
//   - a call waits for the packets: a flush, a full arena, the end;
//
// and then work until nothing is left. If the caller helps, the workers rest on, and the call that
// finds so much waiting, or the oldest waiting for longestWait, makes the packets with the host's
// team.
type backlog struct {
	yields  bool
	helped  bool          // callers make packets when many wait, and the workers rest on
	began   time.Time     // what entry.came counts from
	high    int64         // so many bytes are many
	longest time.Duration // that a packet may wait
	idle    time.Duration // without a packet until the workers work
	more    func() bool   // reports whether tensors wait in the intake: the host is not idle

	mu      mutex[leafRank]
	work    sync.Cond // signals that a worker may go on
	waits   []*entry
	bytes   int64 // staged, of the packets that wait or are being worked on
	queued  int64 // staged, of the packets that wait
	active  int   // packets that are being worked on
	open    bool  // yielding workers may work, until nothing is left
	hurried int   // calls of Hurry whose end is to come
	closed  bool
	last    time.Time // when the newest packet came, if the workers yield
	timer   *time.Timer
	drained chan struct{} // closed when nothing is left
}

func newBacklog(yields, helped bool, high int64) *backlog {
	b := &backlog{
		yields: yields, helped: helped, began: time.Now(), high: high, longest: longestWait, idle: idleAfter,
		drained: make(chan struct{}), more: func() bool { return false },
	}
	if helped {
		// A small backlog may wait: it slows no call. A packet that a worker has begun, without a
		// CPU to finish it, holds up the packets behind it.
		b.idle = longestWait
	}
	b.work.L = &b.mu
	return b
}

// staged returns the bytes of memory that the packet holds.
func (it *entry) staged() int64 { return int64(it.region.Counted()) }

// pushed is the answer of Push.
type pushed struct {
	much    bool            // the caller makes packets with the team, or waits for drained
	drained <-chan struct{} // closed when the workers have made all packets; nil where callers help
}

// Push adds a packet. Where callers help, much is set if high bytes wait before this packet, or the
// oldest packet waits for longest. Without help, much is set if high bytes wait with this packet.
// Eager workers never set it.
func (b *backlog) Push(it *entry) pushed {
	b.mu.Lock()
	defer b.mu.Unlock()
	before := b.queued
	b.waits = append(b.waits, it)
	b.bytes += it.staged()
	b.queued += it.staged()
	if !b.yields {
		b.work.Signal()
		return pushed{}
	}
	b.last = time.Now()
	it.came = b.last.Sub(b.began)
	if b.timer == nil {
		b.timer = time.AfterFunc(b.idle, b.tick)
	}
	late := b.last.Sub(b.oldest()) >= b.longest
	if b.helped {
		if b.opened() {
			b.work.Broadcast()
		}
		// One packet that is much by itself waits for the next, which may hold the same elements
		// or be made beside it.
		return pushed{much: before >= b.high || late}
	}
	much := b.bytes >= b.high
	b.open = b.open || much || late
	if b.opened() {
		b.work.Broadcast()
	}
	return pushed{much: much, drained: b.drained}
}

// tick, run by the timer, gives the workers their turn if no packet came for idle, or the oldest
// packet waits for longest.
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

// Hurried reports whether a call waits for the packets.
func (b *backlog) Hurried() bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.hurried > 0
}

// Pop waits for a packet. ok is false once the backlog is closed and empty. The worker calls Done
// for each packet when it is through with it.
func (b *backlog) Pop() (it *entry, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for (b.waiting() == 0 || !b.opened()) && !b.closed {
		b.work.Wait()
	}
	return b.pop()
}

// TryPop takes a packet for a helper, which calls Done as a worker does.
func (b *backlog) TryPop() (it *entry, ok bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.pop()
}

func (b *backlog) pop() (it *entry, ok bool) {
	if b.waiting() == 0 {
		return nil, false
	}
	it, b.waits[0] = b.waits[0], nil // the rest of the list keeps its memory
	b.waits = b.waits[1:]
	b.active++
	b.queued -= it.staged()
	return it, true
}

// alikeWithin is how many packets behind one may be found alike.
const alikeWithin = 32

// PopAlike takes one of the next alikeWithin packets that has the size, type, first 64 bytes and
// last 64 bytes of the packet `of`, or returns nil. The bytes between may differ. The packet needs
// Done too.
func (b *backlog) PopAlike(of *entry) *entry {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, it := range b.waits[:min(b.waiting(), alikeWithin)] {
		if it.alike(of) {
			copy(b.waits[1:], b.waits[:i]) // those before it, which are few; there may be many behind it
			b.waits[0] = it
			it, _ = b.pop()
			return it
		}
	}
	return nil
}

// Done records that a worker is through with n packets of so many staged bytes.
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

// Packets returns how many packets wait that no worker has begun.
func (b *backlog) Packets() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.waiting()
}

// Waiting returns the staged bytes that wait for a worker or are being worked on.
func (b *backlog) Waiting() int64 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.bytes
}

// oldest returns when the first of the packets that wait came.
func (b *backlog) oldest() time.Time { return b.began.Add(b.waits[0].came) }

func (b *backlog) waiting() int { return len(b.waits) }

func (b *backlog) opened() bool { return !b.yields || b.open || b.hurried > 0 }
