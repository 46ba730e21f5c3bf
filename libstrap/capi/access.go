// The functions of the C API for libstrap-access: its files as traces, and the files that
// recordings write.

package main

/*
#include "strap.h"
#include "arrow_abi.h"
*/
import "C"

import (
	"os"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/access"
	"github.com/libstrap/strap/libstrap/internal/memtrace/label"
	"github.com/libstrap/strap/libstrap/internal/memtrace/parquet"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// ---- reading ----

// accessFormat is the format of strap_trace_parse that parseAccess reads.
const accessFormat = "access"

type accessOptions struct {
	RunID  string `json:"run_id"`
	Phases []struct {
		Phase   string `json:"phase"`
		StartNS int64  `json:"start_ns"`
		EndNS   int64  `json:"end_ns"`
	} `json:"phases"`
	BatchRows int  `json:"batch_rows"`
	Source    bool `json:"source"`
}

// accessTrace is a file of libstrap-access being read. The trace still returns its counts after
// its release.
type accessTrace struct {
	notASink
	trace *access.Trace
}

// parseAccess does strap_trace_parse for accessFormat.
func parseAccess(path, options *C.char, out *C.struct_ArrowArrayStream, h *C.strap_trace) error {
	var given accessOptions
	if err := traceOptions(options, &given); err != nil {
		return err
	}
	o := access.Options{RunID: given.RunID, BatchRows: given.BatchRows, Source: given.Source}
	for _, p := range given.Phases {
		o.Phases = append(o.Phases, access.Phase{Name: p.Phase, StartNS: p.StartNS, EndNS: p.EndNS})
	}
	t, err := access.Open(C.GoString(path), o)
	if err != nil {
		return err
	}
	defer t.Release()
	if err := exportReader(t, out); err != nil {
		return err
	}
	*h = C.strap_trace(traces.add(&accessTrace{trace: t}))
	return nil
}

func (t *accessTrace) counts() traceCounts {
	c := t.trace.Counts()
	return traceCounts{
		done: c.Done, rows: c.Rows, malformed: c.Invalid, bytes: c.Read, totalBytes: c.Bytes,
		failure: t.trace.Err(),
	}
}

func (t *accessTrace) table(name string) (array.RecordReader, error) {
	switch name {
	case "ranges":
		return tableOf(rangeTable(t.trace.Ranges()))
	case "program":
		return tableOf(programTable(t.trace))
	case "problems":
		b := textTable("text")
		defer b.Release()
		for _, problem := range t.trace.Problems() {
			b.Field(0).(*array.StringBuilder).Append(problem)
		}
		return tableOf(b.NewRecord())
	default:
		return nil, notFound(name)
	}
}

func (t *accessTrace) close() error { return nil }

func textTable(names ...string) *array.RecordBuilder {
	fields := make([]arrow.Field, len(names))
	for i, name := range names {
		fields[i] = arrow.Field{Name: name, Type: arrow.BinaryTypes.String}
	}
	return array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema(fields, nil))
}

func rangeTable(ranges []label.Range) arrow.Record {
	i64, u64, text := arrow.PrimitiveTypes.Int64, arrow.PrimitiveTypes.Uint64, arrow.BinaryTypes.String
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{
		{Name: "start", Type: u64}, {Name: "end", Type: u64},
		{Name: "from_ns", Type: i64}, {Name: "to_ns", Type: i64},
		{Name: "region_type", Type: text}, {Name: "region_id", Type: i64}, {Name: "name", Type: text},
	}, nil))
	defer b.Release()
	for _, r := range ranges {
		b.Field(0).(*array.Uint64Builder).Append(r.Start)
		b.Field(1).(*array.Uint64Builder).Append(r.End)
		b.Field(2).(*array.Int64Builder).Append(r.FromNS)
		b.Field(3).(*array.Int64Builder).Append(r.ToNS)
		b.Field(4).(*array.StringBuilder).Append(r.Type)
		b.Field(5).(*array.Int64Builder).Append(r.ID)
		b.Field(6).(*array.StringBuilder).Append(r.Name)
	}
	return b.NewRecord()
}

func programTable(t *access.Trace) arrow.Record {
	b := textTable("key", "value")
	defer b.Release()
	p, c := t.Program(), t.Counts()
	number := func(n int64) string { return strconv.FormatInt(n, 10) }
	for _, line := range [][2]string{
		{"exe", p.Exe}, {"pid", number(p.PID)}, {"clock", p.Clock},
		{"clock_every", number(p.ClockEvery)}, {"sample_every", number(p.SampleEvery)},
		{"realtime_ns", number(p.RealtimeNS)}, {"ended", strconv.FormatBool(p.Ended)},
		{"threads", number(int64(c.Threads))}, {"seen", strconv.FormatUint(c.Seen, 10)},
		{"recorded", number(c.Records)}, {"lost", strconv.FormatUint(c.Lost, 10)},
	} {
		b.Field(0).(*array.StringBuilder).Append(line[0])
		b.Field(1).(*array.StringBuilder).Append(line[1])
	}
	return b.NewRecord()
}

