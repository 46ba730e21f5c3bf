// Exports records of Go as streams of the Arrow C stream interface.

package main

/*
#include <errno.h>
#include "arrow_stream.h"
*/
import "C"

import (
	"encoding/binary"
	"strings"
	"sync"
	"unsafe"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/bitutil"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Records leave the library through the Arrow C stream interface, batch by batch. get_next
// (arrow_stream.c) asks for a batch, and only then is the batch copied into C memory. The
// consumer holds C memory alone, so a batch outlives the stream, and its release does not
// enter Go.

// arrowStream is one exported stream.
type arrowStream struct {
	mu     sync.Mutex
	source array.RecordReader // nil once released
}

// arrowStreams holds the streams by their ids. C memory has the id of a stream, because it
// must not hold Go pointers.
var arrowStreams = struct {
	sync.Mutex
	last uint64
	open map[uint64]*arrowStream
}{open: map[uint64]*arrowStream{}}

// exportRecords makes *out a stream over records. Each record must have the given schema;
// otherwise the error is InvalidArgument. See exportReader for the rest.
func exportRecords(schema *arrow.Schema, records []arrow.Record, out *C.struct_ArrowArrayStream) error {
	*out = C.struct_ArrowArrayStream{}
	source, err := array.NewRecordReader(schema, records)
	if err != nil {
		return status.Wrap(status.InvalidArgument, err, "records of one stream")
	}
	defer source.Release()
	return exportReader(source, out)
}

// exportReader makes *out a stream over the records of source. It holds a reference to source
// until the consumer releases the stream. It asks source for a record when the consumer asks for
// that record, and copies it.
//
// Columns may be null, bool, integers, float32, float64, timestamp, utf8, large_utf8, binary,
// large_binary, dictionaries of these with signed indices, and lists and structs of these. Any
// other type is status.Unsupported. After an error *out is all zero, which means released.
func exportReader(source array.RecordReader, out *C.struct_ArrowArrayStream) error {
	*out = C.struct_ArrowArrayStream{}
	for _, f := range source.Schema().Fields() {
		if err := exportable(f); err != nil {
			return err
		}
	}

	arrowStreams.Lock()
	arrowStreams.last++
	id := arrowStreams.last
	arrowStreams.open[id] = &arrowStream{source: source}
	arrowStreams.Unlock()
	source.Retain()
	if C.arrow_stream_init(out, C.uint64_t(id)) != 0 {
		closeArrowStream(id)
		return status.New(status.NoMemory, "no memory for an Arrow stream")
	}
	return nil
}

func findArrowStream(id uint64) (*arrowStream, error) {
	arrowStreams.Lock()
	defer arrowStreams.Unlock()
	if s, ok := arrowStreams.open[id]; ok {
		return s, nil
	}
	return nil, errReleased(id)
}

func errReleased(id uint64) error {
	return status.New(status.InvalidState, "Arrow stream %d has been released", id)
}

func closeArrowStream(id uint64) {
	arrowStreams.Lock()
	s := arrowStreams.open[id]
	delete(arrowStreams.open, id)
	arrowStreams.Unlock()
	if s == nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.source.Release()
	s.source = nil
}

//export strapgoArrowSchema
func strapgoArrowSchema(id C.uint64_t, out *C.struct_ArrowSchema, message *C.char) C.int {
	return guardArrow(message, func() error {
		s, err := findArrowStream(uint64(id))
		if err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.source == nil {
			return errReleased(uint64(id))
		}
		schema := s.source.Schema()
		return fillSchema(out, arrow.StructOf(schema.Fields()...), "", 0, schema.Metadata())
	})
}

//export strapgoArrowNext
func strapgoArrowNext(id C.uint64_t, out *C.struct_ArrowArray, message *C.char) C.int {
	return guardArrow(message, func() error {
		s, err := findArrowStream(uint64(id))
		if err != nil {
			return err
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.source == nil {
			return errReleased(uint64(id))
		}
		if !s.source.Next() {
			return s.source.Err() // nil is the end: *out stays released
		}
		return fillRecord(out, s.source.Record())
	})
}

//export strapgoArrowRelease
func strapgoArrowRelease(id C.uint64_t) {
	guardArrow(nil, func() error {
		closeArrowStream(uint64(id))
		return nil
	})
}

// guardArrow runs f and returns 0, or an errno value for its error or panic. The message then
// receives the text, at most STRAP_ARROW_MESSAGE bytes with the final zero. message may be nil.
func guardArrow(message *C.char, f func() error) (errno C.int) {
	report := func(err error) C.int {
		if message != nil {
			putString(cBytes(unsafe.Pointer(message), C.STRAP_ARROW_MESSAGE), err.Error())
		}
		switch status.CodeOf(err) {
		case status.NoMemory:
			return C.ENOMEM
		case status.InvalidState, status.InvalidArgument:
			return C.EINVAL
		case status.Unsupported:
			return C.ENOSYS
		default:
			return C.EIO
		}
	}
	defer func() {
		if p := recover(); p != nil {
			errno = report(status.New(status.Internal, "Arrow export: %v", p))
		}
	}()
	if err := f(); err != nil {
		return report(err)
	}
	return 0
}

// ---- schema ----

// formats are the Arrow format strings of the types without parameters.
var formats = map[arrow.Type]string{
	arrow.NULL: "n", arrow.BOOL: "b",
	arrow.INT8: "c", arrow.UINT8: "C", arrow.INT16: "s", arrow.UINT16: "S",
	arrow.INT32: "i", arrow.UINT32: "I", arrow.INT64: "l", arrow.UINT64: "L",
	arrow.FLOAT32: "f", arrow.FLOAT64: "g",
	arrow.STRING: "u", arrow.LARGE_STRING: "U", arrow.BINARY: "z", arrow.LARGE_BINARY: "Z",
	arrow.LIST: "+l", arrow.STRUCT: "+s",
}

var timestampFormats = map[arrow.TimeUnit]string{
	arrow.Second: "tss:", arrow.Millisecond: "tsm:", arrow.Microsecond: "tsu:", arrow.Nanosecond: "tsn:",
}

func formatOf(t arrow.DataType) (string, error) {
	if ts, ok := t.(*arrow.TimestampType); ok {
		return timestampFormats[ts.Unit] + ts.TimeZone, nil
	}
	if d, ok := t.(*arrow.DictionaryType); ok {
		t = d.IndexType
	}
	if f, ok := formats[t.ID()]; ok {
		return f, nil
	}
	return "", status.New(status.Unsupported, "the Arrow export has no type %v", t)
}

// exportable checks that the stream can express the type of a field and of all its children. It
// is called before a stream is exported, so get_schema and get_next do not fail for a type.
func exportable(f arrow.Field) error {
	format, err := formatOf(f.Type)
	if err != nil {
		return status.Wrap(status.Unsupported, err, "column %q", f.Name)
	}
	if strings.IndexByte(f.Name+format, 0) >= 0 {
		return status.New(status.Unsupported, "column %q: a name with a zero byte cannot cross the C interface", f.Name)
	}
	if d, ok := f.Type.(*arrow.DictionaryType); ok {
		if !arrow.IsSignedInteger(d.IndexType.ID()) {
			return status.New(status.Unsupported, "column %q: the Arrow export has no dictionary index %v", f.Name, d.IndexType)
		}
		return exportable(arrow.Field{Name: f.Name, Type: d.ValueType})
	}
	for _, child := range childFields(f.Type) {
		if err := exportable(child); err != nil {
			return err
		}
	}
	return nil
}

func childFields(t arrow.DataType) []arrow.Field {
	if n, ok := t.(arrow.NestedType); ok {
		return n.Fields()
	}
	return nil
}

func fillSchema(out *C.struct_ArrowSchema, t arrow.DataType, name string, flags int64, metadata arrow.Metadata) error {
	format, err := formatOf(t)
	if err != nil {
		return err
	}
	pairs := encodeMetadata(metadata)
	fields := childFields(t)
	if C.arrow_schema_init(out, C.size_t(len(format)), C.size_t(len(name)), C.size_t(len(pairs)),
		C.int64_t(flags), C.int64_t(len(fields))) != 0 {
		return status.New(status.NoMemory, "no memory for the Arrow schema of column %q", name)
	}
	filled := false
	defer func() {
		if !filled {
			C.arrow_schema_release(out)
		}
	}()
	copy(cBytes(unsafe.Pointer(out.format), len(format)), format)
	copy(cBytes(unsafe.Pointer(out.name), len(name)), name)
	copy(cBytes(unsafe.Pointer(out.metadata), len(pairs)), pairs)
	if d, ok := t.(*arrow.DictionaryType); ok {
		if d.Ordered {
			out.flags |= C.ARROW_FLAG_DICTIONARY_ORDERED
		}
		if out.dictionary = C.arrow_schema_node(); out.dictionary == nil {
			return status.New(status.NoMemory, "no memory for the dictionary of column %q", name)
		}
		if err := fillSchema(out.dictionary, d.ValueType, "", C.ARROW_FLAG_NULLABLE, arrow.Metadata{}); err != nil {
			return err
		}
	}
	for i, child := range unsafe.Slice(out.children, len(fields)) {
		f := fields[i]
		flags := int64(0)
		if f.Nullable {
			flags = C.ARROW_FLAG_NULLABLE
		}
		if err := fillSchema(child, f.Type, f.Name, flags, f.Metadata); err != nil {
			return err
		}
	}
	filled = true
	return nil
}

// encodeMetadata encodes m for ArrowSchema.metadata: the number of pairs, then each key and value
// with its length before it. Numbers are int32 in the machine's byte order. Without pairs it
// returns nil.
func encodeMetadata(m arrow.Metadata) []byte {
	if m.Len() == 0 {
		return nil
	}
	b := binary.NativeEndian.AppendUint32(nil, uint32(m.Len()))
	for i, key := range m.Keys() {
		for _, s := range []string{key, m.Values()[i]} {
			b = binary.NativeEndian.AppendUint32(b, uint32(len(s)))
			b = append(b, s...)
		}
	}
	return b
}

// ---- arrays ----

func fillRecord(out *C.struct_ArrowArray, r arrow.Record) error {
	const validity = 1 // the one buffer of a struct; absent here, as no row is null
	if err := initArray(out, int(r.NumRows()), 0, validity, int(r.NumCols())); err != nil {
		return err
	}
	filled := false
	defer func() {
		if !filled {
			C.arrow_array_release(out)
		}
	}()
	for i, child := range unsafe.Slice(out.children, int(r.NumCols())) {
		if err := fillArray(child, r.Column(i).Data()); err != nil {
			return status.Wrap(status.CodeOf(err), err, "column %q", r.ColumnName(i))
		}
	}
	filled = true
	return nil
}

func initArray(out *C.struct_ArrowArray, length, nulls, buffers, children int) error {
	if C.arrow_array_init(out, C.int64_t(length), C.int64_t(nulls), C.int64_t(buffers), C.int64_t(children)) != 0 {
		return status.New(status.NoMemory, "no memory for an Arrow array of %d rows", length)
	}
	return nil
}

// fillArray copies the elements of d into *out, and no element outside the range of d. The copy
// begins at offset 0. After an error, the release of *out's parent frees the parts that were made.
func fillArray(out *C.struct_ArrowArray, d arrow.ArrayData) error {
	length, offset := d.Len(), d.Offset()
	switch t := d.DataType().(type) {
	case *arrow.DictionaryType:
		return fillDictionary(out, d, t)

	case *arrow.NullType:
		return initArray(out, length, length, 0, 0)

	case *arrow.BooleanType:
		if err := initValid(out, d, 2, 0); err != nil {
			return err
		}
		return fillBits(out, 1, d)

	case *arrow.StringType, *arrow.BinaryType:
		return fillBytes[int32](out, d)

	case *arrow.LargeStringType, *arrow.LargeBinaryType:
		return fillBytes[int64](out, d)

	case *arrow.ListType:
		if err := initValid(out, d, 2, 1); err != nil {
			return err
		}
		first, last, err := fillOffsets[int32](out, d)
		if err != nil {
			return err
		}
		return fillChild(out, d, 0, int(first), int(last))

	case *arrow.StructType:
		if err := initValid(out, d, 1, t.NumFields()); err != nil {
			return err
		}
		for i := range t.NumFields() {
			if err := fillChild(out, d, i, offset, offset+length); err != nil {
				return err
			}
		}
		return nil

	case arrow.FixedWidthDataType:
		if err := initValid(out, d, 2, 0); err != nil {
			return err
		}
		src, err := span(d, 1, offset*t.Bytes(), (offset+length)*t.Bytes())
		if err != nil {
			return err
		}
		dst, err := buffer(out, 1, len(src))
		copy(dst, src)
		return err

	default:
		return status.New(status.Unsupported, "the Arrow export has no type %v", t)
	}
}

// fillDictionary copies the indices and the whole dictionary. It checks the indices, because a
// consumer may use them without a check.
func fillDictionary(out *C.struct_ArrowArray, d arrow.ArrayData, t *arrow.DictionaryType) error {
	size := t.Bytes()
	if _, err := span(d, 1, d.Offset()*size, (d.Offset()+d.Len())*size); err != nil {
		return err
	}
	indices := array.NewData(t.IndexType, d.Len(), d.Buffers(), nil, array.UnknownNullCount, d.Offset())
	defer indices.Release()
	values := d.Dictionary()
	plain := array.MakeFromData(indices)
	defer plain.Release()
	if err := checkIndices(plain, values.Len()); err != nil {
		return err
	}
	if err := fillArray(out, indices); err != nil {
		return err
	}
	if out.dictionary = C.arrow_array_node(); out.dictionary == nil {
		return status.New(status.NoMemory, "no memory for a dictionary")
	}
	return fillArray(out.dictionary, values)
}

func checkIndices(a arrow.Array, length int) error {
	switch a := a.(type) {
	case *array.Int8:
		return checkWithin(a, a.Int8Values(), length)
	case *array.Int16:
		return checkWithin(a, a.Int16Values(), length)
	case *array.Int32:
		return checkWithin(a, a.Int32Values(), length)
	case *array.Int64:
		return checkWithin(a, a.Int64Values(), length)
	default:
		return status.New(status.Internal, "dictionary index %v", a.DataType())
	}
}

func checkWithin[T int8 | int16 | int32 | int64](a arrow.Array, indices []T, length int) error {
	for i, x := range indices {
		if (x < 0 || int64(x) >= int64(length)) && a.IsValid(i) {
			return status.New(status.Corrupt, "index %d of element %d into a dictionary of %d", x, i, length)
		}
	}
	return nil
}

// initValid calls initArray and copies the validity bitmap of d to buffer 0. If no element is
// null, that buffer stays absent.
func initValid(out *C.struct_ArrowArray, d arrow.ArrayData, buffers, children int) error {
	bitmap := d.Buffers()[0]
	nulls := 0
	if bitmap != nil && bitmap.Len() > 0 {
		if _, err := span(d, 0, 0, bitBytes(d)); err != nil {
			return err
		}
		nulls = d.Len() - bitutil.CountSetBits(bitmap.Bytes(), d.Offset(), d.Len())
	}
	if err := initArray(out, d.Len(), nulls, buffers, children); err != nil || nulls == 0 {
		return err
	}
	return fillBits(out, 0, d)
}

// fillBits copies the bitmap in buffer index of d.
func fillBits(out *C.struct_ArrowArray, index int, d arrow.ArrayData) error {
	src, err := span(d, index, 0, bitBytes(d))
	if err != nil {
		return err
	}
	dst, err := buffer(out, index, (d.Len()+7)/8)
	if err != nil {
		return err
	}
	clear(dst)
	bitutil.CopyBitmap(src, d.Offset(), d.Len(), dst, 0)
	return nil
}

// bitBytes returns how many bytes a bitmap of d must have.
func bitBytes(d arrow.ArrayData) int { return (d.Offset() + d.Len() + 7) / 8 }

// fillBytes copies strings: their offsets, then the bytes from the first offset to the last.
func fillBytes[T int32 | int64](out *C.struct_ArrowArray, d arrow.ArrayData) error {
	if err := initValid(out, d, 3, 0); err != nil {
		return err
	}
	first, last, err := fillOffsets[T](out, d)
	if err != nil {
		return err
	}
	src, err := span(d, 2, int(first), int(last))
	if err != nil {
		return err
	}
	dst, err := buffer(out, 2, len(src))
	copy(dst, src)
	return err
}

// fillOffsets copies the offsets of d into buffer 1, less the first offset, so that the copy begins
// at 0. It returns the first and the last offset of d. It checks that no offset is less than the
// one before it, because a consumer may use offsets without a check.
func fillOffsets[T int32 | int64](out *C.struct_ArrowArray, d arrow.ArrayData) (first, last T, err error) {
	size := int(unsafe.Sizeof(first))
	raw, err := buffer(out, 1, (d.Len()+1)*size)
	if err != nil {
		return 0, 0, err
	}
	clear(raw)
	if d.Len() == 0 {
		return 0, 0, nil // Arrow allows an empty array to have no offsets
	}
	src, err := span(d, 1, d.Offset()*size, (d.Offset()+d.Len()+1)*size)
	if err != nil {
		return 0, 0, err
	}
	from := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(src))), d.Len()+1)
	to := unsafe.Slice((*T)(unsafe.Pointer(unsafe.SliceData(raw))), d.Len()+1)
	first, last = from[0], from[0]
	for i, o := range from {
		if o < last || o < 0 {
			return 0, 0, status.New(status.Corrupt, "offset %d of element %d is out of order", o, i)
		}
		to[i], last = o-first, o
	}
	return first, last, nil
}

