// Tests of the export and the import of Arrow C streams.

package main

import (
	"errors"
	"math/rand/v2"
	"runtime"
	"strings"
	"testing"
	"time"
	"unsafe"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/cdata"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// exportTo calls exportRecords with the stream struct of package cdata. It is the same C struct
// under another Go type. A test file cannot import "C", so it cannot name the type of this package.
func exportTo[T any](export func(*arrow.Schema, []arrow.Record, *T) error,
	schema *arrow.Schema, records []arrow.Record, out *cdata.CArrowArrayStream) error {
	return export(schema, records, (*T)(unsafe.Pointer(out)))
}

// recordReader has the methods of cdata's importer that are used here.
type recordReader interface {
	Schema() *arrow.Schema
	Read() (arrow.Record, error)
}

func importFrom(t *testing.T, stream *cdata.CArrowArrayStream) recordReader {
	t.Helper()
	r, err := cdata.ImportCRecordReader(stream, nil)
	if err != nil {
		t.Fatal(err)
	}
	return r.(recordReader)
}

// everyType has two columns, nullable and not, of each type that exportRecords can export.
var everyType = func() *arrow.Schema {
	types := []arrow.DataType{
		arrow.Null, arrow.FixedWidthTypes.Boolean,
		arrow.PrimitiveTypes.Int8, arrow.PrimitiveTypes.Int16, arrow.PrimitiveTypes.Int32, arrow.PrimitiveTypes.Int64,
		arrow.PrimitiveTypes.Uint8, arrow.PrimitiveTypes.Uint16, arrow.PrimitiveTypes.Uint32, arrow.PrimitiveTypes.Uint64,
		arrow.PrimitiveTypes.Float32, arrow.PrimitiveTypes.Float64,
		arrow.FixedWidthTypes.Timestamp_ns, &arrow.TimestampType{Unit: arrow.Second},
		arrow.BinaryTypes.String, arrow.BinaryTypes.LargeString, arrow.BinaryTypes.Binary, arrow.BinaryTypes.LargeBinary,
		&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String},
		&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String},
		arrow.ListOf(arrow.PrimitiveTypes.Int64),
		arrow.ListOf(arrow.ListOf(arrow.BinaryTypes.String)),
		arrow.StructOf(arrow.Field{Name: "x", Type: arrow.PrimitiveTypes.Int32, Nullable: true},
			arrow.Field{Name: "y", Type: arrow.BinaryTypes.String}),
	}
	var fields []arrow.Field
	for _, t := range types {
		fields = append(fields,
			arrow.Field{Name: t.String(), Type: t, Metadata: arrow.NewMetadata([]string{"k"}, []string{"v"})},
			arrow.Field{Name: t.String() + "?", Type: t, Nullable: true})
	}
	m := arrow.NewMetadata([]string{"capture", "empty"}, []string{"id \x00 with a zero", ""})
	return arrow.NewSchema(fields, &m)
}()

// appendRandom appends one random value of b's type. If nullable is set, it is sometimes null.
func appendRandom(rnd *rand.Rand, b array.Builder, nullable bool) {
	if nullable && rnd.IntN(3) == 0 {
		b.AppendNull()
		return
	}
	text := strings.Repeat("é", rnd.IntN(4))
	switch b := b.(type) {
	case *array.NullBuilder:
		b.AppendNull()
	case *array.BooleanBuilder:
		b.Append(rnd.IntN(2) == 0)
	case *array.Int8Builder:
		b.Append(int8(rnd.Uint32()))
	case *array.Int16Builder:
		b.Append(int16(rnd.Uint32()))
	case *array.Int32Builder:
		b.Append(int32(rnd.Uint32()))
	case *array.Int64Builder:
		b.Append(int64(rnd.Uint64()))
	case *array.Uint8Builder:
		b.Append(uint8(rnd.Uint32()))
	case *array.Uint16Builder:
		b.Append(uint16(rnd.Uint32()))
	case *array.Uint32Builder:
		b.Append(rnd.Uint32())
	case *array.Uint64Builder:
		b.Append(rnd.Uint64())
	case *array.Float32Builder:
		b.Append(rnd.Float32())
	case *array.Float64Builder:
		b.Append(rnd.Float64())
	case *array.TimestampBuilder:
		b.Append(arrow.Timestamp(rnd.Int64()))
	case *array.StringBuilder:
		b.Append(text)
	case *array.LargeStringBuilder:
		b.Append(text)
	case *array.BinaryDictionaryBuilder:
		if err := b.AppendString(text); err != nil {
			panic(err)
		}
	case *array.BinaryBuilder:
		b.Append([]byte(text))
	case *array.ListBuilder:
		b.Append(true)
		for range rnd.IntN(4) {
			appendRandom(rnd, b.ValueBuilder(), true)
		}
	case *array.StructBuilder:
		b.Append(true)
		for i := range b.NumField() {
			appendRandom(rnd, b.FieldBuilder(i), i == 0)
		}
	default:
		panic(b.Type())
	}
}

