// Makes packets of tensors: checks a tensor, splits it, and chooses a lane for each part.

package session

import (
	"cmp"
	"errors"
	"fmt"
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/ringfile"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// enqueuer makes packets of tensors: it validates a tensor, splits it into parts, and chooses a lane
// for each.
type enqueuer struct {
	opts     *Options
	names    *names
	life     *lifecycle
	counters *counters
	staging  *staging
	pending  *pending
	notes    *notes
	inline   *inline
	staged   *staged
	streamed *streamed
}

// enqueue is Session.Enqueue, without the tensors of the intake. It has three defers and five returns:
// a sixth return makes each defer slower, because Go opens at most 15 pairs of them in place.
func (q *enqueuer) enqueue(t *Tensor, timeout time.Duration) error {
	if err := q.life.refusedTo(t.fromIntake); err != nil {
		return err
	}
	c := call{limit: timeout, stalled: t.Cursor != 0, refuse: q.life.closing, fromIntake: t.fromIntake, step: t.Step}
	if t.fromIntake && timeout == 0 { // also the writer enqueues so, while the session is closing
		c.refuse = q.life.discarded
	}
	defer c.stop()
	defer q.staging.line.Leave(&c.turn) // also if this call panics
	if t.Cursor&1 != 0 {
		k, err := q.pending.take(t.Cursor, t.fromIntake)
		if err != nil {
			return cmp.Or(q.life.refusedTo(t.fromIntake), err) // the end may have taken the emission back
		}
		defer q.putBack(k)
		c.turn, k.place, k.tensor = q.staging.line.Return(k.place), 0, t
		return q.proceed(&k.emission, &c)
	}
	var e emission
	if err := q.begin(&e, t); err != nil || q.staging.ring != nil && q.staging.ring.late(t.Step) {
		return err
	}
	if t.Cursor != 0 {
		c.turn, t.Cursor = q.staging.line.Return(t.Cursor>>1), 0
	}
	return q.proceed(&e, &c)
}

// putBack lets other calls work on an emission. If the session has begun to close meanwhile, close has
// skipped the emission because this call worked on it. Then putBack gives it up.
func (q *enqueuer) putBack(k *kept) {
	k.tensor = nil
	k.running.Unlock()
	if q.life.isClosing() {
		q.close()
	}
}

// begin validates a tensor and makes e its emission.
func (q *enqueuer) begin(e *emission, t *Tensor) (err error) {
	if e.origin, err = q.names.find(t.Layer, t.Request); err != nil {
		return err
	}
	if e.elems, err = t.check(q.opts); err != nil {
		return err
	}
	e.opts, e.tensor, e.text = q.opts, t, t.text()
	e.source, e.stored = t.source(), q.opts.stored(t.DType)
	e.fromIntake, e.bound = t.fromIntake, q.opts.rounding
	if t.Conversion != nil {
		e.conversion, e.bound = t.Conversion, t.Conversion.left(e.bound)
	}
	return nil
}

// proceed hands over the rest of the tensor. After a Timeout it keeps the call's place in the line
// (line.go). It also keeps the emission if a packet of the tensor is in the order already. If another
// error ends the tensor behind its first packet, the index has a note that the rest is missing.
func (q *enqueuer) proceed(e *emission, c *call) error {
	t, err := e.tensor, q.emit(e, c)
	if errors.Is(err, errGaveWay) {
		err = nil // the ring has counted it
	}
	if errors.Is(err, status.Timeout) {
		place := q.staging.line.Keep(&c.turn, c.need)
		if !e.begun {
			t.Cursor = placeCursor(place)
			return err
		}
		if q.pending.keep(e, place) {
			return err
		}
		err = q.life.refused()
	}
	switch {
	case err == nil || !e.begun || errors.Is(err, ErrDropped): // nothing is missing, or drop has noted it
	case q.life.halted():
		e.giveUp()
	default:
		_ = q.cutShort(e, t) // an error: the session has ended, so there is nowhere to note it
	}
	if t.Cursor != 0 {
		q.pending.forget(t.Cursor)
		t.Cursor = 0
	}
	return err
}

// emit hands over the packets of the tensor in its stored type, and counts the tensor. If wantsTwin
// says so, float32 packets follow. If the packet name has no room for the suffix of these packets,
// emit notes the reason in the index instead.
func (q *enqueuer) emit(e *emission, c *call) error {
	if err := q.emitParts(e, c); err != nil || e.twin {
		return err
	}
	if !e.fromIntake {
		q.counters.tensors.Add(1)
		q.counters.rawBytes.Add(uint64(e.elems) * uint64(e.source.Size()))
	}
	lost := e.lost
	if e.conversion != nil {
		lost = e.withConversion(lost, e.elems)
	}
	if lost != (codec.Stats{}) {
		q.counters.addLoss(&lost)
	}
	if !q.wantsTwin(e) {
		return nil
	}
	if len(e.layer.packetName)+len(wire.OverflowSuffix) > wire.MaxName {
		return q.notes.add(&e.origin, e.tensor, e.whyTwin()+": the packet name leaves no room for "+wire.OverflowSuffix)
	}
	e.startTwin()
	return q.emitParts(e, c)
}

// wantsTwin reports whether float32 packets, the twin, follow the float16 packets. Values that are too
// large for float16 always get a twin. Values that are too small get one only if the session has an
// error bound and the host did not convert the values. wantsTwin counts the tensor in both cases.
func (q *enqueuer) wantsTwin(e *emission) bool {
	switch {
	case e.lost.Overflow > 0:
		q.counters.overflowed.Add(1)
		return true
	case e.tiny:
		q.counters.underflowed.Add(1)
		return q.opts.bounded() && e.conversion == nil
	default:
		return false
	}
}

// emitParts hands over the packets of one stored type.
func (q *enqueuer) emitParts(e *emission, c *call) error {
	for ; q.cut(e); e.part.index++ {
		err := q.emitPart(e, c)
		if errors.Is(err, ErrDropped) {
			return q.drop(e, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// cut describes packet number e.part.index in e.part. It returns false if the tensor has no such
// packet in the stored type.
func (q *enqueuer) cut(e *emission) bool {
	p, size := &e.part, int64(e.stored.Size())
	perPart := q.opts.split / size
	p.of = max((e.elems+perPart-1)/perPart, 1)
	if p.index >= p.of {
		return false
	}
	p.start = p.index * perPart
	p.count = min(e.elems-p.start, perPart)
	p.size = p.count * size
	p.name = e.layer.packetName
	if e.twin {
		p.name += wire.OverflowSuffix
	}
	p.kind = q.opts.Codec
	if p.kind == codec.Archive && !codec.Archives(e.stored, p.count) {
		p.kind = codec.Zstd
	}
	p.bytes = int64(wire.HeaderSize+len(p.name)) + p.size + int64(codec.Headroom(p.kind, int(p.size)))
	if q.opts.RingFile != "" {
		p.record = ringfile.RecordSize(len(e.tensor.Shape), e.origin.text()+e.text+len(wire.TransformOverflow))
	}
	if p.beside = rowCost + e.text; q.opts.Ring {
		p.beside = keptCost + e.text
	}
	p.room = p.bytes + int64(p.record) + int64(p.beside)
	return true
}

// emitPart hands over the current packet, on from where it stopped. This is where the lane is chosen:
//
//   - streamed, if the packet is larger than a region should be, a quarter of the arena. With
//     DropOnFull no packet is streamed, because pieces wait, and with a ring none, because pieces
//     cannot be kept: such a packet gets a region of up to the whole arena, or is dropped.
//   - inline, if making it takes no time and nothing waits before it. That saves a copy, and no
//     thread has to be woken.
//   - staged otherwise: compressing takes time that the caller should not spend.
func (q *enqueuer) emitPart(e *emission, c *call) error {
	room := e.part.room
	switch {
	case e.feed != nil:
		return q.streamed.rest(e, c)
	case room > int64(q.staging.arena.MaxRegion()) && !q.keepsWhole():
		return q.streamed.emit(e, c)
	case q.needsNoTime(e) && q.inline.emit(e):
		return nil
	case room > q.staging.arena.Limit() && q.keepsWhole():
		return fmt.Errorf("%w for a packet of %d bytes: it has %d", ErrDropped, room, q.staging.arena.Limit())
	default:
		return q.staged.emit(e, c)
	}
}

// keepsWhole reports whether a packet gets a region of its own, however large it is.
func (q *enqueuer) keepsWhole() bool { return q.opts.DropOnFull || q.opts.Ring }

// needsNoTime reports whether the current packet is made without compressing: it has no codec, or it is
// one LZ4 block of a layer whose last packet LZ4 did not shrink. With BurstBytes it returns false,
// because a burst is written after the host has finished, and with a ring, whose packets wait.
func (q *enqueuer) needsNoTime(e *emission) bool {
	p := &e.part
	raw := p.kind == codec.None || q.opts.findsRaw && e.layer.raw.Load() > 0
	return raw && p.count > 0 && q.opts.BurstBytes == 0 && !q.opts.Ring && codec.Surrounds(p.kind, int(p.size))
}

// drop leaves out the rest of a tensor, from the current packet on. It counts the elements, notes why
// in the index, and returns ErrDropped.
func (q *enqueuer) drop(e *emission, why error) error {
	what := ""
	switch {
	case e.twin:
		what = e.whyTwin() + ": their packet was "
	case e.part.index > 0:
		what = fmt.Sprintf("part %d and those behind it were ", e.part.index)
	}
	q.counters.dropped.Add(1)
	q.counters.droppedBytes.Add(uint64(e.elems-e.part.start) * uint64(e.source.Size()))
	if err := q.notes.push(q.notes.entry(&e.origin, e.tensor, what+why.Error())); err != nil {
		return err
	}
	return ErrDropped
}

// abandon is Session.Abandon.
func (q *enqueuer) abandon(cursor uint64) error {
	if cursor&1 == 0 {
		q.staging.line.GiveUp(cursor >> 1)
		return nil
	}
	k, err := q.pending.take(cursor, false)
	if err != nil {
		return err
	}
	defer k.running.Unlock()
	q.pending.forget(cursor)
	return q.takeBack(k)
}

// takeBack ends an emission that was kept, and the place of its call in the line.
func (q *enqueuer) takeBack(k *kept) error {
	q.staging.line.GiveUp(k.place)
	return q.cutShort(&k.emission, &k.about)
}

// cutShort ends an emission. Its packets in the order stay, and a note in the index says that the rest
// is missing. about describes the tensor. The error says why the session takes no note.
func (q *enqueuer) cutShort(e *emission, about *Tensor) error {
	if e.feed != nil {
		e.giveUp() // the writer turns the packet into the note
		return nil
	}
	return q.notes.add(&e.origin, about, abandonedMessage)
}

// close takes back every emission whose Enqueue timed out, unless a repeated call works on it now. It
// may be called again.
func (q *enqueuer) close() {
	q.pending.close(func(k *kept) {
		_ = q.takeBack(k) // an error: the session has ended, so there is nowhere to note it
	})
}
