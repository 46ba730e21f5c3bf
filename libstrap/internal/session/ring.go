// Keeps the last steps of a session in memory, until a dump writes them.

package session

import (
	"errors"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/ringfile"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// errGaveWay is internal: the step of the tensor has given way, so the tensor is left out.
var errGaveWay = errors.New("the step gave way")

// ring holds the packets and notes of a flight recorder, where other sessions have the order. A step
// gives way as a whole when the arena has no room for a newer one.
//
// BeginDump hands all that is kept to the order, for a new segment. Until EndDump entries go to the order
// as in any other session, and then into the ring again.
type ring struct {
	opts     *Options
	life     *lifecycle
	arena    *arena.Arena
	order    *order
	jobs     *backlog
	entries  *entries
	counters *counters

	file *ringfile.File // nil: the ring is in memory alone

	mu      mutex[ringRank]
	steps   []*keptStep // by their first entry
	byStep  map[int64]*keptStep
	newest  int64  // of the steps that gave way; -1: none did
	dumped  int64  // the greatest number of a step that has an entry in a dump; -1: there is none
	number  uint64 // of the newest entry
	dumping bool
	closed  bool
	kept    RingStats
}

// RingStats are the counters of a ring.
type RingStats struct {
	Steps, Packets, Bytes  uint64 // in the ring now
	GoneSteps, GonePackets uint64 // gave way
	OldestStep             int64  // the least number of a step; -1: none, or it is not known
	GoneStep               int64  // the greatest number of a step that gave way; -1: none did
	OldestTimeNS           int64  // CLOCK_MONOTONIC of the oldest tensor; 0: none
}

func newRing(opts *Options, life *lifecycle, mem *arena.Arena, file *ringfile.File, o *order, jobs *backlog, made *entries, c *counters) *ring {
	return &ring{
		opts: opts, life: life, arena: mem, file: file, order: o, jobs: jobs, entries: made, counters: c,
		byStep: map[int64]*keptStep{}, newest: -1, dumped: -1,
	}
}

// push keeps an entry, or adds it to the order during a dump. The caller copies the elements of a packet
// afterwards, and then calls copied.
func (g *ring) push(it *entry) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return g.life.refused()
	}
	if g.dumping {
		return g.pass(it)
	}
	if g.isLate(it.row.Step) {
		return errGaveWay
	}
	g.number++
	it.number = g.number
	in := g.stepOf(it.row.Step)
	it.kept = in
	in.entries = append(in.entries, it)
	it.first = in.entries[0].number
	if len(in.entries) == 1 {
		g.expire(it.row.TimeNS)
	}
	if it.is == packetEntry {
		in.copying++
		in.packets++
		g.kept.Packets++
		g.kept.Bytes += uint64(it.staged())
	}
	g.mark(in)
	return nil
}

// stepOf returns the step with a number. A tensor that came outside of any step belongs to the newest one.
func (g *ring) stepOf(number int64) *keptStep {
	if number < 0 && len(g.steps) > 0 {
		return g.steps[len(g.steps)-1]
	}
	in := g.byStep[number]
	if in == nil {
		in = &keptStep{step: number}
		g.byStep[number] = in
		g.steps = append(g.steps, in)
	}
	return in
}

// pass adds an entry to the order.
func (g *ring) pass(it *entry) error {
	g.dumped = max(g.dumped, it.row.Step)
	if it.is == noteEntry {
		return g.order.Push(it)
	}
	return g.order.PushPacket(it, g.counters)
}

// copied tells that the elements of a packet are in its region.
func (g *ring) copied(it *entry) (answer pushed) {
	g.mu.Lock()
	defer g.mu.Unlock()
	switch {
	case it.givenUp:
		g.recycle(it)
		return pushed{}
	case it.kept == nil: // a dump has it
		return g.jobs.Push(it)
	}
	it.kept.copying--
	it.isCopied = true
	if it.record > 0 && it.err == nil {
		ringfile.Commit(it.region.Buf)
		g.mark(it.kept)
	}
	return pushed{}
}

// describe writes the record of a packet into the ring file. The elements are in its region, and copied is
// called next. sum is their checksum, if it is known.
func (g *ring) describe(it *entry, sum *codec.Sum) {
	if it.record == 0 || it.number == 0 { // a dump has it
		return
	}
	if it.row.CRC = sum.CRC; !sum.Known {
		it.row.CRC = crc32c.Checksum(it.elements())
	}
	at := it.record + wire.HeaderSize + len(it.name) + it.front
	g.file.Put(it.region.Buf, it.region.Offset(), &it.row, at, it.source, it.number, it.first)
}

// endStep tells that a step has all its tensors, which the ring file then says. It does nothing if the step
// has given way, had no tensor, or may have some in a dump.
func (g *ring) endStep(step int64) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if in := g.byStep[step]; in != nil && step > g.dumped {
		in.ended = true
		g.mark(in)
	}
}

// mark notes in the ring file what a step has that has ended: in the record of its first packet.
func (g *ring) mark(in *keptStep) {
	if !in.ended || g.file == nil {
		return
	}
	for _, it := range in.entries {
		if it.is != packetEntry {
			continue
		}
		if it.isCopied && it.err == nil {
			ringfile.PutMark(it.region.Buf, it.first, in.packets, len(in.entries)-in.packets)
		}
		return
	}
}

