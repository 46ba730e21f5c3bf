// Reads an Arrow C stream of the caller as records of Go.

package main

/*
#include "arrow_stream.h"
*/
import "C"

import (
	"sync/atomic"
	"syscall"
	"unsafe"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/cdata"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// importedStream reads a stream of the caller as an array.RecordReader. Its records are in the
// memory of the caller; the last Release of a record frees that memory. The last Release of the
// importedStream releases the stream. The garbage collector does not, because it may run late,
// and the stream may hold files open.
type importedStream struct {
	refs   atomic.Int64
	stream *C.struct_ArrowArrayStream
	schema *arrow.Schema
	record arrow.Record
	err    error
}

// importStream takes ownership of *in and leaves *in released, also if it fails.
func importStream(in *C.struct_ArrowArrayStream) (*importedStream, error) {
	if in.release == nil {
		return nil, status.New(status.InvalidArgument, "the Arrow stream has been released")
	}
	own := C.arrow_import_take(in)
	if own == nil {
		return nil, status.New(status.NoMemory, "no memory for an Arrow stream")
	}
	s := &importedStream{stream: own}
	s.refs.Store(1)
	var schema C.struct_ArrowSchema
	if errno := C.arrow_import_schema(own, &schema); errno != 0 {
		err := s.failure(errno)
		s.Release()
		return nil, err
	}
	if C.GoString(schema.format) != "+s" {
		C.arrow_import_schema_release(&schema)
		s.Release()
		return nil, status.New(status.InvalidArgument, "the Arrow stream has no columns: it holds single arrays")
	}
	var err error
	s.schema, err = cdata.ImportCArrowSchema((*cdata.CArrowSchema)(unsafe.Pointer(&schema)))
	if err != nil {
		s.Release()
		return nil, status.Wrap(status.Unsupported, err, "the schema of the Arrow stream")
	}
	return s, nil
}

// failure returns the error of a callback that returned errno.
func (s *importedStream) failure(errno C.int) error {
	err := syscall.Errno(errno)
	code := status.IO
	if err == syscall.EINVAL {
		code = status.InvalidArgument
	}
	if message := C.arrow_import_error(s.stream); message != nil {
		return status.Wrap(code, err, "the Arrow stream broke off: %s", C.GoString(message))
	}
	return status.Wrap(code, err, "the Arrow stream broke off")
}

func (s *importedStream) Schema() *arrow.Schema { return s.schema }

// Record returns the batch that Next found. It is valid until the next call of Next, or longer if
// the caller retains it.
func (s *importedStream) Record() arrow.Record { return s.record }
func (s *importedStream) Err() error           { return s.err }

func (s *importedStream) Next() bool {
	if s.record != nil {
		s.record.Release()
		s.record = nil
	}
	if s.err != nil {
		return false
	}
	var array C.struct_ArrowArray
	if errno := C.arrow_import_next(s.stream, &array); errno != 0 {
		s.err = s.failure(errno)
		return false
	}
	if array.release == nil {
		return false // the end
	}
	record, err := cdata.ImportCRecordBatchWithSchema((*cdata.CArrowArray)(unsafe.Pointer(&array)), s.schema)
	if err != nil {
		C.arrow_import_array_release(&array)
		s.err = status.Wrap(status.InvalidArgument, err, "a batch of the Arrow stream")
		return false
	}
	s.record = record
	return true
}

func (s *importedStream) Retain() { s.refs.Add(1) }

func (s *importedStream) Release() {
	if s.refs.Add(-1) != 0 {
		return
	}
	if s.record != nil {
		s.record.Release()
		s.record = nil
	}
	C.arrow_import_release(s.stream)
	s.stream = nil
}
