package session

import (
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// rowCost is what a queued packet costs beside its region: its item and its
	// row of the index. It is counted in the region so that a flood of tiny
	// packets is bounded too.
	rowCost = 768
	// maxNotes bounds the notes that wait for the writer, which no region bounds;
	// tensors beyond are counted in the statistics only.
	maxNotes = 4096
	// appendPatience is how long a call that yields waits for the writer beyond the
	// workers: long enough for it to copy what they made, were it not for the disk.
	appendPatience = 10 * time.Millisecond
	// maxPiece is the most bytes a streamed tensor hands over at a time.
	maxPiece = 8 << 20
)

// ErrDropped is Enqueue's answer when DropOnFull left the tensor out.
var ErrDropped = errors.New("dropped: the staging memory is full")

// errCopy is the error of a packet until its elements are copied.
var errCopy = status.New(status.Internal, "the copy of a tensor did not end")

// item is one entry of the order queue: a packet, a note or a barrier.
type item struct {
	row      wire.Row
	shape    []int64 // backs row.Shape
	layer    *layer  // of a packet
	name     string
	region   arena.Region
	kind     codec.Kind  // of the payload
	source   int         // bytes to compress; see elements
	front    int         // bytes between the packet's name and them, for the codec
	out      []byte      // the finished packet, in the region
	err      error       // why there is none
	made     atomic.Bool // a worker is through with it
	hastened bool        // with less than all its effort
	came     time.Time   // to the backlog
	feed     *feed       // a streamed packet
	barrier  *barrier

	converted codec.Stats // of the packet, where it is float16 of float32
}

// ready reports whether the writer can take it: all but packets that a worker still
// has to make.
func (it *item) ready() bool {
	return it.barrier != nil || it.feed != nil || it.row.Error != "" || it.made.Load()
}

// feed carries a tensor larger than a region through two halves of one.
type feed struct {
	region  arena.Region
	owners  atomic.Int32 // enqueuer and writer; the last one frees the region
	size    int64        // source bytes of the packet
	full    chan []byte
	empty   chan []byte
	gaveUp  chan struct{}
	stopped chan struct{} // the writer takes no more
	error   measure       // of the packet, set before the last piece is sent
}

func (s *Session) release(f *feed) {
	if f.owners.Add(-1) == 0 {
		s.arena.Free(f.region)
	}
}

// emission is the progress of one Enqueue: which packet of the tensor is next,
// and how much of it is handed over. It outlives the call after a Timeout.
type emission struct {
	running sync.Mutex // held by the call that works on it
	layer   *layer
	elems   int64
	stored  wire.DType
	twin    bool  // now the float32 packets behind the float16 ones
	part    int64 // next or current packet
	fed     int64 // elements of it handed over
	feed    *feed
	begun   bool // something is already in the queue
	stats   codec.Stats
	before  codec.Stats // stats when the packet began
	bits    int         // the most bits of mantissa that a part of the packet was rounded to
	stalled bool
	about   Tensor // what the index says of it, without the data

	conversion *Conversion // of the caller, nil: none
	fromIntake bool        // which has counted it
	quiet      bool        // waits are not counted: they are no enqueue's
	room       int         // what the current packet needs of the arena
}

// Enqueue copies a tensor into the staging memory. It waits at most timeout for
// room (negative: without limit).
//
// A Timeout after a part of the tensor was taken sets t.Cursor: call again with
// the same t to go on, or give it up with Abandon.
func (s *Session) Enqueue(t *Tensor, timeout time.Duration) error {
	if err := s.refused(); err != nil {
		return err
	}
	d := newDeadline(timeout)
	defer d.Stop()
	if t.Cursor != 0 {
		e, err := s.takePending(t.Cursor)
		if err != nil {
			return err
		}
		defer e.running.Unlock()
		return s.proceed(e, t, d)
	}
	var e emission
	if err := s.begin(&e, t); err != nil {
		return err
	}
	if err := s.settle(&e, d); err != nil {
		return err
	}
	return s.proceed(&e, t, d)
}

