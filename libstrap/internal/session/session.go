// Package session is a capture: tensors go in, a stream file and its index come
// out.
//
//	Intake           has small tensors, which the next call settles: they go the same way
//	Enqueue          copies a tensor into the arena, in the caller's thread
//	  -> jobs  ->    workers, or threads of the caller, compress each packet in place
//	  -> order ->    they or the writer append the packets in the order of Enqueue
//
// What takes no time to make, while nothing waits, is made in the stream's blocks (place.go).
//
// The arena bounds all of it: a packet holds its region until it is written, and
// Enqueue waits for room. Nothing downstream ever needs arena memory to go on,
// so the wait always ends while the disk answers.
package session

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"
	"unicode/utf8"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/stopwatch"
	"github.com/libstrap/strap/libstrap/internal/stream"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// Session is an open capture. All methods are safe for concurrent use.
type Session struct {
	opts   Options
	path   string
	arena  *arena.Arena
	stream *stream.Writer // the writer's, once it runs
	index  *index.Writer  // likewise
	frames *encoders      // likewise, for tensors larger than a region

	layersMu sync.RWMutex
	layers   []*layer
	layerIDs map[layerKey]uint32

	// turn is held while a region is reserved. A channel, to wait for it with a
	// time limit.
	turn chan struct{}

	settling settling

	jobs   *backlog
	drains atomic.Int32 // calls that wait until all is written
	opened time.Time
	writer *writer

	sparesMu sync.Mutex
	spares   []*encoders // of helpers

	items sync.Pool

	orderMu  sync.Mutex // what is pushed to order, and in which order
	order    *order
	sequence uint64   // of the next row
	pushes   uint64   // to order
	barrier  *barrier // the last one pushed
	ended    bool     // nothing is pushed any more

	pendingMu  sync.Mutex
	pending    map[uint64]*emission
	lastCursor uint64
	remembers  bool // until the session closes

	closing   chan struct{} // closed when the session accepts no more
	closeOnce sync.Once
	discarded chan struct{} // closed when what is queued is to be given up
	discard1  sync.Once
	failed    chan struct{} // closed once failure is set
	failure   error
	failOnce  sync.Once
	finished  chan struct{} // closed when the files are closed
	finishErr error
	workers   sync.WaitGroup

	counters counters
	convert  struct {
		sync.Mutex
		codec.Stats
	}
}

type counters struct {
	packets, storedBytes                     atomic.Uint64
	tensors, rawBytes                        atomic.Uint64 // but for those of the intake
	dropped, droppedBytes, noted, overflowed atomic.Uint64
	stalls, queuedPackets, fileBytes, lost   atomic.Uint64
	repeated, hastened                       atomic.Uint64
	stalled, yielded                         stopwatch.Stopwatch
	writerThread                             atomic.Int32
	queuedNotes                              atomic.Int64
}

type layer struct {
	model, name, path string
	packetName        string
	raw               atomic.Int32 // how many packets from the last one that was tried are raw
}

type layerKey struct{ model, name, path string }

// Open starts a capture to path, with its index at path + ".index".
func Open(path string, o Options) (*Session, error) {
	if err := o.validate(path); err != nil {
		return nil, err
	}
	encoders := make([]*encoders, o.Workers+1)
	for i := range encoders {
		var err error
		if encoders[i], err = newEncoders(&o); err != nil {
			return nil, err
		}
	}
	mem, err := arena.New(memoryLimit(o.MaxMemory))
	if err != nil {
		return nil, err
	}
	mem.Touch(o.BurstBytes)
	s := &Session{
		opts:      o,
		path:      path,
		opened:    time.Now(),
		arena:     mem,
		frames:    encoders[o.Workers],
		layerIDs:  map[layerKey]uint32{},
		turn:      make(chan struct{}, 1),
		jobs:      newBacklog(o.Yield, o.helped(), min(o.backlogBytes(), mem.Limit()/4)),
		order:     newOrder(),
		pending:   map[uint64]*emission{},
		remembers: true,
		closing:   make(chan struct{}),
		discarded: make(chan struct{}),
		failed:    make(chan struct{}),
		finished:  make(chan struct{}),
	}
	// Nobody waits for room before the workers have had their turn.
	if burst := min(o.BurstBytes, mem.Limit()*3/4); burst > s.jobs.high {
		s.jobs.high, s.jobs.longest = burst, math.MaxInt64
	}
	s.jobs.more = func() bool { return s.opts.Intake.Waiting() > 0 }
	s.items.New = func() any { return &item{} }
	if o.Resume {
		err = s.resume()
	} else {
		err = s.create()
	}
	if err != nil {
		mem.Close()
		return nil, err
	}
	s.counters.fileBytes.Store(uint64(s.stream.Offset()))
	// A thread of the host that calls in must find a free P although workers,
	// writer and disk hold one each: they run at low priority, and Go does not
	// know that. As many of its threads help as there are workers.
	if need := 2*o.Workers + 3; runtime.GOMAXPROCS(0) < need {
		runtime.GOMAXPROCS(need)
	}
	s.workers.Add(o.Workers)
	for _, e := range encoders[:o.Workers] {
		go s.work(e)
	}
	s.writer = &writer{Session: s}
	go s.writer.write()
	return s, nil
}

