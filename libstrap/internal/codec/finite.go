// Finds values that are not finite.

package codec

import (
	"bytes"
	"encoding/binary"
	"math"

	"github.com/libstrap/strap/libstrap/internal/wire"
)

// exponent says how a type of floats marks values that are not finite: its words without the sign are
// at least least.
type exponent struct {
	width int    // bytes of a word
	least uint64 // of the words without sign
}

// exponents are those of the types that can hold infinities or NaN. Of the float8 types without
// infinities, NaN has all bits but the sign (E4M3FN), the sign alone (FNUZ), or all bits (E8M0FNU).
var exponents = map[wire.DType]exponent{
	wire.Float16:      {2, 0x7C00},
	wire.BFloat16:     {2, 0x7F80},
	wire.Float32:      {4, 0x7F80_0000},
	wire.Float64:      {8, 0x7FF0_0000_0000_0000},
	wire.Float8E5M2:   {1, 0x7C},
	wire.Float8E4M3FN: {1, 0x7F},
	wire.Complex32:    {2, 0x7C00},
	wire.Complex64:    {4, 0x7F80_0000},
	wire.Complex128:   {8, 0x7FF0_0000_0000_0000},
}

// lonelyNaN are the float8 types whose only value that is not finite is one byte.
var lonelyNaN = map[wire.DType]byte{
	wire.Float8E4M3FNUZ: 0x80,
	wire.Float8E5M2FNUZ: 0x80,
	wire.Float8E8M0FNU:  0xFF,
}

// FirstNotFinite returns the number of the first element that is infinite or NaN, and -1 if there is
// none. A complex element is not finite if a part of it is not. b has whole elements of type t.
func FirstNotFinite(t wire.DType, b []byte) int {
	at := -1
	if nan, ok := lonelyNaN[t]; ok {
		at = bytes.IndexByte(b, nan)
	} else if e, ok := exponents[t]; ok {
		at = e.first(b)
	}
	if at < 0 {
		return -1
	}
	return at / t.Size()
}

// first returns the offset of the first word that is not finite, or -1.
func (e exponent) first(b []byte) int {
	// One addition tests all words of 8 bytes: it carries into the sign of a word, which was cleared,
	// if the rest is at least least. No carry leaves a word.
	var clear, add, signs uint64
	bits := 8 * e.width
	sign := uint64(1) << (bits - 1)
	for shift := 0; shift < 64; shift += bits {
		clear |= (sign - 1) << shift
		add |= (sign - e.least) << shift
		signs |= sign << shift
	}
	at := 0
	for ; at+32 <= len(b); at += 32 {
		x0 := binary.NativeEndian.Uint64(b[at:])&clear + add
		x1 := binary.NativeEndian.Uint64(b[at+8:])&clear + add
		x2 := binary.NativeEndian.Uint64(b[at+16:])&clear + add
		x3 := binary.NativeEndian.Uint64(b[at+24:])&clear + add
		if (x0|x1|x2|x3)&signs != 0 {
			break
		}
	}
	for ; at+e.width <= len(b); at += e.width {
		if word(b[at:], e.width)&(sign-1) >= e.least {
			return at
		}
	}
	return -1
}

func word(b []byte, width int) uint64 {
	switch width {
	case 1:
		return uint64(b[0])
	case 2:
		return uint64(binary.NativeEndian.Uint16(b))
	case 4:
		return uint64(binary.NativeEndian.Uint32(b))
	default:
		return binary.NativeEndian.Uint64(b)
	}
}

// ValueOf returns element i of b as a float64; of a complex element the part that is not finite, or the
// real part. It is for messages: types without a value of their own give NaN.
func ValueOf(t wire.DType, b []byte, i int) float64 {
	size := t.Size()
	switch t {
	case wire.Complex32, wire.Complex64, wire.Complex128:
		half := map[wire.DType]wire.DType{
			wire.Complex32: wire.Float16, wire.Complex64: wire.Float32, wire.Complex128: wire.Float64,
		}[t]
		parts := b[i*size:][:size]
		if at := FirstNotFinite(half, parts); at > 0 {
			return ValueOf(half, parts, at)
		}
		return ValueOf(half, parts, 0)
	case wire.Float16:
		return float64(float16Value(binary.NativeEndian.Uint16(b[i*size:])))
	case wire.BFloat16:
		return float64(math.Float32frombits(uint32(binary.NativeEndian.Uint16(b[i*size:])) << 16))
	case wire.Float32:
		return float64(math.Float32frombits(binary.NativeEndian.Uint32(b[i*size:])))
	case wire.Float64:
		return math.Float64frombits(binary.NativeEndian.Uint64(b[i*size:]))
	case wire.Float8E5M2: // the upper byte of a float16
		return float64(float16Value(uint16(b[i]) << 8))
	}
	return math.NaN()
}