// erase takes a packet out of the ring file, before its memory is used for something else.
func (it *entry) erase() {
	if it.record > 0 {
		ringfile.Erase(it.region.Buf)
	}
}

// late reports whether the step of a tensor has given way already. It counts the tensor then.
func (g *ring) late(step int64) bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.dumping || !g.isLate(step) {
		return false
	}
	g.kept.GonePackets++
	return true
}

func (g *ring) isLate(step int64) bool { return step >= 0 && step <= g.newest && g.byStep[step] == nil }

// giveWay frees the oldest step for a tensor of another one. It returns false if no step can give way
// now, and then busy if one can soon: a tensor of it is being copied, or a dump is being written.
func (g *ring) giveWay(step int64) (gave, busy bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if len(g.steps) == 0 || len(g.steps) == 1 && (step < 0 || g.steps[0].step == step) {
		return false, g.dumping || g.counters.queuedPackets.Load() > 0
	}
	if g.steps[0].copying > 0 {
		return false, true
	}
	g.dropOldest()
	return true, false
}

// expire drops the steps beyond the limits, when a step has begun at a time. A step of which a tensor is
// being copied stays until the next step begins.
func (g *ring) expire(now int64) {
	for len(g.steps) > 1 && g.steps[0].copying == 0 {
		many := g.opts.RingSteps > 0 && len(g.steps) > g.opts.RingSteps
		age := float64(now-g.steps[0].entries[0].row.TimeNS) / 1e9
		if !many && (g.opts.RingSeconds == 0 || age <= g.opts.RingSeconds) {
			return
		}
		g.dropOldest()
	}
}

// dropOldest frees the oldest step. The ring has its size then, so memory that it has not used can go.
func (g *ring) dropOldest() {
	g.arena.GiveBack()
	gone := g.steps[0]
	g.steps[0] = nil // the rest of the list keeps its memory
	g.steps = g.steps[1:]
	delete(g.byStep, gone.step)
	g.newest = max(g.newest, gone.step)
	g.kept.GoneSteps++
	for _, it := range gone.entries {
		if it.is == packetEntry {
			g.kept.GonePackets++
			g.kept.Packets--
			g.kept.Bytes -= uint64(it.staged())
		} else {
			g.counters.queuedNotes.Add(-1)
		}
		g.recycle(it)
	}
}

// recycle frees the memory of an entry, and keeps the entry for reuse.
func (g *ring) recycle(it *entry) {
	it.erase()
	g.arena.Free(it.region)
	*it = entry{row: wire.Row{Shape: it.row.Shape[:0]}} // its memory is used again
	g.entries.Put(it)
}

// beginDump hands the entries to the order, behind one that begins the segment.
func (g *ring) beginDump(next *segment) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.dumping {
		return status.New(status.InvalidState, "a dump is being written already: end it first")
	}
	if err := g.order.Push(&entry{is: rollEntry, next: next}); err != nil {
		return err
	}
	g.dumping = true
	for _, it := range g.taken() {
		if it.kept = nil; g.pass(it) != nil { // the session has ended meanwhile
			g.giveUp(it)
		} else if it.isCopied {
			g.jobs.Push(it)
		}
	}
	return nil
}

// giveUp frees an entry that the ring no longer has, now or when its elements are copied.
func (g *ring) giveUp(it *entry) {
	it.kept = nil
	if it.givenUp = it.is == packetEntry && !it.isCopied; !it.givenUp {
		g.recycle(it)
	}
}

// endDump lets entries go into the ring again, and closes the segment behind what it has.
func (g *ring) endDump() error {
	g.mu.Lock()
	defer g.mu.Unlock()
	if !g.dumping {
		return status.New(status.InvalidState, "no dump is being written")
	}
	g.dumping = false
	return g.order.Push(&entry{is: rollEntry})
}

// taken empties the ring, and returns its entries in the order in which they came.
func (g *ring) taken() []*entry {
	n := 0
	for _, of := range g.steps {
		n += len(of.entries)
	}
	all := make([]*entry, 0, n)
	for _, of := range g.steps {
		all = append(all, of.entries...)
	}
	slices.SortFunc(all, func(a, b *entry) int { return int(int64(a.number - b.number)) })
	g.steps, g.byStep = nil, map[int64]*keptStep{}
	g.kept.Packets, g.kept.Bytes = 0, 0
	return all
}

// close gives up what is kept, and takes no more.
func (g *ring) close() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.closed = true
	for _, it := range g.taken() {
		g.giveUp(it)
	}
}

// removeFile removes the ring file, because the session has ended.
func (g *ring) removeFile() error {
	if g.file == nil {
		return nil
	}
	return g.file.Remove()
}

// stats returns the counters.
func (g *ring) stats() RingStats {
	g.mu.Lock()
	defer g.mu.Unlock()
	s := g.kept
	s.Steps, s.OldestStep, s.GoneStep = uint64(len(g.steps)), -1, g.newest
	if len(g.steps) > 0 {
		s.OldestStep, s.OldestTimeNS = g.steps[0].step, g.steps[0].entries[0].row.TimeNS
		for _, in := range g.steps { // those of several threads may have come in another order
			s.OldestStep = min(s.OldestStep, in.step)
		}
	}
	return s
}
