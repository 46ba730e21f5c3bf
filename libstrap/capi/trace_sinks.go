// The functions of the C API that consume a trace: the analysis, and the writer of Parquet.

package main

/*
#include "strap.h"
#include "arrow_abi.h"
*/
import "C"

import (
	"slices"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/analyse"
	"github.com/libstrap/strap/libstrap/internal/memtrace/parquet"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// ---- analyse ----

type analyseOptions struct {
	Tables      []string `json:"tables"`
	Workers     int      `json:"workers"`
	Ordered     bool     `json:"ordered"`
	MemoryBytes int      `json:"memory_bytes"`
	SpillDir    string   `json:"spill_dir"`
	Bins        int      `json:"bins"`
	CDFPoints   int      `json:"cdf_points"`
	Windows     int      `json:"windows"`
	Top         int      `json:"top"`
}

type analysedTrace struct {
	task
	kind   trace.Kind
	tables map[string]arrow.Record
}

//export strapgoTraceAnalyse
func strapgoTraceAnalyse(stream *C.struct_ArrowArrayStream, options *C.char, h *C.strap_trace, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		in, err := importStream(stream)
		if err != nil {
			return err
		}
		kind, analyser, err := newAnalyser(in.Schema(), options)
		if err != nil {
			in.Release()
			return err
		}
		t := &analysedTrace{kind: kind}
		t.sink(in, analyser.Add, func() error {
			defer analyser.Close()
			tables, err := analyser.Finish()
			t.keep(tables)
			return err
		}, analyser.Close)
		*h = C.strap_trace(traces.add(t))
		return nil
	})
}

func (t *analysedTrace) keep(tables []analyse.Table) {
	t.tables = make(map[string]arrow.Record, len(tables))
	for _, table := range tables {
		t.tables[table.Name] = table.Record
	}
}

func newAnalyser(schema *arrow.Schema, options *C.char) (trace.Kind, *analyse.Analyser, error) {
	var given analyseOptions
	if err := traceOptions(options, &given); err != nil {
		return "", nil, err
	}
	kind, err := traceKind(schema)
	if err != nil {
		return "", nil, err
	}
	a, err := analyse.New(analyse.Options{
		Kind: kind, Tables: given.Tables, Ordered: given.Ordered, Workers: given.Workers,
		MemoryBytes: given.MemoryBytes, SpillDir: given.SpillDir,
		Bins: given.Bins, CDFPoints: given.CDFPoints, Windows: given.Windows, Top: given.Top,
	})
	return kind, a, err
}

// traceKind checks the columns of a trace and returns its kind.
func traceKind(schema *arrow.Schema) (trace.Kind, error) {
	if err := trace.Check(schema); err != nil {
		return "", err
	}
	return trace.KindOf(schema)
}

func (t *analysedTrace) table(name string) (array.RecordReader, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if name == "support" {
		return tableOf(supportTable(t.kind))
	}
	if !t.done {
		return nil, status.New(status.InvalidState, "the analysis is not done")
	}
	record, ok := t.tables[name]
	if !ok {
		return nil, notFound(name)
	}
	record.Retain()
	return tableOf(record)
}

// supportTable has a row for each table: its name, and the reason why a trace of this kind cannot
// give it. The reason is null if the trace can.
func supportTable(kind trace.Kind) arrow.Record {
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema([]arrow.Field{
		{Name: "table", Type: arrow.BinaryTypes.String},
		{Name: "reason", Type: arrow.BinaryTypes.String, Nullable: true},
	}, nil))
	defer b.Release()
	for _, name := range slices.Concat(analyse.Ten, analyse.Further) {
		b.Field(0).(*array.StringBuilder).Append(name)
		if ok, why := analyse.Supports(kind, name); ok {
			b.Field(1).AppendNull()
		} else {
			b.Field(1).(*array.StringBuilder).Append(why)
		}
	}
	return b.NewRecord()
}

// ---- write ----

type parquetOptions struct {
	RowGroupRows int64  `json:"row_group_rows"`
	Compression  string `json:"compression"`
}

type writtenTrace struct{ task }

//export strapgoTraceWriteParquet
func strapgoTraceWriteParquet(stream *C.struct_ArrowArrayStream, path, options *C.char, h *C.strap_trace, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		in, err := importStream(stream)
		if err != nil {
			return err
		}
		writer, err := newParquetWriter(in.Schema(), C.GoString(path), options)
		if err != nil {
			in.Release()
			return err
		}
		t := &writtenTrace{}
		t.sink(in, writer.Write, writer.Close, writer.Abort)
		*h = C.strap_trace(traces.add(t))
		return nil
	})
}

func newParquetWriter(schema *arrow.Schema, path string, options *C.char) (*parquet.Writer, error) {
	var given parquetOptions
	if err := traceOptions(options, &given); err != nil {
		return nil, err
	}
	return parquet.NewWriter(path, schema, parquet.Options{
		RowGroupRows: given.RowGroupRows, Compression: given.Compression,
	})
}

func (t *writtenTrace) table(name string) (array.RecordReader, error) {
	return nil, notFound(name)
}
