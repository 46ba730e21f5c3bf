package parquet

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/file"
	"github.com/apache/arrow/go/v17/parquet/metadata"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func dictionary(index, value arrow.DataType) arrow.DataType {
	return &arrow.DictionaryType{IndexType: index, ValueType: value}
}

var i64 = arrow.PrimitiveTypes.Int64

// fields has a column of every type that can be written.
var fields = []arrow.Field{
	{Name: "rising", Type: arrow.PrimitiveTypes.Uint64},
	{Name: "rising, then wild", Type: i64, Nullable: true},
	{Name: "few", Type: i64, Nullable: true},
	{Name: "wild", Type: arrow.PrimitiveTypes.Uint64, Nullable: true},
	{Name: "int8", Type: arrow.PrimitiveTypes.Int8, Nullable: true},
	{Name: "int16", Type: arrow.PrimitiveTypes.Int16},
	{Name: "int32", Type: arrow.PrimitiveTypes.Int32, Nullable: true},
	{Name: "uint8", Type: arrow.PrimitiveTypes.Uint8, Nullable: true},
	{Name: "uint16", Type: arrow.PrimitiveTypes.Uint16},
	{Name: "uint32", Type: arrow.PrimitiveTypes.Uint32, Nullable: true},
	{Name: "float32", Type: arrow.PrimitiveTypes.Float32},
	{Name: "float64", Type: arrow.PrimitiveTypes.Float64, Nullable: true},
	{Name: "bool", Type: arrow.FixedWidthTypes.Boolean, Nullable: true},
	{Name: "text", Type: arrow.BinaryTypes.String, Nullable: true},
	{Name: "large text", Type: arrow.BinaryTypes.LargeString},
	{Name: "binary", Type: arrow.BinaryTypes.Binary, Nullable: true},
	{Name: "large binary", Type: arrow.BinaryTypes.LargeBinary, Nullable: true},
	{Name: "date", Type: arrow.FixedWidthTypes.Date32, Nullable: true},
	{Name: "time in ns", Type: &arrow.TimestampType{Unit: arrow.Nanosecond}, Nullable: true},
	{Name: "time in us", Type: &arrow.TimestampType{Unit: arrow.Microsecond, TimeZone: "UTC"}},
	{Name: "time in ms", Type: &arrow.TimestampType{Unit: arrow.Millisecond, TimeZone: "UTC"}, Nullable: true},
	{Name: "null", Type: arrow.Null, Nullable: true},
	{Name: "word", Type: dictionary(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String)},
	{Name: "word or none", Type: dictionary(arrow.PrimitiveTypes.Int8, arrow.BinaryTypes.String), Nullable: true},
	{Name: "bytes", Type: dictionary(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.Binary), Nullable: true},
	{Name: "number", Type: dictionary(arrow.PrimitiveTypes.Int16, i64), Nullable: true},
	{Name: "fraction", Type: dictionary(arrow.PrimitiveTypes.Uint32, arrow.PrimitiveTypes.Float32)},
	{Name: "nothing", Type: dictionary(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String), Nullable: true},
	{Name: "no number", Type: i64, Nullable: true},
}

// readAs returns the type that a reader finds for a column that was written with type t.
func readAs(t arrow.DataType) arrow.DataType {
	switch t := t.(type) {
	case *arrow.DictionaryType:
		return t.ValueType
	case *arrow.LargeStringType:
		return arrow.BinaryTypes.String
	case *arrow.LargeBinaryType:
		return arrow.BinaryTypes.Binary
	default:
		return t
	}
}

// shredder overwrites memory that is freed, as the memory's next owner would.
type shredder struct{ memory.Allocator }

func (s shredder) Free(b []byte) {
	for i := range b {
		b[i] = 0xAA
	}
	s.Allocator.Free(b)
}

// wild returns records of these sizes, with random values and nulls.
func wild(t *testing.T, sizes ...int) []arrow.Record {
	r := rand.New(rand.NewPCG(11, 12))
	var records []arrow.Record
	row := 0
	for _, n := range sizes {
		b := array.NewRecordBuilder(shredder{memory.DefaultAllocator}, arrow.NewSchema(fields, nil))
		for range n {
			row++
			for i, field := range fields {
				if field.Nullable && (row > 10_000 && r.IntN(4) == 0 || strings.HasPrefix(field.Name, "no")) {
					b.Field(i).AppendNull()
					continue
				}
				if err := appendWild(b.Field(i), field.Name, row, r); err != nil {
					t.Fatal(err)
				}
			}
		}
		records = append(records, b.NewRecord())
		b.Release()
	}
	return records
}

