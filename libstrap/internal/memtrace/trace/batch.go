// Checks the columns of a trace, and views those of a record.

package trace

import (
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Op is a load or a store.
type Op uint8

const (
	Load Op = iota
	Store
)

// Needed lists the columns that Check and Open require. A complete trace has run_id and sample_id
// too.
var Needed = []string{"timestamp_ns", "address", "address_page", "op_type"}

// Check returns InvalidArgument, with the names of the columns, if a schema lacks needed columns or
// has a column twice.
func Check(schema *arrow.Schema) error {
	var missing []string
	for _, name := range Needed {
		if !schema.HasField(name) {
			missing = append(missing, name)
		}
	}
	if missing != nil {
		return status.New(status.InvalidArgument, "the trace lacks the columns %s", strings.Join(missing, ", "))
	}
	for _, field := range schema.Fields() {
		if len(schema.FieldIndices(field.Name)) > 1 {
			return status.New(status.InvalidArgument, "the trace has the column %s more than once", field.Name)
		}
	}
	return nil
}

// MostLength is the largest number of bytes that one row may span. A longer row is taken for a
// mistake.
const MostLength = 1 << 40

// Batch is a view of the columns of a record. The slices have one element per row and may be the
// record's own memory. So they are read-only, and valid until the record is released.
//
// A row of Length L > 0 stands for one access to each page that it touches. The first access is at
// Address, the others are at the starts of the following pages. All have the same time and follow
// each other in the order of their addresses. L = 0 is one access at Address.
type Batch struct {
	Rows    int
	Time    []int64  // timestamp_ns, never negative
	Address []uint64 // of the first byte
	Page    []uint64 // address_page as given
	Op      []Op
	Region  []int64  // region_id, 0 if absent or null
	Type    Texts    // region_type, "unknown" if absent or null
	Length  []uint64 // length_bytes: nil if the trace has no such column, 0 for a null
	record  arrow.Record
}

// Open checks a record and views its columns. Columns of numbers may be integers of any width,
// timestamps in ns, or floats that hold whole numbers. A NaN counts as a null if the column may
// have nulls. Columns of text may be utf8, large_utf8, string_view or dictionaries of these. A
// column of nulls only may have any type. Columns that Batch does not have may hold anything.
//
// Errors: InvalidArgument, with the name of the column. If one value is at fault, the error names
// its row in the batch; [After] turns that into the row of the trace.
func Open(record arrow.Record) (*Batch, error) {
	if err := Check(record.Schema()); err != nil {
		return nil, err
	}
	b := &Batch{Rows: int(record.NumRows()), record: record}
	var err error
	if b.Time, err = b.signed("timestamp_ns", nil); err != nil {
		return nil, err
	}
	if b.Address, err = b.unsigned("address"); err != nil {
		return nil, err
	}
	if b.Page, err = b.unsigned("address_page"); err != nil {
		return nil, err
	}
	if b.Region, err = b.signed("region_id", new(int64)); err != nil {
		return nil, err
	}
	if b.has("length_bytes") {
		length, err := b.signed("length_bytes", new(int64))
		if err != nil {
			return nil, err
		}
		for i, n := range length {
			switch {
			case n < 0 || n > 0 && uint64(n-1) > math.MaxUint64-b.Address[i]:
				return nil, bad("length_bytes", i, "%d bytes at %#x", n, b.Address[i])
			case n > MostLength:
				return nil, bad("length_bytes", i, "%d bytes in one access, of at most %d", n, int64(MostLength))
			}
		}
		b.Length = asUnsigned(length)
	}
	for i, t := range b.Time {
		if t < 0 {
			return nil, bad("timestamp_ns", i, "%d is negative", t)
		}
	}
	ops, err := b.Text("op_type")
	if err != nil {
		return nil, err
	}
	if b.Op, err = opsOf(ops); err != nil {
		return nil, err
	}
	b.Type, err = b.Text("region_type")
	if err != nil {
		return nil, err
	}
	b.Type.fill("unknown")
	return b, nil
}

// cellError is InvalidArgument for the value in one row of a column.
type cellError struct {
	column string
	row    int64
	of     string // "batch" or "trace": row is counted from its beginning
	what   string
}

func bad(column string, row int, format string, args ...any) error {
	return &cellError{column, int64(row), "batch", fmt.Sprintf(format, args...)}
}

func (e *cellError) Error() string {
	return fmt.Sprintf("column %s, row %d of the %s: %s", e.column, e.row, e.of, e.what)
}

func (e *cellError) Unwrap() error { return status.InvalidArgument }

// After makes an error of Open name the row of the trace in place of the row of the batch. rows is
// how many rows of the trace came before the batch. Other errors, and nil, stay as they are.
func After(rows int64, err error) error {
	var cell *cellError
	if !errors.As(err, &cell) || cell.of == "trace" {
		return err
	}
	return &cellError{cell.column, rows + cell.row, "trace", cell.what}
}

func (b *Batch) has(name string) bool { return b.record.Schema().HasField(name) }

func (b *Batch) column(name string) arrow.Array {
	if i := b.record.Schema().FieldIndices(name); len(i) > 0 {
		return b.record.Column(i[0])
	}
	return nil
}

// Texts holds the values of a text column. The value of row i is Values[Codes[i]]; a code of -1 is
// a null. Values are copies and outlive the record. Codes may be the record's own memory.
type Texts struct {
	Codes  []int32
	Values []string
}

// fill gives null rows a value.
func (t *Texts) fill(value string) {
	code := int32(-1)
	for i, c := range t.Codes {
		if c >= 0 {
			continue
		}
		if code < 0 {
			// The codes may be the record's own memory.
			t.Codes = append([]int32(nil), t.Codes...)
			code = int32(len(t.Values))
			t.Values = append(t.Values[:len(t.Values):len(t.Values)], value)
		}
		t.Codes[i] = code
	}
}

// Text views a text column. All rows are null if the trace has no such column. It returns
// InvalidArgument if the column holds something other than text.
func (b *Batch) Text(name string) (Texts, error) {
	nulls := func() []int32 {
		codes := make([]int32, b.Rows)
		for i := range codes {
			codes[i] = -1
		}
		return codes
	}
	column := b.column(name)
	if column == nil || allNull(column) {
		return Texts{Codes: nulls()}, nil
	}
	switch a := column.(type) {
	case *array.Dictionary:
		values, err := stringsOf(name, a.Dictionary())
		if err != nil {
			return Texts{}, err
		}
		if indices, ok := a.Indices().(*array.Int32); ok && a.NullN() == 0 && a.Dictionary().NullN() == 0 {
			return Texts{Codes: indices.Int32Values(), Values: values}, nil
		}
		codes := nulls()
		for i := range codes {
			if a.IsValid(i) && a.Dictionary().IsValid(a.GetValueIndex(i)) {
				codes[i] = int32(a.GetValueIndex(i))
			}
		}
		return Texts{Codes: codes, Values: values}, nil
	default:
		at, err := textAt(name, a)
		if err != nil {
			return Texts{}, err
		}
		t := Texts{Codes: nulls()}
		known := map[string]int32{}
		last, code := "", int32(-1)
		for i := range t.Codes {
			if a.IsNull(i) {
				continue
			}
			if v := at(i); code < 0 || v != last {
				c, ok := known[v]
				if !ok {
					c = int32(len(t.Values))
					v = strings.Clone(v)
					known[v] = c
					t.Values = append(t.Values, v)
				}
				last, code = v, c
			}
			t.Codes[i] = code
		}
		return t, nil
	}
}

// allNull reports whether a column has no values. The type of this column says nothing, because a
// writer that saw no values had to choose a type.
func allNull(a arrow.Array) bool {
	if d, ok := a.(*array.Dictionary); ok && d.Dictionary().DataType().ID() == arrow.NULL {
		return true
	}
	return a.DataType().ID() == arrow.NULL || a.NullN() == a.Len() // NullN of a Null array may be 0
}

func textAt(name string, a arrow.Array) (func(int) string, error) {
	switch a := a.(type) {
	case *array.String:
		return a.Value, nil
	case *array.LargeString:
		return a.Value, nil
	case *array.StringView:
		return a.Value, nil
	default:
		return nil, status.New(status.InvalidArgument, "column %s holds %v, not text", name, a.DataType())
	}
}

func stringsOf(name string, a arrow.Array) ([]string, error) {
	at, err := textAt(name, a)
	if err != nil {
		return nil, err
	}
	out := make([]string, a.Len())
	for i := range out {
		if a.IsValid(i) {
			out[i] = strings.Clone(at(i))
		}
	}
	return out, nil
}

func opsOf(t Texts) ([]Op, error) {
	byCode := make([]int8, len(t.Values))
	for i, v := range t.Values {
		switch v {
		case "load":
			byCode[i] = int8(Load)
		case "store":
			byCode[i] = int8(Store)
		default:
			byCode[i] = -1
		}
	}
	ops := make([]Op, len(t.Codes))
	for i, c := range t.Codes {
		if c < 0 {
			return nil, bad("op_type", i, "no value")
		}
		if byCode[c] < 0 {
			return nil, bad("op_type", i, "%q is neither load nor store", t.Values[c])
		}
		ops[i] = Op(byCode[c])
	}
	return ops, nil
}
