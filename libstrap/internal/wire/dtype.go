// The element types, with their sizes and names.

package wire

import (
	"math"
	"math/bits"
	"slices"
)

// DType is an element type. Its values are those of strap_dtype in strap.h. Its names are those of torch
// and numpy.
type DType uint8

const (
	Float32 DType = iota + 1
	Float16
	BFloat16
	Float64
	Float8E4M3FN
	Float8E5M2
	Float8E4M3FNUZ
	Float8E5M2FNUZ
	Float8E8M0FNU
	Int8
	Int16
	Int32
	Int64
	UInt8
	UInt16
	UInt32
	UInt64
	Bool
	Complex32
	Complex64
	Complex128
	lastDType
)

var dtypes = [lastDType]struct {
	name string
	size int
}{
	Float32:        {"float32", 4},
	Float16:        {"float16", 2},
	BFloat16:       {"bfloat16", 2},
	Float64:        {"float64", 8},
	Float8E4M3FN:   {"float8_e4m3fn", 1},
	Float8E5M2:     {"float8_e5m2", 1},
	Float8E4M3FNUZ: {"float8_e4m3fnuz", 1},
	Float8E5M2FNUZ: {"float8_e5m2fnuz", 1},
	Float8E8M0FNU:  {"float8_e8m0fnu", 1},
	Int8:           {"int8", 1},
	Int16:          {"int16", 2},
	Int32:          {"int32", 4},
	Int64:          {"int64", 8},
	UInt8:          {"uint8", 1},
	UInt16:         {"uint16", 2},
	UInt32:         {"uint32", 4},
	UInt64:         {"uint64", 8},
	Bool:           {"bool", 1},
	Complex32:      {"complex32", 4},
	Complex64:      {"complex64", 8},
	Complex128:     {"complex128", 16},
}

// Valid reports whether d is one of the types above.
func (d DType) Valid() bool { return d >= Float32 && d < lastDType }

// Size returns the bytes of one element, or 0 for an invalid type.
func (d DType) Size() int {
	if !d.Valid() {
		return 0
	}
	return dtypes[d].size
}

// String returns the name that the index has, for example "bfloat16".
func (d DType) String() string {
	if !d.Valid() {
		return "invalid"
	}
	return dtypes[d].name
}

// ParseDType is the inverse of String. It returns 0 for an unknown name.
func ParseDType(name string) DType {
	for d := Float32; d < lastDType; d++ {
		if dtypes[d].name == name {
			return d
		}
	}
	return 0
}

// TensorLen returns the bytes of a tensor's elements. It returns math.MaxInt64 if they are more, or if
// the shape has a negative number.
func TensorLen(shape []int64, d DType) int64 {
	if slices.Contains(shape, 0) {
		return 0
	}
	total := uint64(d.Size())
	for _, n := range shape {
		hi, lo := bits.Mul64(total, uint64(n))
		if n < 0 || hi != 0 || lo > math.MaxInt64 {
			return math.MaxInt64
		}
		total = lo
	}
	return int64(total)
}
