package codec

import (
	"math"
	"unsafe"
)

// Team is threads of the host that share copies with the caller's, which would have
// them wait for it: the address of a C function like GOMP_parallel. Without one the caller copies alone.
type Team struct{ Parallel unsafe.Pointer }

// A copy of fewer elements is through before others have begun.
const teamLeast = 1 << 16

// Float32ToFloat16 is the function of that name.
func (t Team) Float32ToFloat16(dst, src unsafe.Pointer, n, bits int, st *Stats) {
	if t.takes(n) {
		shareKernel(t, convertWay, dst, src, n, Float16.rounding(bits), st)
	} else {
		Float32ToFloat16(dst, src, n, bits, st)
	}
}

// Round is Mantissa.Round.
func (t Team) Round(m Mantissa, dst, src unsafe.Pointer, n, bits int, st *Stats) {
	if r := m.rounding(bits); t.takes(n) && r.drop > 0 {
		var own Stats
		shareKernel(t, roundWay, dst, src, n, r, &own)
		if own.Count > 0 && !math.IsInf(own.SquareSum, 0) {
			st.Add(&own)
			return
		}
	}
	m.Round(dst, src, n, bits, st)
}

// Copy copies n bytes that do not overlap.
func (t Team) Copy(dst, src unsafe.Pointer, n int) {
	if t.takes(n / 4) {
		shareKernel(t, copyWay, dst, src, n, rounding{}, &Stats{})
	} else {
		copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
	}
}

func (t Team) takes(n int) bool { return t.Parallel != nil && n >= teamLeast && len(kernels) > 0 }
