// Package session is a capture: tensors go in, a stream file and its index come out.
//
// Enqueue chooses one of three lanes for a packet; emitPart (enqueue.go) gives the reasons:
//
//	inline     the caller makes the packet in the stream's memory
//	staged     the caller copies the tensor into the arena (staging.go), and a worker or a
//	           thread of the caller makes the packet there (backlog.go, maker.go)
//	streamed   the caller hands over the tensor in pieces, and the writer compresses them
//
// Entries of the last two lanes, and notes, wait in the order (order.go). The writer (writer.go), or
// threads that help, bring them to the sink (sink.go): it appends packets to the stream and gives
// their rows to the index, in the order of the calls.
//
// The arena bounds the memory: a packet holds its region until it is in the stream's memory, and
// Enqueue waits for room. Workers, writer and disk take no arena memory, so packets leave the arena
// and the wait ends, as long as the disk accepts writes.
//
// # Order of the locks
//
// A goroutine that holds one of these locks takes only locks further down:
//
//	emission.running   by TryLock alone where pending.mu is held
//	sink.mu            by TryLock alone, except in the writer
//	intake.mu
//	pending.mu
//	all others         of which a goroutine holds one at a time
//
// In builds for the race detector a wrong order panics (mutex_race.go).
//
// The test files_test.go keeps the files in layers: a file uses only files below it.
package session

import (
	"errors"
	"math"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/procs"
	"github.com/libstrap/strap/libstrap/internal/ringfile"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/stopwatch"
	"github.com/libstrap/strap/libstrap/internal/stream"
)

// Session is an open capture. All methods are safe for concurrent use.
type Session struct {
	opts     Options
	files    stream.Options // of each segment
	busy     *stopwatch.Stopwatch
	life     *lifecycle
	arena    *arena.Arena
	names    *names
	order    *order
	ring     *ring  // nil unless Options.Ring
	alarm    *alarm // likewise
	progress *progress
	jobs     *backlog
	counters *counters
	staging  *staging
	sink     *sink
	maker    *maker
	writer   *writer
	notes    *notes
	enqueuer *enqueuer
	intake   *intake
}

// Open starts a capture to path, with its index at path + ".index". It raises GOMAXPROCS if that is
// below 2*Workers + 3, and does not lower it again.
func Open(path string, o Options) (*Session, error) {
	if err := o.validate(path); err != nil {
		return nil, err
	}
	if o.Ring { // a dump puts the whole ring into the backlog: callers would stop for seconds
		o.Yield = false
	}
	encoders := make([]*encoders, o.Workers+1)
	for i := range encoders {
		var err error
		if encoders[i], err = newEncoders(&o); err != nil {
			return nil, err
		}
	}
	mem, file, err := openMemory(&o)
	if err != nil {
		return nil, err
	}
	mem.Touch(o.BurstBytes)
	if o.Ring { // all of it will be used, and touching memory later would slow the host
		mem.Touch(mem.Limit())
	}
	count := &counters{}
	with := stream.Options{
		Memory: mem.Limit() / 4, Files: o.Files, Busy: &stopwatch.Stopwatch{},
		Thread: func(direct bool) {
			// Where writing takes time on a CPU, the model's threads go first. Direct writes take none,
			// and the disk would stand still until a thread of low priority had its turn.
			if !direct {
				lowerPriority()
			}
			count.writerThread.Store(int32(threadID()))
		},
	}
	var files files
	if !o.Ring {
		files, err = openFiles(path, &o, with)
	}
	if err != nil {
		mem.Close()
		return nil, err
	}
	s := assemble(path, o, mem, file, count, files, encoders[o.Workers])
	s.files, s.busy = with, with.Busy
	if !o.Ring {
		s.counters.fileBytes.Store(uint64(files.stream.Offset()))
	}
	// A thread of the host that calls in must find a free P although workers, writer and disk hold
	// one each: they run at low priority, and Go does not know that. As many threads of the host
	// help as there are workers.
	procs.Need(2*o.Workers + 3)
	s.maker.start(encoders[:o.Workers])
	go s.writer.write()
	return s, nil
}

// openMemory returns the staging memory, in a ring file if the options have one.
func openMemory(o *Options) (*arena.Arena, *ringfile.File, error) {
	limit := memoryLimit(o.MaxMemory)
	if o.RingFile == "" {
		mem, err := arena.New(limit)
		return mem, nil, err
	}
	file, err := ringfile.Create(o.RingFile, limit, newCaptureID(), o.Rank, o.Files)
	if err != nil {
		return nil, nil, err
	}
	return arena.On(file.Memory, ringfile.HeadSize), file, nil
}