func (s *Session) create() (err error) {
	if s.stream, err = stream.Create(s.path, s.streamOptions()); err != nil {
		return err
	}
	if s.index, err = index.Create(index.PathOf(s.path), newCaptureID()); err != nil {
		return errors.Join(err, s.stream.Close())
	}
	return nil
}

// streamOptions are those of a file that is written from memory in proportion, by a
// thread which lets the model's go first where writing takes its time on a CPU. Where it does
// not, the disk would stand still until that thread had its turn.
func (s *Session) streamOptions() stream.Options {
	return stream.Options{Memory: s.arena.Limit() / 4, Thread: func(direct bool) {
		if !direct {
			lowerPriority()
		}
		s.counters.writerThread.Store(int32(threadID()))
	}}
}

func newCaptureID() string {
	var id [16]byte
	rand.Read(id[:]) // never fails, crypto/rand
	return hex.EncodeToString(id[:])
}

// resume opens stream and index to append to them. An index that is missing or
// not this stream's is begun anew: what the stream holds is listed by scanning.
func (s *Session) resume() (err error) {
	if s.stream, _, err = stream.Resume(s.path, s.opts.Cut, s.streamOptions()); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.stream.Close())
		}
	}()
	var kept index.Kept
	s.index, kept, err = index.Resume(index.PathOf(s.path), s.stream.Offset())
	switch {
	case errors.Is(err, status.Corrupt):
		if err = setAside(index.PathOf(s.path)); err != nil {
			return err
		}
		fallthrough
	case errors.Is(err, status.NotFound):
		if s.index, err = index.Create(index.PathOf(s.path), newCaptureID()); err != nil {
			return err
		}
	case err != nil:
		return err
	}
	s.sequence = kept.NextSequence
	err = s.stream.Packets(kept.End, func(p scan.Packet) error {
		row := wire.Row{
			Sequence: s.sequence, Offset: p.Offset, Length: uint64(p.End() - p.Offset), Parts: 1,
			Layer: p.Name, Codec: codec.Detect(p.Head()).String(), Step: -1, Token: -1,
			MSE: math.NaN(), MeanSquare: math.NaN(),
		}
		s.sequence++
		return s.index.Append(&row)
	})
	if err != nil {
		return errors.Join(err, s.index.Close())
	}
	return nil
}

func setAside(path string) error {
	for n := 1; ; n++ {
		to := fmt.Sprintf("%s.bad-%d", path, n)
		if _, err := os.Lstat(to); errors.Is(err, os.ErrNotExist) {
			if err := os.Rename(path, to); err != nil {
				return status.FromOS(err, "cannot set the unreadable index %q aside", path)
			}
			return nil
		}
	}
}

// Layer registers a source of tensors and returns its id; the same three names
// give the same id.
func (s *Session) Layer(model, name, path string) (uint32, error) {
	for _, v := range []struct{ what, text string }{{"model", model}, {"name", name}, {"path", path}} {
		if !utf8.ValidString(v.text) {
			return 0, status.New(status.InvalidArgument, "%s %q is not UTF-8", v.what, v.text)
		}
	}
	if n := len(name) + len(path); n > wire.MaxName {
		return 0, status.New(status.InvalidArgument,
			"packet name of %d bytes (%.40q...): at most %d", n, name+path, wire.MaxName)
	}
	key := layerKey{model, name, path}
	s.layersMu.Lock()
	defer s.layersMu.Unlock()
	id, known := s.layerIDs[key]
	if !known {
		id = uint32(len(s.layers))
		s.layers = append(s.layers, &layer{model: model, name: name, path: path, packetName: name + path})
		s.layerIDs[key] = id
		s.opts.Intake.Layers(len(s.layers))
	}
	return id, nil
}