func randomRecord(rnd *rand.Rand, schema *arrow.Schema, rows int) arrow.Record {
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	for i, f := range b.Fields() {
		for range rows {
			appendRandom(rnd, f, schema.Field(i).Nullable)
		}
	}
	return b.NewRecord()
}

// Arrow's own importer reads exported records, and slices of records, back unchanged.
func TestExportRoundTrip(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 200 {
		var records []arrow.Record
		for range rnd.IntN(4) {
			whole := randomRecord(rnd, everyType, rnd.IntN(40))
			from := rnd.Int64N(whole.NumRows() + 1)
			to := from + rnd.Int64N(whole.NumRows()-from+1)
			records = append(records, whole, whole.NewSlice(from, to))
		}

		var stream cdata.CArrowArrayStream
		if err := exportTo(exportRecords, everyType, records, &stream); err != nil {
			t.Fatal(err)
		}
		got := importFrom(t, &stream)
		if !got.Schema().Equal(everyType) || !got.Schema().Metadata().Equal(everyType.Metadata()) {
			t.Fatalf("schema came back as %v", got.Schema())
		}
		for i, want := range records {
			r, err := got.Read()
			if err != nil {
				t.Fatalf("record %d of %d: %v", i, len(records), err)
			}
			if !array.RecordEqual(r, want) {
				t.Fatalf("record %d came back as\n%v\nnot\n%v", i, r, want)
			}
		}
		if r, err := got.Read(); err == nil {
			t.Fatalf("a record behind the last: %v", r)
		}
	}
}

// importStream reads the streams of exportRecords back unchanged. Afterwards no stream is open.
func TestImportRoundTrip(t *testing.T) {
	rnd := rand.New(rand.NewPCG(3, 4))
	before := openStreams()
	for range 100 {
		records := []arrow.Record{randomRecord(rnd, everyType, 30), randomRecord(rnd, everyType, 0), randomRecord(rnd, everyType, 7)}
		var stream cdata.CArrowArrayStream
		if err := exportTo(exportRecords, everyType, records, &stream); err != nil {
			t.Fatal(err)
		}
		got, err := importOf(importStream, &stream)
		if err != nil {
			t.Fatal(err)
		}
		if !got.Schema().Equal(everyType) {
			t.Fatalf("schema came back as %v", got.Schema())
		}
		for i, want := range records {
			if !got.Next() || !array.RecordEqual(got.Record(), want) {
				t.Fatalf("record %d: %v, %v", i, got.Record(), got.Err())
			}
		}
		if got.Next() || got.Err() != nil {
			t.Fatalf("behind the last: %v", got.Err())
		}
		got.Release()
	}
	if after := openStreams(); after > before {
		t.Errorf("%d streams stay open", after-before)
	}
	var released cdata.CArrowArrayStream
	if _, err := importOf(importStream, &released); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a released stream: %v", err)
	}
}

// importOf calls importStream with the stream struct of package cdata; see exportTo.
func importOf[T any](take func(*T) (*importedStream, error), in *cdata.CArrowArrayStream) (*importedStream, error) {
	return take((*T)(unsafe.Pointer(in)))
}

func TestExportReleasesRecords(t *testing.T) {
	mem := memory.NewCheckedAllocator(memory.DefaultAllocator)
	defer mem.AssertSize(t, 0)
	schema := arrow.NewSchema([]arrow.Field{{Name: "n", Type: arrow.PrimitiveTypes.Int64}}, nil)
	b := array.NewRecordBuilder(mem, schema)
	b.Field(0).(*array.Int64Builder).AppendValues([]int64{1, 2, 3}, nil)
	r := b.NewRecord()
	b.Release()

	var stream cdata.CArrowArrayStream
	if err := exportTo(exportRecords, schema, []arrow.Record{r, r}, &stream); err != nil {
		t.Fatal(err)
	}
	r.Release() // the stream has its own references
	if first, err := importFrom(t, &stream).Read(); err != nil {
		t.Fatal(err)
	} else {
		first.Release()
	}
	// cdata releases the stream, with the second record still inside, in a finalizer.
	for deadline := time.Now().Add(time.Minute); openStreams() > 0; runtime.GC() {
		if time.Now().After(deadline) {
			t.Fatalf("%d streams are left in the table", openStreams())
		}
	}
}

func openStreams() int {
	arrowStreams.Lock()
	defer arrowStreams.Unlock()
	return len(arrowStreams.open)
}

func TestExportRefusesUnsupportedTypes(t *testing.T) {
	for _, typ := range []arrow.DataType{
		&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Uint8, ValueType: arrow.BinaryTypes.String},
		&arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.FixedWidthTypes.Date32},
		arrow.FixedWidthTypes.Date32,
		arrow.ListOf(arrow.FixedWidthTypes.Float16),
		arrow.StructOf(arrow.Field{Name: "m", Type: arrow.MapOf(arrow.BinaryTypes.String, arrow.BinaryTypes.String)}),
	} {
		schema := arrow.NewSchema([]arrow.Field{{Name: "odd", Type: typ}}, nil)
		var stream cdata.CArrowArrayStream
		err := exportTo(exportRecords, schema, nil, &stream)
		if !errors.Is(err, status.Unsupported) || !strings.Contains(err.Error(), "column") {
			t.Errorf("%v: %v, want an unsupported column", typ, err)
		}
	}
}

