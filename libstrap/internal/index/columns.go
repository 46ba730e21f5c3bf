// The columns of the index: their Arrow fields, and how values pass between rows and cells.

package index

import (
	"math"
	"slices"
	"strconv"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	format  = "libstrap.index"
	version = 4 // of new indexes; older versions can be read
)

// column is one column of the index. It has the Arrow field, and copies values between a row and a cell.
// get does not change the row if the cell is null. The row begins as unknownRow.
type column struct {
	field arrow.Field
	put   func(array.Builder, *wire.Row)
	get   func(*cells, int, *wire.Row)
	since int // first version with this column; 0: all versions have it
}

// from returns the column with its first version. In older indexes its cells are null.
func (c column) from(version int) column {
	c.since = version
	return c
}

// columnsOf returns the columns of a version.
func columnsOf(version int) []column {
	return slices.DeleteFunc(slices.Clone(columns), func(c column) bool { return c.since > version })
}

// unknownRow returns a row whose nullable cells are all null.
func unknownRow() wire.Row {
	return wire.Row{Offset: -1, Step: -1, Token: -1, MSE: math.NaN(), MeanSquare: math.NaN()}
}

var columns = []column{
	uint64s("sequence", func(r *wire.Row) *uint64 { return &r.Sequence }),
	offsets("offset"),
	uint64s("length", func(r *wire.Row) *uint64 { return &r.Length }),
	uint32s("part", func(r *wire.Row) *uint32 { return &r.Part }),
	uint32s("parts", func(r *wire.Row) *uint32 { return &r.Parts }),
	text("model", func(r *wire.Row) *string { return &r.Model }),
	text("layer", func(r *wire.Row) *string { return &r.Layer }),
	text("path", func(r *wire.Row) *string { return &r.Path }),
	uint32s("call", func(r *wire.Row) *uint32 { return &r.Call }),
	int64sUnless(negative, "step", func(r *wire.Row) *int64 { return &r.Step }),
	int64sUnless(negative, "token", func(r *wire.Row) *int64 { return &r.Token }),
	ranks("rank"),
	uint64s("thread", func(r *wire.Row) *uint64 { return &r.Thread }),
	shapes("shape"),
	dtypes("source_dtype", func(r *wire.Row) *wire.DType { return &r.Source }),
	dtypes("stored_dtype", func(r *wire.Row) *wire.DType { return &r.Stored }),
	text("codec", func(r *wire.Row) *string { return &r.Codec }),
	textOrNull("transform", func(r *wire.Row) *string { return &r.Transform }),
	textOrNull("parameters", func(r *wire.Row) *string { return &r.Parameters }),
	checksums("crc32c"),
	int64sUnless(zero, "time_ns", func(r *wire.Row) *int64 { return &r.TimeNS }),
	float64s("mse", func(r *wire.Row) *float64 { return &r.MSE }),
	float64s("mean_square", func(r *wire.Row) *float64 { return &r.MeanSquare }).from(2),
	mantissas("mantissa_bits").from(2),
	textOrNull("request", func(r *wire.Row) *string { return &r.Request }).from(3),
	textOrNull("error", func(r *wire.Row) *string { return &r.Error }),
}

const (
	columnOffset    = 1
	columnLength    = 2
	columnParts     = 4
	columnLayer     = 6
	columnPath      = 7
	columnShape     = 13
	columnStored    = 15
	columnCodec     = 16
	columnTransform = 17
	columnCRC       = 19
)

func negative(v int64) bool { return v < 0 }
func zero(v int64) bool     { return v == 0 }

func field(name string, t arrow.DataType, nullable bool) arrow.Field {
	return arrow.Field{Name: name, Type: t, Nullable: nullable}
}

func uint64s(name string, of func(*wire.Row) *uint64) column {
	return column{
		field: field(name, arrow.PrimitiveTypes.Uint64, false),
		put:   func(b array.Builder, r *wire.Row) { b.(*array.Uint64Builder).Append(*of(r)) },
		get:   func(c *cells, i int, r *wire.Row) { *of(r) = c.number(i) },
	}
}

func uint32s(name string, of func(*wire.Row) *uint32) column {
	return column{
		field: field(name, arrow.PrimitiveTypes.Uint32, false),
		put:   func(b array.Builder, r *wire.Row) { b.(*array.Uint32Builder).Append(*of(r)) },
		get:   func(c *cells, i int, r *wire.Row) { *of(r) = uint32(c.number(i)) },
	}
}