func appendWild(column array.Builder, name string, row int, r *rand.Rand) error {
	x := r.Int64() - r.Int64()
	word := []string{"", "a", fmt.Sprint(x % 30)}[r.IntN(3)]
	switch column := column.(type) {
	case *array.Uint64Builder:
		if name == "rising" {
			x = int64(row) | -1<<63
		}
		column.Append(uint64(x))
	case *array.Int64Builder:
		switch {
		case name == "few":
			x %= 5
		case row < 20_000:
			x = int64(row) << 40
		}
		column.Append(x)
	case *array.Int8Builder:
		column.Append(int8(x))
	case *array.Int16Builder:
		column.Append(int16(x))
	case *array.Int32Builder:
		column.Append(int32(x))
	case *array.Uint8Builder:
		column.Append(uint8(x))
	case *array.Uint16Builder:
		column.Append(uint16(x))
	case *array.Uint32Builder:
		column.Append(uint32(x))
	case *array.Float32Builder:
		column.Append(r.Float32() - 0.5)
	case *array.Float64Builder:
		column.Append(r.NormFloat64())
	case *array.BooleanBuilder:
		column.Append(x&1 == 0)
	case *array.StringBuilder:
		column.Append(word)
	case *array.LargeStringBuilder:
		column.Append(word)
	case *array.BinaryBuilder:
		column.AppendString(word + "\xFF")
	case *array.Date32Builder:
		column.Append(arrow.Date32(x % 40_000))
	case *array.TimestampBuilder:
		column.Append(arrow.Timestamp(int64(row)*1000 + x%1500))
	case *array.NullBuilder:
		column.AppendNull()
	case *array.BinaryDictionaryBuilder:
		return column.AppendString(word)
	case *array.Int64DictionaryBuilder:
		return column.Append(x % 50)
	case *array.Float32DictionaryBuilder:
		return column.Append(float32(x%50) / 8)
	default:
		return fmt.Errorf("no values for %T", column)
	}
	return nil
}

func written(t *testing.T, schema *arrow.Schema, o Options, records ...arrow.Record) *file.Reader {
	t.Helper()
	path := filepath.Join(t.TempDir(), "t.parquet")
	w, err := NewWriter(path, schema, o)
	if err != nil {
		t.Fatal(err)
	}
	for _, record := range records {
		if err := w.Write(record); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	in, err := file.OpenParquetFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { in.Close() })
	return in
}

// table reads a file with Arrow's reader.
func table(t *testing.T, in *file.Reader) arrow.Table {
	t.Helper()
	reader, err := pqarrow.NewFileReader(in, pqarrow.ArrowReadProperties{}, memory.DefaultAllocator)
	if err != nil {
		t.Fatal(err)
	}
	table, err := reader.ReadTable(context.Background())
	if err != nil {
		t.Fatal(err)
	}
	return table
}

// values returns the values of a column as text.
func values(chunks ...arrow.Array) []string {
	var all []string
	for _, chunk := range chunks {
		for row := range chunk.Len() {
			all = append(all, chunk.ValueStr(row))
		}
	}
	return all
}

func TestAnyColumnsComeBack(t *testing.T) {
	sizes, group := []int{9000, 1, 0, 20_000, 700, 40_000, 3}, 25_000
	if testing.Short() {
		sizes, group = []int{900, 1, 0, 2000, 70, 4000, 3}, 2500
	}
	records := wild(t, sizes...)
	in := written(t, arrow.NewSchema(fields, nil), Options{RowGroupRows: int64(group)}, records...)
	if n := in.NumRowGroups(); n != 3 {
		t.Errorf("%d row groups", n)
	}
	read := table(t, in)
	for i, field := range fields {
		var want []string
		for _, record := range records {
			want = append(want, values(record.Column(i))...)
		}
		got := values(read.Column(i).Data().Chunks()...)
		if !slices.Equal(got, want) {
			t.Errorf("column %s is not what was written", field.Name)
		}
		if got := read.Schema().Field(i); !arrow.TypeEqual(got.Type, readAs(field.Type)) || got.Nullable != field.Nullable {
			t.Errorf("column %s: read as %v", field.Name, got)
		}
	}
}

