// Opens a file of libstrap-access, and reads it as records.

package access

import (
	"io"
	"os"
	"sync"
	"sync/atomic"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/label"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Phase names the times StartNS <= t < EndNS, in ns of CLOCK_MONOTONIC.
type Phase struct {
	Name           string
	StartNS, EndNS int64
}

// Options are the options of Open. The zero value is usable.
type Options struct {
	// RunID is the run_id of every row.
	RunID string
	// Phases name the times of rows. A row gets the first phase that has its time.
	Phases []Phase
	// BatchRows is the most rows of a batch. 0 means 65,536.
	BatchRows int
	// Source adds "source" as the last column: "FILE:LINE", from DWARF.
	Source bool
}

const maxBatchRows = 1 << 24

// Counts describes the file and what has been read of it so far.
type Counts struct {
	Rows    int64  // returned so far; an access that loads and stores gives two rows
	Records int64  // accesses in the file
	Seen    uint64 // accesses that the program made within its filters, up to the last block
	Lost    uint64 // further accesses that the runtime could not record
	Invalid int64  // records that no program can have made; they are left out
	Threads int
	Bytes   int64 // length of the file
	Read    int64 // bytes read so far
	Done    bool
}

// Trace reads a file as an array.RecordReader. Its rows are the loads and stores of all threads in
// the order of time. Its memory grows with the number of blocks and of distinct places in the
// program, and not with the number of accesses.
type Trace struct {
	refs   atomic.Int64
	schema *arrow.Schema
	file   *os.File // nil if newTrace was called directly
	index  *index
	merger *merger
	rows   *rows

	mu     sync.Mutex // guards counts, err and the problems in index
	counts Counts
	record arrow.Record
	err    error
}

// Open opens a file and reads the headers of its blocks. The caller must Release the trace.
//
// Errors: NotFound, Permission, IO; InvalidArgument (no regular file, an option); Corrupt (the
// file does not begin like a file of libstrap-access); Unsupported (the file has another version,
// or more than 1,048,576 threads).
func Open(path string, o Options) (*Trace, error) {
	f, info, err := openRegular(path)
	if err != nil {
		return nil, status.FromOS(err, "cannot read the accesses in %s", path)
	}
	t, err := newTrace(f, info.Size(), o)
	if err != nil {
		f.Close()
		return nil, err
	}
	t.file = f
	return t, nil
}

// newTrace reads the first size bytes of in.
func newTrace(in io.ReaderAt, size int64, o Options) (*Trace, error) {
	if o.BatchRows < 0 || o.BatchRows > maxBatchRows {
		return nil, status.New(status.InvalidArgument, "batch_rows = %d: must be 0 to %d", o.BatchRows, maxBatchRows)
	}
	if o.BatchRows == 0 {
		o.BatchRows = 1 << 16
	}
	for _, p := range o.Phases {
		if p.StartNS > p.EndNS {
			return nil, status.New(status.InvalidArgument, "phase %q ends at %d, before its start at %d", p.Name, p.EndNS, p.StartNS)
		}
	}
	x, err := readIndex(in, size)
	if err != nil {
		return nil, err
	}
	t := &Trace{schema: schemaOf(o.Source), index: x, merger: newMerger(in, size, x.order)}
	t.counts = Counts{
		Records: x.records, Seen: x.seen, Lost: x.lost, Threads: len(x.order), Bytes: x.size,
	}
	sites := &symbolizer{
		maps: x.maps, modules: map[string]*module{}, changed: x.program.RealtimeNS,
		sources: o.Source, problem: t.problem,
	}
	t.rows = newRows(t.schema, sites, o)
	t.refs.Store(1)
	return t, nil
}

func schemaOf(source bool) *arrow.Schema {
	schema := trace.Schema(trace.Accesses)
	if !source {
		return schema
	}
	meta := schema.Metadata()
	fields := append(schema.Fields(), arrow.Field{Name: "source", Type: trace.Text, Nullable: true})
	return arrow.NewSchema(fields, &meta)
}

func (t *Trace) problem(format string, args ...any) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.index.problem(format, args...)
}

// Program returns the description of the program and its recording in the file.
func (t *Trace) Program() Program { return t.index.program }

// Ranges returns the ranges that the program named, in the order in which they began. A range that
// did not end has ToNS math.MaxInt64. All ranges have ID 0.
func (t *Trace) Ranges() []label.Range { return t.index.ranges }

// Problems returns what the file lacks and what could not be read. The list may grow while rows are
// read, because symbols are looked up only then.
func (t *Trace) Problems() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.index.problems...)
}

// Counts returns the counts after the last batch that Next found.
func (t *Trace) Counts() Counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts
}

// Schema returns trace.Schema(trace.Accesses). Options.Source adds the column "source".
func (t *Trace) Schema() *arrow.Schema { return t.schema }

// Record returns the batch that Next found. It is valid until the next call of Next.
func (t *Trace) Record() arrow.Record { return t.record }

// Err returns the error that ended the reading early, or nil.
func (t *Trace) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// Next reads the next batch. It returns false at the end, and after an error; see Err.
func (t *Trace) Next() bool {
	t.drop()
	if t.refs.Load() <= 0 || t.Counts().Done || t.Err() != nil {
		return false
	}
	t.rows.begin()
	done, err := t.merger.rows(t.rows.add)
	invalid, taken := t.merger.invalid, t.merger.taken
	var record arrow.Record
	if err == nil && t.rows.n > 0 {
		record = t.rows.record(t.Counts().Rows)
	}
	if done && invalid > 0 {
		t.problem("%d records are damaged and left out", invalid)
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.err, t.record = err, record
	t.counts.Invalid = invalid
	t.counts.Done = done
	t.counts.Read = taken * recordBytes
	if done {
		t.counts.Read = t.counts.Bytes
	}
	if record == nil {
		return false
	}
	t.counts.Rows += record.NumRows()
	return true
}

func (t *Trace) drop() {
	if t.record != nil {
		t.record.Release()
		t.record = nil
	}
}

// Retain adds a reference.
func (t *Trace) Retain() { t.refs.Add(1) }

// Release drops a reference. The last Release closes the file. Counts, Ranges, Program and Problems
// still answer afterwards.
func (t *Trace) Release() {
	if t.refs.Add(-1) != 0 {
		return
	}
	t.drop()
	t.merger, t.rows = nil, nil
	if t.file != nil {
		t.file.Close()
	}
}
