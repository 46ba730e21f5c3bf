// The goroutine that takes entries to the sink, and ends the session.

package session

import (
	"errors"
	"io"
	"runtime"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// fileLag is the writer's tick. A packet waits in a block of the stream for one to two ticks at most,
// and so does a tensor in the intake.
const fileLag = 50 * time.Millisecond

// writer is the goroutine that takes the entries of the order to the sink, serves the calls that
// wait, and ends the session.
type writer struct {
	helped   bool // helpers append too
	life     *lifecycle
	intake   *intake
	arena    *arena.Arena
	order    *order
	progress *progress
	maker    *maker
	counters *counters
	sink     *sink
	ring     *ring // nil: the session has none

	// The holder of sink.mu alone uses these, but the writer waits for the tick without it.
	frames *encoders // for streamed packets
	tick   *time.Ticker
}

// write takes entries until the session is closing and nothing is left.
func (w *writer) write() {
	runtime.LockOSThread()
	if !w.helped { // helpers hold the sink's lock in turns with this thread
		lowerPriority()
	}
	k := w.sink
	k.mu.Lock()
	defer k.mu.Unlock()
	w.tick, k.indexed = time.NewTicker(fileLag), time.Now()
	defer w.tick.Stop()
	for {
		select {
		case <-w.tick.C:
			k.attempt(k.tick)
		default:
		}
		k.serve()
		k.finishing = w.life.isClosing()
		if it := w.order.First(); it != nil {
			w.order.Pop()
			k.attempt(func() error { return w.handle(it) })
		} else if k.finishing && w.end() {
			break
		} else {
			w.rest()
		}
	}
	w.finish()
}

// rest waits until there is something to do. Helpers append meanwhile.
func (w *writer) rest() {
	w.sink.mu.Unlock()
	ticked := false
	if w.life.isClosing() {
		w.tickIntake()
	}
	if w.order.First() == nil { // else a helper found the lock taken when it had made the packet
		select {
		case <-w.order.Ready:
		case <-w.tick.C:
			w.tickIntake()
			ticked = true
		}
	}
	w.sink.mu.Lock()
	if ticked {
		w.sink.attempt(w.sink.tick)
	}
}

// tickIntake lets the intake enqueue the tensors that wait there. Its error is the session's failure
// or is met by the next call too.
func (w *writer) tickIntake() { _ = w.life.Guard(w.intake.tick) }

// end lets no more entries into the order, if all are taken and the intake is empty. It reports
// whether it did.
func (w *writer) end() bool {
	return (w.intake.empty() || w.life.halted()) && w.order.End()
}

// closeFiles closes the files of the last segment.
func (w *writer) closeFiles() {
	k := w.sink
	displaced := k.displaced()
	k.attempt(func() error {
		err := k.index.Close()
		if w.life.halted() {
			// The capture already failed: a second failure adds nothing.
			return nil
		}
		return err
	})
	k.attempt(k.stream.Close)
	k.attempt(func() error { return displaced })
}

// handle brings an entry to the sink.
func (w *writer) handle(it *entry) error {
	k := w.sink
	switch {
	case it.is == rollEntry:
		return k.roll(it.next)
	case it.is == streamEntry:
		return w.writeStreamed(it)
	case w.life.halted() || !k.hasFiles(): // a dump without files has failed
		k.lose(it)
		return nil
	case it.is == noteEntry:
		k.list(it)
	case it.err != nil:
		err := it.err
		k.lose(it)
		return err
	default:
		if err := k.append(it); err != nil {
			return err
		}
	}
	return k.publishWhenDue()
}

// writeStreamed writes a streamed packet, or notes that it was given up.
func (w *writer) writeStreamed(it *entry) error {
	defer it.feed.release()
	err := w.life.Guard(func() error { return w.writePieces(it) })
	if it.is == streamEntry && (err != nil || it.row.Offset < 0) {
		w.sink.lose(it)
		return err
	}
	w.sink.list(it)
	return w.sink.publishWhenDue()
}

// writePieces writes a streamed packet as its pieces come.
func (w *writer) writePieces(it *entry) error {
	if w.life.halted() {
		return nil
	}
	k := w.sink
	f, offset := it.feed, k.stream.Offset()
	packet, err := k.stream.Begin([]byte(it.name))
	if err != nil {
		return err
	}
	var sum crc32c.Sum
	frame, err := w.frames.newFrame(it, io.MultiWriter(packet, &sum), f.size)
	if err != nil {
		return errors.Join(err, packet.Abort())
	}
	for left := f.size; left > 0; {
		select {
		case piece := <-f.full:
			if _, err := frame.Write(piece); err != nil {
				return err
			}
			left -= int64(len(piece))
			f.empty <- piece[:cap(piece)]
		case <-w.tick.C:
			k.attempt(k.tick)
		case <-f.gaveUp:
			if w.life.halted() {
				return packet.Abort()
			}
			if err := packet.Abort(); err != nil {
				return err
			}
			k.becomeNote(it, abandonedMessage)
			return nil
		case <-w.life.failed:
			return packet.Abort()
		case <-w.life.discarded:
			return packet.Abort()
		}
		k.measure()
	}
	if err := frame.Close(); err != nil {
		return err
	}
	length, err := packet.Finish()
	if err != nil {
		return err
	}
	it.row.Offset, it.row.Length = offset, uint64(length)
	it.row.CRC = uint32(sum)
	it.setLoss(f.loss)
	if it.kind == codec.Archive {
		w.counters.addArchiveLoss(it, w.frames.archive.Loss())
	}
	return nil
}

// finish publishes what is left, ends the workers and closes the files.
func (w *writer) finish() {
	k, l := w.sink, w.life
	w.progress.End()
	if w.ring != nil {
		w.ring.close()
	}
	if l.halted() {
		k.attempt(func() error { return k.finishRows(nil) })
	} else {
		k.attempt(k.publish)
	}
	w.maker.stop()
	k.attempt(k.sealed)
	if k.hasFiles() {
		w.closeFiles()
	}
	w.arena.Close()
	if w.ring != nil {
		k.attempt(w.ring.removeFile)
	}
	w.counters.lost.Add(w.intake.close())
	if err := w.progress.takeFailure(); err != nil { // no call has asked
		l.fail(err)
	}
	select {
	case <-l.failed:
		l.finishErr = l.failure
	default:
	}
	if lost := w.counters.lost.Load(); lost > 0 && l.finishErr != nil {
		l.finishErr = status.Wrap(status.CodeOf(l.finishErr), l.finishErr,
			"the capture of %q stopped: %d packets are not in it", l.path, lost)
	}
	close(l.finished)
}