// assemble connects the parts of a session. file is nil if it has no ring file.
func assemble(path string, o Options, mem *arena.Arena, file *ringfile.File, count *counters, f files, frames *encoders) *Session {
	in := newIntake(o.Intake)
	s := &Session{
		opts: o, arena: mem, counters: count, intake: in,
		life:     newLifecycle(path, in.shut),
		names:    newNames(),
		progress: newProgress(),
		jobs:     newBacklog(o.Yield, o.helped(), min(o.backlogBytes(), mem.Limit()/4)),
	}
	// No call waits for room before the workers have had their turn.
	if burst := min(o.BurstBytes, mem.Limit()*3/4); burst > s.jobs.high {
		s.jobs.high, s.jobs.longest = burst, math.MaxInt64
	}
	s.jobs.more = func() bool { return in.waiting() > 0 }
	id := ""
	if !o.Ring {
		id = f.index.CaptureID()
	}
	s.order = newOrder(s.life, id, f.sequence)
	made := newEntries(o.Rank)
	if o.Ring {
		s.ring, s.alarm = newRing(&s.opts, s.life, mem, file, s.order, s.jobs, made, count), newAlarm(o.RingOutlier)
	}
	s.staging = &staging{
		arena: mem, line: newLine(), jobs: s.jobs, ring: s.ring, order: s.order, life: s.life,
		counters: count, drops: o.DropOnFull,
	}
	s.sink = &sink{
		life: s.life, arena: mem, order: s.order, progress: s.progress, jobs: s.jobs,
		entries: made, counters: count, waiting: in.waiting, dumps: o.Ring, segment: f.segment,
	}
	s.maker = &maker{
		opts: &s.opts, jobs: s.jobs, sink: s.sink, order: s.order, life: s.life, counters: count,
	}
	s.writer = &writer{
		helped: o.helped(), life: s.life, intake: in, arena: mem, order: s.order,
		progress: s.progress, maker: s.maker, counters: count, sink: s.sink, frames: frames, ring: s.ring,
	}
	s.notes = &notes{entries: made, order: s.order, ring: s.ring, counters: count}
	s.enqueuer = &enqueuer{
		opts: &s.opts, names: s.names, life: s.life, counters: count, staging: s.staging,
		pending: newPending(), notes: s.notes,
		inline: &inline{
			opts: &s.opts, entries: made, maker: s.maker, jobs: s.jobs, order: s.order,
			counters: count, sink: s.sink,
		},
		staged: &staged{
			opts: &s.opts, entries: made, staging: s.staging, alarm: s.alarm, ring: s.ring, maker: s.maker,
			jobs: s.jobs, order: s.order, life: s.life, counters: count, sink: s.sink,
		},
		streamed: &streamed{entries: made, staging: s.staging},
	}
	in.life, in.notes, in.enqueuer = s.life, s.notes, s.enqueuer
	return s
}

// CaptureID returns the id of the stream that the next tensor goes to: 32 hexadecimal digits. Every
// stream has its own id.
func (s *Session) CaptureID() string { return s.order.CaptureID() }

// Roll begins a new stream at path, with an index of its own, and returns its id. The stream gets all
// that is enqueued from now on. Roll waits for the memory of small tensors alone, at most timeout: a
// Timeout begins nothing. Flush then waits until the stream before has all that was enqueued before,
// and Checkpoint until that stream is durable and closed. Errors: those of Open, and why the session
// takes no more calls.
func (s *Session) Roll(path string, overwrite bool, timeout time.Duration) (captureID string, err error) {
	if _, err := s.intake.drain(timeout); err != nil {
		return "", err
	}
	if err := s.life.refused(); err != nil {
		return "", err
	}
	o := s.opts
	o.Resume, o.CaptureID, o.Overwrite = false, "", overwrite
	if err := o.validate(path); err != nil {
		return "", err
	}
	if s.ring != nil {
		return "", status.New(status.InvalidState, "a session with a ring has no stream to go on from: dump it")
	}
	next, err := openFiles(path, &o, s.files)
	if err != nil {
		return "", err
	}
	if err := s.order.Push(&entry{is: rollEntry, next: &next.segment}); err != nil {
		return "", errors.Join(err, next.discard())
	}
	return next.index.CaptureID(), nil
}

// BeginDump writes what the ring holds, and then all that is enqueued until EndDump, to a new stream at
// path with an index of its own. It returns the id of the stream. Steps that were dumped are no longer in
// the ring. BeginDump does not wait for the disk; Flush and Checkpoint do, as after Roll. Errors: those of
// Roll; InvalidState without a ring and during another dump.
func (s *Session) BeginDump(path string, overwrite bool, timeout time.Duration) (captureID string, err error) {
	o, err := s.forDump(timeout)
	if err != nil {
		return "", err
	}
	o.Overwrite = overwrite
	if err := o.validate(path); err != nil {
		return "", err
	}
	next, err := openFiles(path, &o, s.files)
	if err != nil {
		return "", err
	}
	if err := s.ring.beginDump(&next.segment); err != nil {
		return "", errors.Join(err, next.discard())
	}
	return next.index.CaptureID(), nil
}

