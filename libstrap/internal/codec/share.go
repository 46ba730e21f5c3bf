package codec

import (
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/team"
)

// Copier copies and converts in the threads of a team.
type Copier struct {
	Team team.Team
	Sum  *Sum // becomes known where a team wrote all, but for Round; nil: is not asked for
}

// Sum is a CRC-32C, if it is known.
type Sum struct {
	CRC   uint32
	Known bool
}

// A copy of fewer elements is through before others have begun.
const shareLeast = 1 << 16

// Float32ToFloat16 is the function of that name.
func (c Copier) Float32ToFloat16(dst, src unsafe.Pointer, n, bits int, st *Stats) {
	if c.shares(n) {
		shareKernel(c.Team, convertWay, dst, src, n, Float16.rounding(bits), st, c.Sum)
	} else {
		Float32ToFloat16(dst, src, n, bits, st)
	}
}

// Round is Mantissa.Round.
func (c Copier) Round(m Mantissa, dst, src unsafe.Pointer, n, bits int, st *Stats) {
	if r := m.rounding(bits); c.shares(n) && r.drop > 0 {
		shareKernel(c.Team, roundWay, dst, src, n, r, st, nil)
	} else {
		m.Round(dst, src, n, bits, st)
	}
}

// Copy copies n bytes that do not overlap.
func (c Copier) Copy(dst, src unsafe.Pointer, n int) {
	if c.shares(n / 4) {
		shareKernel(c.Team, copyWay, dst, src, n, rounding{}, &Stats{}, c.Sum)
	} else {
		copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
	}
}

func (c Copier) shares(n int) bool {
	_, kernel := kernelInUse()
	return kernel && c.Team.Present() && n >= shareLeast
}
