package session

import (
	"errors"
	"fmt"
	"io"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// The index lags the data by at most this much.
	indexLag      = time.Second
	indexLagBytes = 64 << 20
	// A packet that a block of the stream still holds is brought into the file
	// after one to two of these. So long a tensor of the intake may wait to become one.
	fileLag = 50 * time.Millisecond
	// maxUnpublished bounds the rows that wait for their packets to be in the file.
	maxUnpublished = 4096
	// maxUnpublishedText bounds the bytes of text in these rows, but for those of one.
	maxUnpublishedText = 4 << 20
)

// writer brings packets to the stream and their rows to the index. It has a goroutine of
// its own, and helpers come in between.
type writer struct {
	*Session
	mu          sync.Mutex // the rest, stream, index and frames, and what is taken from order
	finishing   bool       // the session is closing: the goroutine takes all that is left
	unpublished []*item    // appended to the stream, not yet known to be in the file
	text        int        // bytes of it in those
	tick        *time.Ticker
	settled     uint64    // Intake.Settled at the last tick
	due         int64     // the stream's length at the last tick: in the file at the next
	indexed     time.Time // when the index was last written
	indexedAt   int64     // and the stream's length then
}

// write appends what the order brings, and serves those who wait for it, until the session is
// closing and nothing is left.
func (w *writer) write() {
	runtime.LockOSThread()
	if !w.opts.helped() { // who hold the lock in turns with it
		lowerPriority()
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.tick, w.indexed = time.NewTicker(fileLag), time.Now()
	defer w.tick.Stop()
	for {
		select {
		case <-w.tick.C:
			w.attempt(w.ticked)
		default:
		}
		w.serve()
		w.finishing = w.isClosing()
		if it := w.order.First(); it != nil {
			w.order.Pop()
			w.attempt(func() error { return w.handle(it) })
		} else if w.finishing && w.end() {
			break
		} else {
			w.rest()
		}
	}
	w.finish()
}

// rest waits until there is something to do. Helpers append meanwhile.
func (w *writer) rest() {
	w.mu.Unlock()
	ticked := false
	if w.isClosing() {
		_ = w.Guard(w.settleAtOnce) // what is in the way ends, or is the session's failure
	}
	if w.order.First() == nil { // else a helper found the lock taken when it had made it
		select {
		case <-w.order.Ready:
		case <-w.tick.C:
			w.settleIdle()
			ticked = true
		}
	}
	w.mu.Lock()
	if ticked {
		w.attempt(w.ticked)
	}
}

// settleIdle settles what the intake took before the last tick, if no call came that did.
func (w *writer) settleIdle() {
	before := w.settled
	if w.settled = w.opts.Intake.Settled(); w.settled == before {
		_ = w.Guard(w.settleAtOnce) // what is in the way, the next call meets too
	}
}

// awaited is the stage that callers wait for, and up to which position.
func (w *writer) awaited() (s stage, at uint64, ok bool) {
	if w.progress.Idle() {
		return 0, 0, false
	}
	at = w.order.Taken()
	s, ok = w.progress.Due(at)
	return s, at, ok
}

// serve brings the items that were taken to the stage that callers wait for.
func (w *writer) serve() {
	stage, at, ok := w.awaited()
	if !ok || w.halted() {
		return
	}
	w.attempt(func() error {
		if stage >= written {
			if err := w.publish(); err != nil {
				return err
			}
		}
		if stage == durable {
			if err := w.stream.Sync(); err != nil {
				return err
			}
			if err := w.index.Sync(); err != nil {
				return err
			}
		}
		w.measure() // whoever waits may look at the statistics next
		w.progress.Reach(stage, at, w.stream.Written())
		return nil
	})
}

// tryAppend appends packets that are made to the stream, for a helper. It reports whether
// the writer's goroutine has to be woken: for what somebody waits for, or for the next packet;
// not if all that is missing is room and nobody waits, for the next helper may find some, and
// the writer looks when it ticks.
//
// Who finds the lock taken leaves its packet to the one who holds it and looks again
// behind it. Were the writer to wait for the lock, giving it back would wake it each time.
func (w *writer) tryAppend() (stuck bool) {
	for w.mu.TryLock() {
		it := w.order.First()
		takes := it != nil && !w.halted() && !w.finishing && it.made.Load() && it.err == nil &&
			!w.crowded()
		room := takes && int64(len(it.out)) <= w.stream.Room()
		if room {
			w.order.Pop()
			w.attempt(func() error { return w.appendPacket(it) })
		}
		_, _, awaited := w.awaited()
		w.mu.Unlock()
		if awaited {
			return true
		}
		if it != nil && !room {
			return !takes || w.jobs.Hurried()
		}
		if it == nil && w.order.First() == nil {
			return false
		}
	}
	return false
}

// attempt runs a step of the writer; an error stops the writing, not the loop,
// which goes on to free what is queued.
func (w *writer) attempt(step func() error) {
	if err := w.Guard(step); err != nil {
		w.fail(err)
	}
	w.measure()
}

func (w *writer) measure() {
	w.counters.fileBytes.Store(uint64(w.stream.Written()))
}

// halted reports whether nothing more is to be written.
func (w *writer) halted() bool {
	select { // one channel at a time, which takes no lock
	case <-w.failed:
		return true
	default:
	}
	select {
	case <-w.discarded:
		return true
	default:
		return false
	}
}

func (w *writer) handle(it *item) error {
	switch {
	case it.feed != nil:
		return w.writeFeed(it)
	case it.row.Error != "":
		return w.writeNote(it)
	default:
		return w.writePacket(it)
	}
}

func (w *writer) writePacket(it *item) error {
	if w.halted() {
		w.lose(it)
		return nil
	}
	if err := it.err; err != nil {
		w.lose(it)
		return err
	}
	if err := w.appendPacket(it); err != nil {
		return err
	}
	return w.publishWhenDue()
}

// appendPacket appends a packet that is made to the stream.
func (w *writer) appendPacket(it *item) error {
	if len(it.out) == wire.HeaderSize {
		// An empty tensor without a name or codec: six zero bytes are not for a
		// stream, so the index alone has it.
		it.row.Length = 0
	} else {
		it.row.Offset = w.stream.Offset()
		if err := w.stream.Append(it.out); err != nil {
			w.lose(it)
			return err
		}
	}
	w.arena.Free(it.region)
	it.region.Buf = nil
	w.list(it)
	return nil
}

func (w *writer) writeNote(it *item) error {
	if w.halted() {
		w.lose(it)
		return nil
	}
	w.list(it)
	return w.publishWhenDue()
}

// list keeps an item until what it is about is in the file.
func (w *writer) list(it *item) {
	w.unpublished = append(w.unpublished, it)
	w.text += it.text()
}

// crowded reports whether no more items are to be listed.
func (w *writer) crowded() bool {
	return len(w.unpublished) >= maxUnpublished || w.text >= maxUnpublishedText
}

func (w *writer) publishWhenDue() error {
	if w.crowded() {
		if err := w.collect(); err != nil {
			return err
		}
		if len(w.unpublished) >= maxUnpublished/2 || w.text >= maxUnpublishedText/2 {
			return w.publish()
		}
	}
	return w.writeIndexWhenDue()
}

// ticked publishes where the last tick saw something already that is in a block
// yet.
func (w *writer) ticked() error {
	due := w.due
	w.due = w.stream.Offset()
	if w.stream.Passed() < due && !w.halted() {
		if err := w.publish(); err != nil {
			return err
		}
	} else if err := w.collect(); err != nil {
		return err
	}
	return w.writeIndexWhenDue()
}

// publish brings all that was appended into the file, and its rows to the index:
// after a failed write, too, some are in the file.
func (w *writer) publish() (err error) {
	if len(w.unpublished) == 0 {
		return nil
	}
	if !w.halted() {
		err = w.stream.Flush()
	}
	err = errors.Join(err, w.collect())
	for _, it := range w.unpublished {
		w.lose(it)
	}
	clear(w.unpublished)
	w.unpublished, w.text = w.unpublished[:0], 0
	return err
}

// collect gives the index the rows of what is in the file.
func (w *writer) collect() (err error) {
	written, n := w.stream.Written(), 0
	for _, it := range w.unpublished {
		if it.row.Offset >= 0 && it.row.Offset+int64(it.row.Length) > written {
			break
		}
		if failed := w.index.Append(&it.row); failed != nil {
			err = errors.Join(err, failed)
		}
		w.text -= it.text()
		w.account(it)
		w.recycle(it)
		n++
	}
	w.unpublished = slices.Delete(w.unpublished, 0, n)
	return err
}

// account counts an item that is in the file.
func (w *writer) account(it *item) {
	if it.row.Error != "" {
		w.counters.queuedNotes.Add(-1)
		return
	}
	w.counters.queuedPackets.Add(^uint64(0))
	if it.row.Offset >= 0 {
		w.counters.packets.Add(1)
		w.counters.storedBytes.Add(it.row.Length - uint64(wire.HeaderSize+len(it.name)))
	}
}

// lose counts an item that will not be in the file, and frees what it holds.
func (w *writer) lose(it *item) {
	if it.row.Error == "" {
		w.counters.lost.Add(1)
		w.counters.queuedPackets.Add(^uint64(0))
	} else {
		w.counters.queuedNotes.Add(-1)
	}
	w.recycle(it)
}

func (w *writer) recycle(it *item) {
	if it.feed != nil {
		return // its feeder may still hold it
	}
	if it.region.Buf != nil {
		w.arena.Free(it.region)
	}
	*it = item{shape: it.shape}
	w.items.Put(it)
}

func (w *writer) writeIndexWhenDue() error {
	if w.halted() {
		return nil
	}
	if time.Since(w.indexed) < indexLag && w.stream.Written()-w.indexedAt < indexLagBytes {
		return nil
	}
	if err := w.collect(); err != nil {
		return err
	}
	return w.writeIndex()
}

func (w *writer) writeIndex() error {
	w.indexed, w.indexedAt = time.Now(), w.stream.Written()
	if w.index.Pending() == 0 {
		return nil
	}
	return w.index.Flush()
}

// writeFeed writes a streamed packet, or notes that it was given up.
func (w *writer) writeFeed(it *item) error {
	f := it.feed
	defer w.release(f)
	err := w.Guard(func() error { return w.writePieces(it) })
	if (err != nil || it.row.Offset < 0) && it.row.Error == "" {
		w.lose(it)
		return err
	}
	w.list(it)
	return w.publishWhenDue()
}

// writePieces writes a streamed packet as its pieces come.
func (w *writer) writePieces(it *item) error {
	if w.halted() {
		return nil
	}
	f, offset := it.feed, w.stream.Offset()
	packet, err := w.stream.Begin([]byte(it.name))
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
			w.attempt(w.ticked)
		case <-f.gaveUp:
			if err := packet.Abort(); err != nil {
				return err
			}
			w.counters.queuedPackets.Add(^uint64(0))
			w.counters.noted.Add(1)
			w.counters.queuedNotes.Add(1)
			it.row.Error = abandonedMessage
			return nil
		case <-w.discarded:
			return packet.Abort()
		}
		w.measure()
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
	it.setError(f.error)
	if it.kind == codec.Archive {
		w.addLoss(it, w.frames.archive.Loss())
	}
	return nil
}

