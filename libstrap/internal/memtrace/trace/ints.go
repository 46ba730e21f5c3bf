// Views columns of integers of any width as 64-bit numbers.

package trace

import (
	"math"
	"unsafe"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func asUnsigned(v []int64) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(unsafe.SliceData(v))), len(v))
}

// signed views an integer column as int64. Nulls become *null; if null is nil, a null is an error.
// A column that the trace lacks is all 0.
func (b *Batch) signed(name string, null *int64) ([]int64, error) {
	a := b.column(name)
	if a == nil {
		return make([]int64, b.Rows), nil
	}
	if allNull(a) {
		if null == nil && b.Rows > 0 {
			return nil, bad(name, 0, "no value")
		}
		v := make([]int64, b.Rows)
		for i := range v {
			v[i] = *null
		}
		return v, nil
	}
	var v []int64
	switch a := a.(type) {
	case *array.Int64:
		v = a.Int64Values()
	case *array.Timestamp:
		if unit := a.DataType().(*arrow.TimestampType).Unit; unit != arrow.Nanosecond {
			return nil, status.New(status.InvalidArgument, "column %s has unit %s, not ns", name, unit)
		}
		v = unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(a.TimestampValues()))), a.Len())
	case *array.Uint64:
		v = unsafe.Slice((*int64)(unsafe.Pointer(unsafe.SliceData(a.Uint64Values()))), a.Len())
		for i, x := range v {
			if x < 0 && a.IsValid(i) {
				return nil, bad(name, i, "%d is too large", uint64(x))
			}
		}
	case *array.Int32:
		v = widened[int64](a.Int32Values())
	case *array.Uint32:
		v = widened[int64](a.Uint32Values())
	case *array.Int16:
		v = widened[int64](a.Int16Values())
	case *array.Uint16:
		v = widened[int64](a.Uint16Values())
	case *array.Int8:
		v = widened[int64](a.Int8Values())
	case *array.Uint8:
		v = widened[int64](a.Uint8Values())
	case *array.Float64:
		return wholes(name, a, a.Float64Values(), 1<<53, null)
	case *array.Float32:
		return wholes(name, a, a.Float32Values(), 1<<24, null)
	default:
		return nil, status.New(status.InvalidArgument, "column %s holds %v, not integers", name, a.DataType())
	}
	return withoutNulls(name, a, v, null)
}

// unsigned views a column of addresses or pages as uint64. Nulls and negative values are errors.
func (b *Batch) unsigned(name string) ([]uint64, error) {
	a := b.column(name)
	if a, ok := a.(*array.Uint64); ok { // every value is valid
		return withoutNulls(name, a, a.Uint64Values(), nil)
	}
	v, err := b.signed(name, nil)
	if err != nil {
		return nil, err
	}
	for i, x := range v {
		if x < 0 {
			return nil, bad(name, i, "%d is negative: addresses from 2^63 on need an unsigned column", x)
		}
	}
	return asUnsigned(v), nil
}

// wholes converts a float column to int64. It refuses fractions, and values of more than most, up to
// which the type is exact. If null is not nil, nulls and NaN become *null.
func wholes[F float32 | float64](name string, a arrow.Array, floats []F, most float64, null *int64) ([]int64, error) {
	v := make([]int64, len(floats))
	for i, f := range floats {
		x := float64(f)
		switch {
		case a.IsNull(i) && null == nil:
			return nil, bad(name, i, "no value")
		case a.IsNull(i) || math.IsNaN(x) && null != nil:
			v[i] = *null
		case x != math.Trunc(x) || math.Abs(x) > most:
			return nil, bad(name, i, "%v is no whole number that a float holds exactly: give integers", f)
		default:
			v[i] = int64(x)
		}
	}
	return v, nil
}

func widened[T int64, S int8 | int16 | int32 | uint8 | uint16 | uint32](v []S) []T {
	out := make([]T, len(v))
	for i, x := range v {
		out[i] = T(x)
	}
	return out
}

func withoutNulls[T int64 | uint64](name string, a arrow.Array, v []T, null *T) ([]T, error) {
	if a.NullN() == 0 {
		return v, nil
	}
	v = append([]T(nil), v...)
	for i := range v {
		if a.IsNull(i) {
			if null == nil {
				return nil, bad(name, i, "no value")
			}
			v[i] = *null
		}
	}
	return v, nil
}
