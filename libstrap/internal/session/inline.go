// The lane of packets that are made in the stream's memory, within the call.

package session

import (
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/team"
)

// inline is the lane of packets that take no time to make: they are made in the stream's memory,
// within the call. The elements are copied once, and checked while they are in the caches.
type inline struct {
	opts     *Options
	entries  *entries
	maker    *maker
	jobs     *backlog
	order    *order
	counters *counters
	sink     *sink
}

// emit makes a packet in the stream's memory and appends it. It returns false, and takes nothing of
// the packet, if other entries wait before the packet, another thread appends, or the stream has no
// free memory because the disk does not keep up. An error in making the packet becomes the
// session's failure, and emit then returns true.
func (l *inline) emit(e *emission) bool {
	k, p := l.sink, &e.part
	if !l.lockEmpty(p.kind, p.bytes, !e.fromIntake) {
		return false
	}
	defer k.unlock(l.opts.helped())
	memory := k.stream.Place(int(p.bytes))
	if memory == nil || k.crowded() {
		return false
	}
	it := e.newPacket(packetEntry, l.entries)
	if !l.order.Claim(it) {
		k.recycle(it)
		return false
	}
	l.counters.queuedPackets.Add(1)
	e.begun = true
	it.region.Buf = memory
	// Should the copy panic, nothing of the packet is in the stream.
	it.err = errCopy
	defer func() {
		it.region.Buf = nil // it is not the arena's
		if it.err != nil {
			k.lose(it)
		}
	}()
	var sum codec.Sum
	e.copy(it.elements(), p.start, p.count, &sum)
	it.setLoss(e.measure())
	if it.kind == codec.None || it.layer.takeRawTurn() {
		it.err = it.surround(&sum)
	} else {
		it.err = l.maker.spares.use(l.opts, func(e *encoders) error { return l.maker.encode(it, e) })
	}
	if it.err != nil {
		k.life.fail(it.err)
		return true
	}
	k.attempt(func() error { return k.commit(it) })
	return true
}

// makesBehind is the most staged bytes, of earlier packets, that a call compresses before it
// appends its own packet.
const makesBehind = 1 << 20

// lockEmpty locks the sink if no entry waits in the order. It does not wait for the lock. If
// entries wait, helps is set and a team helps, it first makes and appends the waiting packets in
// this thread. It does so only if these and a packet of n bytes fit into the stream's memory and,
// with compression, at most makesBehind bytes wait.
func (l *inline) lockEmpty(kind codec.Kind, n int64, helps bool) bool {
	k := l.sink
	if !k.tryLock() {
		return false
	}
	if l.order.Empty() {
		return true
	}
	helped := l.opts.helped()
	waiting, room := l.jobs.Waiting(), k.stream.Room()
	k.unlock(helped)
	if !helps || !helped || waiting+n > room || kind != codec.None && waiting > makesBehind {
		return false
	}
	end := l.counters.yielded.Start()
	l.maker.makeWaiting(team.Team{}) // in this thread
	end()
	if !k.tryLock() {
		return false
	}
	if !l.order.Empty() {
		k.unlock(helped)
		return false
	}
	return true
}
