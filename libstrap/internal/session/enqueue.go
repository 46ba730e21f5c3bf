package session

import (
	"errors"
	"fmt"
	"math"
	"strings"
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
	// maxMessage bounds the bytes of a note's message.
	maxMessage = 4 << 10
	// appendPatience is how long a call that yields waits for the writer beyond the
	// workers: long enough for it to copy what they made, were it not for the disk.
	appendPatience = 10 * time.Millisecond
	// maxPiece is the most bytes a streamed tensor hands over at a time.
	maxPiece = 8 << 20
)

// ErrDropped is Enqueue's answer when DropOnFull left the tensor out, or a part of it.
var ErrDropped = errors.New("dropped: the staging memory has no room")

// errCopy is the error of a packet until its elements are copied.
var errCopy = status.New(status.Internal, "the copy of a tensor did not end")

// item is one entry of the order: a packet or a note.
type item struct {
	row    wire.Row
	shape  []int64 // backs row.Shape
	layer  *layer  // of a packet
	name   string
	region arena.Region
	kind   codec.Kind  // of the payload
	source int         // bytes to compress; see elements
	front  int         // bytes between the packet's name and them, for the codec
	out    []byte      // the finished packet, in the region
	err    error       // why there is none
	made   atomic.Bool // a worker is through with it
	came   time.Time   // to the backlog
	feed   *feed       // a streamed packet

	converted codec.Stats // of the packet, where it is float16 of float32
}

// ready reports whether the writer can take it: all but packets that a worker still
// has to make.
func (it *item) ready() bool {
	return it.feed != nil || it.row.Error != "" || it.made.Load()
}

// text is how many bytes of text are the item's own.
func (it *item) text() int {
	return len(it.row.Transform) + len(it.row.Parameters) + len(it.row.Error)
}

// feed carries a tensor larger than a region through two halves of one.
type feed struct {
	region arena.Region
	owners atomic.Int32 // enqueuer and writer; the last one frees the region
	size   int64        // source bytes of the packet
	full   chan []byte
	empty  chan []byte
	gaveUp chan struct{}
	error  measure // of the packet, set before the last piece is sent
}

func (s *Session) release(f *feed) {
	if f.owners.Add(-1) == 0 {
		s.arena.Free(f.region)
	}
}

// emission is the progress of one Enqueue: which packet of the tensor is next,
// and how much of it is handed over. It outlives the call after a Timeout, once something
// of the tensor is taken.
type emission struct {
	running sync.Mutex // held by the call that works on it
	layer   *layer
	elems   int64
	stored  wire.DType
	twin    bool  // now the float32 packets behind the float16 ones
	part    int64 // next or current packet
	fed     int64 // elements of it handed over
	feed    *feed
	begun   bool        // something is already in the queue
	stats   codec.Stats // of the tensor so far
	own     codec.Stats // of the current packet
	bits    int         // the most bits of mantissa that a part of the packet was rounded to
	tiny    bool        // a packet so far lost its values as float16; see measure
	about   Tensor      // what the index says of it, without the data
	place   uint64      // in the line, while no call works on it

	conversion *Conversion // of the caller, nil: none
	fromIntake bool        // which has counted it
}

// Cursors name what a Timeout leaves for the repeated call: odd ones an emission, even ones
// a place in the line, of a tensor of which nothing is taken.
func emissionCursor(id uint64) uint64 { return id<<1 | 1 }
func placeCursor(id uint64) uint64    { return id << 1 }

// Enqueue copies a tensor into the staging memory. It waits at most timeout for
// room (negative: without limit).
//
// A Timeout sets t.Cursor: call again with the same t to go on, or give it up with Abandon.
// A tensor of which nothing is taken keeps its place in the line for keptFor. With DropOnFull
// there is no Timeout.
func (s *Session) Enqueue(t *Tensor, timeout time.Duration) error {
	if err := s.refused(); err != nil {
		return err
	}
	c := call{limit: timeout, stalled: t.Cursor != 0}
	defer c.stop()
	defer s.line.Leave(&c.turn) // also where this call panics
	if t.Cursor&1 != 0 {
		e, err := s.takePending(t.Cursor)
		if err != nil {
			return err
		}
		defer e.running.Unlock()
		c.turn, e.place = s.line.Return(e.place), 0
		return s.proceed(e, t, &c)
	}
	var e emission
	if err := s.begin(&e, t); err != nil {
		return err
	}
	c.turn = s.line.Return(t.Cursor >> 1)
	t.Cursor = 0
	return s.proceed(&e, t, &c)
}

