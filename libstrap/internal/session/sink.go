// Appends entries to the stream, and their rows to the index.

package session

import (
	"errors"
	"slices"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// indexLag and indexLagBytes are how far the index may lag behind the stream.
	indexLag      = time.Second
	indexLagBytes = 64 << 20
	// maxUnpublished bounds the rows that wait for their packets to be in the file.
	maxUnpublished = 4096
	// maxUnpublishedText bounds the bytes of text in these rows. The last row may exceed it.
	maxUnpublishedText = 4 << 20
)

// sink brings entries to the stream and their rows to the index. The writer's goroutine and threads
// that help append through it, one at a time.
type sink struct {
	life     *lifecycle
	arena    *arena.Arena
	order    *order
	progress *progress
	jobs     *backlog
	entries  *entries
	counters *counters
	waiting  func() uint64 // how many tensors wait in the intake
	dumps    bool          // the segments are dumps of a ring: one that fails does not end the session

	mu          mutex[sinkRank] // guards what follows, and what is taken from order
	segment                     // gets the packets
	sealing     chan error      // receives the end of sealing the segment before; nil: it is sealed
	finishing   bool            // the writer takes all that is left, and helpers append nothing
	unpublished []*entry        // appended to the stream, not yet known to be in the file
	text        int             // bytes of text in those
	due         int64           // the stream's length at the last tick: in the file at the next
	indexed     time.Time       // when the index was last written
	indexedAt   int64           // and the stream's length then
}

// tryLock locks the sink and returns true. It returns false if another thread holds the lock, or
// the session is closing, has failed or was discarded.
func (k *sink) tryLock() bool {
	if k.life.halted() || !k.mu.TryLock() {
		return false
	}
	if k.finishing {
		k.mu.Unlock()
		return false
	}
	return true
}

// unlock gives the lock back. If helped is set, it then appends the packets that helpers left
// because the lock was taken; see tryAppend.
func (k *sink) unlock(helped bool) {
	k.mu.Unlock()
	if helped && k.order.First() != nil && k.tryAppend() {
		k.order.Signal()
	}
}

// tryAppend appends packets that are made to the stream, for a helper. It reports whether the
// writer's goroutine has to be woken: for a position that a call waits for, or for the next packet.
// It need not be woken if only room in the stream is missing and no call waits, because the next
// helper may find room, and the writer looks when it ticks.
//
// A helper that finds the lock taken leaves its packet to the holder, which looks again after it has
// unlocked. If helpers waited for the lock, each unlocking would wake one of them.
func (k *sink) tryAppend() (stuck bool) {
	for k.mu.TryLock() {
		it := k.order.First()
		takes := it != nil && !k.life.halted() && !k.finishing && it.is == packetEntry && it.err == nil &&
			k.hasFiles() && !k.crowded()
		room := takes && int64(len(it.out)) <= k.stream.Room()
		if room {
			k.order.Pop()
			k.attempt(func() error { return k.append(it) })
		}
		_, _, awaited := k.awaited()
		k.mu.Unlock()
		if awaited {
			return true
		}
		if it != nil && !room {
			return !takes || k.jobs.Hurried()
		}
		if it == nil && k.order.First() == nil {
			return false
		}
	}
	return false
}

// awaited returns the stage that callers wait for, and up to which position.
func (k *sink) awaited() (s stage, at uint64, ok bool) {
	if k.progress.Idle() {
		return 0, 0, false
	}
	at = k.order.Taken()
	s, ok = k.progress.Due(at)
	return s, at, ok
}

// await waits until all entries up to a position have come to a stage.
func (k *sink) await(to stage, position uint64, c *call) error {
	for {
		done, changed, err := k.progress.want(to, position)
		if done {
			return nil
		}
		if err != nil {
			return k.life.refused()
		}
		k.order.Signal()
		select {
		case <-changed:
			continue
		default:
		}
		select {
		case <-changed:
		case <-k.life.failed:
			return k.life.failure
		case <-k.life.discarded:
			return status.New(status.InvalidState, "the capture of %q was discarded", k.life.path)
		case <-c.Done():
			return k.late()
		}
	}
}

// late returns the Timeout of a call whose limit passed before all packets were written.
func (k *sink) late() error {
	return status.New(status.Timeout, "%q: %d packets are not yet written", k.life.path, k.queued())
}

// queued returns how many packets wait, with the tensors in the intake. While a tensor moves from
// the intake to the order, queued may count that tensor two times, but counts it at least once.
func (k *sink) queued() uint64 {
	small := k.waiting()
	return small + k.counters.queuedPackets.Load()
}