// ---- recording ----

var recordings = handles[*recording]{what: "recording of accesses", last: 1 << 61, step: 1, open: map[uint64]*recording{}}

type recordOptions struct {
	RunID        string `json:"run_id"`
	Source       bool   `json:"source"`
	KeepBlocks   bool   `json:"keep_blocks"`
	RowGroupRows int64  `json:"row_group_rows"`
	Compression  string `json:"compression"`
}

// recording is the object behind a strap_access handle. First it writes blocks to a file. Then
// strap_access_close turns that file into a Parquet file.
type recording struct {
	path    string // the Parquet file
	blocks  string // the file of blocks
	options recordOptions
	sink    *access.Recorder

	mu       sync.Mutex // guards the fields below, which strap_access_close uses
	closed   bool       // sink is closed
	trace    *access.Trace
	labeller *label.Labeller
	writer   *parquet.Writer
}

//export strapgoAccessOpen
func strapgoAccessOpen(path, options *C.char, h *C.strap_access, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r := &recording{path: C.GoString(path), blocks: C.GoString(path) + ".access"}
		if err := traceOptions(options, &r.options); err != nil {
			return err
		}
		var err error
		if r.sink, err = access.Create(r.blocks); err != nil {
			return err
		}
		*h = C.strap_access(recordings.add(r))
		return nil
	})
}

//export strapgoAccessWrite
func strapgoAccessWrite(h C.strap_access, blocks unsafe.Pointer, size C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, err := recordings.get(uint64(h))
		if err != nil {
			return err
		}
		return r.sink.Write(unsafe.Slice((*byte)(blocks), size))
	})
}

//export strapgoAccessClose
func strapgoAccessClose(h C.strap_access, timeoutMS C.int32_t, rows *C.uint64_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, err := recordings.get(uint64(h))
		if err != nil {
			return err
		}
		until := time.Now().Add(timeout(timeoutMS))
		if timeoutMS < 0 {
			until = time.Unix(1<<40, 0)
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		finished := false
		defer func() { // deferred, so that it runs also after a panic
			if finished {
				recordings.remove(uint64(h))
				r.release()
			}
		}()
		finished = true
		done, err := r.work(until)
		if r.trace != nil {
			*rows = C.uint64_t(r.trace.Counts().Rows)
		}
		if err == nil && !done {
			finished = false
			return status.New(status.Timeout, "more to do after %d ms", timeoutMS)
		}
		return err
	})
}

// work turns blocks into Parquet until the deadline, and reports whether all is done.
func (r *recording) work(until time.Time) (bool, error) {
	if r.writer == nil {
		if err := r.begin(); err != nil {
			return false, err
		}
	}
	for {
		if !r.trace.Next() {
			break
		}
		labelled, err := r.labeller.Label(r.trace.Record())
		if err != nil {
			return false, err
		}
		err = r.writer.Write(labelled)
		labelled.Release()
		if err != nil {
			return false, err
		}
		if !time.Now().Before(until) {
			return false, nil
		}
	}
	if err := r.trace.Err(); err != nil {
		return false, err
	}
	writer := r.writer
	r.writer = nil
	if err := writer.Close(); err != nil {
		return false, err
	}
	if r.options.KeepBlocks {
		return true, nil
	}
	if err := os.Remove(r.blocks); err != nil {
		return false, status.FromOS(err, "%s is written, but %s stays", r.path, r.blocks)
	}
	return true, nil
}

func (r *recording) begin() error {
	if !r.closed {
		r.closed = true
		if err := r.sink.Close(); err != nil {
			return err
		}
	}
	var err error
	r.trace, err = access.Open(r.blocks, access.Options{RunID: r.options.RunID, Source: r.options.Source})
	if err != nil {
		return err
	}
	// Label by ranges alone, without rules for symbols: a reader of the file can apply rules later.
	r.labeller, err = label.New(label.Options{Rules: []label.Rule{}, Ranges: r.trace.Ranges()})
	if err != nil {
		return err
	}
	schema, err := r.labeller.Schema(r.trace.Schema())
	if err != nil {
		return err
	}
	r.writer, err = parquet.NewWriter(r.path, schema, parquet.Options{
		RowGroupRows: r.options.RowGroupRows, Compression: r.options.Compression,
	})
	return err
}

func (r *recording) release() {
	if r.writer != nil {
		r.writer.Abort()
		r.writer = nil
	}
	if r.trace != nil {
		r.trace.Release()
	}
}
