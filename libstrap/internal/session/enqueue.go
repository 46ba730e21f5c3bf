package session

import (
	"errors"
	"fmt"
	"time"

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

// enqueue is Session.Enqueue.
func (q *enqueuer) enqueue(t *Tensor, timeout time.Duration) error {
	if err := q.life.refusedTo(t.FromIntake); err != nil {
		return err
	}
	c := call{limit: timeout, stalled: t.Cursor != 0, refuse: q.life.closing, fromIntake: t.FromIntake}
	if t.FromIntake && timeout == 0 { // also the writer enqueues so, while the session is closing
		c.refuse = q.life.discarded
	}
	defer c.stop()
	defer q.staging.line.Leave(&c.turn) // also where this call panics
	if t.Cursor&1 != 0 {
		e, err := q.pending.take(t.Cursor, t.FromIntake)
		if err != nil {
			return err
		}
		defer q.putBack(e)
		c.turn, e.place = q.staging.line.Return(e.place), 0
		return q.proceed(e, t, &c)
	}
	var e emission
	if err := q.begin(&e, t); err != nil {
		return err
	}
	c.turn = q.staging.line.Return(t.Cursor >> 1)
	t.Cursor = 0
	return q.proceed(&e, t, &c)
}

// putBack lets other calls work on an emission. If the session has begun to close meanwhile, close
// has passed over the emission, so putBack gives it up.
func (q *enqueuer) putBack(e *emission) {
	e.running.Unlock()
	if q.life.isClosing() {
		q.close()
	}
}

// begin validates a tensor and makes e its emission.
func (q *enqueuer) begin(e *emission, t *Tensor) (err error) {
	if e.layer, err = q.names.layer(t.Layer); err != nil {
		return err
	}
	if _, err = q.names.request(t.Request); err != nil {
		return err
	}
	if e.elems, err = t.elements(); err != nil {
		return err
	}
	if t.Strides != nil && contiguous(t.Shape, t.Strides) {
		t.Strides = nil
	}
	if t.Conversion != nil {
		if err := t.checkConversion(q.opts, e.elems); err != nil {
			return err
		}
	}
	e.stored, e.conversion, e.fromIntake = t.DType, t.Conversion, t.FromIntake
	if t.DType == wire.Float32 && !q.opts.KeepFloat32 {
		e.stored = wire.Float16
	}
	return nil
}

// proceed hands over the rest of the tensor. After a Timeout it keeps the call's place in the line,
// and its progress if something of the tensor is taken.
func (q *enqueuer) proceed(e *emission, t *Tensor, c *call) error {
	err := q.emit(e, t, c)
	if !errors.Is(err, status.Timeout) {
		if err != nil {
			e.giveUp()
		}
		q.pending.forget(t)
		return err
	}
	place := q.staging.line.Keep(&c.turn, c.need)
	if !e.begun {
		t.Cursor = placeCursor(place)
		return err
	}
	e.place = place
	if t.Cursor == 0 && !q.pending.keep(e, t) {
		e.giveUp()
		return q.life.refused()
	}
	return err
}

// emit hands over the packets of the tensor in its stored type, and counts the tensor. If wantsTwin
// says so, float32 packets follow. If the packet name has no room for the suffix of these packets,
// emit notes the reason in the index instead.
func (q *enqueuer) emit(e *emission, t *Tensor, c *call) error {
	if !e.twin {
		if err := q.emitParts(e, t, c); err != nil {
			return err
		}
		if !e.fromIntake {
			q.counters.tensors.Add(1)
			q.counters.rawBytes.Add(uint64(e.elems) * uint64(t.source().Size()))
		}
		if e.conversion != nil || t.measured(e.stored, q.opts.copying().bound) {
			lost := e.lost(e.stats, e.elems)
			q.counters.addLoss(&lost)
		}
		if !q.wantsTwin(e) {
			return nil
		}
		if len(e.layer.packetName)+len(wire.OverflowSuffix) > wire.MaxName {
			return q.notes.add(e.layer, t, e.whyTwin()+": the packet name leaves no room for "+wire.OverflowSuffix)
		}
		e.twin, e.stored, e.part = true, wire.Float32, 0
	}
	return q.emitParts(e, t, c)
}

// wantsTwin reports whether float32 packets follow the float16 packets. It counts a tensor whose
// values are too large or too small for float16. For values that are too small it returns true only
// with an error bound, and not for values that the host converted.
func (q *enqueuer) wantsTwin(e *emission) bool {
	switch {
	case e.stats.Overflow > 0:
		q.counters.overflowed.Add(1)
		return true
	case e.tiny:
		q.counters.underflowed.Add(1)
		return q.opts.bounded() && e.conversion == nil
	default:
		return false
	}
}

// emitParts hands over the packets of one stored form of the tensor.
func (q *enqueuer) emitParts(e *emission, t *Tensor, c *call) error {
	perPart := q.opts.split / int64(e.stored.Size())
	p := part{name: e.layer.packetName, parts: max((e.elems+perPart-1)/perPart, 1)}
	if e.twin {
		p.name += wire.OverflowSuffix
	}
	for ; e.part < p.parts; e.part++ {
		p.start = e.part * perPart
		p.count = min(e.elems-p.start, perPart)
		err := q.emitPart(e, t, c, &p)
		if errors.Is(err, ErrDropped) {
			return q.drop(e, t, e.elems-p.start, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// emitPart hands over one packet, on from where it stopped. This is where the lane is chosen:
//
//   - streamed, if the packet is larger than a region of the arena. DropOnFull does not wait for
//     pieces, so it stages such a packet if the whole arena can hold it.
//   - inline, if making it takes no time and nothing waits before it. One copy is saved, and nobody
//     has to be woken.
//   - staged otherwise: compressing takes time that the caller should not spend.
func (q *enqueuer) emitPart(e *emission, t *Tensor, c *call, p *part) error {
	p.size = p.count * int64(e.stored.Size())
	p.kind = q.opts.kindOf(e.stored, p.count)
	p.room = p.packetBytes() + rowCost + int64(t.text())
	switch {
	case e.feed != nil:
		return q.streamed.rest(e, t, c, p)
	case p.room > int64(q.staging.arena.MaxRegion()) && !q.opts.DropOnFull:
		return q.streamed.emit(e, t, c, p)
	case q.inline.takes(e, p) && q.inline.emit(e, t, p):
		return nil
	case p.room > q.staging.arena.Limit() && q.opts.DropOnFull:
		return fmt.Errorf("%w for a packet of %d bytes: it has %d", ErrDropped, p.room, q.staging.arena.Limit())
	default:
		return q.staged.emit(e, t, c, p)
	}
}

// drop leaves out the last `left` elements of a tensor. It counts them, notes why in the index, and
// returns ErrDropped.
func (q *enqueuer) drop(e *emission, t *Tensor, left int64, why error) error {
	what := ""
	switch {
	case e.twin:
		what = e.whyTwin() + ": their packet was "
	case e.part > 0:
		what = fmt.Sprintf("part %d and those behind it were ", e.part)
	}
	q.counters.dropped.Add(1)
	q.counters.droppedBytes.Add(uint64(left) * uint64(t.source().Size()))
	if err := q.notes.push(e.layer, t, what+why.Error()); err != nil {
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
	e, err := q.pending.take(cursor, false)
	if err != nil {
		return err
	}
	defer e.running.Unlock()
	q.pending.forget(&Tensor{Cursor: cursor})
	return q.takeBack(e)
}

// takeBack gives an emission up and notes it.
func (q *enqueuer) takeBack(e *emission) error {
	q.staging.line.GiveUp(e.place)
	if e.feed != nil {
		e.giveUp() // the writer turns the packet into the note
		return nil
	}
	return q.notes.add(e.layer, &e.about, abandonedMessage)
}

// close gives up every tensor whose Enqueue timed out, unless a repeated call works on it now. It
// may be called again.
func (q *enqueuer) close() {
	q.pending.close(func(e *emission) {
		if err := q.takeBack(e); err != nil {
			e.giveUp() // the session has ended: there is nowhere to note it
		}
	})
}