// displaced is an error if the stream is no longer at its path. The index follows it to where it
// is, unless something stands there.
func (w *writer) displaced() error {
	stands, now, err := w.stream.Stands(w.home)
	if stands || err != nil {
		return err
	}
	if now == "" {
		return status.New(status.NotFound, "%q was removed during its capture, or another file took its name: "+
			"its packets are lost; capture again, and move the file when the capture has ended", w.path)
	}
	followed, err := w.index.Follow(index.PathOf(w.home), index.PathOf(now))
	if err != nil {
		return err
	}
	beside := "its index is beside it"
	if !followed {
		beside = fmt.Sprintf("its index is not beside it: rename %q to %q", index.PathOf(w.path), index.PathOf(now))
	}
	return status.New(status.NotFound, "%q was renamed to %q during its capture, and has all packets; %s",
		w.path, now, beside)
}

// finish publishes what is left, ends the workers and closes the files.
func (w *writer) finish() {
	s := w.Session
	s.progress.End()
	w.attempt(w.publish)
	s.jobs.Close()
	s.workers.Wait()
	displaced := w.displaced()
	w.attempt(func() error {
		err := s.index.Close()
		if w.halted() {
			// The capture already failed: a second failure adds nothing.
			return nil
		}
		return err
	})
	w.attempt(s.stream.Close)
	w.attempt(func() error { return displaced })
	s.arena.Close()
	s.closeIntake()
	select {
	case <-s.failed:
		s.finishErr = s.failure
	default:
	}
	if lost := s.counters.lost.Load(); lost > 0 && s.finishErr != nil {
		s.finishErr = status.Wrap(status.CodeOf(s.finishErr), s.finishErr,
			"the capture of %q stopped: %d packets are not in it", s.path, lost)
	}
	close(s.finished)
}