func int64sUnless(null func(int64) bool, name string, of func(*wire.Row) *int64) column {
	return column{
		field: field(name, arrow.PrimitiveTypes.Int64, true),
		put: func(b array.Builder, r *wire.Row) {
			if v := *of(r); null(v) {
				b.AppendNull()
			} else {
				b.(*array.Int64Builder).Append(v)
			}
		},
		get: func(c *cells, i int, r *wire.Row) {
			if !c.isNull(i) {
				*of(r) = int64(c.number(i))
			}
		},
	}
}

func text(name string, of func(*wire.Row) *string) column {
	return column{
		field: field(name, arrow.BinaryTypes.String, false),
		put:   func(b array.Builder, r *wire.Row) { b.(*array.StringBuilder).Append(*of(r)) },
		get:   func(c *cells, i int, r *wire.Row) { *of(r) = c.text(i) },
	}
}

func textOrNull(name string, of func(*wire.Row) *string) column {
	return column{
		field: field(name, arrow.BinaryTypes.String, true),
		put: func(b array.Builder, r *wire.Row) {
			if s := *of(r); s == "" {
				b.AppendNull()
			} else {
				b.(*array.StringBuilder).Append(s)
			}
		},
		get: func(c *cells, i int, r *wire.Row) {
			if !c.isNull(i) {
				*of(r) = c.text(i)
			}
		},
	}
}

// dtypes returns a column with names of types, null if the type is unknown. A name that this
// version does not know reads as unknown.
func dtypes(name string, of func(*wire.Row) *wire.DType) column {
	return column{
		field: field(name, arrow.BinaryTypes.String, true),
		put: func(b array.Builder, r *wire.Row) {
			if d := *of(r); d.Valid() {
				b.(*array.StringBuilder).Append(d.String())
			} else {
				b.AppendNull()
			}
		},
		get: func(c *cells, i int, r *wire.Row) {
			if !c.isNull(i) {
				*of(r) = wire.ParseDType(c.text(i))
			}
		},
	}
}

// offsets returns a column that is null in a note, which has no packet.
func offsets(name string) column {
	return column{
		field: field(name, arrow.PrimitiveTypes.Uint64, true),
		put: func(b array.Builder, r *wire.Row) {
			if r.Offset < 0 {
				b.AppendNull()
			} else {
				b.(*array.Uint64Builder).Append(uint64(r.Offset))
			}
		},
		get: func(c *cells, i int, r *wire.Row) {
			if !c.isNull(i) {
				r.Offset = int64(c.number(i))
			}
		},
	}
}

func ranks(name string) column {
	return column{
		field: field(name, arrow.PrimitiveTypes.Int32, false),
		put:   func(b array.Builder, r *wire.Row) { b.(*array.Int32Builder).Append(r.Rank) },
		get:   func(c *cells, i int, r *wire.Row) { r.Rank = int32(c.number(i)) },
	}
}

// shapes returns a column that is null if the shape is unknown, as for a packet found by scanning.
// The shape of a scalar is empty.
func shapes(name string) column {
	return column{
		field: field(name, arrow.ListOf(arrow.PrimitiveTypes.Int64), true),
		put: func(b array.Builder, r *wire.Row) {
			if r.Shape == nil && r.Source == 0 {
				b.AppendNull()
				return
			}
			list := b.(*array.ListBuilder)
			list.Append(true)
			list.ValueBuilder().(*array.Int64Builder).AppendValues(r.Shape, nil)
		},
		get: func(c *cells, i int, r *wire.Row) {
			if !c.isNull(i) {
				r.Shape = c.appendList([]int64{}, i)
			}
		},
	}
}

// checksums returns a column that is null if there is no packet, or if the packet was found by
// scanning: its bytes may be damaged.
func checksums(name string) column {
	return column{
		field: field(name, arrow.PrimitiveTypes.Uint32, true),
		put: func(b array.Builder, r *wire.Row) {
			if hasCRC(r) {
				b.(*array.Uint32Builder).Append(r.CRC)
			} else {
				b.AppendNull()
			}
		},
		get: func(c *cells, i int, r *wire.Row) {
			if !c.isNull(i) {
				r.CRC = uint32(c.number(i))
			}
		},
	}
}

