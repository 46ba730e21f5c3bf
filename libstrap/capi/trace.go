// The handle of a memory trace in the C API: its run, counts, tables and end.

package main

/*
#include "strap.h"
#include "arrow_abi.h"
*/
import "C"

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// openTrace is the object behind a strap_trace handle.
type openTrace interface {
	counts() traceCounts
	// table returns a table. The caller releases it. The error is NotFound for an unknown name,
	// and InvalidState if the table needs the work to be done.
	table(name string) (array.RecordReader, error)
	// run works until the deadline and reports whether all is done.
	run(until time.Time) (bool, error)
	// close gives up unfinished work.
	close() error
}

type traceCounts struct {
	done                                                                 bool
	rows, skipped, malformed, unaddressed, bytes, totalBytes, renumbered int64
	failure                                                              error
}

var traces = handles[openTrace]{what: "trace", last: 1 << 62, step: 1, open: map[uint64]openTrace{}}

// traceOptions decodes a JSON object into the struct out. The fields of out are the options. An
// unknown key is InvalidArgument. NULL and "" leave out as it is.
func traceOptions(text *C.char, out any) error {
	if text == nil || *text == 0 {
		return nil
	}
	d := json.NewDecoder(bytes.NewReader([]byte(C.GoString(text))))
	d.DisallowUnknownFields()
	if err := d.Decode(out); err != nil {
		return status.Wrap(status.InvalidArgument, err, "options")
	}
	if _, err := d.Token(); !errors.Is(err, io.EOF) {
		return status.New(status.InvalidArgument, "options: more than one JSON object")
	}
	return nil
}

func notFound(name string) error {
	return status.New(status.NotFound, "there is no table %q", name)
}

// notASink is embedded in traces that do their work while their stream is read: run is an error.
type notASink struct{}

func (notASink) run(time.Time) (bool, error) {
	return false, status.New(status.InvalidState, "this trace works as its stream is read: there is nothing to run")
}

// task does its work in steps.
type task struct {
	mu     sync.Mutex
	rows   int64 // read so far
	done   bool
	failed error
	ended  bool                          // done, failed or given up
	next   func() (done bool, err error) // does one step
	end    func(given bool)              // frees what the steps use; given: the work is not done
}

// run holds the lock for one step at a time, so counts can answer between two steps.
func (s *task) run(until time.Time) (bool, error) {
	for {
		if done, err := s.step(); done || err != nil {
			return done, err
		}
		if !time.Now().Before(until) {
			return false, nil
		}
	}
}

func (s *task) step() (done bool, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done || s.failed != nil {
		return s.done, s.failed
	}
	if s.ended {
		return false, status.New(status.InvalidState, "the trace has been closed")
	}
	// If next panics, this error stays: the work must not continue after a half-done step.
	s.failed = status.New(status.Internal, "the work broke off")
	s.done, s.failed = s.next()
	if s.done || s.failed != nil {
		s.ended = true
		s.end(s.failed != nil)
	}
	return s.done, s.failed
}

func (s *task) counts() traceCounts {
	s.mu.Lock()
	defer s.mu.Unlock()
	return traceCounts{done: s.done, rows: s.rows, failure: s.failed}
}

func (s *task) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if !s.ended {
		s.ended = true
		s.end(true)
	}
	return nil
}

// sink is the task that reads a stream to its end and passes every record to add. At the end it calls
// finish. If the work, finish included, fails or is given up, it calls drop.
func (s *task) sink(in *importedStream, add func(arrow.Record) error, finish func() error, drop func()) {
	s.next = func() (bool, error) {
		if in.Next() {
			record := in.Record()
			before := s.rows
			s.rows += record.NumRows()
			return false, trace.After(before, add(record))
		}
		if err := in.Err(); err != nil {
			return false, err
		}
		err := finish()
		return err == nil, err
	}
	s.end = func(given bool) {
		in.Release()
		if given {
			drop()
		}
	}
}

//export strapgoTraceRun
func strapgoTraceRun(h C.strap_trace, timeoutMS C.int32_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		t, err := traces.get(uint64(h))
		if err != nil {
			return err
		}
		until := time.Now().Add(time.Duration(timeoutMS) * time.Millisecond)
		if timeoutMS < 0 {
			until = time.Unix(1<<40, 0)
		}
		done, err := t.run(until)
		if err == nil && !done {
			err = status.New(status.Timeout, "more to do after %d ms", timeoutMS)
		}
		return err
	})
}

//export strapgoTraceCounts
func strapgoTraceCounts(h C.strap_trace, out *C.strap_trace_counts_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		t, err := traces.get(uint64(h))
		if err != nil {
			return err
		}
		c := t.counts()
		out.done = boolInt(c.done)
		out.rows = C.uint64_t(c.rows)
		out.skipped = C.uint64_t(c.skipped)
		out.malformed = C.uint64_t(c.malformed)
		out.bytes = C.uint64_t(c.bytes)
		out.total_bytes = C.uint64_t(c.totalBytes)
		out.unaddressed = C.uint64_t(c.unaddressed)
		out.renumbered = C.uint64_t(c.renumbered)
		return c.failure
	})
}

//export strapgoTraceTable
func strapgoTraceTable(h C.strap_trace, name *C.char, out *C.struct_ArrowArrayStream, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		t, err := traces.get(uint64(h))
		if err != nil {
			return err
		}
		table, err := t.table(C.GoString(name))
		if err != nil {
			return err
		}
		defer table.Release()
		return exportReader(table, out)
	})
}

// tableOf makes a table of one record. It takes over the caller's reference to the record.
func tableOf(record arrow.Record) (array.RecordReader, error) {
	defer record.Release()
	return array.NewRecordReader(record.Schema(), []arrow.Record{record})
}

//export strapgoTraceClose
func strapgoTraceClose(h C.strap_trace, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		t, err := traces.remove(uint64(h))
		if err != nil {
			return err
		}
		return t.close()
	})
}