// begin validates a tensor and makes e its emission.
func (s *Session) begin(e *emission, t *Tensor) (err error) {
	if e.layer, err = s.layer(t.Layer); err != nil {
		return err
	}
	if e.elems, err = t.elements(); err != nil {
		return err
	}
	if t.Strides != nil && contiguous(t.Shape, t.Strides) {
		t.Strides = nil
	}
	if t.Conversion != nil {
		if err := s.checkConversion(t, e.elems); err != nil {
			return err
		}
	}
	e.stored, e.conversion = t.DType, t.Conversion
	if t.DType == wire.Float32 && !s.opts.KeepFloat32 {
		e.stored = wire.Float16
	}
	return nil
}

// proceed hands over what is left of the tensor.
func (s *Session) proceed(e *emission, t *Tensor, d *deadline) error {
	err := s.emit(e, t, d)
	switch {
	case err == nil:
		s.forget(t)
	case errors.Is(err, status.Timeout):
		if e.begun && t.Cursor == 0 {
			if err := s.remember(e, t); err != nil {
				return err
			}
		}
	default:
		s.giveUp(e)
		s.forget(t)
	}
	return err
}

func (s *Session) emit(e *emission, t *Tensor, d *deadline) error {
	if !e.twin {
		if err := s.emitParts(e, t, d); err != nil {
			return err
		}
		if !e.fromIntake {
			s.counters.tensors.Add(1)
			s.counters.rawBytes.Add(uint64(e.elems) * uint64(t.source().Size()))
		}
		if e.conversion != nil || t.measured(e.stored, s.opts.copying().bound) {
			lost := e.lost(e.stats, e.elems)
			s.convert.Lock()
			s.convert.Add(&lost)
			s.convert.Unlock()
		}
		if e.stats.Overflow == 0 {
			return nil
		}
		s.counters.overflowed.Add(1)
		if len(e.layer.packetName)+len(wire.OverflowSuffix) > wire.MaxName {
			return s.note(e.layer, t, "float32 values beyond float16 are stored as infinities: "+
				"the packet name leaves no room for "+wire.OverflowSuffix, s.push)
		}
		e.twin, e.stored, e.part = true, wire.Float32, 0
	}
	return s.emitParts(e, t, d)
}

// emitParts hands over the packets of one stored form of the tensor.
func (s *Session) emitParts(e *emission, t *Tensor, d *deadline) error {
	perPart := s.opts.split / int64(e.stored.Size())
	parts := max((e.elems+perPart-1)/perPart, 1)
	for ; e.part < parts; e.part++ {
		start := e.part * perPart
		if err := s.emitPart(e, t, d, start, min(e.elems-start, perPart), parts); err != nil {
			return err
		}
	}
	return nil
}

// emitPart hands over the elements [start, start+count) as one packet, on from
// where it stopped.
func (s *Session) emitPart(e *emission, t *Tensor, d *deadline, start, count, parts int64) error {
	name := e.layer.packetName
	if e.twin {
		name += wire.OverflowSuffix
	}
	if e.feed != nil {
		return s.feedRest(e, t, d, start, count)
	}
	size := count * int64(e.stored.Size())
	kind := s.opts.kindOf(e.stored, count)
	whole := int64(wire.HeaderSize+len(name)+rowCost) + size + int64(codec.Headroom(kind, int(size)))
	streamed := whole > int64(s.arena.MaxRegion())
	half := min(s.arena.MaxRegion()/4, maxPiece) &^ 63
	room := int(whole)
	if streamed {
		room = 2 * half
	} else if s.place(e, t, kind, name, start, count, parts) {
		return nil
	}
	region, err := s.reserve(e, t, d, room)
	if err != nil {
		return err
	}
	it := s.newPacket(e, t, kind, name, parts)
	it.region, it.source, it.front = region, int(size), codec.Front(kind, int(size))
	if streamed {
		e.feed, e.fed = newFeed(region, half, size), 0
		it.feed = e.feed
	}
	s.counters.queuedPackets.Add(1)
	err = s.push(it)
	<-s.turn
	if err != nil {
		s.counters.queuedPackets.Add(^uint64(0))
		s.arena.Free(region)
		return err
	}
	e.begun, e.before, e.bits = true, e.stats, 0
	if streamed {
		return s.feedRest(e, t, d, start, count)
	}
	if f := s.copyPacket(e, t, it, start, count); !e.fromIntake { // or others would wait too
		s.yield(f, d)
	}
	return nil
}

