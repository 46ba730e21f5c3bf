// Package analyse makes the tables that tell how a model's memory is used out of a
// memory trace, in one pass over its batches.
//
// Rows are copied into blocks, and each block goes through several stages at the same
// time: one for each question, split by regions or addresses where there are more
// cores than questions. What a stage keeps is bounded by the regions, the addresses
// and the pages of the trace, not by its rows; the pages of a long row are kept as spans,
// which its ends bound. The exceptions are the values whose
// exact quantiles are wanted (strides, gaps) and the rows for sorting: they are kept
// in compact form up to Options.MemoryBytes, and go to a file in Options.SpillDir
// beyond. Quantiles of spilled values are found by radix selection, some passes over
// the file.
//
// Order: locality, gaps, reuse distances and the working set over time follow the
// accesses in the order of their times, rows of one time in the order of the trace. As
// long as rows come like this, which nearly all traces do, they are taken as they
// come; beside that they are packed into a journal, about ten bytes a row. The first
// row that comes late ends the stages that need the order. Finish sorts the journal
// (an external merge sort within the memory) and runs them over the sorted rows. With
// Options.Ordered there is no journal and a late row is an error, for callers who know
// the order or can read their trace twice.
//
// Numbers: sums have 128 bits, means are the exact sum over the count, rounded once.
// Quantiles are those of numpy's linear interpolation to the last bit where float64
// holds the values exactly (below 2^53), and exact beyond. Means over regions are
// summed as pandas does.
package analyse