func TestExportRefusesForeignRecords(t *testing.T) {
	of := func(name string) *arrow.Schema {
		return arrow.NewSchema([]arrow.Field{{Name: name, Type: arrow.PrimitiveTypes.Int64}}, nil)
	}
	r := randomRecord(rand.New(rand.NewPCG(1, 2)), of("a"), 3)
	var stream cdata.CArrowArrayStream
	if err := exportTo(exportRecords, of("b"), []arrow.Record{r}, &stream); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a record of another schema: %v", err)
	}
}

// The export reports arrays whose buffers or offsets are wrong, as a damaged file may have them.
func TestExportRefusesDamagedArrays(t *testing.T) {
	offsets := func(o ...int32) *memory.Buffer {
		return memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(o))
	}
	text := memory.NewBufferBytes([]byte("abc"))
	numbers := array.NewData(arrow.PrimitiveTypes.Int64, 2, []*memory.Buffer{nil, memory.NewBufferBytes(make([]byte, 16))}, nil, 0, 0)
	for name, data := range map[string]*array.Data{
		"short values":        array.NewData(arrow.PrimitiveTypes.Int64, 3, []*memory.Buffer{nil, memory.NewBufferBytes(make([]byte, 16))}, nil, 0, 0),
		"absent values":       array.NewData(arrow.PrimitiveTypes.Int64, 3, []*memory.Buffer{nil, nil}, nil, 0, 0),
		"short validity":      array.NewData(arrow.PrimitiveTypes.Int64, 9, []*memory.Buffer{memory.NewBufferBytes([]byte{0}), memory.NewBufferBytes(make([]byte, 72))}, nil, 0, 0),
		"short bits":          array.NewData(arrow.FixedWidthTypes.Boolean, 9, []*memory.Buffer{nil, memory.NewBufferBytes([]byte{0})}, nil, 0, 0),
		"short list":          array.NewData(arrow.ListOf(arrow.PrimitiveTypes.Int64), 1, []*memory.Buffer{nil, offsets(0, 3)}, []arrow.ArrayData{numbers}, 0, 0),
		"falling list":        array.NewData(arrow.ListOf(arrow.PrimitiveTypes.Int64), 2, []*memory.Buffer{nil, offsets(0, 2, 1)}, []arrow.ArrayData{numbers}, 0, 0),
		"negative list":       array.NewData(arrow.ListOf(arrow.PrimitiveTypes.Int64), 1, []*memory.Buffer{nil, offsets(-1, 1)}, []arrow.ArrayData{numbers}, 0, 0),
		"short offsets":       array.NewData(arrow.ListOf(arrow.PrimitiveTypes.Int64), 2, []*memory.Buffer{nil, offsets(0, 1)}, []arrow.ArrayData{numbers}, 0, 0),
		"index past its end":  withDictionary(3),
		"negative index":      withDictionary(-1),
		"text past its end":   rawText(2, offsets(0, 1, 4), text),
		"text falling":        rawText(3, offsets(0, 3, 1, 2), text),
		"text without offset": rawText(1, nil, text),
	} {
		t.Run(name, func(t *testing.T) {
			schema := arrow.NewSchema([]arrow.Field{{Name: "c", Type: data.DataType(), Nullable: true}}, nil)
			r := array.NewRecord(schema, []arrow.Array{damaged{data: data}}, int64(data.Len()))
			var stream cdata.CArrowArrayStream
			if err := exportTo(exportRecords, schema, []arrow.Record{r}, &stream); err != nil {
				t.Fatal(err)
			}
			reader := importFrom(t, &stream)
			if _, err := reader.Read(); err == nil || !strings.Contains(err.Error(), `column "c"`) {
				t.Errorf("the damage was not reported: %v", err)
			}
		})
	}
}

func rawText(rows int, offsets, text *memory.Buffer) *array.Data {
	return array.NewData(arrow.BinaryTypes.String, rows, []*memory.Buffer{nil, offsets, text}, nil, 0, 0)
}

func withDictionary(index int8) *array.Data {
	typ := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int8, ValueType: arrow.BinaryTypes.String}
	words := array.NewStringData(rawText(2, memory.NewBufferBytes(arrow.Int32Traits.CastToBytes([]int32{0, 1, 3})), memory.NewBufferBytes([]byte("abc"))))
	indices := memory.NewBufferBytes([]byte{0, byte(index)})
	return array.NewDataWithDictionary(typ, 2, []*memory.Buffer{nil, indices}, 0, 0, words.Data().(*array.Data))
}

// damaged is an array that arrow's own constructors might refuse.
type damaged struct {
	arrow.Array
	data arrow.ArrayData
}

func (d damaged) Data() arrow.ArrayData    { return d.data }
func (d damaged) DataType() arrow.DataType { return d.data.DataType() }
func (d damaged) Len() int                 { return d.data.Len() }
func (d damaged) Retain()                  {}
func (d damaged) Release()                 {}