// copyPacket puts elements into a packet's region and hands it to the workers; see
// backlog.Push.
func (s *Session) copyPacket(e *emission, t *Tensor, it *item, start, count int64) (f full) {
	// Should the copy panic, the writer must not wait for this item for ever.
	it.err = errCopy
	defer func() { f = s.jobs.Push(it) }()
	s.copy(e, t, it.elements(), start, count, nil)
	it.setError(e.measure(count))
	it.keepWhole()
	it.err = nil
	return full{}
}

// yield makes packets with the team, or leaves the CPUs to the workers until they are
// through with what waits for them, and to the writer to take it. The disk is not waited for.
func (s *Session) yield(f full, d *deadline) {
	if !f.is || s.opts.DropOnFull {
		return
	}
	defer s.counters.yielded.Start()()
	if s.opts.helped() {
		s.makeWaiting(s.opts.Team)
		return
	}
	select {
	case <-f.drained:
	case <-s.failed:
		return
	case <-s.closing:
		return
	case <-d.Done(): // the packet is in; that the workers are late is no matter
		return
	}
	b := s.pushBarrier(toAppend)
	if b == nil {
		return
	}
	patience := time.NewTimer(appendPatience)
	defer patience.Stop()
	select {
	case <-b.done:
	case <-patience.C:
	case <-d.Done():
	}
}

// copy puts elements of the current packet into dst. sum may get their checksum; nil: it
// is not asked for.
func (s *Session) copy(e *emission, t *Tensor, dst []byte, start, count int64, sum *codec.Sum) {
	how := s.opts.copying()
	how.by.Sum = sum
	how.bound = e.conversion.left(how.bound)
	bits := t.copyElements(dst, e.stored, start, count, how, &e.stats)
	e.bits = max(e.bits, bits)
}

// measure is the error of a packet.
type measure struct {
	converted codec.Stats // of its values; MaxError is that of the tensor so far
	bits      int         // of mantissa that they were rounded to, 0: they were not
}

// measure is that of the current packet, which has count elements.
func (e *emission) measure(count int64) measure {
	own := e.stats
	own.Count -= e.before.Count
	own.SquareError -= e.before.SquareError
	own.SquareSum -= e.before.SquareSum
	return measure{e.lost(own, count), e.bits}
}

// lost joins what the library measured of count elements with the caller's conversion.
func (e *emission) lost(own codec.Stats, count int64) codec.Stats {
	if e.conversion == nil || count == 0 {
		return own
	}
	return e.conversion.joined(float64(count)/float64(e.elems), &own)
}

// setError tells the row of it.
func (it *item) setError(m measure) {
	it.converted = m.converted
	n := float64(m.converted.Count) // 0 / 0 where nothing was measured
	it.row.MSE, it.row.MeanSquare = m.converted.SquareError/n, m.converted.SquareSum/n
	it.row.Mantissa = int8(m.bits)
}

func newFeed(region arena.Region, half int, size int64) *feed {
	f := &feed{
		region: region, size: size,
		full: make(chan []byte, 2), empty: make(chan []byte, 2),
		gaveUp: make(chan struct{}), stopped: make(chan struct{}),
	}
	f.owners.Store(2)
	f.empty <- region.Buf[:half:half]
	f.empty <- region.Buf[half : 2*half : 2*half]
	return f
}

func (s *Session) feedRest(e *emission, t *Tensor, d *deadline, start, count int64) error {
	f := e.feed
	size := int64(e.stored.Size())
	for e.fed < count {
		piece, err := s.emptyPiece(e, d)
		if err != nil {
			return err
		}
		n := min(int64(cap(piece))/size, count-e.fed)
		piece = piece[:n*size]
		s.copy(e, t, piece, start+e.fed, n, nil)
		if e.fed += n; e.fed == count {
			f.error = e.measure(count)
		}
		f.full <- piece
	}
	e.feed = nil
	s.release(f)
	return nil
}

// emptyPiece waits until the writer has given back a half of the region.
func (s *Session) emptyPiece(e *emission, d *deadline) ([]byte, error) {
	f := e.feed
	select {
	case piece := <-f.empty:
		return piece, nil
	default:
	}
	defer s.stalled(e, time.Now())()
	defer s.jobs.Hurry()()
	select {
	case piece := <-f.empty:
		return piece, nil
	case <-f.stopped:
		return nil, s.refused()
	case <-s.closing:
		return nil, s.refused()
	case <-d.Done():
		return nil, s.timedOut()
	}
}

