// The functions of the C API that analyse a part of a trace, and merge such analyses.

package main

/*
#include "strap.h"
#include "arrow_abi.h"
*/
import "C"

import (
	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/analyse"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

type partialOptions struct {
	analyse.Part
	Workers     int    `json:"workers"`
	Ordered     bool   `json:"ordered"`
	MemoryBytes int    `json:"memory_bytes"`
	SpillDir    string `json:"spill_dir"`
}

//export strapgoTracePartial
func strapgoTracePartial(stream *C.struct_ArrowArrayStream, path, options *C.char, h *C.strap_trace, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		in, err := importStream(stream)
		if err != nil {
			return err
		}
		given, analyser, err := newPart(in.Schema(), options)
		if err != nil {
			in.Release()
			return err
		}
		t, to := &writtenTrace{}, C.GoString(path)
		row := int64(given.FirstRow)
		add := func(record arrow.Record) error {
			before := row
			row += record.NumRows()
			return trace.After(before, analyser.Add(record))
		}
		t.sink(in, add, func() error {
			defer analyser.Close()
			return analyser.WritePart(to)
		}, analyser.Close)
		*h = C.strap_trace(traces.add(t))
		return nil
	})
}

func newPart(schema *arrow.Schema, options *C.char) (given partialOptions, a *analyse.Analyser, err error) {
	if err := traceOptions(options, &given); err != nil {
		return given, nil, err
	}
	kind, err := traceKind(schema)
	if err != nil {
		return given, nil, err
	}
	a, err = analyse.NewPart(analyse.Options{
		Kind: kind, Ordered: given.Ordered, Workers: given.Workers,
		MemoryBytes: given.MemoryBytes, SpillDir: given.SpillDir,
	}, given.Part)
	return given, a, err
}

type mergeOptions struct {
	Paths       []string `json:"paths"`
	Workers     int      `json:"workers"`
	MemoryBytes int      `json:"memory_bytes"`
	SpillDir    string   `json:"spill_dir"`
}

//export strapgoTraceMerge
func strapgoTraceMerge(options *C.char, h *C.strap_trace, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		var given mergeOptions
		if err := traceOptions(options, &given); err != nil {
			return err
		}
		merger, err := analyse.NewMerger(analyse.Options{
			Workers: given.Workers, MemoryBytes: given.MemoryBytes, SpillDir: given.SpillDir,
		}, given.Paths)
		if err != nil {
			return err
		}
		t := &analysedTrace{}
		t.next = func() (bool, error) {
			all, err := merger.Step()
			t.rows = int64(merger.Rows())
			if err != nil || !all {
				return false, err
			}
			tables, err := merger.Finish()
			t.kind = merger.Kind()
			t.keep(tables)
			return err == nil, err
		}
		t.end = func(bool) { merger.Close() }
		*h = C.strap_trace(traces.add(t))
		return nil
	})
}