// A dictionary may hold words that are null, or that no row uses.
func TestDictionariesOfOthers(t *testing.T) {
	build := func(values arrow.DataType, words, rows string) arrow.Array {
		dictionaryOf, _, err := array.FromJSON(memory.DefaultAllocator, values, strings.NewReader(words))
		if err != nil {
			t.Fatal(err)
		}
		indices, _, err := array.FromJSON(memory.DefaultAllocator, arrow.PrimitiveTypes.Int32, strings.NewReader(rows))
		if err != nil {
			t.Fatal(err)
		}
		return array.NewDictionaryArray(dictionary(arrow.PrimitiveTypes.Int32, values), indices, dictionaryOf)
	}
	for _, c := range []struct {
		values arrow.DataType
		words  string
		want   []string
	}{
		{arrow.BinaryTypes.LargeString, `["x", null, "y", "z"]`, []string{"z", "(null)", "(null)", "x"}},
		{arrow.PrimitiveTypes.Uint8, `[7, null, 8, 255]`, []string{"255", "(null)", "(null)", "7"}},
		{arrow.FixedWidthTypes.Boolean, `[true, null, true, false]`, []string{"false", "(null)", "(null)", "true"}},
		{arrow.Null, `[null, null, null, null]`, []string{"(null)", "(null)", "(null)", "(null)"}},
	} {
		schema := arrow.NewSchema([]arrow.Field{{Name: "d", Type: dictionary(arrow.PrimitiveTypes.Int32, c.values), Nullable: true}}, nil)
		record := array.NewRecord(schema, []arrow.Array{build(c.values, c.words, `[3, 1, null, 0]`)}, 4)
		read := table(t, written(t, schema, Options{}, record))
		if got := values(read.Column(0).Data().Chunks()...); !slices.Equal(got, c.want) {
			t.Errorf("%v: %v, want %v", c.values, got, c.want)
		}

		w, err := NewWriter(filepath.Join(t.TempDir(), "t.parquet"), schema, Options{})
		if err != nil {
			t.Fatal(err)
		}
		wrong := array.NewRecord(schema, []arrow.Array{build(c.values, c.words, `[0, 4]`)}, 2)
		if err := errors.Join(w.Write(wrong), w.Close()); !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "row 1 is word 4 of a dictionary of 4") {
			t.Errorf("%v: %v", c.values, err)
		}
	}
}

func TestTypesThatAreRefused(t *testing.T) {
	for _, refused := range []arrow.DataType{
		arrow.ListOf(i64), arrow.StructOf(arrow.Field{Name: "a", Type: i64}), arrow.MapOf(i64, i64),
		&arrow.Decimal128Type{Precision: 9, Scale: 2}, &arrow.FixedSizeBinaryType{ByteWidth: 4}, arrow.FixedWidthTypes.Float16,
		arrow.FixedWidthTypes.Timestamp_s, arrow.FixedWidthTypes.Date64, arrow.FixedWidthTypes.Time32ms, arrow.FixedWidthTypes.Duration_ns,
		arrow.BinaryTypes.StringView, dictionary(i64, &arrow.Decimal128Type{Precision: 9, Scale: 2}), dictionary(i64, dictionary(i64, i64)),
	} {
		folder := t.TempDir()
		schema := arrow.NewSchema([]arrow.Field{{Name: "n", Type: i64}, {Name: "odd", Type: refused, Nullable: true}}, nil)
		_, err := NewWriter(filepath.Join(folder, "t.parquet"), schema, Options{})
		if !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), fmt.Sprintf("column odd is %v: flatten it, or cast it", refused)) {
			t.Errorf("%v: %v", refused, err)
		}
		if left, _ := filepath.Glob(filepath.Join(folder, "*")); len(left) > 0 {
			t.Errorf("%v: %v left", refused, left)
		}
	}
}