func (s *Session) timedOut() error {
	return status.New(status.Timeout,
		"%q: the staging memory of %d bytes is full and nothing was written in time",
		s.path, s.arena.Limit())
}

// stalled counts a wait for room, from its beginning until end is called.
func (s *Session) stalled(e *emission, since time.Time) (end func()) {
	if e.quiet {
		return func() {}
	}
	if !e.stalled {
		e.stalled = true
		s.counters.stalls.Add(1)
	}
	return s.counters.stalled.StartAt(since)
}

// takeTurn waits for the right to reserve memory.
func (s *Session) takeTurn(d *deadline) error {
	select {
	case s.turn <- struct{}{}: // also when no time is left
		return nil
	default:
	}
	select {
	case s.turn <- struct{}{}:
	case <-s.failed:
		return s.failure
	case <-s.closing:
		return s.refused()
	case <-d.Done():
		return s.timedOut()
	}
	return nil
}

// reserve gets a region and the turn, which the caller gives back once its item
// is in the order queue: regions are handed out in the order of the file, so that
// a large request is not overtaken for ever. ErrDropped: there was no room and nobody was to wait.
func (s *Session) reserve(e *emission, t *Tensor, d *deadline, room int) (region arena.Region, err error) {
	began := time.Now()
	e.room = room
	if err := s.takeTurn(d); err != nil {
		s.stalled(e, began)()
		return region, err
	}
	defer func() {
		if err != nil {
			<-s.turn
		}
	}()
	region, ok, err := s.arena.TryAlloc(room)
	if ok || err != nil {
		return region, err
	}
	s.jobs.Open()
	if s.opts.DropOnFull && !e.begun {
		return region, s.drop(e, t)
	}
	defer s.stalled(e, began)()
	defer s.jobs.Hurry()()
	s.order.Wake() // for what helpers left because the stream had no room
	for {
		select {
		case <-s.arena.Freed():
		case <-s.failed:
			return region, s.failure
		case <-s.closing:
			return region, s.refused()
		case <-d.Done():
			return region, s.timedOut()
		}
		if region, ok, err = s.arena.TryAlloc(room); ok || err != nil {
			return region, err
		}
	}
}

// newItem returns an item with what its row says of the tensor.
func (s *Session) newItem(l *layer, t *Tensor) *item {
	it := s.items.Get().(*item)
	it.shape = append(it.shape[:0], t.Shape...)
	it.row = wire.Row{
		Offset: -1, Parts: 1,
		Model: l.model, Layer: l.name, Path: l.path,
		Call: t.Call, Step: t.Step, Token: t.Token, Rank: s.opts.Rank, Thread: t.Thread,
		Shape: it.shape, Source: t.source(), Codec: codec.None.String(),
		Transform: t.Transform, Parameters: t.Parameters,
		TimeNS: t.TimeNS, MSE: math.NaN(), MeanSquare: math.NaN(),
	}
	if !t.DType.Valid() {
		it.row.Shape = nil // unknown, which an empty shape is not
	}
	return it
}

// newPacket returns the item of the current packet of a tensor.
func (s *Session) newPacket(e *emission, t *Tensor, kind codec.Kind, name string, parts int64) *item {
	it := s.newItem(e.layer, t)
	it.layer, it.name, it.kind = e.layer, name, kind
	it.row.Stored, it.row.Codec = e.stored, kind.String()
	it.row.Part, it.row.Parts = uint32(e.part), uint32(parts)
	if e.twin {
		it.row.Transform = wire.TransformOverflow
	}
	return it
}

// push numbers an item and gives it its place in the order.
func (s *Session) push(it *item) error {
	s.orderMu.Lock()
	defer s.orderMu.Unlock()
	if s.ended {
		return s.refused()
	}
	if it.barrier == nil {
		it.row.Sequence = s.sequence
		s.sequence++
	}
	s.pushes++
	if b := it.barrier; b != nil && b.kind != toAppend {
		s.barrier, b.place = b, s.pushes
	}
	s.order.Push(it)
	return nil
}

