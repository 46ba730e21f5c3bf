// Encodes the columns of a row group by the type of their values.

package parquet

import (
	"bytes"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/file"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// column encodes a column of a row group.
type column interface {
	add(chunk arrow.Array) error
	// end encodes the values that add left, and ends the last page.
	end() error
}

func newColumn(field arrow.Field, out file.ColumnChunkWriter) column {
	base := base{nullable: field.Nullable, out: out}
	if d, ok := field.Type.(*arrow.DictionaryType); ok && arrow.IsBaseBinary(d.ValueType.ID()) {
		return &textColumn{base: base}
	}
	switch out := out.(type) {
	case *file.BooleanColumnChunkWriter:
		return &valueColumn[bool]{base: base, write: out.WriteBatch, of: bools}
	case *file.Int32ColumnChunkWriter:
		return &valueColumn[int32]{base: base, write: out.WriteBatch, of: int32s}
	case *file.Int64ColumnChunkWriter:
		return &valueColumn[int64]{base: base, write: out.WriteBatch, of: int64s}
	case *file.Float32ColumnChunkWriter:
		return &valueColumn[float32]{base: base, write: out.WriteBatch, of: float32s}
	case *file.Float64ColumnChunkWriter:
		return &valueColumn[float64]{base: base, write: out.WriteBatch, of: float64s}
	default:
		return &valueColumn[parquet.ByteArray]{base: base, write: out.(*file.ByteArrayColumnChunkWriter).WriteBatch, of: byteArrays}
	}
}

// base is the part that columns of all types share.
type base struct {
	nullable bool
	out      file.ColumnChunkWriter
	levels   []int16
}

// definitionLevels returns 1 for each value and 0 for each null, or nil if the column is not
// nullable. The slice is valid until the next call.
//
// Errors: InvalidArgument for a null in a column that is not nullable.
func (c *base) definitionLevels(chunk arrow.Array) ([]int16, error) {
	n, nulls := chunk.Len(), chunk.NullN()
	if !c.nullable {
		if nulls > 0 {
			return nil, status.New(status.InvalidArgument, "%d rows have no value, though the column's type is not nullable", nulls)
		}
		return nil, nil
	}
	if cap(c.levels) < n {
		c.levels = make([]int16, n)
	}
	levels := c.levels[:n]
	for i := range levels {
		levels[i] = 0
		if nulls == 0 || nulls < n && chunk.IsValid(i) {
			levels[i] = 1
		}
	}
	return levels, nil
}

// end compresses the last page. The columns call end side by side, so their last pages are
// compressed side by side too.
func (c *base) end() error {
	// If the last batch filled its page, the current page is empty, and Arrow would panic. Columns
	// of type null have no statistics; they never fill a page.
	if page := c.out.PageStatistics(); page != nil && page.NumValues()+page.NullCount() == 0 {
		return nil
	}
	if page, ok := c.out.(interface{ FlushCurrentPage() error }); ok {
		return page.FlushCurrentPage()
	}
	return nil
}

// valueColumn encodes values when they are added.
type valueColumn[T any] struct {
	base
	write  func(values []T, definitionLevels, _ []int16) (int64, error)
	of     func(arrow.Array) []T // a value for each row; that of a null means nothing
	values []T
}

func (c *valueColumn[T]) add(chunk arrow.Array) error {
	rows, at := chunk, func(row int) int { return row }
	d, isDictionary := chunk.(*array.Dictionary)
	if isDictionary {
		codes, err := codesOf(d)
		if err != nil {
			return err
		}
		indices := indicesOf(codes)
		defer indices.Release()
		chunk, rows, at = d.Dictionary(), indices, func(row int) int { return int(codes[row]) }
	}
	levels, err := c.definitionLevels(rows)
	if err != nil {
		return err
	}
	var values []T
	if nulls := rows.NullN(); nulls < rows.Len() { // a chunk of nulls only may have no memory for values
		values = c.of(chunk)
		if isDictionary || nulls > 0 {
			values = c.gathered(values, rows, at)
		}
	}
	_, err = c.write(values, levels, nil)
	return err
}

// gathered returns the values of the rows that are not null. at maps a row to its place in values.
// The slice is valid until the next call.
func (c *valueColumn[T]) gathered(values []T, rows arrow.Array, at func(row int) int) []T {
	c.values = c.values[:0]
	for row := range rows.Len() {
		if rows.IsValid(row) {
			c.values = append(c.values, values[at(row)])
		}
	}
	return c.values
}

func bools(a arrow.Array) []bool {
	bits := a.(*array.Boolean)
	values := make([]bool, bits.Len())
	for i := range values {
		values[i] = bits.Value(i)
	}
	return values
}

func int32s(a arrow.Array) []int32 {
	switch a := a.(type) {
	case *array.Int8:
		return widened(a.Int8Values())
	case *array.Int16:
		return widened(a.Int16Values())
	case *array.Uint8:
		return widened(a.Uint8Values())
	case *array.Uint16:
		return widened(a.Uint16Values())
	case *array.Uint32:
		return arrow.Int32Traits.CastFromBytes(arrow.Uint32Traits.CastToBytes(a.Uint32Values()))
	case *array.Date32:
		return arrow.Int32Traits.CastFromBytes(arrow.Date32Traits.CastToBytes(a.Date32Values()))
	default:
		return a.(*array.Int32).Int32Values()
	}
}

func widened[T int8 | int16 | uint8 | uint16](narrow []T) []int32 {
	values := make([]int32, len(narrow))
	for i, v := range narrow {
		values[i] = int32(v)
	}
	return values
}

func int64s(a arrow.Array) []int64 {
	switch a := a.(type) {
	case *array.Uint64:
		return arrow.Int64Traits.CastFromBytes(arrow.Uint64Traits.CastToBytes(a.Uint64Values()))
	case *array.Timestamp:
		return arrow.Int64Traits.CastFromBytes(arrow.TimestampTraits.CastToBytes(a.TimestampValues()))
	default:
		return a.(*array.Int64).Int64Values()
	}
}

func float32s(a arrow.Array) []float32 { return a.(*array.Float32).Float32Values() }

func float64s(a arrow.Array) []float64 { return a.(*array.Float64).Float64Values() }

// byteArrays returns copies of the values, because the statistics keep the least and the greatest
// value after the rows were released.
func byteArrays(a arrow.Array) []parquet.ByteArray {
	texts := a.(array.BinaryLike)
	all, start := bytes.Clone(texts.ValueBytes()), texts.ValueOffset64(0)
	values := make([]parquet.ByteArray, texts.Len())
	for i := range values {
		from := texts.ValueOffset64(i) - start
		values[i] = all[from : from+int64(texts.ValueLen(i))]
	}
	return values
}
