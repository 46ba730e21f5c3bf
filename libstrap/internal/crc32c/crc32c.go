// Package crc32c computes the checksum of payloads, CRC-32C (Castagnoli, RFC 3720, appendix B.4). It has
// several times the speed of hash/crc32 if the processor multiplies polynomials in 512-bit registers.
package crc32c

import (
	"hash/crc32"
	"sync/atomic"
)

// kernelLeast is the least number of bytes that make a call of C worth it.
const kernelLeast = 4 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// withoutKernel is set by tests alone.
var withoutKernel atomic.Bool

// UseKernel sets whether the whole process uses the kernel, if this processor can run it. It is for
// tests of hash/crc32. A process begins with the kernel.
func UseKernel(use bool) { withoutKernel.Store(!use) }

func usesKernel() bool { return hasKernel && !withoutKernel.Load() }

// Checksum returns the CRC-32C of data.
func Checksum(data []byte) uint32 { return Update(0, data) }

// Sum is the CRC-32C of the bytes that were written to it.
type Sum uint32

func (s *Sum) Write(b []byte) (int, error) {
	*s = Sum(Update(uint32(*s), b))
	return len(b), nil
}

// Shift combines two checksums. It knows the number n of bytes of the second: its value is x^(8n)
// modulo the polynomial of the checksum.
type Shift uint32

// After returns the Shift by n bytes.
func After(n int) Shift {
	power, square := uint32(1)<<31, uint32(1)<<23 // x^0, x^8; bit 31 is x^0
	for ; n > 0; n >>= 1 {
		if n&1 != 0 {
			power = multiply(power, square)
		}
		square = multiply(square, square)
	}
	return Shift(power)
}

// Combine returns the checksum of two pieces of data in a row. a is the checksum of the first piece, b of
// the second.
func (s Shift) Combine(a, b uint32) uint32 { return multiply(a, uint32(s)) ^ b }

// multiply returns the product of two polynomials modulo the polynomial of the checksum.
func multiply(a, b uint32) (product uint32) {
	for ; a != 0; a <<= 1 {
		if a>>31 != 0 {
			product ^= b
		}
		b = b>>1 ^ crc32.Castagnoli&-(b&1)
	}
	return product
}

// Update continues the CRC-32C crc with data.
func Update(crc uint32, data []byte) uint32 {
	if usesKernel() && len(data) >= kernelLeast {
		return kernel(crc, data)
	}
	return crc32.Update(crc, castagnoli, data)
}
