package codec

import (
	"math"
	"unsafe"
)

// Mantissa is the format of a 16-bit float, by its mantissa.
type Mantissa int

const (
	Float16  Mantissa = 10 // bits, IEEE 754 binary16
	BFloat16 Mantissa = 7
)

// rounding is how words of such a format are rounded.
type rounding struct {
	exponent uint16 // mask of its bits
	drop     int    // mantissa bits to drop
}

// rounding to bits of mantissa; all that the format has, and more, rounds nothing.
func (m Mantissa) rounding(bits int) rounding {
	return rounding{exponent: 0x7FFF &^ (1<<m - 1), drop: max(int(m)-bits, 0)}
}

// nearest rounds to nearest, ties to even. NaN and infinities stay as they are, and
// what would become infinite is rounded towards zero.
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

// LeastBits is the fewest bits of mantissa with which values of one binade, evenly
// distributed, keep their normalised squared error within bound: 4^-bits / 28, from
// a variance of 4^-bits / 12 over a mean square of 7/3.
//
// It does not depend on the values: a packet with a few large ones could meet the
// bound with fewer bits, which would leave little of its small ones.
func (m Mantissa) LeastBits(bound float64) int {
	bits := int(math.Ceil(math.Log(1/(28*bound)) / math.Log(4)))
	return min(max(bits, 1), int(m))
}

// Round copies n 16-bit floats from src to dst with no more than bits of mantissa,
// rounded to nearest, ties to even; NaN and infinities stay as they are, and what
// would become infinite is rounded towards zero. Subnormal ones keep the same bits
// of the word. It adds to st. The two do not overlap.
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

// roundPortable is the twin of the kernels in kernel.c.
func roundPortable(dst, src []uint16, r rounding, st *Stats) {
	for i, w := range src {
		n := r.nearest(w)
		dst[i] = n
		if n&r.exponent != r.exponent {
			st.measure(r.value(w), r.value(n))
		}
	}
}

// value widens a word.
func (r rounding) value(w uint16) float64 {
	if r.exponent == 0x7C00 {
		return float64(float16Value(w))
	}
	return float64(math.Float32frombits(uint32(w) << 16))
}