func (s *Session) layer(id uint32) (*layer, error) {
	s.layersMu.RLock()
	defer s.layersMu.RUnlock()
	if int(id) >= len(s.layers) {
		return nil, status.New(status.InvalidArgument,
			"layer = %d was not registered; %d are", id, len(s.layers))
	}
	return s.layers[id], nil
}

// fail stops the writing for good; the first cause stays.
func (s *Session) fail(cause error) {
	s.failOnce.Do(func() {
		s.failure = cause
		s.opts.Intake.Shut()
		close(s.failed)
	})
}

// refused says why the session takes nothing more, or nil while it does.
func (s *Session) refused() error {
	select { // one channel at a time, which takes no lock
	case <-s.failed:
		return s.failure
	default:
	}
	select {
	case <-s.closing:
		return status.New(status.InvalidState, "the capture of %q is closed", s.path)
	default:
		return nil
	}
}

// Guard runs f and turns a panic into the session's failure.
func (s *Session) Guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = status.New(status.Internal, "panic: %v\n%s", p, debug.Stack())
			s.fail(err)
		}
	}()
	return f()
}

// deadline is a point in time until which a call may wait, or none.
type deadline struct {
	timer *time.Timer
	limit time.Duration
	over  chan struct{}
}

// newDeadline takes a negative limit for none.
func newDeadline(limit time.Duration) *deadline { return &deadline{limit: limit} }

// past is the Done of a deadline that leaves no time.
var past = func() <-chan struct{} {
	over := make(chan struct{})
	close(over)
	return over
}()

// Done is closed at the deadline, which begins with its first call; never where there is
// none.
func (d *deadline) Done() <-chan struct{} {
	if d.limit == 0 {
		return past
	}
	if d.limit > 0 && d.timer == nil {
		over := make(chan struct{})
		d.over, d.timer = over, time.AfterFunc(d.limit, func() { close(over) })
	}
	return d.over
}

func (d *deadline) Stop() {
	if d.timer != nil {
		d.timer.Stop()
	}
}

// barrier is a request to the writer that has its place among the packets.
type barrier struct {
	kind   barrierKind
	place  uint64 // Session.pushes behind it
	done   chan struct{}
	err    error
	offset int64
}

type barrierKind int

const (
	toAppend barrierKind = iota // the packets before are with the stream
	toFlush
	toSync
	toFinish
)

// pushBarrier pushes a barrier, or finds the last one where nothing was pushed
// since and it still waits: a caller that repeats its call need not queue another.
func (s *Session) pushBarrier(kind barrierKind) *barrier {
	s.orderMu.Lock()
	last := s.barrier
	again := last != nil && last.kind == kind && last.place == s.pushes
	s.orderMu.Unlock()
	if again {
		select {
		case <-last.done:
		default:
			return last
		}
	}
	b := &barrier{kind: kind, done: make(chan struct{})}
	if err := s.push(&item{barrier: b}); err != nil {
		return nil // the writer has ended
	}
	return b
}

// await waits until the writer has come to a barrier. It is nil, without an error,
// where the writer had ended before.
func (s *Session) await(kind barrierKind, d *deadline) (*barrier, error) {
	defer s.drains.Add(-1)
	s.drains.Add(1)
	if kind != toFinish { // the writer settles then
		if err := s.settle(nil, d); err != nil {
			return nil, err
		}
	}
	defer s.jobs.Hurry()() // before helpers can come upon the barrier
	b := s.pushBarrier(kind)
	if b == nil {
		<-s.finished
		return nil, nil
	}
	select {
	case <-b.done:
		return b, b.err
	default:
	}
	select {
	case <-b.done:
		return b, b.err
	case <-d.Done():
		return nil, status.New(status.Timeout, "%q: %d packets are not yet written",
			s.path, s.counters.queuedPackets.Load())
	case <-s.discarded:
		return nil, status.New(status.InvalidState, "the capture of %q was discarded", s.path)
	}
}

