// Parses a text, and gives its rows as records.

package parse

import (
	"io"
	"os"
	"sync"
	"sync/atomic"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Counts says how far a source has come. Each line is accepted, skipped, unaddressed or malformed.
type Counts struct {
	Done       bool
	Rows       int64
	Bytes      int64
	TotalBytes int64 // the size of a regular file, else 0
	Lines      int64
	// Skipped counts the lines that hold no access, as comments, headers, blank lines and call
	// chains. It also counts the rows that SampleEvery leaves out.
	Skipped int64
	// Unaddressed counts the samples without a data address. Their event counts no accesses, or
	// they were printed without the address.
	Unaddressed int64
	Malformed   int64
	Samples     []Sample // the first 20 malformed lines
}

// Sample is a malformed line.
type Sample struct {
	Line int64  // from 1
	Text string // cut to 200 bytes
}

const (
	maxSamples    = 20
	maxSampleText = 200
)

// Source is an array.RecordReader over the rows of a text. Counts and Err may be called at any time
// and by any goroutine, also after Release. Only one goroutine at a time may call the other
// methods.
type Source struct {
	in      io.Reader
	file    *os.File // in, if the source has to close it
	format  Format
	options Options
	schema  *arrow.Schema
	columns *columns
	refs    atomic.Int64

	started  bool
	stop     chan struct{}
	running  sync.WaitGroup
	ordered  chan *block // the blocks in the order of the text
	ordinal  int64       // number of the next row, before sampling
	sampleID int64
	pending  *rows // rows of the block whose batches Next gives out
	given    int   // how many rows of pending were given out
	record   arrow.Record

	mu     sync.Mutex
	counts Counts
	err    error
}

func newSource(format Format, o Options) (*Source, error) {
	kind, err := format.kind()
	if err != nil {
		return nil, err
	}
	if err := o.check(); err != nil {
		return nil, err
	}
	s := &Source{
		format: format, options: o, schema: trace.Schema(kind), stop: make(chan struct{}),
		columns: newColumns(trace.Schema(kind), o.RunID, o.Phases),
	}
	s.refs.Store(1)
	return s, nil
}

// Schema returns trace.Schema of the format's kind.
func (s *Source) Schema() *arrow.Schema { return s.schema }

// Record returns the batch that Next found. It is valid until the next call of Next or the last
// Release.
func (s *Source) Record() arrow.Record { return s.record }

// Counts returns how far the source has come. Rows counts the rows that Next gave out. The other
// counts include all of the block that the current batch is from.
func (s *Source) Counts() Counts {
	s.mu.Lock()
	defer s.mu.Unlock()
	c := s.counts
	c.Samples = append([]Sample(nil), c.Samples...)
	return c
}

// Err returns the error that stopped the parsing early, or nil. It is an IO error of reading, or
// Internal.
func (s *Source) Err() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.err
}

// Next makes the next batch the current one, and reports whether there is one. It returns false at
// the end of the text, after an error and after the last Release.
func (s *Source) Next() bool {
	s.drop()
	if s.refs.Load() <= 0 || s.Counts().Done || s.Err() != nil {
		return false
	}
	if !s.started {
		s.start()
	}
	for s.pending == nil || s.given == s.pending.len() {
		s.pending = nil
		if !s.take() {
			return false
		}
	}
	end := min(s.given+s.options.BatchRows, s.pending.len())
	s.record = s.columns.record(s.pending, s.given, end, s.sampleID)
	n := int64(end - s.given)
	s.given = end
	s.sampleID += n
	s.mu.Lock()
	s.counts.Rows += n
	s.mu.Unlock()
	return true
}

