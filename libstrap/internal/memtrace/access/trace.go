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

// Phase is a name for the times from StartNS up to, not including, EndNS.
type Phase struct {
	Name           string
	StartNS, EndNS int64
}

// Options say how to read. The zero value is usable.
type Options struct {
	// RunID stands in every row.
	RunID string
	// Phases name the times of the rows; the first that fits a time names it.
	Phases []Phase
	// BatchRows is the most rows of a batch; 0 is 65,536.
	BatchRows int
	// Source adds the column "source" behind the others: "FILE:LINE", from DWARF.
	Source bool
}

const maxBatchRows = 1 << 24

// Counts is what has been read so far.
type Counts struct {
	Rows    int64  // given out; an access that both loads and stores gives two
	Records int64  // accesses in the file
	Seen    uint64 // accesses that the program made within its filters, up to the last block
	Lost    uint64 // and further ones that it could not record
	Invalid int64  // records that no program can have made, left out
	Threads int
	Bytes   int64 // of the file
	Read    int64 // of them so far
	Done    bool
}

// Trace reads a file as an array.RecordReader: loads and stores in the order of time, of
// all threads. Memory is bounded by the number of blocks and distinct places in the
// program, not by that of accesses.
type Trace struct {
	refs   atomic.Int64
	schema *arrow.Schema
	file   *os.File // nil where it was not opened here
	index  *index
	merger *merger
	rows   *rows

	mu     sync.Mutex // the counts and problems
	counts Counts
	record arrow.Record
	err    error
}

// Open reads the headers of a file. The caller must Release the trace.
//
// Errors: NotFound, Permission, IO; InvalidArgument (no regular file, an option); Corrupt
// where the file does not begin as one of libstrap-access; Unsupported where it has another
// version, or more than a million threads.
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

// newTrace reads SIZE bytes of in.
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

// Program is what the file says about the program and its recording.
func (t *Trace) Program() Program { return t.index.program }

// Ranges are those that the program named, in the order in which they began. One that did
// not end has ToNS math.MaxInt64. All have ID 0.
func (t *Trace) Ranges() []label.Range { return t.index.ranges }

// Problems tell what the file lacks and what could not be read, so far; symbols are looked
// for as rows are read.
func (t *Trace) Problems() []string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return append([]string(nil), t.index.problems...)
}

// Counts are those of the batches given out so far.
func (t *Trace) Counts() Counts {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.counts
}

// Schema is trace.Schema(trace.Accesses), and "source" where that was asked for.
func (t *Trace) Schema() *arrow.Schema { return t.schema }

// Record is the batch that Next found, valid until the next call of Next.
func (t *Trace) Record() arrow.Record { return t.record }

// Err is what ended the reading early, or nil.
func (t *Trace) Err() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.err
}

// Next makes the next batch the current one, and tells whether there was one.
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

// Retain and Release count the users; the last Release closes the file. Counts, Ranges and
// Problems go on to answer.
func (t *Trace) Retain() { t.refs.Add(1) }

// Release is described at Retain.
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