// EndDump ends the dump behind what was enqueued so far. Checkpoint then waits until the files of the dump
// are durable and closed. Errors: InvalidState if no dump is being written.
func (s *Session) EndDump(timeout time.Duration) error {
	if _, err := s.forDump(timeout); err != nil {
		return err
	}
	return s.ring.endDump()
}

// Alarm returns the first tensor since the last Alarm that has a value that is not finite, or is an outlier;
// see Options.RingOutlier. If there are both, it returns the one that came first, and the next Alarm the
// other. Of tensors that threads enqueue at once, any may be the first. Errors: InvalidState without a ring; why the session takes
// no more calls; Timeout if small tensors wait for memory.
func (s *Session) Alarm(timeout time.Duration) (first Alarm, rang bool, err error) {
	if _, err := s.forDump(timeout); err != nil {
		return Alarm{}, false, err
	}
	first, rang = s.alarm.take()
	return first, rang, nil
}

// EndStep tells that all tensors of a step were enqueued. A ring file then says that the step is whole. Errors:
// InvalidState without a ring; why the session takes no more calls; Timeout if small tensors wait for memory.
func (s *Session) EndStep(step int64, timeout time.Duration) error {
	if _, err := s.forDump(timeout); err != nil {
		return err
	}
	s.ring.endStep(step)
	return nil
}

// forDump brings the tensors of the intake into the ring, and returns the options of the files of a dump.
func (s *Session) forDump(timeout time.Duration) (o Options, err error) {
	if s.ring == nil {
		return o, status.New(status.InvalidState, "%q is captured to a stream: only a session with a ring dumps", s.life.path)
	}
	if _, err := s.intake.drain(timeout); err != nil {
		return o, err
	}
	if err := s.life.refused(); err != nil {
		return o, err
	}
	o = s.opts
	o.Ring, o.RingSteps, o.RingSeconds, o.RingOutlier, o.RingFile = false, 0, 0, 0, ""
	return o, nil
}

// Layer registers a source of tensors and returns its id. The same three names give the same id. It
// works also after Close.
func (s *Session) Layer(model, name, path string) (uint32, error) {
	id, err := s.names.addLayer(model, name, path)
	if err == nil {
		s.intake.admit(id+1, 0, 0)
	}
	return id, err
}

// Request registers a request that tensors are made for and returns its id, from 1 on. The same
// name gives the same id until the names that came after it take half of maxNames. Then the next
// registration gives it a new one. The old id is valid until they take all of it.
func (s *Session) Request(name string) (uint32, error) {
	added, err := s.names.addRequest(name, s.intake.passed.Load())
	if err != nil {
		return 0, err
	}
	s.intake.admit(0, added.least, added.id)
	if added.turned {
		tensors, _ := s.intake.taken()
		s.names.setWaited(tensors)
	}
	return added.id, nil
}

// Enqueue captures a tensor: when it returns nil, the caller may change the elements. It waits at
// most timeout for room (negative: without limit).
//
// A Timeout sets t.Cursor: call again with the same t to go on, or give it up with Abandon. If
// Enqueue took nothing of the tensor, the call keeps its place among the calls that wait for memory
// for one second (keptFor, line.go). A Timeout while small tensors wait for memory leaves t.Cursor 0.
// With DropOnFull there is no Timeout.
func (s *Session) Enqueue(t *Tensor, timeout time.Duration) (err error) {
	if t.Cursor == 0 {
		if timeout, err = s.intake.drain(timeout); err != nil {
			return err
		}
	}
	return s.enqueuer.enqueue(t, timeout)
}

// Abandon gives up a tensor whose Enqueue timed out, and frees the place of the call in the line.
// If Enqueue had taken a part of the tensor, Abandon withdraws the unfinished packet and notes the
// tensor in the index. With cursor 0 it does nothing and returns nil. Errors: InvalidArgument (no
// tensor has the cursor), InvalidState (another call uses it).
func (s *Session) Abandon(cursor uint64) error { return s.enqueuer.abandon(cursor) }

// Note puts into the index that a tensor could not be captured, and why. It does not wait. Errors:
// InvalidArgument if the layer or the request is not registered, InvalidState after Close.
func (s *Session) Note(t *Tensor, message string) error {
	if err := s.life.refused(); err != nil {
		return err
	}
	from, err := s.names.find(t.Layer, t.Request)
	if err != nil {
		return err
	}
	return s.intake.note(&from, t, message)
}

