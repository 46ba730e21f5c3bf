package parquet

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"path/filepath"
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

var (
	i64 = arrow.PrimitiveTypes.Int64

	flatFields = []arrow.Field{
		{Name: "rising", Type: arrow.PrimitiveTypes.Uint64},
		{Name: "rising, then wild", Type: i64, Nullable: true},
		{Name: "few", Type: i64, Nullable: true},
		{Name: "wild", Type: arrow.PrimitiveTypes.Uint64, Nullable: true},
		{Name: "small", Type: arrow.PrimitiveTypes.Int8, Nullable: true},
		{Name: "float", Type: arrow.PrimitiveTypes.Float64, Nullable: true},
		{Name: "bool", Type: arrow.FixedWidthTypes.Boolean, Nullable: true},
		{Name: "text", Type: arrow.BinaryTypes.String, Nullable: true},
		{Name: "time", Type: arrow.FixedWidthTypes.Timestamp_ns, Nullable: true},
		{Name: "word", Type: dictionary(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String)},
		{Name: "word or none", Type: dictionary(arrow.PrimitiveTypes.Int8, arrow.BinaryTypes.String), Nullable: true},
		{Name: "bytes", Type: dictionary(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.Binary), Nullable: true},
		{Name: "number", Type: dictionary(arrow.PrimitiveTypes.Int16, i64), Nullable: true},
		{Name: "nothing", Type: dictionary(arrow.PrimitiveTypes.Int32, arrow.BinaryTypes.String), Nullable: true},
	}
	nestedFields = append(flatFields[:len(flatFields):len(flatFields)],
		arrow.Field{Name: "list", Type: arrow.ListOf(i64), Nullable: true},
		arrow.Field{Name: "struct", Type: arrow.StructOf(arrow.Field{Name: "a", Type: i64, Nullable: true}), Nullable: true})
)

// wild are rows of any values and nulls, in records of many sizes.
func wild(t *testing.T, schema *arrow.Schema, sizes ...int) []arrow.Record {
	r := rand.New(rand.NewPCG(11, 12))
	var records []arrow.Record
	row := 0
	for _, n := range sizes {
		b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
		for range n {
			row++
			for i, field := range schema.Fields() {
				if field.Nullable && (row > 10_000 && r.IntN(4) == 0 || field.Name == "nothing") {
					b.Field(i).AppendNull()
					continue
				}
				x := r.Int64()
				word := []string{"", "a", fmt.Sprint(x % 30)}[r.IntN(3)]
				switch column := b.Field(i).(type) {
				case *array.Uint64Builder:
					if field.Name == "rising" {
						x = int64(row)
					}
					column.Append(uint64(x) | 1<<63)
				case *array.Int64Builder:
					switch {
					case field.Name == "few":
						x %= 5
					case row < 20_000:
						x = int64(row) << 40
					}
					column.Append(x)
				case *array.Int8Builder:
					column.Append(int8(x))
				case *array.Float64Builder:
					column.Append(r.Float64())
				case *array.BooleanBuilder:
					column.Append(x&1 == 0)
				case *array.StringBuilder:
					column.Append(word)
				case *array.TimestampBuilder:
					column.Append(arrow.Timestamp(int64(row)*1000 + x%1500))
				case *array.BinaryDictionaryBuilder:
					if err := column.AppendString(word); err != nil {
						t.Fatal(err)
					}
				case *array.Int64DictionaryBuilder:
					if err := column.Append(x % 50); err != nil {
						t.Fatal(err)
					}
				case *array.ListBuilder:
					column.Append(true)
					for range r.IntN(3) {
						column.ValueBuilder().(*array.Int64Builder).Append(x)
					}
				case *array.StructBuilder:
					column.Append(true)
					column.FieldBuilder(0).(*array.Int64Builder).Append(x)
				default:
					t.Fatalf("no values for %v", field)
				}
			}
		}
		records = append(records, b.NewRecord())
		b.Release()
	}
	return records
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

func TestAnyColumnsComeBack(t *testing.T) {
	for name, fields := range map[string][]arrow.Field{"flat": flatFields, "nested": nestedFields} {
		schema := arrow.NewSchema(fields, nil)
		records := wild(t, schema, 9000, 1, 0, 20_000, 700, 40_000, 3)
		in := written(t, schema, Options{RowGroupRows: 25_000}, records...)
		if n := in.NumRowGroups(); n != 3 {
			t.Errorf("%s: %d row groups", name, n)
		}
		reader, err := pqarrow.NewFileReader(in, pqarrow.ArrowReadProperties{}, memory.DefaultAllocator)
		if err != nil {
			t.Fatal(err)
		}
		table, err := reader.ReadTable(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		for i, field := range fields {
			var want []arrow.Array
			for _, record := range records {
				dense, err := withoutDictionary(record.Column(i))
				if err != nil {
					t.Fatal(err)
				}
				want = append(want, dense)
			}
			whole, err := array.Concatenate(want, memory.DefaultAllocator)
			if err != nil {
				t.Fatal(err)
			}
			got, err := array.Concatenate(table.Column(i).Data().Chunks(), memory.DefaultAllocator)
			if err != nil {
				t.Fatal(err)
			}
			if !array.Equal(got, whole) {
				t.Errorf("%s: column %s is not what was written", name, field.Name)
			}
		}
	}
}

// Readers leave out row groups by the statistics: these must hold for every row.
func TestStatisticsAreThoseOfTheRows(t *testing.T) {
	schema := arrow.NewSchema(flatFields, nil)
	records := wild(t, schema, 9000, 30_000, 700, 140_000)
	in := written(t, schema, Options{RowGroupRows: 1 << 30}, records...)
	chunk := in.MetaData().RowGroup(0)
	for i, field := range flatFields {
		nulls := 0
		least, greatest := "", ""
		seen := false
		for _, record := range records {
			column, err := withoutDictionary(record.Column(i))
			if err != nil {
				t.Fatal(err)
			}
			nulls += column.NullN()
			if texts, ok := column.(*array.String); ok {
				for row := range texts.Len() {
					if v := texts.Value(row); texts.IsValid(row) {
						if !seen || v < least {
							least = v
						}
						if !seen || v > greatest {
							greatest = v
						}
						seen = true
					}
				}
			}
		}
		column, err := chunk.ColumnChunk(i)
		if err != nil {
			t.Fatal(err)
		}
		statistics, err := column.Statistics()
		if err != nil {
			t.Fatal(err)
		}
		if field.Name == "wild" {
			if statistics != nil {
				t.Error("statistics of nullable unsigned numbers, which arrow v17 gets wrong")
			}
			continue
		}
		if statistics == nil || statistics.NullCount() != int64(nulls) {
			t.Errorf("%s: %v, want %d nulls", field.Name, statistics, nulls)
			continue
		}
		if texts, ok := statistics.(*metadata.ByteArrayStatistics); ok && field.Name != "bytes" {
			if texts.HasMinMax() != seen || string(texts.Min()) != least || string(texts.Max()) != greatest {
				t.Errorf("%s: from %q to %q, want %q to %q", field.Name, texts.Min(), texts.Max(), least, greatest)
			}
		}
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

func TestNoRows(t *testing.T) {
	for _, fields := range [][]arrow.Field{flatFields, nestedFields} {
		if in := written(t, arrow.NewSchema(fields, nil), Options{}); in.NumRows() != 0 || in.MetaData().Schema.NumColumns() < len(fields) {
			t.Errorf("%d rows, %d columns", in.NumRows(), in.MetaData().Schema.NumColumns())
		}
	}
}

// What does not fit ends the file: no half of it stays.
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
