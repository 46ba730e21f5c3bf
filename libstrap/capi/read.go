// The functions of the C API that read captures and export their index.

package main

/*
#include "strap.h"
#include "arrow_abi.h"
*/
import "C"

import (
	"math"
	"strings"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
)

//export strapgoReaderOpen
func strapgoReaderOpen(path *C.char, o *C.strap_reader_options, out *C.strap_reader, info *C.strap_reader_info, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		if o.flags&^C.STRAP_READ_IGNORE_INDEX != 0 {
			return status.New(status.InvalidArgument, "flags = %#x: unknown STRAP_READ_ bits", o.flags)
		}
		r, err := reader.Open(C.GoString(path), reader.Options{
			IgnoreIndex: o.flags&C.STRAP_READ_IGNORE_INDEX != 0,
		})
		if err != nil {
			return err
		}
		putInfo(info, r)
		*out = C.strap_reader(readers.add(&openReader{Reader: r}))
		return nil
	})
}

//export strapgoReaderFollow
func strapgoReaderFollow(h C.strap_reader, first C.uint64_t, out *C.strap_reader, info *C.strap_reader_info, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, err := readers.get(uint64(h))
		if err != nil {
			return err
		}
		next, err := r.Follow(int(min(first, math.MaxInt64)))
		if err != nil || next == nil {
			return err
		}
		putInfo(info, next)
		*out = C.strap_reader(readers.add(&openReader{Reader: next}))
		return nil
	})
}

func putInfo(info *C.strap_reader_info, r *reader.Reader) {
	have := r.Info()
	info.indexed = boolInt(have.Indexed)
	info.rows = C.uint64_t(have.Rows)
	info.packets = C.uint64_t(have.Packets)
	info.file_bytes = C.uint64_t(have.FileBytes)
	info.valid_bytes = C.uint64_t(have.ValidBytes)
	info.scanned = C.uint64_t(have.Scanned)
	info.live = boolInt(have.Live)
	putString(unsafe.Slice((*byte)(unsafe.Pointer(&info.problem)), len(info.problem)), have.Problem)
}

//export strapgoReaderNext
func strapgoReaderNext(h C.strap_reader, out *C.strap_packet, e *C.strap_error) C.strap_status {
	end := false
	code := guarded(e, func() error {
		r, err := readers.get(uint64(h))
		if err != nil {
			return err
		}
		r.mu.Lock()
		defer r.mu.Unlock()
		if end = r.next >= r.NumRows(); end {
			return nil
		}
		// Advance before describe: if this row has an error, the next call describes the next row.
		i := r.next
		r.next++
		return r.describe(i, out)
	})
	if end {
		return C.STRAP_END
	}
	return code
}

//export strapgoReaderAt
func strapgoReaderAt(h C.strap_reader, row C.uint64_t, out *C.strap_packet, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, i, err := findRow(h, row)
		if err != nil {
			return err
		}
		return r.describe(i, out)
	})
}

func findRow(h C.strap_reader, row C.uint64_t) (*openReader, int, error) {
	r, err := readers.get(uint64(h))
	if err != nil {
		return nil, 0, err
	}
	if n := r.NumRows(); uint64(row) >= uint64(n) {
		return nil, 0, status.New(status.NotFound, "row = %d: the capture has %d", row, n)
	}
	return r, int(row), nil
}