// bounds returns the least and the greatest of the values that are not null.
func bounds[T cmp.Ordered](chunks []arrow.Array, at func(arrow.Array) func(int) T) []T {
	var all []T
	for _, chunk := range chunks {
		for row := range chunk.Len() {
			if chunk.IsValid(row) {
				all = append(all, at(chunk)(row))
			}
		}
	}
	return []T{slices.Min(all), slices.Max(all)}
}

// Readers skip row groups by their statistics, so the statistics must hold for every row.
func TestStatisticsAreThoseOfTheRows(t *testing.T) {
	sizes := []int{9000, 30_000, 700, 95_000}
	if testing.Short() {
		sizes = []int{90, 11_000, 7, 950}
	}
	records := wild(t, sizes...)
	in := written(t, arrow.NewSchema(fields, nil), Options{RowGroupRows: 1 << 30}, records...)
	read := table(t, in)
	for i, field := range fields {
		column, err := in.MetaData().RowGroup(0).ColumnChunk(i)
		if err != nil {
			t.Fatal(err)
		}
		statistics, err := column.Statistics()
		if err != nil {
			t.Fatal(err)
		}
		chunks, nulls := read.Column(i).Data().Chunks(), read.Column(i).NullN()
		if field.Type.ID() == arrow.NULL {
			continue // a column of nulls has no least value
		}
		if statistics == nil || statistics.NullCount() != int64(nulls) || statistics.HasMinMax() == (nulls == int(read.NumRows())) {
			t.Errorf("%s: %v, want %d nulls", field.Name, statistics, nulls)
			continue
		}
		if !statistics.HasMinMax() {
			continue
		}
		var got, want any
		switch s := statistics.(type) {
		case *metadata.BooleanStatistics:
			got, want = []bool{s.Min(), s.Max()}, []bool{false, true}
		case *metadata.Float32Statistics:
			got, want = []float32{s.Min(), s.Max()}, bounds(chunks, func(a arrow.Array) func(int) float32 { return a.(*array.Float32).Value })
		case *metadata.Float64Statistics:
			got, want = []float64{s.Min(), s.Max()}, bounds(chunks, func(a arrow.Array) func(int) float64 { return a.(*array.Float64).Value })
		case *metadata.ByteArrayStatistics:
			got, want = []string{string(s.Min()), string(s.Max())}, bounds(chunks, textsOf)
		case *metadata.Int32Statistics:
			got = []int64{int64(s.Min()), int64(s.Max())}
			if arrow.IsUnsignedInteger(field.Type.ID()) {
				got = []int64{int64(uint32(s.Min())), int64(uint32(s.Max()))}
			}
			want = bounds(chunks, func(a arrow.Array) func(int) int64 {
				return func(row int) int64 {
					if d, ok := a.(*array.Date32); ok {
						return int64(d.Value(row))
					}
					n, err := strconv.ParseInt(a.ValueStr(row), 10, 64)
					if err != nil {
						t.Fatal(err)
					}
					return n
				}
			})
		case *metadata.Int64Statistics:
			if field.Type.ID() == arrow.UINT64 {
				got, want = []uint64{uint64(s.Min()), uint64(s.Max())}, bounds(chunks, func(a arrow.Array) func(int) uint64 { return a.(*array.Uint64).Value })
			} else {
				got, want = []int64{s.Min(), s.Max()}, bounds(chunks, numbers)
			}
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("%s: from and to %v, want %v", field.Name, got, want)
		}
	}
}