// take waits for the next block, makes its rows pending and adds its counts. It returns false at
// the end or if reading or parsing failed.
func (s *Source) take() bool {
	b, ok := <-s.ordered
	if !ok {
		s.mu.Lock()
		s.counts.Done = true
		s.mu.Unlock()
		return false
	}
	<-b.parsed
	if b.err != nil {
		s.mu.Lock()
		s.err = b.err
		s.mu.Unlock()
		s.halt()
		return false
	}
	r := b.rows
	if s.format == Lackey {
		for i := range r.time {
			r.time[i] = s.ordinal + int64(i)
		}
	}
	accepted := r.len()
	every := int64(s.options.SampleEvery)
	r.keep(int((every-s.ordinal%every)%every), s.options.SampleEvery)
	s.ordinal += int64(accepted)
	s.pending, s.given = r, 0

	s.mu.Lock()
	defer s.mu.Unlock()
	c := &s.counts
	for _, sample := range b.samples {
		if len(c.Samples) < maxSamples {
			c.Samples = append(c.Samples, Sample{Line: c.Lines + sample.Line, Text: sample.Text})
		}
	}
	c.Bytes += b.bytes
	c.Lines += b.lines
	c.Skipped += b.skipped + int64(accepted-r.len())
	c.Unaddressed += b.unaddressed
	c.Malformed += b.malformed
	return true
}

func (s *Source) drop() {
	if s.record != nil {
		s.record.Release()
		s.record = nil
	}
}

// Retain adds a reference.
func (s *Source) Retain() { s.refs.Add(1) }

// Release gives up a reference. The last Release stops the parsing, waits for its goroutines and
// closes the file that Open opened. Counts stays available.
func (s *Source) Release() {
	if s.refs.Add(-1) == 0 {
		s.drop()
		s.pending = nil
		s.halt()
	}
}

// start starts the pipeline: one goroutine reads blocks, and the workers parse them.
func (s *Source) start() {
	s.started = true
	workers := s.options.Workers
	work := make(chan *block, workers)
	// ordered holds the blocks that were read and not yet taken. Its capacity bounds the memory.
	s.ordered = make(chan *block, workers+1)
	free := make(chan []byte, 2*workers+2)
	for range cap(free) {
		free <- nil
	}
	s.running.Add(1)
	go s.read(work, free)
	for range workers {
		s.running.Add(1)
		go s.parse(work, free)
	}
}

// halt stops the pipeline, closes the file and waits until the goroutines have ended.
func (s *Source) halt() {
	select {
	case <-s.stop:
		return
	default:
		close(s.stop)
	}
	if s.file != nil {
		s.file.Close() // also ends a Read that waits for a pipe
	}
	s.running.Wait()
}

func (s *Source) read(work chan<- *block, free <-chan []byte) {
	defer s.running.Done()
	defer close(work)
	defer close(s.ordered)
	err := guarded(func() error {
		blocks := blockReader{in: s.in}
		for {
			var buffer []byte
			select {
			case buffer = <-free:
			case <-s.stop:
				return nil
			}
			b, err := blocks.next(buffer)
			if err != nil || b == nil {
				return err
			}
			if !s.send(work, b) || !s.send(s.ordered, b) {
				return nil
			}
		}
	})
	if err != nil {
		failed := &block{err: err, parsed: make(chan struct{})}
		close(failed.parsed)
		s.send(s.ordered, failed)
	}
}

func (s *Source) send(to chan<- *block, b *block) bool {
	select {
	case to <- b:
		return true
	case <-s.stop:
		return false
	}
}

func (s *Source) parse(work <-chan *block, free chan<- []byte) {
	defer s.running.Done()
	p := s.format.parser(&s.options)
	density := 0.01 // rows per byte, from the previous block
	for b := range work {
		b.err = guarded(func() error {
			b.parse(p, int(density*float64(len(b.text)))+1)
			density = 1.05 * float64(b.rows.len()) / float64(len(b.text))
			return nil
		})
		free <- b.buffer
		b.text, b.buffer = nil, nil
		close(b.parsed)
	}
}

// guarded turns a panic into an Internal error.
func guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = status.New(status.Internal, "parsing broke off: %v", p)
		}
	}()
	return f()
}
