// Package crc32c is the checksum of payloads: CRC-32C (Castagnoli, RFC 3720, appendix B.4),
// at several times the speed of hash/crc32 where the processor multiplies polynomials in
// 512-bit registers.
package crc32c

import (
	"hash/crc32"
	"sync/atomic"
)

// Shorter data are not worth a call of C.
const kernelLeast = 4 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// withoutKernel is set by tests alone.
var withoutKernel atomic.Bool

// UseKernel tells the whole process whether to use the kernel, where the processor has one. It is
// for tests of the other way; a process begins with the kernel.
func UseKernel(use bool) { withoutKernel.Store(!use) }

func usesKernel() bool { return hasKernel && !withoutKernel.Load() }

// Checksum returns the CRC-32C of data.
func Checksum(data []byte) uint32 { return Update(0, data) }

// Sum is the CRC-32C of what has been written to it.
type Sum uint32

func (s *Sum) Write(b []byte) (int, error) {
	*s = Sum(Update(uint32(*s), b))
	return len(b), nil
}

// Shift puts checksums together whose second is of a number of bytes.
type Shift uint32 // x^(8n), modulo the polynomial of the checksum

// After returns the Shift by n bytes.
func After(n int) Shift {
	power, square := uint32(1)<<31, uint32(1)<<23 // x^0, x^8; bit 31 is the one of x^0
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			power = multiply(power, square)
		}
		square = multiply(square, square)
	}
	return Shift(power)
}

// Combine returns the checksum of what has a, followed by what has b.
func (s Shift) Combine(a, b uint32) uint32 { return multiply(a, uint32(s)) ^ b }

// multiply is the product of two polynomials modulo that of the checksum.
func multiply(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		if a>>31 != 0 {
			product ^= b
		}
		b = b>>1 ^ crc32.Castagnoli&-(b&1)
	}
	return product
}

// Update returns the CRC-32C of what has crc, followed by data.
func Update(crc uint32, data []byte) uint32 {
	if usesKernel() && len(data) >= kernelLeast {
		return kernel(crc, data)
	}
	return crc32.Update(crc, castagnoli, data)
}
