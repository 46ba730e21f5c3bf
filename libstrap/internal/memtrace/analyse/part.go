// Writes the file of a partial analysis, which covers some of a trace's rows.

package analyse

import (
	"bufio"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	stdhash "hash"
	"math"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/partial"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// A partial analysis has all that the ten tables need of a part of a trace: of some consecutive rows.
// A Merger makes the tables of the partial analyses of all parts. They equal those of one analysis
// of the whole trace. docs/MEMORY_TRACES.md says what each table needs.
//
// The file of a partial analysis begins with the records of strides and gaps (record.go). A sequence of
// streams of Arrow's IPC format follows, one for each partTable, and then the offset of the first stream,
// in 8 bytes, and the SHA-256 of all bytes before. The metadata of the first stream's schema has the Part,
// as JSON.

// partVersion is the version of the format. Files of other versions are refused.
const partVersion = 1

// offsetBytes is the size of the offset of the first stream.
const offsetBytes = 8

// partKey is the key of the Part in the metadata of the first stream's schema.
const partKey = "strap_partial_analysis"

// Part says which rows of which trace a partial analysis is of.
type Part struct {
	Trace TraceID `json:"trace"`
	// FirstRow and EndRow are the rows of the part: [FirstRow, EndRow) of the trace.
	FirstRow uint64 `json:"first_row"`
	EndRow   uint64 `json:"end_row"`
	// RowsKept says that the partial analysis has the rows themselves for the tables that need the
	// order of time. It is for traces whose parts overlap in time. All parts of a trace must have
	// the same value.
	RowsKept bool `json:"rows_kept"`
}

// TraceID tells traces apart. Equal traces have equal ids.
type TraceID struct {
	Fingerprint string `json:"fingerprint"`
	Rows        uint64 `json:"rows"`
	Bytes       uint64 `json:"bytes"` // the size of its files
}

// partHead is the JSON in the file of a partial analysis.
type partHead struct {
	Version int `json:"version"`
	Part
	Kind trace.Kind `json:"kind"`
	// The times of the earliest and the latest row in ns. Without rows Earliest is above Latest.
	Earliest int64 `json:"earliest_ns"`
	Latest   int64 `json:"latest_ns"`
}

// NewPart starts a partial analysis of the rows of a part. The caller passes them to Add, calls
// WritePart in place of Finish, and must Close the analyser. Options.Tables must be nil.
//
// Errors: InvalidArgument; the message names the option.
func NewPart(o Options, p Part) (*Analyser, error) {
	switch {
	case o.Tables != nil:
		return nil, status.New(status.InvalidArgument, "Tables = %v: a partial analysis is for all of %v", o.Tables, Ten)
	case p.Trace.Fingerprint == "":
		return nil, status.New(status.InvalidArgument, "trace.fingerprint is empty")
	case p.FirstRow > p.EndRow || p.EndRow > p.Trace.Rows:
		return nil, status.New(status.InvalidArgument, "rows %d to %d: they must ascend, within the %d rows of the trace", p.FirstRow, p.EndRow, p.Trace.Rows)
	}
	return start(o, &p, false)
}

// WritePart waits for the workers and writes the partial analysis to a file, which appears when it is
// whole. Errors: as for Add, InvalidArgument if Add got more or fewer rows than the part has, NotFound,
// Permission, NoSpace, IO.
func (a *Analyser) WritePart(path string) error {
	a.calls.Lock()
	defer a.calls.Unlock()
	if err := a.ready(); err != nil {
		return err
	}
	a.done = true
	a.err = guarded(func() error {
		if err := a.settle(); err != nil {
			return err
		}
		if n := a.part.EndRow - a.part.FirstRow; a.filler.rows != n {
			return status.New(status.InvalidArgument, "the part has %d rows, and %d came", n, a.filler.rows)
		}
		return a.writePart(path)
	})
	return a.err
}

func (a *Analyser) writePart(path string) error {
	head := partHead{Version: partVersion, Part: *a.part, Kind: a.options.Kind, Earliest: math.MaxInt64}
	for _, s := range a.stages.counts {
		for _, r := range s.regions {
			head.Earliest = min(head.Earliest, r.first[0], r.first[1])
			head.Latest = max(head.Latest, r.last[0], r.last[1])
		}
	}
	text, err := json.Marshal(head)
	if err != nil {
		return status.Wrap(status.Internal, err, "the head of the partial analysis")
	}
	file, err := partial.Create(path, 0o644)
	if err != nil {
		return err
	}
	defer file.Discard()
	to := &partSink{path: path, file: file, sum: sha256.New()}
	w := &partWriter{buffer: bufio.NewWriterSize(to, 1<<18)}
	if err := a.writeBody(w, arrow.NewMetadata([]string{partKey}, []string{string(text)})); err != nil {
		return to.cause(err)
	}
	if _, err := file.Write(to.sum.Sum(nil)); err != nil {
		return status.FromOS(err, "cannot write %q", path)
	}
	return file.Place()
}

// writeBody writes all of a file but the checksum.
func (a *Analyser) writeBody(w *partWriter, metadata arrow.Metadata) error {
	if err := a.moveValues(w); err != nil {
		return err
	}
	tables := w.at()
	if err := a.writeTables(w, metadata); err != nil {
		return err
	}
	if err := w.write(binary.LittleEndian.AppendUint64(nil, uint64(tables))); err != nil {
		return err
	}
	return w.buffer.Flush()
}

// partWriter counts the bytes that it writes.
type partWriter struct {
	buffer *bufio.Writer
	size   int64
}

func (w *partWriter) at() int64 { return w.size }

func (w *partWriter) write(p []byte) error {
	_, err := w.Write(p)
	return err
}

func (w *partWriter) Write(p []byte) (int, error) {
	n, err := w.buffer.Write(p)
	w.size += int64(n)
	return n, err
}

// partSink writes to the file, and computes the checksum of what it writes.
type partSink struct {
	path string
	file *partial.File
	sum  stdhash.Hash
	err  error
}

func (w *partSink) Write(p []byte) (int, error) {
	w.sum.Write(p) // never fails
	n, err := w.file.Write(p)
	if err != nil {
		w.err = status.FromOS(err, "cannot write %q", w.path)
	}
	return n, err
}

// cause returns the error of the disk if there is one. Arrow's error has lost its code.
func (w *partSink) cause(err error) error {
	if w.err != nil {
		return w.err
	}
	return err
}
