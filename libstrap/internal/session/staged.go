// The lane of packets that workers or a team make in the arena.

package session

import (
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
)

// appendPatience is how long a call in yield waits for the writer after the workers have finished.
// In that time the writer can copy the workers' packets, if it need not wait for the disk.
const appendPatience = 10 * time.Millisecond

// staged is the lane of packets that take time to make: the elements are copied into the arena, and
// workers or the host's team make the packets there.
type staged struct {
	opts     *Options
	entries  *entries
	staging  *staging
	alarm    *alarm // nil: values are not inspected
	ring     *ring  // nil: the session has none
	maker    *maker
	jobs     *backlog
	order    *order
	life     *lifecycle
	counters *counters
	sink     *sink
}

// emit copies a packet's elements into the arena, and may then help to make packets.
func (l *staged) emit(e *emission, c *call) error {
	region, err := l.staging.takeRoom(c, int(e.part.bytes)+e.part.record, e.part.beside)
	if err != nil {
		return err
	}
	it := e.newPacket(packetEntry, l.entries)
	it.region, it.record = region, e.part.record
	if err := l.staging.push(c, it); err != nil {
		return err
	}
	e.begun = true
	answer := l.copy(e, it)
	if answer.much && !l.opts.DropOnFull && !e.fromIntake {
		l.yield(answer.drained, c)
	}
	return nil
}

// copy puts the elements into the packet's region and adds the packet to the backlog. The packet is
// in the order already.
func (l *staged) copy(e *emission, it *entry) (answer pushed) {
	// Should the copy panic, the writer must not wait for this packet for ever.
	it.err = errCopy
	defer func() { answer = l.staging.copied(it) }()
	var sum codec.Sum
	if it.record > 0 {
		e.copy(it.elements(), e.part.start, e.part.count, &sum)
	} else {
		e.copy(it.elements(), e.part.start, e.part.count, nil)
	}
	it.setLoss(e.measure())
	if l.alarm != nil {
		l.alarm.inspect(e, it.elements())
	}
	if it.kind == codec.Archive {
		it.keepWhole()
	}
	if l.ring != nil {
		l.ring.describe(it, &sum)
	}
	it.err = nil
	return pushed{}
}

// yield makes the waiting packets with the team. Without a team it waits, so that the workers get
// the CPUs, until drained is closed, the limit of the call has passed, or the session fails or
// closes. After drained it waits at most appendPatience for the writer to append the packets.
func (l *staged) yield(drained <-chan struct{}, c *call) {
	defer l.counters.yielded.Start()()
	if l.opts.helped() {
		l.maker.makeWaiting(l.opts.Team)
		return
	}
	select {
	case <-drained:
	case <-l.life.failed:
		return
	case <-l.life.closing:
		return
	case <-c.Done(): // the packet is in the backlog, so a late worker does not matter
		return
	}
	soon := call{limit: appendPatience}
	defer soon.stop()
	_ = l.sink.await(appended, l.order.Added(), &soon) // late or not, the call goes on
}