func hasCRC(r *wire.Row) bool { return r.Source != 0 && r.Offset >= 0 }

// float64s returns a column that is null for NaN.
func float64s(name string, of func(*wire.Row) *float64) column {
	return column{
		field: field(name, arrow.PrimitiveTypes.Float64, true),
		put: func(b array.Builder, r *wire.Row) {
			if v := *of(r); math.IsNaN(v) {
				b.AppendNull()
			} else {
				b.(*array.Float64Builder).Append(v)
			}
		},
		get: func(c *cells, i int, r *wire.Row) {
			if !c.isNull(i) {
				*of(r) = math.Float64frombits(c.number(i))
			}
		},
	}
}

// mantissas returns a column that is null if nothing was rounded.
func mantissas(name string) column {
	return column{
		field: field(name, arrow.PrimitiveTypes.Int8, true),
		put: func(b array.Builder, r *wire.Row) {
			if r.Mantissa == 0 {
				b.AppendNull()
			} else {
				b.(*array.Int8Builder).Append(r.Mantissa)
			}
		},
		get: func(c *cells, i int, r *wire.Row) {
			if !c.isNull(i) {
				r.Mantissa = int8(c.number(i))
			}
		},
	}
}

// Schema returns the Arrow schema of an index with this metadata.
func Schema(m Metadata) *arrow.Schema {
	fields := make([]arrow.Field, len(columns))
	for i, c := range columns {
		fields[i] = c.field
	}
	md := arrow.NewMetadata(
		[]string{"format", "version", "capture_id", "first_crc32c"},
		[]string{format, strconv.Itoa(version), m.CaptureID, m.firstCRC()},
	)
	return arrow.NewSchema(fields, &md)
}

// Record makes one record batch of rows. A row may have at most maxText bytes of text.
func Record(schema *arrow.Schema, rows []wire.Row) arrow.Record {
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	b.Reserve(len(rows))
	for i, c := range columns {
		f := b.Field(i)
		for j := range rows {
			c.put(f, &rows[j])
		}
	}
	return b.NewRecord()
}

// texts is the type of text columns in the schemas that Select returns.
var texts = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}

// Select returns the schema of some columns. Text columns become dictionaries. ok is false if there is no
// column of a name; missing is this name.
func Select(names []string) (schema *arrow.Schema, missing string, ok bool) {
	fields := make([]arrow.Field, len(names))
	for i, name := range names {
		k := placeOf(name)
		if k < 0 {
			return nil, name, false
		}
		if fields[i] = columns[k].field; fields[i].Type.ID() == arrow.STRING {
			fields[i].Type = texts
		}
	}
	return arrow.NewSchema(fields, nil), "", true
}

func placeOf(name string) int {
	return slices.IndexFunc(columns, func(c column) bool { return c.field.Name == name })
}

// RowsOf makes Rows of rows that are in no index.
func RowsOf(rows []wire.Row) Rows {
	rec := Record(Schema(Metadata{}), rows)
	defer rec.Release()
	b, r := &batch{rows: len(rows)}, room{}
	for k := range columns {
		b.columns = append(b.columns, cellsOf(rec.Column(k).Data(), &r))
	}
	return Rows{batch: b, to: len(rows)}
}

// Recorder makes records of the schema of an index, or of Select. A record is valid until the next one.
type Recorder struct {
	schema *arrow.Schema
	places []int // index of each column in columns
	memory slots
}

func NewRecorder(schema *arrow.Schema) *Recorder {
	r := &Recorder{schema: schema}
	for _, f := range schema.Fields() {
		r.places = append(r.places, placeOf(f.Name))
	}
	return r
}

func (r *Recorder) Schema() *arrow.Schema { return r.schema }

// Record makes a record of rows.
func (r *Recorder) Record(rows Rows) arrow.Record {
	r.memory.next = 0
	arrays := make([]arrow.Array, len(r.places))
	for i, k := range r.places {
		arrays[i] = rows.batch.columns[k].array(r.schema.Field(i).Type, rows.from, rows.to, &r.memory)
	}
	return array.NewRecord(r.schema, arrays, int64(rows.to-rows.from))
}
