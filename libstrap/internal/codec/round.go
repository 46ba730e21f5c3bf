// Rounds 16-bit floats to fewer bits of mantissa.

package codec

import (
	"math"
	"unsafe"
)

// Mantissa is the format of a 16-bit float, by its number of mantissa bits.
type Mantissa int

const (
	Float16  Mantissa = 10 // bits, IEEE 754 binary16
	BFloat16 Mantissa = 7
)

// rounding says how words of a format are rounded.
type rounding struct {
	exponent uint16 // mask of the exponent's bits
	drop     int    // mantissa bits to drop
}

// rounding returns how to round to bits of mantissa. With all bits of the format, or more, nothing is
// rounded.
func (m Mantissa) rounding(bits int) rounding {
	return rounding{exponent: 0x7FFF &^ (1<<m - 1), drop: max(int(m)-bits, 0)}
}

// nearest rounds to nearest, ties to even. NaN and infinities stay the same. A value that would become
// infinite is rounded towards zero.
func (r rounding) nearest(w uint16) uint16 {
	if r.drop == 0 || w&r.exponent == r.exponent {
		return w
	}
	kept := uint16(0xFFFF) << r.drop
	n := (w + 1<<(r.drop-1) - 1 + w>>r.drop&1) & kept
	if n&r.exponent == r.exponent {
		return w & kept
	}
	return n
}

// LeastBits returns the fewest bits of mantissa that keep a normalised squared error within bound, for
// values that are evenly distributed in one binade. Their error is 4^-bits / 28: a variance of
// 4^-bits / 12 over a mean square of 7/3.
//
// The result does not depend on the values of a packet. A packet with a few large values could meet the
// bound with fewer bits, but would lose most of its small values.
func (m Mantissa) LeastBits(bound float64) int {
	bits := int(math.Ceil(math.Log(1/(28*bound)) / math.Log(4)))
	return min(max(bits, 1), int(m))
}

// Round copies n 16-bit floats from src to dst and rounds them to bits of mantissa: to nearest, ties to
// even. NaN and infinities stay the same. A value that would become infinite is rounded towards zero.
// Subnormal values keep the same bits of the word as others. Round adds to st. dst and src must not
// overlap.
func (m Mantissa) Round(dst, src unsafe.Pointer, n, bits int, st *Stats) {
	if n <= 0 {
		return
	}
	r := m.rounding(bits)
	if kernel, ok := kernelInUse(); ok && r.drop > 0 {
		roundKernel(kernel, dst, src, n, r, st)
	} else {
		roundPortable(unsafe.Slice((*uint16)(dst), n), unsafe.Slice((*uint16)(src), n), r, st)
	}
}

// roundPortable is the twin in Go of the roundings in kernel.c.
func roundPortable(dst, src []uint16, r rounding, st *Stats) {
	for i, w := range src {
		n := r.nearest(w)
		dst[i] = n
		if n&r.exponent != r.exponent {
			st.measure(r.value(w), r.value(n))
		}
	}
}

// value returns the value of a word.
func (r rounding) value(w uint16) float64 {
	if r.exponent == 0x7C00 {
		return float64(float16Value(w))
	}
	return float64(math.Float32frombits(uint32(w) << 16))
}
