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
	"io"
	"math"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

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
	home   string // absolute, for a host that changes its working directory
	arena  *arena.Arena
	stream *stream.Writer // the writer's, once it runs
	index  *index.Writer  // likewise
	frames *encoders      // likewise, for tensors larger than a region

	captureID string

	names names

	line     *line
	settling settling
	order    *order
	progress *progress

	jobs   *backlog
	writer *writer

	sparesMu sync.Mutex
	spares   []*encoders // of helpers

	items sync.Pool

	pendingMu   sync.Mutex
	pending     map[uint64]*emission // by cursor
	lastPending uint64
	remembers   bool // until the session closes

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
	repeated, underflowed                    atomic.Uint64
	stalled, yielded                         stopwatch.Stopwatch
	writerThread                             atomic.Int32
	queuedNotes                              atomic.Int64
}

// Open starts a capture to path, with its index at path + ".index".
func Open(path string, o Options) (*Session, error) {
	if err := o.validate(path); err != nil {
		return nil, err
	}
	home, err := filepath.Abs(path)
	if err != nil {
		return nil, status.FromOS(err, "cannot open %q", path)
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
		home:      home,
		arena:     mem,
		frames:    encoders[o.Workers],
		names:     newNames(),
		line:      newLine(),
		jobs:      newBacklog(o.Yield, o.helped(), min(o.backlogBytes(), mem.Limit()/4)),
		order:     newOrder(),
		progress:  newProgress(),
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
	s.captureID = s.index.CaptureID()
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
	s.stream, err = stream.Create(s.path, s.streamOptions(), func() (err error) {
		s.index, err = index.Prepare(index.PathOf(s.path), newCaptureID(), s.opts.Overwrite)
		return err
	})
	if err != nil {
		if s.index != nil {
			err = errors.Join(err, s.index.Discard())
		}
		return err
	}
	if err = s.index.Begin(); err != nil {
		return errors.Join(err, s.stream.Close())
	}
	return nil
}

// streamOptions are those of a file that is written from memory in proportion, by a
// thread which lets the model's go first where writing takes its time on a CPU. Where it does
// not, the disk would stand still until that thread had its turn.
func (s *Session) streamOptions() stream.Options {
	return stream.Options{Memory: s.arena.Limit() / 4, Files: s.opts.Files, Overwrite: s.opts.Overwrite, Thread: func(direct bool) {
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
// Nothing is changed before both are open and checked.
func (s *Session) resume() (err error) {
	var found *index.Found
	s.stream, _, err = stream.Resume(s.path, s.opts.Cut, s.streamOptions(), func(f io.ReaderAt, end int64) (err error) {
		if found, err = index.Find(index.PathOf(s.path), f, end); err != nil {
			return err
		}
		return s.expected(found.CaptureID)
	})
	if err != nil {
		if found != nil {
			err = errors.Join(err, found.Close())
		}
		return err
	}
	id := s.opts.CaptureID
	if id == "" && found.Lost == nil {
		id = found.CaptureID
	}
	if id == "" {
		id = newCaptureID()
	}
	if s.index, err = found.Resume(id); err != nil {
		return errors.Join(err, s.stream.Close())
	}
	s.order.sequence = found.NextSequence
	err = s.stream.Packets(found.End, func(p scan.Packet) error {
		row := wire.Row{
			Sequence: s.order.sequence, Offset: p.Offset, Length: uint64(p.End() - p.Offset), Parts: 1,
			Layer: p.Name, Codec: codec.Detect(p.Head()).String(), Step: -1, Token: -1,
			MSE: math.NaN(), MeanSquare: math.NaN(),
		}
		s.order.sequence++
		return s.index.Append(&row)
	})
	if err != nil {
		return errors.Join(err, s.index.Close(), s.stream.Close())
	}
	return nil
}

// expected refuses to go on with another capture than the caller means. An index that is lost
// does not say which one it was.
func (s *Session) expected(id string) error {
	if want := s.opts.CaptureID; want != "" && id != "" && id != want {
		return status.New(status.Corrupt,
			"%q holds capture %s, not capture %s (capture_id): another capture has taken its place; "+
				"give no capture_id to append to it", s.path, id, want)
	}
	return nil
}

// CaptureID tells the capture from every other: 32 hexadecimal digits.
func (s *Session) CaptureID() string { return s.captureID }

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
	if s.isClosing() {
		return status.New(status.InvalidState, "the capture of %q is closed", s.path)
	}
	return nil
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

// await waits until the writer has brought all up to a position of the order to a stage.
func (s *Session) await(to stage, position uint64, c *call) error {
	for {
		done, changed, err := s.progress.want(to, position)
		if done {
			return nil
		}
		if err != nil {
			return s.refused()
		}
		s.order.Signal()
		select {
		case <-changed:
			continue
		default:
		}
		select {
		case <-changed:
		case <-s.failed:
			return s.failure
		case <-s.discarded:
			return status.New(status.InvalidState, "the capture of %q was discarded", s.path)
		case <-c.Done():
			return status.New(status.Timeout, "%q: %d packets are not yet written", s.path, s.queued())
		}
	}
}

// Cursors of Flush and Checkpoint are odd for a position of the order, and even for a round of
// the intake, which has to be settled first.
func positionCursor(position uint64) uint64 { return position<<1 | 1 }
func roundCursor(round uint64) uint64       { return round << 1 }

// reach waits until all that was enqueued before has come to a stage.
func (s *Session) reach(to stage, cursor *uint64, timeout time.Duration) error {
	if err := s.refused(); err != nil {
		return err
	}
	c := call{limit: timeout, quiet: true}
	defer c.stop()
	position := *cursor >> 1
	if *cursor&1 == 0 {
		round := position
		if round == 0 {
			round, _ = s.nextRound()
		}
		if round > 0 {
			if err := s.awaitRound(round, &c); err != nil {
				if *cursor = 0; errors.Is(err, status.Timeout) {
					*cursor = roundCursor(round)
				}
				return err
			}
		}
		position = s.order.Added()
	}
	defer s.jobs.Hurry()()
	err := s.await(to, position, &c)
	if *cursor = 0; errors.Is(err, status.Timeout) {
		*cursor = positionCursor(position)
	}
	return err
}

// Flush waits until all that was enqueued before is in the file. A negative timeout waits
// without limit.
//
// A Timeout sets *cursor, which is 0 at first: call again with it to go on waiting for the
// same, whatever was enqueued since.
func (s *Session) Flush(cursor *uint64, timeout time.Duration) error {
	return s.reach(written, cursor, timeout)
}

// Checkpoint waits until all that was enqueued before is durable, data first,
// then index, and returns the length of the stream that is covered. For cursor see Flush.
func (s *Session) Checkpoint(cursor *uint64, timeout time.Duration) (offset int64, err error) {
	if err := s.reach(durable, cursor, timeout); err != nil {
		return 0, err
	}
	return s.progress.Durable(), nil
}

// Close writes all that is queued and closes the files. After a Timeout it may
// be called again; any other answer is final, and is the failure that stopped
// the writing if there was one.
func (s *Session) Close(timeout time.Duration) error {
	s.refuse()
	s.abandonPending()
	c := call{limit: timeout}
	defer c.stop()
	defer s.jobs.Hurry()()
	select {
	case <-s.finished: // also where no time is left
		return s.finishErr
	default:
	}
	select {
	case <-s.finished:
		return s.finishErr
	case <-s.discarded:
		return status.New(status.InvalidState, "the capture of %q was discarded", s.path)
	case <-c.Done():
		return status.New(status.Timeout, "%q: %d packets are not yet written", s.path, s.queued())
	}
}

// refuse lets the session take nothing more, and the writer finish.
func (s *Session) refuse() {
	s.closeOnce.Do(func() {
		s.opts.Intake.Shut() // first: who is refused once is refused from then on
		close(s.closing)
	})
	s.order.Signal()
}

func (s *Session) isClosing() bool {
	select {
	case <-s.closing:
		return true
	default:
		return false
	}
}

// Discard closes without waiting and returns the number of packets given up.
// The files are closed when the write call under way returns.
func (s *Session) Discard() (lost uint64) {
	s.refuse()
	s.discard1.Do(func() { close(s.discarded) })
	lost = s.queued()
	s.abandonPending()
	s.jobs.Hurry() // until the end
	s.order.Signal()
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
	Repeated, Underflowed                     uint64
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
		Underflowed: c.underflowed.Load(),
		Stalls:      c.stalls.Load(), StallNS: uint64(c.stalled.Total()), YieldNS: uint64(c.yielded.Total()),
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