// Flush waits until all that was enqueued before is in the file. A negative
// timeout waits without limit.
func (s *Session) Flush(timeout time.Duration) error {
	if err := s.refused(); err != nil {
		return err
	}
	d := newDeadline(timeout)
	defer d.Stop()
	b, err := s.await(toFlush, d)
	if b == nil && err == nil {
		return s.refused()
	}
	return err
}

// Checkpoint waits until all that was enqueued before is durable, data first,
// then index, and returns the length of the stream that is covered.
func (s *Session) Checkpoint(timeout time.Duration) (offset int64, err error) {
	if err := s.refused(); err != nil {
		return 0, err
	}
	d := newDeadline(timeout)
	defer d.Stop()
	b, err := s.await(toSync, d)
	if b == nil && err == nil {
		err = s.refused()
	}
	if err != nil {
		return 0, err
	}
	return b.offset, nil
}

// Close writes all that is queued and closes the files. After a Timeout it may
// be called again; any other answer is final, and is the failure that stopped
// the writing if there was one.
func (s *Session) Close(timeout time.Duration) error {
	d := newDeadline(timeout)
	defer d.Stop()
	s.refuse()
	s.abandonPending()
	_, err := s.await(toFinish, d)
	if errors.Is(err, status.Timeout) {
		return err
	}
	<-s.finished
	return s.finishErr
}

// refuse lets the session take nothing more.
func (s *Session) refuse() {
	s.closeOnce.Do(func() {
		s.opts.Intake.Shut() // first: who is refused once is refused from then on
		close(s.closing)
	})
}

// Discard closes without waiting and returns the number of packets given up.
// The files are closed when the write call under way returns.
func (s *Session) Discard() (lost uint64) {
	s.refuse()
	s.discard1.Do(func() { close(s.discarded) })
	lost = s.queued()
	s.abandonPending()
	s.jobs.Hurry() // until the end
	s.pushBarrier(toFinish)
	return lost
}

// Stats are the counters of a capture; strap_stats_t in strap.h describes them.
type Stats struct {
	Workers                                   int
	Packets, Tensors, RawBytes, StoredBytes   uint64
	FileBytes                                 uint64
	Dropped, DroppedBytes, Failed, Overflowed uint64
	Stalls, StallNS, YieldNS                  uint64
	QueuedPackets, QueuedBytes                uint64
	MemoryBytes, MemoryPeak, MemoryLimit      uint64
	Repeated, Hastened                        uint64
	WriteNS                                   uint64
	WriterThread                              int // the system's id, 0: unknown
	Convert                                   codec.Stats
	Failure                                   error
}

// taken is how many tensors came, and the bytes of their elements.
func (s *Session) taken() (tensors, bytes uint64) {
	tensors, bytes = s.opts.Intake.Taken()
	return tensors + s.counters.tensors.Load(), bytes + s.counters.rawBytes.Load()
}

// queued is how many packets wait. What is being settled may count twice, but not be missed.
func (s *Session) queued() uint64 {
	small := s.opts.Intake.Waiting()
	return uint64(small) + s.counters.queuedPackets.Load()
}

// Stats reads the counters.
func (s *Session) Stats() Stats {
	c := &s.counters
	taken, peak, held := s.arena.Usage()
	tensors, rawBytes := s.taken()
	st := Stats{
		Workers: s.opts.Workers,
		Packets: c.packets.Load(), Tensors: tensors,
		RawBytes: rawBytes, StoredBytes: c.storedBytes.Load(), FileBytes: c.fileBytes.Load(),
		Dropped: c.dropped.Load(), DroppedBytes: c.droppedBytes.Load(),
		Failed: c.noted.Load(), Overflowed: c.overflowed.Load(), Repeated: c.repeated.Load(),
		Hastened: c.hastened.Load(),
		Stalls:   c.stalls.Load(), StallNS: uint64(c.stalled.Total()), YieldNS: uint64(c.yielded.Total()),
		QueuedPackets: s.queued(), QueuedBytes: uint64(held),
		MemoryBytes: uint64(taken), MemoryPeak: uint64(peak), MemoryLimit: uint64(s.arena.Limit()),
		WriteNS: uint64(s.stream.Busy()), WriterThread: int(c.writerThread.Load()),
	}
	s.convert.Lock()
	st.Convert = s.convert.Stats
	s.convert.Unlock()
	select {
	case <-s.failed:
		st.Failure = s.failure
	default:
	}
	return st
}
