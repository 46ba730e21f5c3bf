package session

import (
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// placedWith is how many staged bytes a caller compresses at most to have its own packet
// placed behind them.
const placedWith = 1 << 20

// place makes a packet where the stream is written from, if nothing is in the queue before it
// and the disk keeps up. That spares it the way through the staging memory: the elements
// are copied once, and checked while they are in the caches. false: it has to go that
// way, as all packets do that take time to compress.
func (s *Session) place(e *emission, t *Tensor, kind codec.Kind, name string, start, count, parts int64) bool {
	w, head, size := s.writer, wire.HeaderSize+len(name), int(count)*e.stored.Size()
	if count == 0 || s.opts.BurstBytes > 0 || !s.opts.knownRaw(kind, e.layer) || !codec.Surrounds(kind, size) {
		return false
	}
	room := head + size + codec.Headroom(kind, size)
	if !w.lockEmpty(kind, room, e.fromIntake) {
		return false
	}
	defer w.unlock()
	memory := w.stream.Place(room)
	if memory == nil || w.crowded() {
		return false
	}
	it := s.newPacket(e, t, kind, name, parts)
	if !s.order.Claim(it) {
		w.recycle(it)
		return false
	}
	s.counters.queuedPackets.Add(1)
	e.begun, e.own, e.bits = true, codec.Stats{}, 0
	it.region.Buf, it.source, it.front = memory, size, codec.Front(kind, size)
	// Should the copy panic, nothing of it is in the stream.
	it.err = errCopy
	defer func() {
		it.region.Buf = nil // it is not the arena's
		if it.err != nil {
			w.lose(it)
		}
	}()
	var sum codec.Sum
	s.copy(e, t, it.elements(), start, count, &sum)
	it.setError(s.measure(e, t, count))
	if it.err = s.encodePlaced(it, &sum); it.err != nil {
		w.fail(it.err)
		return true
	}
	w.attempt(func() error { return w.commit(it) })
	return true
}

// foundRaw reports whether it is known at little cost that a codec leaves elements as they are.
func (o *Options) foundRaw(kind codec.Kind) bool { return kind == codec.LZ4 && o.Level == 0 }

// knownRaw reports whether the packets of a layer are taken to stay raw, but for one in tryEvery.
func (o *Options) knownRaw(kind codec.Kind, l *layer) bool {
	return kind == codec.None || o.foundRaw(kind) && l.raw.Load() > 0
}

// encodePlaced is encode for a packet whose elements' checksum may be known.
func (s *Session) encodePlaced(it *item, sum *codec.Sum) error {
	if it.kind == codec.None || it.layer.raw.Add(-1) > 0 {
		return it.surround(sum)
	}
	e, err := s.lend()
	if err != nil {
		return err
	}
	defer s.giveBack(e)
	return s.encode(it, e)
}

// tryEvery is how many packets of a layer have one of them tried, where it stays raw.
const tryEvery = 32

// tried notes whether a packet stayed raw when it was tried to compress it.
func (l *layer) tried(raw bool) {
	if raw {
		l.raw.Store(tryEvery)
	} else {
		l.raw.Store(0)
	}
}

// lockEmpty locks the writer where the order is empty, for a packet of n bytes. What little
// waits there, because an earlier packet found the lock taken, it makes and appends first, unless
// others wait behind this caller.
func (w *writer) lockEmpty(kind codec.Kind, n int, settles bool) bool {
	if !w.tryLock() {
		return false
	}
	if w.order.Empty() {
		return true
	}
	waiting, room := w.jobs.Waiting(), w.stream.Room()
	w.unlock()
	if settles || !w.opts.helped() || waiting+int64(n) > room || kind != codec.None && waiting > placedWith {
		return false
	}
	end := w.counters.yielded.Start()
	w.makeWaiting(team.Team{}) // in this thread
	end()
	if !w.tryLock() {
		return false
	}
	if !w.order.Empty() {
		w.unlock()
		return false
	}
	return true
}

// tryLock locks the writer, unless it is in use, stops or has stopped.
func (w *writer) tryLock() bool {
	if w.halted() || !w.mu.TryLock() {
		return false
	}
	if w.finishing {
		w.mu.Unlock()
		return false
	}
	return true
}

// unlock gives the lock back, and looks for what was left to who held it; see tryAppend.
func (w *writer) unlock() {
	w.mu.Unlock()
	if w.opts.helped() && w.order.First() != nil && w.tryAppend() {
		w.order.Signal()
	}
}

// commit adds a packet that was made in the stream's memory.
func (w *writer) commit(it *item) error {
	it.row.Offset = w.stream.Offset()
	if err := w.stream.Commit(len(it.out)); err != nil {
		it.err = err
		return err
	}
	it.out = nil
	w.list(it)
	return nil
}
