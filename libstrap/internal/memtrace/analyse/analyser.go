// Package analyse computes tables about the use of memory from a memory trace, in one pass over
// the batches of the trace. docs/MEMORY_TRACES.md describes the tables.
//
// # Stages
//
// Rows are copied into blocks. Several stages process each block at the same time. A stage
// computes the data for one or more tables. If there are many cores, a stage is split into shares
// by regions, addresses or pages.
//
// # Memory
//
// The memory of a stage grows with the regions, addresses and pages of the trace, and not with its
// rows. A long row covers many pages; its pages are kept as a span, which takes memory for its two
// ends. There are two exceptions: values whose exact quantiles are needed (strides, gaps), and rows
// that may have to be sorted. They are kept in compact form up to Options.MemoryBytes, and the rest
// goes to a file in Options.SpillDir. Radix selection finds the quantiles of spilled values, in a
// few passes over the file.
//
// # Order
//
// Locality, gaps, reuse distances and the working set over time need the accesses in the order of
// time. Rows of the same time keep the order of the trace. Nearly all traces have this order, so
// the stages process rows as they come. Meanwhile the rows are packed into a journal, about ten
// bytes a row. A row is late if its time is before that of the row before it. The first late row
// ends the stages that need the order. Finish then sorts the journal with an external merge sort
// and runs these stages over the sorted rows. With Options.Ordered there is no journal, and a late
// row is an error. That is for callers that know the order or can read their trace twice.
//
// # Numbers
//
// Sums have 128 bits. A mean is the exact sum over the count, rounded once. If float64 holds the
// values exactly (below 2^53), a quantile equals numpy's linear interpolation to the last bit. Above
// that it is exact. Means over regions are summed as in pandas.
package analyse

import (
	"errors"
	"math/bits"
	"os"
	"sync"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/procs"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Options are the options of New.
type Options struct {
	// Kind is the kind of the trace. "" means trace.Accesses. Tables that the kind does not support
	// (see Supports) are empty.
	Kind trace.Kind
	// Tables are the names of the tables to make. nil means Ten.
	Tables []string
	// Ordered states that no row is earlier than the row before it. Then no rows are kept for
	// sorting, and an earlier row ends the analysis with ErrLate.
	Ordered bool

	// Workers is the number of goroutines that analyse, at most 256. 0 means one for each core.
	Workers int
	// MemoryBytes is the memory for rows to sort and for the values behind exact quantiles. The
	// memory for regions, addresses and pages comes on top. 0 means DefaultMemory.
	MemoryBytes int
	// SpillDir is the folder for a temporary file with the rows and values that exceed MemoryBytes.
	// "" means the system's folder for temporary files.
	SpillDir string

	// Bins is the number of bins of a retention histogram (0: 100). CDFPoints is the most points
	// of a retention distribution (0: 1000). Windows is the number of windows of time (0: 200);
	// there may be up to twice as many. Top is the number of top regions (0: 20).
	Bins, CDFPoints, Windows, Top int
}

// DefaultMemory is the default of Options.MemoryBytes: 512 MiB.
const DefaultMemory = 512 << 20

const maxWorkers = 256

func (o *Options) complete() error {
	for _, v := range []struct {
		name  string
		value *int
		zero  int
	}{
		{"Workers", &o.Workers, min(procs.Count, maxWorkers)},
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

// ErrLate is wrapped by the InvalidArgument error for a late row with Options.Ordered. Analyse the
// trace again without Ordered: then its rows are sorted.
var ErrLate = errors.New("a row is earlier than the one before it")

// Analyser makes the tables of one trace. One goroutine calls Add and Finish. Any goroutine may call
// Close at any time.
type Analyser struct {
	options Options
	part    *Part // nil for a whole trace
	merging bool  // for a Merger: the stages take no blocks
	needs   need
	filler  filler
	spill   spill

	journal *journal
	stages  stages

	mu       sync.Mutex // guards pipeline and closed
	pipeline *pipeline  // runs the stages
	closed   bool

	calls sync.Mutex // held by Add, Finish and Close; guards done, err and the fields above mu
	done  bool       // Finish was called
	err   error
}

// New starts an analysis. The caller must Close it.
//
// Errors: InvalidArgument; the message names the option.
func New(o Options) (*Analyser, error) { return start(o, nil, false) }

func start(o Options, part *Part, merging bool) (*Analyser, error) {
	if err := o.complete(); err != nil {
		return nil, err
	}
	ballast()
	a := &Analyser{options: o, part: part, merging: merging}
	for _, name := range o.Tables {
		if ok, _ := Supports(o.Kind, name); ok {
			a.needs |= makers[name].needs
		}
	}
	a.filler.typeNumber = map[string]uint32{}
	a.spill = spill{dir: o.SpillDir, memory: o.MemoryBytes}
	which := anyOrder | inOrder
	if a.keepsRows() {
		which = anyOrder
	}
	all := a.newStages(which)
	if a.needs&inOrder != 0 && (!o.Ordered || a.keepsRows()) {
		a.journal = &journal{store: a.store(1)}
		all = append(all, a.journal)
	}
	if merging {
		all = nil
	}
	a.pipeline = newPipeline(all, o.Workers)
	return a, nil
}

// keepsRows reports whether the stages that need the order of time run only when parts are merged.
func (a *Analyser) keepsRows() bool { return a.part != nil && a.part.RowsKept }

// shardBits returns the logarithm to base 2 of the shares of a stage. It grows with the workers, so
// that all of them have work. A part has one share: parts run side by side.
func (a *Analyser) shardBits() int {
	if a.part != nil {
		return 0
	}
	return min(max(bits.Len(uint(a.options.Workers))-2, 0), 5)
}

// store returns the memory of one share of a stage. The journal, the strides, the gaps and the
// sorting each get a quarter of MemoryBytes, which the shares of a stage divide.
func (a *Analyser) store(shards int) store {
	return store{limit: int64(a.options.MemoryBytes / 4 / shards), spill: &a.spill}
}

// Add copies the rows of a batch, and the workers analyse them. Add does not use the batch after it
// returns. It waits while the workers are many blocks behind.
//
// Errors: InvalidArgument for bad rows, InvalidState after Finish or Close, and errors of the workers,
// such as a full disk. After an error only Close has an effect.
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
		if a.options.Ordered && a.filler.late && !a.keepsRows() {
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

// Finish waits for the workers and returns the tables in the order of Options.Tables. The caller
// releases their records. Errors: as for Add.
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

// settle waits until the stages have all rows, in the order that they need.
func (a *Analyser) settle() error {
	if err := a.flush(); err != nil {
		return err
	}
	if err := a.pipeline.drain(); err != nil {
		return err
	}
	if a.filler.late && a.journal != nil && !a.keepsRows() {
		return a.replay()
	}
	return nil
}

func (a *Analyser) finish() ([]Table, error) {
	if err := a.settle(); err != nil {
		return nil, err
	}
	r, err := a.results()
	if err != nil {
		return nil, err
	}
	return r.tables(a.options.Tables), nil
}

// replay runs the stages that need the order of time again, over the sorted rows of the journal.
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

// use stops the running pipeline and replaces it by p. If the analyser is closed, it does not replace
// it, and returns false.
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

// Close ends the analysis, finished or not, and waits for its goroutines. It frees the memory and
// the temporary file. Tables that Finish returned stay valid. A second call does nothing.
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

// open returns an error if the analyser is closed.
func (a *Analyser) open() error {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return errClosed
	}
	return nil
}