// The statistics must stay valid after the rows were released.
func TestStatisticsOutliveTheRows(t *testing.T) {
	b := array.NewRecordBuilder(shredder{memory.DefaultAllocator}, arrow.NewSchema([]arrow.Field{{Name: "text", Type: arrow.BinaryTypes.String}}, nil))
	b.Field(0).(*array.StringBuilder).AppendValues([]string{"least", "most"}, nil)
	record := b.NewRecord()
	b.Release()
	path := filepath.Join(t.TempDir(), "t.parquet")
	w, err := NewWriter(path, record.Schema(), Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Write(record); err != nil {
		t.Fatal(err)
	}
	record.Release()
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	in, err := file.OpenParquetFile(path, false)
	if err != nil {
		t.Fatal(err)
	}
	defer in.Close()
	column, err := in.MetaData().RowGroup(0).ColumnChunk(0)
	if err != nil {
		t.Fatal(err)
	}
	statistics, err := column.Statistics()
	if err != nil {
		t.Fatal(err)
	}
	if s := statistics.(*metadata.ByteArrayStatistics); string(s.Min()) != "least" || string(s.Max()) != "most" {
		t.Errorf("from %q to %q", s.Min(), s.Max())
	}
}

func TestEncodings(t *testing.T) {
	schema := trace.Schema(trace.Accesses)
	records := []arrow.Record{accesses(0, 20_000), accesses(20_000, 20_000)}
	in := written(t, schema, Options{}, records...)
	for i, field := range schema.Fields() {
		want := parquet.Encodings.RLEDict
		switch field.Name {
		case "sample_id", "timestamp_ns":
			want = parquet.Encodings.DeltaBinaryPacked
		case "address", "address_page":
			want = parquet.Encodings.Plain
		}
		column, err := in.MetaData().RowGroup(0).ColumnChunk(i)
		if err != nil {
			t.Fatal(err)
		}
		if got := column.Encodings()[0]; got != want {
			t.Errorf("%s: %v, want %v", field.Name, column.Encodings(), want)
		}
	}
}

// A page ends when it has a megabyte. Here it ends with the last row of the row group, or just before
// or after it.
func TestPagesThatEndWithTheRows(t *testing.T) {
	const page = 1 << 20 / 8
	sizes := []int{0, page - 1, page, page + 1, 2 * page}
	if testing.Short() {
		sizes = []int{0, 1000}
	}
	for _, rows := range sizes {
		schema := arrow.NewSchema([]arrow.Field{{Name: "n", Type: i64, Nullable: true}, {Name: "m", Type: i64}}, nil)
		b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
		for row := range rows {
			for _, column := range b.Fields() {
				column.(*array.Int64Builder).Append(int64(row*7919) % page)
			}
		}
		record := b.NewRecord()
		b.Release()
		back := table(t, written(t, schema, Options{}, record))
		for i, column := range record.Columns() {
			if !slices.Equal(values(column), values(back.Column(i).Data().Chunks()...)) {
				t.Errorf("%d rows: column %d differs", rows, i)
			}
		}
	}
}

func TestNoRows(t *testing.T) {
	in := written(t, arrow.NewSchema(fields, nil), Options{})
	if in.NumRows() != 0 || in.MetaData().Schema.NumColumns() != len(fields) {
		t.Errorf("%d rows, %d columns", in.NumRows(), in.MetaData().Schema.NumColumns())
	}
}

// A record that does not fit the schema makes the file fail, and no part of the file stays.
func TestRecordsThatDoNotFit(t *testing.T) {
	missing := func(fields ...arrow.Field) []arrow.Record {
		b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema(fields, nil))
		defer b.Release()
		for _, column := range b.Fields() {
			column.AppendNull()
		}
		return []arrow.Record{b.NewRecord()}
	}
	number := arrow.Field{Name: "n", Type: i64}
	word := arrow.Field{Name: "w", Type: trace.Text}
	for name, c := range map[string]struct {
		schema  *arrow.Schema
		records []arrow.Record
		says    string
	}{
		"other columns": {arrow.NewSchema([]arrow.Field{number}, nil), missing(word), "other columns"},
		"no number":     {arrow.NewSchema([]arrow.Field{number}, nil), missing(number), "column n: 1 rows have no value"},
		"no word":       {arrow.NewSchema([]arrow.Field{number, word}, nil), missing(number, word), "rows have no value"},
	} {
		folder := t.TempDir()
		w, err := NewWriter(filepath.Join(folder, "t.parquet"), c.schema, Options{})
		if err != nil {
			t.Fatal(err)
		}
		for _, record := range c.records {
			if err = w.Write(record); err != nil {
				break
			}
		}
		closed := w.Close()
		if err == nil {
			err = closed
		}
		left, _ := filepath.Glob(filepath.Join(folder, "*"))
		if !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), c.says) || len(left) > 0 || closed == nil {
			t.Errorf("%s: %v, %v left", name, err, left)
		}
	}
}
