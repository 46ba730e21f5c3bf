// Converts float32 to float16, and measures the error. The loops in C have twins in Go here.

package codec

import (
	"math"
	"unsafe"
)

// Stats is the error that a conversion or rounding made. Count and the sums are over the values that
// are finite before and after. A sum is at least the true sum, except for the rounding of double, and
// exceeds it by less than the share sumExcess.
type Stats struct {
	Count       int64
	Overflow    int64   // finite values that became infinite
	SquareError float64 // sum of (value - stored value)^2
	SquareSum   float64 // sum of value^2
	MaxError    float64 // largest |value - stored value|, exact
}

// sumExcess is by what share a kernel's sum may exceed the true sum. Kernels add partly in float32, and
// make the sum larger by the most that rounding can lose; see kernel.c and quantise.go.
const sumExcess = 2e-6

// Within reports whether the squared error is certainly at most bound times the sum of squares, also
// with the true sums.
func (s *Stats) Within(bound float64) bool { return within(s.SquareError, s.SquareSum, bound) }

func within(squareError, squareSum, bound float64) bool {
	return squareError <= bound*squareSum*(1-sumExcess)
}

// Add merges o into s.
func (s *Stats) Add(o *Stats) {
	s.Count += o.Count
	s.Overflow += o.Overflow
	s.SquareError += o.SquareError
	s.SquareSum += o.SquareSum
	s.MaxError = max(s.MaxError, o.MaxError)
}

// Float32ToFloat16 converts n float32 values at src to IEEE 754 binary16 at dst. It rounds to nearest,
// ties to even. Values that are too large become infinite. A NaN keeps its sign and the upper bits of its
// payload. Then Float32ToFloat16 rounds to bits of mantissa, as Round does. It adds to st. dst and src
// must not overlap.
func Float32ToFloat16(dst, src unsafe.Pointer, n, bits int, st *Stats) {
	if n <= 0 {
		return
	}
	r := Float16.rounding(bits)
	if kernel, ok := kernelInUse(); ok {
		convertKernel(kernel, dst, src, n, r, st)
	} else {
		convertPortable(unsafe.Slice((*uint16)(dst), n), unsafe.Slice((*float32)(src), n), r, st)
	}
}

// convertPortable is the twin in Go of the conversions in kernel.c.
func convertPortable(dst []uint16, src []float32, r rounding, st *Stats) {
	for i, x := range src {
		h := r.nearest(float16Bits(x))
		dst[i] = h
		switch {
		case h&0x7C00 != 0x7C00:
			st.measure(float64(x), float64(float16Value(h)))
		case math.Float32bits(x)&0x7F800000 != 0x7F800000:
			st.Overflow++
		}
	}
}

// measure counts a finite value and the finite value that is stored for it.
func (s *Stats) measure(value, stored float64) {
	err := value - stored
	s.Count++
	s.SquareError += err * err
	s.SquareSum += value * value
	s.MaxError = max(s.MaxError, math.Abs(err))
}

// float16Bits rounds x to binary16.
func float16Bits(x float32) uint16 {
	b := math.Float32bits(x)
	sign := uint16(b >> 16 & 0x8000)
	b &= 0x7FFFFFFF
	switch {
	case b > 0x7F800000: // NaN: keep the upper payload, make it quiet
		return sign | 0x7E00 | uint16(b>>13&0x3FF)
	case b >= 0x477FF000: // rounds to 65520 or more
		return sign | 0x7C00
	case b < 0x38800000: // below 2^-14: subnormal, in units of 2^-24
		if b < 0x33000000 { // below 2^-25
			return sign
		}
		shift := 126 - b>>23
		m := b&0x7FFFFF | 0x800000
		return sign | uint16(roundShift(m, shift))
	default:
		return sign | uint16(roundShift(b-112<<23, 13))
	}
}

// roundShift returns v / 2^shift, rounded to nearest, ties to even.
func roundShift(v, shift uint32) uint32 {
	return (v + (1<<(shift-1) - 1) + v>>shift&1) >> shift
}

// float16Value widens binary16.
func float16Value(h uint16) float32 {
	sign := uint32(h&0x8000) << 16
	exp, frac := uint32(h>>10&0x1F), uint32(h&0x3FF)
	switch exp {
	case 0:
		v := float32(frac) * (1.0 / (1 << 24))
		return math.Float32frombits(sign | math.Float32bits(v))
	case 0x1F:
		return math.Float32frombits(sign | 0x7F800000 | frac<<13)
	default:
		return math.Float32frombits(sign | (exp+112)<<23 | frac<<13)
	}
}