func (r *openReader) describe(i int, out *C.strap_packet) error {
	out.row = C.uint64_t(i)
	row, err := r.Row(i)
	if err != nil {
		return err
	}
	kind, err := codec.ParseKind(row.Codec)
	if err != nil {
		return err
	}
	out.dtype = C.strap_dtype(row.Stored)
	out.source_dtype = C.strap_dtype(row.Source)
	out.codec = C.strap_codec(kind)
	out.sequence = C.uint64_t(row.Sequence)
	out.step = C.int64_t(row.Step)
	out.token = C.int64_t(row.Token)
	out.call = C.uint32_t(row.Call)
	out.part = C.uint32_t(row.Part)
	out.parts = C.uint32_t(row.Parts)
	out.ndim = -1
	if row.Source != 0 && len(row.Shape) <= len(out.shape) {
		out.ndim = C.int32_t(len(row.Shape))
		for d, length := range row.Shape {
			out.shape[d] = C.int64_t(length)
		}
	}
	out.name_bytes = C.uint64_t(len(row.Name()))
	if row.Error != "" {
		return nil
	}
	out.present = 1
	if row.Offset >= 0 {
		out.offset = C.uint64_t(row.Offset)
		out.payload_bytes = C.uint64_t(row.PayloadLen())
	}
	decoded, err := r.DecodedLen(i)
	if err != nil {
		return err
	}
	out.decoded_bytes = C.uint64_t(decoded)
	return nil
}

//export strapgoReaderName
func strapgoReaderName(h C.strap_reader, row C.uint64_t, name *C.char, size C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, i, err := findRow(h, row)
		if err != nil {
			return err
		}
		found, err := r.Row(i)
		if err != nil {
			return err
		}
		putString(unsafe.Slice((*byte)(unsafe.Pointer(name)), size), found.Name())
		return nil
	})
}

//export strapgoReaderRead
func strapgoReaderRead(h C.strap_reader, row C.uint64_t, data unsafe.Pointer, size C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, i, err := findRow(h, row)
		if err != nil {
			return err
		}
		return r.ReadInto(i, unsafe.Slice((*byte)(data), size))
	})
}

//export strapgoReaderReadMany
func strapgoReaderReadMany(h C.strap_reader, rows *C.uint64_t, count, alignment C.size_t, data unsafe.Pointer, size C.size_t, ends *C.uint64_t, done *C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, err := readers.get(uint64(h))
		if err != nil {
			return err
		}
		n, err := r.ReadMany(unsafe.Slice((*uint64)(rows), count), int(alignment), unsafe.Slice((*byte)(data), size),
			unsafe.Slice((*uint64)(ends), count))
		*done = C.size_t(n)
		return err
	})
}

//export strapgoReaderReadRanges
func strapgoReaderReadRanges(h C.strap_reader, ranges *C.strap_range, count C.size_t, data unsafe.Pointer, size C.size_t, done *C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, err := readers.get(uint64(h))
		if err != nil {
			return err
		}
		// A strap_range has the layout of a Range.
		n, err := r.ReadRanges(unsafe.Slice((*reader.Range)(unsafe.Pointer(ranges)), count), unsafe.Slice((*byte)(data), size))
		*done = C.size_t(n)
		return err
	})
}

//export strapgoReaderPrefetch
func strapgoReaderPrefetch(h C.strap_reader, rows *C.uint64_t, count C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, err := readers.get(uint64(h))
		if err != nil {
			return err
		}
		return r.Prefetch(unsafe.Slice((*uint64)(unsafe.Pointer(rows)), count))
	})
}

//export strapgoReaderClose
func strapgoReaderClose(h C.strap_reader, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, err := readers.remove(uint64(h))
		if err != nil {
			return err
		}
		return r.Close()
	})
}

//export strapgoIndexExport
func strapgoIndexExport(h C.strap_reader, out *C.struct_ArrowArrayStream, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		r, err := readers.get(uint64(h))
		if err != nil {
			return err
		}
		records, err := r.Records()
		if err != nil {
			return err
		}
		return exportReader(records, out)
	})
}

//export strapgoIndexColumns
func strapgoIndexColumns(h C.strap_reader, names *C.char, out *C.struct_ArrowArrayStream, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		*out = C.struct_ArrowArrayStream{}
		r, err := readers.get(uint64(h))
		if err != nil {
			return err
		}
		records, err := r.Records(strings.Split(C.GoString(names), ",")...)
		if err != nil {
			return err
		}
		return exportReader(records, out)
	})
}