// drop counts a tensor that is left out.
func (s *Session) drop(e *emission, t *Tensor) error {
	s.counters.dropped.Add(1)
	s.counters.droppedBytes.Add(uint64(e.elems) * uint64(t.source().Size()))
	if err := s.pushNote(e.layer, t, ErrDropped.Error(), s.push); err != nil {
		return err
	}
	return ErrDropped
}

// Note puts into the index that a tensor could not be captured, and why.
func (s *Session) Note(t *Tensor, message string) error {
	if err := s.refused(); err != nil {
		return err
	}
	l, err := s.layer(t.Layer)
	if err != nil {
		return err
	}
	return s.note(l, t, message, s.pushSettled)
}

func (s *Session) note(l *layer, t *Tensor, message string, push func(*item) error) error {
	if err := s.pushNote(l, t, message, push); err != nil {
		return err
	}
	s.counters.noted.Add(1)
	return nil
}

func (s *Session) pushNote(l *layer, t *Tensor, message string, push func(*item) error) error {
	if s.counters.queuedNotes.Load() >= maxNotes {
		return nil
	}
	it := s.newItem(l, t)
	it.row.Error = message
	s.counters.queuedNotes.Add(1)
	err := push(it)
	if err != nil {
		s.counters.queuedNotes.Add(-1)
	}
	return err
}

const abandonedMessage = "abandoned before all of it was captured"

// Abandon gives up a half-enqueued tensor.
func (s *Session) Abandon(cursor uint64) error {
	e, err := s.takePending(cursor)
	if err != nil {
		return err
	}
	defer e.running.Unlock()
	s.forget(&Tensor{Cursor: cursor})
	return s.abandon(e)
}

// abandon gives e up and notes it.
func (s *Session) abandon(e *emission) error {
	if e.feed != nil {
		s.giveUp(e) // the writer turns the packet into the note
		return nil
	}
	return s.note(e.layer, &e.about, abandonedMessage, s.pushSettled)
}

// giveUp tells the writer that no further piece comes.
func (s *Session) giveUp(e *emission) {
	if f := e.feed; f != nil {
		e.feed = nil
		close(f.gaveUp)
		s.release(f)
	}
}

// abandonPending gives up the half-enqueued tensors that no call works on, and
// lets none be remembered from now on; a call that runs sees the session closing.
func (s *Session) abandonPending() {
	s.pendingMu.Lock()
	defer s.pendingMu.Unlock()
	for cursor, e := range s.pending {
		if e.running.TryLock() {
			if err := s.abandon(e); err != nil {
				s.giveUp(e) // the session has ended: there is nowhere to note it
			}
			delete(s.pending, cursor)
			e.running.Unlock()
		}
	}
	s.remembers = false
}

// remember keeps the progress of a call that timed out, under a new cursor.
func (s *Session) remember(e *emission, t *Tensor) error {
	kept := &emission{
		layer: e.layer, elems: e.elems, stored: e.stored, twin: e.twin, part: e.part,
		fed: e.fed, feed: e.feed, begun: true, stats: e.stats, before: e.before, bits: e.bits,
		stalled: e.stalled, about: *t, conversion: e.conversion,
	}
	kept.about.Data = nil
	kept.about.Shape = append([]int64(nil), t.Shape...)
	kept.about.Strides = nil
	s.pendingMu.Lock()
	defer s.pendingMu.Unlock()
	if !s.remembers {
		s.giveUp(e)
		return s.refused()
	}
	s.lastCursor++
	s.pending[s.lastCursor] = kept
	t.Cursor = s.lastCursor
	return nil
}

func (s *Session) forget(t *Tensor) {
	if t.Cursor == 0 {
		return
	}
	s.pendingMu.Lock()
	delete(s.pending, t.Cursor)
	s.pendingMu.Unlock()
	t.Cursor = 0
}

// takePending finds the emission behind a cursor and locks it.
func (s *Session) takePending(cursor uint64) (*emission, error) {
	s.pendingMu.Lock()
	defer s.pendingMu.Unlock()
	e, ok := s.pending[cursor]
	if !ok {
		return nil, status.New(status.InvalidArgument, "cursor = %d names no half-enqueued tensor", cursor)
	}
	if !e.running.TryLock() {
		return nil, status.New(status.InvalidState, "cursor = %d is in use by another thread", cursor)
	}
	return e, nil
}