// fillChild copies the elements from <= i < to of child index of d.
func fillChild(out *C.struct_ArrowArray, d arrow.ArrayData, index, from, to int) error {
	child := d.Children()[index]
	if from < 0 || from > to || to > child.Len() {
		return status.New(status.Corrupt, "elements %d to %d of a child array of %d", from, to, child.Len())
	}
	part := array.NewSliceData(child, int64(from), int64(to))
	defer part.Release()
	return fillArray(unsafe.Slice(out.children, index+1)[index], part)
}

// span returns the bytes from <= i < to of buffer index of d. The array may come from a damaged
// file: a buffer that is too short is Corrupt.
func span(d arrow.ArrayData, index, from, to int) ([]byte, error) {
	var have []byte
	if b := d.Buffers()[index]; b != nil {
		have = b.Bytes()
	}
	if from < 0 || from > to || to > len(have) {
		return nil, status.New(status.Corrupt, "bytes %d to %d of an Arrow buffer of %d", from, to, len(have))
	}
	return have[from:to], nil
}

// buffer allocates buffer index of *out. The caller must write all size bytes.
func buffer(out *C.struct_ArrowArray, index, size int) ([]byte, error) {
	p := C.arrow_array_buffer(out, C.int64_t(index), C.size_t(size))
	if p == nil {
		return nil, status.New(status.NoMemory, "no memory for %d bytes of an Arrow buffer", size)
	}
	return cBytes(p, size), nil
}

func cBytes(p unsafe.Pointer, size int) []byte { return unsafe.Slice((*byte)(p), size) }
