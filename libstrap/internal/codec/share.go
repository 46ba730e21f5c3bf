// Copies and converts large tensors in the threads of a team.

package codec

import (
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/team"
)

// Copier copies and converts in the threads of a team, if there is a team and the tensor is large.
// Otherwise it works in the calling thread.
type Copier struct {
	Team team.Team
	// Sum receives the checksum of dst, if a team wrote all of it. Round does not set it. nil asks for
	// no checksum.
	Sum *Sum
}

// Sum is a CRC-32C. Known reports whether CRC is set.
type Sum struct {
	CRC   uint32
	Known bool
}

// shareLeast is the least number of elements that a team shares. A copy of fewer elements ends before
// the other threads begin.
const shareLeast = 1 << 16

// Float32ToFloat16 works like the function Float32ToFloat16.
func (c Copier) Float32ToFloat16(dst, src unsafe.Pointer, n, bits int, st *Stats) {
	if c.shares(n) {
		shareKernel(c.Team, convertWay, dst, src, n, Float16.rounding(bits), st, c.Sum)
	} else {
		Float32ToFloat16(dst, src, n, bits, st)
	}
}

// Round works like Mantissa.Round.
func (c Copier) Round(m Mantissa, dst, src unsafe.Pointer, n, bits int, st *Stats) {
	if r := m.rounding(bits); c.shares(n) && r.drop > 0 {
		shareKernel(c.Team, roundWay, dst, src, n, r, st, nil)
	} else {
		m.Round(dst, src, n, bits, st)
	}
}

// Copy copies n bytes. dst and src must not overlap.
func (c Copier) Copy(dst, src unsafe.Pointer, n int) {
	if c.shares(n / 4) {
		shareKernel(c.Team, copyWay, dst, src, n, rounding{}, &Stats{}, c.Sum)
	} else {
		copy(unsafe.Slice((*byte)(dst), n), unsafe.Slice((*byte)(src), n))
	}
}

// shares reports whether the team works on n elements.
func (c Copier) shares(n int) bool {
	_, kernel := kernelInUse()
	return kernel && c.Team.Present() && n >= shareLeast
}