// The caller of all that follows holds the lock.

// serve brings the entries that were taken to the stage that callers wait for.
func (k *sink) serve() {
	stage, at, ok := k.awaited()
	if !ok || k.life.halted() {
		return
	}
	k.attempt(func() error {
		if stage >= written {
			if err := k.publish(); err != nil {
				return err
			}
		}
		if stage == durable {
			if err := k.sync(); err != nil {
				return err
			}
		}
		k.measure() // a call that waited may look at the statistics next
		k.progress.Reach(stage, at, k.written())
		return nil
	})
}

// sync makes the files durable.
func (k *sink) sync() error {
	if err := k.sealed(); err != nil || !k.hasFiles() {
		return err
	}
	if err := k.stream.Sync(); err != nil {
		return err
	}
	return k.index.Sync()
}

// written returns the length of the stream that is in the file.
func (k *sink) written() int64 {
	if !k.hasFiles() {
		return 0
	}
	return k.stream.Written()
}

// roll lets the packets to come go to the next segment, and seals the one so far in a goroutine, which
// sealed waits for. The next stream takes over the memory of the one before. next may be nil: the dump of
// a ring has ended.
func (k *sink) roll(next *segment) error {
	if next == nil {
		next = &segment{}
	}
	if k.life.halted() {
		return next.discard()
	}
	err := k.publish()
	if err == nil && k.hasFiles() {
		err = k.stream.Flush() // also where publish found nothing to do
	}
	if err == nil {
		err = k.sealed() // at most one segment is sealed at a time
	}
	if err != nil {
		return errors.Join(err, next.discard())
	}
	before := k.segment
	if before.hasFiles() && next.hasFiles() {
		next.stream.TakeMemory(before.stream)
	}
	k.segment, k.due, k.indexed, k.indexedAt = *next, 0, time.Now(), 0
	if !before.hasFiles() {
		return nil
	}
	k.sealing = make(chan error, 1)
	go func(sealing chan<- error) {
		err := k.life.Guard(before.seal)
		if err != nil && !k.dumps {
			k.life.fail(err) // now, not when the next call asks
		}
		sealing <- err
	}(k.sealing)
	return nil
}

// sealed waits until the segment before is sealed. That a dump could not be sealed is no error of the
// segment now.
func (k *sink) sealed() (err error) {
	if k.sealing != nil {
		err, k.sealing = <-k.sealing, nil
	}
	if err != nil && k.dumps {
		k.progress.failDump(err)
		return nil
	}
	return err
}

// attempt runs a step of the writing. An error stops the writing, not the caller, which goes on to
// free the queued entries. An error of a dump stops the writing of the dump alone.
func (k *sink) attempt(step func() error) {
	if err := k.life.Guard(step); err != nil {
		if k.dumps && !k.finishing {
			k.giveUpDump(err)
		} else {
			k.life.fail(err)
		}
	}
	k.measure()
}

// giveUpDump closes the files of a dump that failed, with the packets that are in them. Entries that
// come until the dump ends are lost.
func (k *sink) giveUpDump(why error) {
	k.progress.failDump(why)
	if !k.hasFiles() {
		return
	}
	// The dump has failed already: a second failure adds nothing.
	_ = k.finishRows(nil)
	_ = k.index.Close()
	_ = k.stream.Close()
	k.segment = segment{}
}

func (k *sink) measure() {
	if k.hasFiles() {
		k.counters.fileBytes.Store(uint64(k.stream.Written()))
	}
}

// append appends a packet that is made to the stream, and frees its region.
func (k *sink) append(it *entry) error {
	if len(it.out) == wire.HeaderSize {
		// An empty tensor without a name or codec. Six zero bytes are not for a stream, so the
		// index alone has it.
		it.row.Length = 0
	} else {
		it.row.Offset = k.stream.Offset()
		if err := k.stream.Append(it.out); err != nil {
			k.lose(it)
			return err
		}
	}
	k.arena.Free(it.region)
	it.region.Buf = nil
	k.list(it)
	return nil
}

// commit adds a packet that was made in the stream's memory.
func (k *sink) commit(it *entry) error {
	it.row.Offset = k.stream.Offset()
	if err := k.stream.Commit(len(it.out)); err != nil {
		it.err = err
		return err
	}
	it.out = nil
	k.list(it)
	return nil
}

// text returns the bytes of text that the entry alone holds.
func (it *entry) text() int {
	return len(it.row.Transform) + len(it.row.Parameters) + len(it.row.Error)
}