// Guard runs f and returns its error. A panic of f becomes the session's failure; an error does
// not.
func (s *Session) Guard(f func() error) error { return s.life.Guard(f) }

// Flush waits until all that was enqueued before is in the file. A negative timeout waits
// without limit.
//
// A Timeout sets *cursor, which is 0 at first: call again with it to go on waiting for the
// same, whatever was enqueued since. A Timeout while small tensors wait for memory leaves it 0.
func (s *Session) Flush(cursor *uint64, timeout time.Duration) error {
	return s.reach(written, cursor, timeout)
}

// Checkpoint waits until all that was enqueued before is durable, data first,
// then index, and returns the length of the stream that is covered. For cursor see Flush. In a session
// with a ring it returns once why a dump could not be written; the ring then keeps what comes next.
func (s *Session) Checkpoint(cursor *uint64, timeout time.Duration) (offset int64, err error) {
	if err := s.reach(durable, cursor, timeout); err != nil {
		return 0, err
	}
	if err := s.progress.takeFailure(); err != nil {
		return 0, err
	}
	return s.progress.Durable(), nil
}

// reach waits until all that was enqueued before has come to a stage.
func (s *Session) reach(to stage, cursor *uint64, timeout time.Duration) (err error) {
	if *cursor == 0 {
		if timeout, err = s.intake.drain(timeout); err != nil {
			return err
		}
	}
	if err := s.life.refused(); err != nil {
		return err
	}
	c := call{limit: timeout}
	defer c.stop()
	position := *cursor
	if position == 0 {
		position = s.order.Added()
	}
	defer s.jobs.Hurry()()
	err = s.sink.await(to, position, &c)
	if *cursor = 0; status.CodeOf(err) == status.Timeout {
		*cursor = position
	}
	return err
}

// Close writes all that is queued and closes the files. After a Timeout it may
// be called again; any other answer is final, and is the failure that stopped
// the writing if there was one.
func (s *Session) Close(timeout time.Duration) error {
	s.refuse()
	c := call{limit: timeout}
	defer c.stop()
	defer s.jobs.Hurry()()
	select {
	case <-s.life.finished: // also where no time is left
		return s.life.finishErr
	default:
	}
	select {
	case <-s.life.finished:
		return s.life.finishErr
	case <-s.life.discarded:
		return status.New(status.InvalidState, "the capture of %q was discarded", s.life.path)
	case <-c.Done():
		return s.sink.late()
	}
}

// Discard closes without waiting and returns the number of packets given up.
// The files are closed when the write call under way returns.
func (s *Session) Discard() (lost uint64) {
	s.life.close()
	s.life.discard()
	lost = s.sink.queued()
	s.jobs.Hurry() // until the end
	s.refuse()
	return lost
}

// refuse lets the session take nothing more, and the writer finish.
func (s *Session) refuse() {
	s.life.close()
	s.enqueuer.close() // before the writer is woken, which may find nothing left and end
	s.order.Signal()
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
	Ring                                      RingStats
	Failure                                   error
}

// Stats reads the counters. Those of tensors include what waits in the intake.
func (s *Session) Stats() Stats {
	c := s.counters
	taken, peak, held := s.arena.Usage()
	st := Stats{
		Workers: s.opts.Workers,
		Packets: c.packets.Load(), Tensors: c.tensors.Load(),
		RawBytes: c.rawBytes.Load(), StoredBytes: c.storedBytes.Load(), FileBytes: c.fileBytes.Load(),
		Dropped: c.dropped.Load(), DroppedBytes: c.droppedBytes.Load(),
		Failed: c.noted.Load(), Overflowed: c.overflowed.Load(), Repeated: c.repeated.Load(),
		Underflowed: c.underflowed.Load(),
		Stalls:      c.stalls.Load(), StallNS: uint64(c.stalled.Total()), YieldNS: uint64(c.yielded.Total()),
		QueuedPackets: s.sink.queued(), QueuedBytes: uint64(held),
		MemoryBytes: uint64(taken), MemoryPeak: uint64(peak), MemoryLimit: uint64(s.arena.Limit()),
		WriteNS: uint64(s.busy.Total()), WriterThread: int(c.writerThread.Load()),
		Convert: c.lossSoFar(),
	}
	if s.ring != nil {
		st.Ring = s.ring.stats()
	}
	small, bytes := s.intake.taken()
	st.Tensors, st.RawBytes = st.Tensors+small, st.RawBytes+bytes
	select {
	case <-s.life.failed:
		st.Failure = s.life.failure
	default:
	}
	return st
}