import (
	"errors"
	"math/bits"
	"os"
	"runtime"
	"sync"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Options say what to make of a trace, and with what means.
type Options struct {
	// Kind of the trace; "" is trace.Accesses. Tables that it does not support (see
	// Supports) come out empty.
	Kind trace.Kind
	// Tables to make, by name; nil: Ten.
	Tables []string
	// Ordered says that no row is earlier than the one before it: none are kept for
	// sorting, and one that is ends the analysis with ErrLate.
	Ordered bool

	// Workers is the number of goroutines that analyse, at most 256; 0: one for each core.
	Workers int
	// MemoryBytes is the memory for values and rows that exceed what regions and
	// addresses take; 0: DefaultMemory.
	MemoryBytes int
	// SpillDir is where what exceeds it goes; "": the system's folder for temporary
	// files.
	SpillDir string

	// Bins of a histogram of retentions (0: 100), CDFPoints of a distribution (0:
	// 1000), Windows of time (0: 200; there are up to twice as many), Top regions (0:
	// 20).
	Bins, CDFPoints, Windows, Top int
}

// DefaultMemory is the default of Options.MemoryBytes.
const DefaultMemory = 512 << 20

const maxWorkers = 256

func (o *Options) complete() error {
	for _, v := range []struct {
		name  string
		value *int
		zero  int
	}{
		{"Workers", &o.Workers, min(runtime.GOMAXPROCS(0), maxWorkers)},
		{"MemoryBytes", &o.MemoryBytes, DefaultMemory},
		{"Bins", &o.Bins, 100},
		{"CDFPoints", &o.CDFPoints, 1000},
		{"Windows", &o.Windows, 200},
		{"Top", &o.Top, 20},
	} {
		if *v.value < 0 {
			return status.New(status.InvalidArgument, "%s = %d is negative", v.name, *v.value)
		}
		if *v.value == 0 {
			*v.value = v.zero
		}
	}
	if o.Workers > maxWorkers {
		return status.New(status.InvalidArgument, "Workers = %d: at most %d", o.Workers, maxWorkers)
	}
	if o.Kind == "" {
		o.Kind = trace.Accesses
	}
	if _, limited := limits[o.Kind]; !limited && o.Kind != trace.Accesses {
		return status.New(status.InvalidArgument, "there is no kind of trace %q", o.Kind)
	}
	if o.Tables == nil {
		o.Tables = Ten
	}
	for _, name := range o.Tables {
		if _, ok := makers[name]; !ok {
			return status.New(status.InvalidArgument, "there is no table %q: those are %v and %v", name, Ten, Further)
		}
	}
	if o.SpillDir == "" {
		o.SpillDir = os.TempDir()
	}
	return nil
}

// ErrLate is in the chain of the error, which is InvalidArgument, for a late row in a
// trace said to be Ordered. Analysed again without that, the trace is sorted.
var ErrLate = errors.New("a row is earlier than the one before it")

// Analyser makes tables out of one trace. One goroutine calls Add and Finish; Close
// may come from any, at any time.
type Analyser struct {
	options Options
	needs   need
	filler  filler
	spill   spill

	journal *journal
	stages  stages

	mu       sync.Mutex
	pipeline *pipeline // of the stages that run
	closed   bool

	calls sync.Mutex // held by Add and Finish, for what follows and the fields above
	done  bool
	err   error
}

// New starts an analysis. Close it.
//
// Errors: InvalidArgument, naming the option.
func New(o Options) (*Analyser, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	ballast()
	a := &Analyser{options: o}
	for _, name := range o.Tables {
		if ok, _ := Supports(o.Kind, name); ok {
			a.needs |= makers[name].needs
		}
	}
	a.filler.typeNumber = map[string]uint32{}
	a.spill = spill{dir: o.SpillDir, memory: o.MemoryBytes}
	all := a.newStages(anyOrder | inOrder)
	if a.needs&inOrder != 0 && !o.Ordered {
		a.journal = &journal{store: a.store(1)}
		all = append(all, a.journal)
	}
	a.pipeline = newPipeline(all, o.Workers)
	return a, nil
}

// shardBits splits the stages so that all workers have something to do.
func (a *Analyser) shardBits() int { return min(max(bits.Len(uint(a.options.Workers))-2, 0), 5) }

// store is a part of the memory: the journal, the strides, the gaps and the sorting get
// a quarter each, which the shards of a stage split.
func (a *Analyser) store(shards int) store {
	return store{limit: int64(a.options.MemoryBytes / 4 / shards), spill: &a.spill}
}

// Add takes the rows of a batch. They are analysed behind; the batch is not used any
// more when it returns.
//
// Errors: InvalidArgument for bad rows, InvalidState after Finish or Close, and what
// went wrong behind, such as a full disk. After an error only Close is of use.
func (a *Analyser) Add(record arrow.Record) error {
	a.calls.Lock()
	defer a.calls.Unlock()
	if err := a.ready(); err != nil {
		return err
	}
	a.err = guarded(func() error { return a.add(record) })
	return a.err
}

func (a *Analyser) ready() error {
	switch {
	case a.err != nil:
		return a.err
	case a.done:
		return status.New(status.InvalidState, "the analysis is finished")
	}
	return nil
}

func (a *Analyser) add(record arrow.Record) error {
	batch, err := trace.Open(record)
	if err != nil {
		return err
	}
	codes := make([]int32, len(batch.Type.Values))
	for i := range codes {
		codes[i] = -1
	}
	for at := 0; at < batch.Rows; {
		if a.filler.block == nil {
			if a.filler.block, err = a.pipeline.block(); err != nil {
				return err
			}
		}
		at = a.filler.fill(batch, at, codes)
		if a.options.Ordered && a.filler.late {
			return status.Wrap(status.InvalidArgument, ErrLate, "the trace is said to be ordered, but is not within its first %d rows", a.filler.rows)
		}
		if a.filler.block.n == blockRows {
			if err := a.flush(); err != nil {
				return err
			}
		}
	}
	return nil
}

func (a *Analyser) flush() error {
	b := a.filler.block
	a.filler.block = nil
	if b == nil || b.n == 0 {
		return nil
	}
	return a.pipeline.put(b)
}

// Finish makes the tables, in the order of Options.Tables. The caller releases their
// records.
func (a *Analyser) Finish() ([]Table, error) {
	a.calls.Lock()
	defer a.calls.Unlock()
	if err := a.ready(); err != nil {
		return nil, err
	}
	a.done = true
	var tables []Table
	a.err = guarded(func() (err error) {
		tables, err = a.finish()
		return err
	})
	return tables, a.err
}

func (a *Analyser) finish() ([]Table, error) {
	if err := a.flush(); err != nil {
		return nil, err
	}
	if err := a.pipeline.drain(); err != nil {
		return nil, err
	}
	if a.filler.late && a.journal != nil {
		if err := a.replay(); err != nil {
			return nil, err
		}
	}
	r, err := a.results()
	if err != nil {
		return nil, err
	}
	return r.tables(a.options.Tables), nil
}

// replay runs the stages that need the order over the sorted rows.
func (a *Analyser) replay() error {
	again := newPipeline(a.newStages(inOrder), a.options.Workers)
	if !a.use(again) {
		again.stop()
		return errClosed
	}
	b, err := again.block()
	if err != nil {
		return err
	}
	full := func() error {
		b.regions, b.types = len(a.filler.regions.values), len(a.filler.types)
		return again.put(b)
	}
	err = a.journal.sorted(a.options.MemoryBytes/4, func(r *row) error {
		b.append(r)
		if b.n < blockRows {
			return nil
		}
		if err := full(); err != nil {
			return err
		}
		b, err = again.block()
		return err
	})
	if err != nil {
		return err
	}
	if b.n > 0 {
		if err := full(); err != nil {
			return err
		}
	}
	return again.drain()
}

// use makes p the running pipeline in place of the one before it, unless the analyser
// is closed.
func (a *Analyser) use(p *pipeline) bool {
	a.pipeline.stop()
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return false
	}
	a.pipeline = p
	return true
}

// Close ends the analysis, finished or not, and waits for its goroutines. What it
// kept in memory and on disk is gone then; tables stay. Calling it again does nothing.
func (a *Analyser) Close() {
	a.mu.Lock()
	a.closed = true
	p := a.pipeline
	a.mu.Unlock()
	p.stop()
	a.calls.Lock()
	defer a.calls.Unlock()
	a.err = errClosed
	a.spill.close()
	a.stages, a.journal, a.filler = stages{}, nil, filler{}
}

// open is an error once the analyser is closed.
func (a *Analyser) open() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return errClosed
	}
	return nil
}