// begin validates a tensor and makes e its emission.
func (s *Session) begin(e *emission, t *Tensor) (err error) {
	if e.layer, err = s.layer(t.Layer); err != nil {
		return err
	}
	if _, err = s.request(t.Request); err != nil {
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
func (s *Session) proceed(e *emission, t *Tensor, c *call) error {
	err := s.settleBefore(e, c)
	if err == nil {
		err = s.emit(e, t, c)
	}
	if !errors.Is(err, status.Timeout) {
		if err != nil {
			s.giveUp(e)
		}
		s.forget(t)
		return err
	}
	place := s.line.Keep(&c.turn, c.need)
	if !e.begun {
		t.Cursor = placeCursor(place)
		return err
	}
	e.place = place
	if t.Cursor == 0 {
		if refused := s.remember(e, t); refused != nil {
			return refused
		}
	}
	return err
}

func (s *Session) emit(e *emission, t *Tensor, c *call) error {
	if !e.twin {
		if err := s.emitParts(e, t, c); err != nil {
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
		if !s.wantsTwin(e) {
			return nil
		}
		if len(e.layer.packetName)+len(wire.OverflowSuffix) > wire.MaxName {
			return s.note(e.layer, t, e.whyTwin()+
				": the packet name leaves no room for "+wire.OverflowSuffix, s.push)
		}
		e.twin, e.stored, e.part = true, wire.Float32, 0
	}
	return s.emitParts(e, t, c)
}

// wantsTwin reports whether float32 packets follow the float16 ones that were made, and counts why.
// Of what the host converted there is no float32.
func (s *Session) wantsTwin(e *emission) bool {
	switch {
	case e.stats.Overflow > 0:
		s.counters.overflowed.Add(1)
		return true
	case e.tiny:
		s.counters.underflowed.Add(1)
		return s.opts.bounded() && e.conversion == nil
	default:
		return false
	}
}

// whyTwin says what float16 did to the values.
func (e *emission) whyTwin() string {
	if e.stats.Overflow > 0 {
		return "float32 values beyond float16 are stored as infinities"
	}
	return "float32 values too small for float16 are stored with an error above the bound"
}

// emitParts hands over the packets of one stored form of the tensor.
func (s *Session) emitParts(e *emission, t *Tensor, c *call) error {
	perPart := s.opts.split / int64(e.stored.Size())
	parts := max((e.elems+perPart-1)/perPart, 1)
	for ; e.part < parts; e.part++ {
		start := e.part * perPart
		err := s.emitPart(e, t, c, start, min(e.elems-start, perPart), parts)
		if errors.Is(err, ErrDropped) {
			return s.drop(e, t, e.elems-start, err)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// emitPart hands over the elements [start, start+count) as one packet, on from
// where it stopped.
func (s *Session) emitPart(e *emission, t *Tensor, c *call, start, count, parts int64) error {
	name := e.layer.packetName
	if e.twin {
		name += wire.OverflowSuffix
	}
	if e.feed != nil {
		return s.feedRest(e, t, c, start, count)
	}
	size := count * int64(e.stored.Size())
	kind := s.opts.kindOf(e.stored, count)
	whole := int64(wire.HeaderSize+len(name)+rowCost+t.text()) + size + int64(codec.Headroom(kind, int(size)))
	streamed := whole > int64(s.arena.MaxRegion()) && !s.opts.DropOnFull // which waits for no piece
	half := min(s.arena.MaxRegion()/4, maxPiece) &^ 63
	room := int(whole)
	if streamed {
		room = 2*half + t.text()
	} else if s.place(e, t, kind, name, start, count, parts) {
		return nil
	}
	if whole > s.arena.Limit() && s.opts.DropOnFull {
		return fmt.Errorf("%w for a packet of %d bytes: it has %d", ErrDropped, whole, s.arena.Limit())
	}
	region, err := s.takeRoom(c, room)
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
	if err := s.push(it); err != nil {
		s.counters.queuedPackets.Add(^uint64(0))
		s.arena.Free(region)
		return err
	}
	if !e.fromIntake { // whose caller leads until all of them are in the order
		s.line.Leave(&c.turn)
	}
	e.begun, e.own, e.bits = true, codec.Stats{}, 0
	if streamed {
		return s.feedRest(e, t, c, start, count)
	}
	if f := s.copyPacket(e, t, it, start, count); !e.fromIntake { // or others would wait too
		s.yield(f, c)
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
	it.setError(s.measure(e, t, count))
	it.keepWhole()
	it.err = nil
	return full{}
}

// yield makes packets with the team, or leaves the CPUs to the workers until they are
// through with what waits for them, and to the writer to take it. The disk is not waited for.
func (s *Session) yield(f full, c *call) {
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
	case <-c.Done(): // the packet is in; that the workers are late is no matter
		return
	}
	soon := call{limit: appendPatience}
	defer soon.stop()
	_ = s.await(appended, s.order.Added(), &soon) // whether or not they are
}

// copy puts elements of the current packet into dst. sum may get their checksum; nil: it
// is not asked for.
func (s *Session) copy(e *emission, t *Tensor, dst []byte, start, count int64, sum *codec.Sum) {
	how := s.opts.copying()
	how.by.Sum = sum
	how.bound = e.conversion.left(how.bound)
	var of codec.Stats
	bits := t.copyElements(dst, e.stored, start, count, how, &of)
	e.stats.Add(&of)
	e.own.Add(&of)
	e.bits = max(e.bits, bits)
}

// measure is the error of a packet.
type measure struct {
	converted codec.Stats // of its values
	bits      int         // of mantissa that they were rounded to, 0: they were not
}

// measure is that of the current packet, which has count elements. Rounding keeps the bound, so it
// is float16 alone that breaks it: the values are too small.
func (s *Session) measure(e *emission, t *Tensor, count int64) measure {
	made := &e.own
	if e.conversion != nil {
		made = &e.conversion.Loss
	}
	if t.source() != e.stored && !made.Within(s.opts.mostLost()) {
		e.tiny = true
	}
	return measure{e.lost(e.own, count), e.bits}
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
		gaveUp: make(chan struct{}),
	}
	f.owners.Store(2)
	f.empty <- region.Buf[:half:half]
	f.empty <- region.Buf[half : 2*half : 2*half]
	return f
}

func (s *Session) feedRest(e *emission, t *Tensor, c *call, start, count int64) error {
	f := e.feed
	size := int64(e.stored.Size())
	for e.fed < count {
		piece, err := s.emptyPiece(f, c)
		if err != nil {
			return err
		}
		n := min(int64(cap(piece))/size, count-e.fed)
		piece = piece[:n*size]
		s.copy(e, t, piece, start+e.fed, n, nil)
		if e.fed += n; e.fed == count {
			f.error = s.measure(e, t, count)
		}
		f.full <- piece
	}
	e.feed = nil
	s.release(f)
	return nil
}

// emptyPiece waits until the writer has given back a half of the region.
func (s *Session) emptyPiece(f *feed, c *call) ([]byte, error) {
	select {
	case piece := <-f.empty:
		return piece, nil
	default:
	}
	defer s.stalls(c, time.Now())()
	defer s.jobs.Hurry()()
	select {
	case piece := <-f.empty:
		return piece, nil
	case <-s.failed:
		return nil, s.failure
	case <-s.closing:
		return nil, s.refused()
	case <-c.Done():
		return nil, s.timedOut()
	}
}

// newItem returns an item with what its row says of the tensor.
func (s *Session) newItem(l *layer, t *Tensor) *item {
	it := s.items.Get().(*item)
	request, _ := s.request(t.Request) // known since the tensor began
	it.shape = append(it.shape[:0], t.Shape...)
	it.row = wire.Row{
		Offset: -1, Parts: 1,
		Model: l.model, Layer: l.name, Path: l.path,
		Call: t.Call, Step: t.Step, Token: t.Token, Request: request, Rank: s.opts.Rank, Thread: t.Thread,
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

// drop leaves out what is left of a tensor, and counts it.
func (s *Session) drop(e *emission, t *Tensor, left int64, why error) error {
	what := ""
	switch {
	case e.twin:
		what = e.whyTwin() + ": their packet was "
	case e.part > 0:
		what = fmt.Sprintf("part %d and those behind it were ", e.part)
	}
	s.counters.dropped.Add(1)
	s.counters.droppedBytes.Add(uint64(left) * uint64(t.source().Size()))
	if err := s.pushNote(e.layer, t, what+why.Error(), s.push); err != nil {
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
	it.row.Error = shorten(message)
	s.counters.queuedNotes.Add(1)
	err := push(it)
	if err != nil {
		s.counters.queuedNotes.Add(-1)
	}
	return err
}

// shorten cuts a note's message to maxMessage bytes.
func shorten(message string) string {
	if len(message) <= maxMessage {
		return message
	}
	const mark = "..."
	return strings.ToValidUTF8(message[:maxMessage-len(mark)], "") + mark
}

const abandonedMessage = "abandoned before all of it was captured"

// Abandon gives up a tensor that timed out: what is under way is taken back and noted, and
// its place in the line is free. The cursor 0 names nothing.
func (s *Session) Abandon(cursor uint64) error {
	if cursor&1 == 0 {
		s.line.GiveUp(cursor >> 1)
		return nil
	}
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
	s.line.GiveUp(e.place)
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
		fed: e.fed, feed: e.feed, begun: true, stats: e.stats, own: e.own, bits: e.bits, tiny: e.tiny,
		about: *t, conversion: e.conversion, place: e.place,
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
	s.lastPending++
	t.Cursor = emissionCursor(s.lastPending)
	s.pending[t.Cursor] = kept
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
