// The functions of the C API that give a trace as a stream: the parser, and the labeller.

package main

/*
#include "strap.h"
#include "arrow_abi.h"
*/
import "C"

import (
	"sync"
	"sync/atomic"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/label"
	"github.com/libstrap/strap/libstrap/internal/memtrace/parse"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// ---- parse ----

type parseOptions struct {
	RunID  string `json:"run_id"`
	Phases []struct {
		Phase   string `json:"phase"`
		StartNS int64  `json:"start_ns"`
		EndNS   int64  `json:"end_ns"`
	} `json:"phases"`
	Workers      int     `json:"workers"`
	BatchRows    int     `json:"batch_rows"`
	SampleEvery  int     `json:"sample_every"`
	CyclesPerNS  float64 `json:"cycles_per_ns"`
	Instructions bool    `json:"instructions"`
}

// parsedTrace is a text being parsed. The source still returns its counts after its release.
type parsedTrace struct {
	notASink
	source *parse.Source
}

//export strapgoTraceParse
func strapgoTraceParse(format, path, options *C.char, out *C.struct_ArrowArrayStream, h *C.strap_trace, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		if C.GoString(format) == accessFormat {
			return parseAccess(path, options, out, h)
		}
		var given parseOptions
		if err := traceOptions(options, &given); err != nil {
			return err
		}
		o := parse.Options{
			RunID: given.RunID, Workers: given.Workers, BatchRows: given.BatchRows,
			SampleEvery: given.SampleEvery, CyclesPerNS: given.CyclesPerNS, Instructions: given.Instructions,
		}
		for _, p := range given.Phases {
			o.Phases = append(o.Phases, parse.Phase{Name: p.Phase, StartNS: p.StartNS, EndNS: p.EndNS})
		}
		source, err := parse.Open(parse.Format(C.GoString(format)), C.GoString(path), o)
		if err != nil {
			return err
		}
		defer source.Release()
		if err := exportReader(source, out); err != nil {
			return err
		}
		*h = C.strap_trace(traces.add(&parsedTrace{source: source}))
		return nil
	})
}

func (t *parsedTrace) counts() traceCounts {
	c := t.source.Counts()
	return traceCounts{
		done: c.Done, rows: c.Rows, skipped: c.Skipped, malformed: c.Malformed,
		unaddressed: c.Unaddressed, bytes: c.Bytes, totalBytes: c.TotalBytes, failure: t.source.Err(),
	}
}

func (t *parsedTrace) table(name string) (array.RecordReader, error) {
	if name != "malformed" {
		return nil, notFound(name)
	}
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{
		{Name: "line", Type: arrow.PrimitiveTypes.Int64},
		{Name: "text", Type: arrow.BinaryTypes.String},
	}, nil))
	defer b.Release()
	for _, sample := range t.source.Counts().Samples {
		b.Field(0).(*array.Int64Builder).Append(sample.Line)
		b.Field(1).(*array.StringBuilder).Append(sample.Text)
	}
	return tableOf(b.NewRecord())
}

func (t *parsedTrace) close() error { return nil }

// ---- label ----

type labelOptions struct {
	Rules  []label.Rule  `json:"rules"`
	Policy label.Policy  `json:"policy"`
	Ranges []label.Range `json:"ranges"`
}

// labelledTrace is an array.RecordReader over the labelled records of a stream.
type labelledTrace struct {
	notASink
	refs atomic.Int64

	mu       sync.Mutex
	in       *importedStream
	labeller *label.Labeller
	schema   *arrow.Schema
	record   arrow.Record
	rows     int64 // read so far
	done     bool
	err      error
}

//export strapgoTraceLabel
func strapgoTraceLabel(stream *C.struct_ArrowArrayStream, options *C.char, out *C.struct_ArrowArrayStream, h *C.strap_trace, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		in, err := importStream(stream)
		if err != nil {
			return err
		}
		t := &labelledTrace{in: in}
		t.refs.Store(1)
		defer t.Release()
		var given labelOptions
		if err := traceOptions(options, &given); err != nil {
			return err
		}
		t.labeller, err = label.New(label.Options{Rules: given.Rules, Policy: given.Policy, Ranges: given.Ranges})
		if err != nil {
			return err
		}
		if t.schema, err = t.labeller.Schema(in.Schema()); err != nil {
			return err
		}
		if err := exportReader(t, out); err != nil {
			return err
		}
		*h = C.strap_trace(traces.add(t))
		return nil
	})
}

func (t *labelledTrace) Schema() *arrow.Schema { return t.schema }
func (t *labelledTrace) Record() arrow.Record  { return t.record }
func (t *labelledTrace) Err() error            { return t.err }
func (t *labelledTrace) Retain()               { t.refs.Add(1) }

func (t *labelledTrace) Next() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.drop()
	if t.done || t.err != nil {
		return false
	}
	if !t.in.Next() {
		t.err = t.in.Err()
		t.done = t.err == nil
		return false
	}
	record := t.in.Record()
	t.record, t.err = t.labeller.Label(record)
	t.err = trace.After(t.rows, t.err)
	t.rows += record.NumRows()
	return t.err == nil
}

func (t *labelledTrace) drop() {
	if t.record != nil {
		t.record.Release()
		t.record = nil
	}
}

func (t *labelledTrace) Release() {
	if t.refs.Add(-1) == 0 {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.drop()
		t.in.Release()
	}
}

func (t *labelledTrace) counts() traceCounts {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.labeller.Counts()
	return traceCounts{done: t.done, rows: c.Rows, skipped: c.Skipped, renumbered: c.Renumbered, failure: t.err}
}

func (t *labelledTrace) table(name string) (array.RecordReader, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	switch name {
	case "region_map":
		return tableOf(t.labeller.RegionMap())
	case "kv_block_lifecycle":
		return t.labeller.KVLifecycle()
	case "label_coverage":
		return tableOf(t.labeller.Coverage())
	default:
		return nil, notFound(name)
	}
}

func (t *labelledTrace) close() error { return nil }