// list keeps an entry until its packet is in the file.
func (k *sink) list(it *entry) {
	k.unpublished = append(k.unpublished, it)
	k.text += it.text()
}

// crowded reports whether no more entries are to be listed.
func (k *sink) crowded() bool {
	return len(k.unpublished) >= maxUnpublished || k.text >= maxUnpublishedText
}

// publishWhenDue keeps the list of entries short. If the list is crowded, it collects the rows of
// the packets in the file, and publishes if the list is still half full. It writes the index if
// that is due.
func (k *sink) publishWhenDue() error {
	if k.crowded() {
		if err := k.collect(); err != nil {
			return err
		}
		if len(k.unpublished) >= maxUnpublished/2 || k.text >= maxUnpublishedText/2 {
			return k.publish()
		}
	}
	return k.writeIndexWhenDue()
}

// tick publishes if a packet that was appended before the last tick is still in a block that
// the stream writes only on a Flush. Otherwise it only collects rows. It writes the index if that
// is due. After a failure or a discard it only collects rows.
func (k *sink) tick() error {
	if k.life.halted() || !k.hasFiles() {
		return k.collect()
	}
	due := k.due
	k.due = k.stream.Offset()
	if k.stream.Passed() < due {
		if err := k.publish(); err != nil {
			return err
		}
	} else if err := k.collect(); err != nil {
		return err
	}
	return k.writeIndexWhenDue()
}

// publish brings every appended packet into the file, and its row to the index.
func (k *sink) publish() error {
	if len(k.unpublished) == 0 {
		return nil
	}
	return k.finishRows(k.stream.Flush())
}

// finishRows gives the index the rows of the packets that reached the file, and counts the others as lost.
// failed is the error of the last write; finishRows returns it with its own errors.
func (k *sink) finishRows(failed error) error {
	err := errors.Join(failed, k.collect())
	for _, it := range k.unpublished {
		k.lose(it)
	}
	clear(k.unpublished)
	k.unpublished, k.text = k.unpublished[:0], 0
	return err
}

// collect gives the index the rows of the packets that are in the file.
func (k *sink) collect() (err error) {
	written, n := k.written(), 0
	for _, it := range k.unpublished {
		if it.row.Offset >= 0 && it.row.Offset+int64(it.row.Length) > written {
			break
		}
		if failed := k.index.Append(&it.row); failed != nil {
			err = errors.Join(err, failed)
		}
		k.text -= it.text()
		k.account(it)
		k.recycle(it)
		n++
	}
	k.unpublished = slices.Delete(k.unpublished, 0, n)
	return err
}

// account counts an entry that is in the file.
func (k *sink) account(it *entry) {
	if it.is == noteEntry {
		k.counters.queuedNotes.Add(-1)
		return
	}
	k.counters.queuedPackets.Add(^uint64(0))
	if it.row.Offset >= 0 {
		k.counters.packets.Add(1)
		k.counters.storedBytes.Add(it.row.Length - uint64(wire.HeaderSize+len(it.name)))
	}
}

// lose counts an entry that will not be in the file, and frees its memory.
func (k *sink) lose(it *entry) {
	if it.is == noteEntry {
		k.counters.queuedNotes.Add(-1)
	} else {
		k.counters.lost.Add(1)
		k.counters.queuedPackets.Add(^uint64(0))
	}
	k.recycle(it)
}

// becomeNote makes a note of a streamed packet that was given up.
func (k *sink) becomeNote(it *entry, message string) {
	it.is, it.row.Error = noteEntry, message
	k.counters.queuedPackets.Add(^uint64(0))
	k.counters.noted.Add(1)
	k.counters.queuedNotes.Add(1)
}

// recycle frees the memory of an entry and keeps the entry for reuse. Enqueue may still hold a
// streamed one, so that is not reused.
func (k *sink) recycle(it *entry) {
	if it.feed != nil {
		return
	}
	if it.region.Buf != nil {
		k.arena.Free(it.region)
	}
	*it = entry{row: wire.Row{Shape: it.row.Shape[:0]}} // its memory is used again
	k.entries.Put(it)
}

// writeIndexWhenDue writes the index if it lags behind the stream by indexLag or indexLagBytes.
func (k *sink) writeIndexWhenDue() error {
	if time.Since(k.indexed) < indexLag && k.stream.Written()-k.indexedAt < indexLagBytes {
		return nil
	}
	if err := k.collect(); err != nil {
		return err
	}
	k.indexed, k.indexedAt = time.Now(), k.stream.Written()
	if k.index.Pending() == 0 {
		return nil
	}
	return k.index.Flush()
}
