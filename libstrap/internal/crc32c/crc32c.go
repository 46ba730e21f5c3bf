// Package crc32c is the checksum of payloads: CRC-32C (Castagnoli, RFC 3720, appendix B.4),
// at several times the speed of hash/crc32 where the processor multiplies polynomials in
// 512-bit registers.
package crc32c

import "hash/crc32"

// Shorter data are not worth a call of C.
const kernelLeast = 4 << 10

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Checksum returns the CRC-32C of data.
func Checksum(data []byte) uint32 { return Update(0, data) }

// Sum is the CRC-32C of what has been written to it.
type Sum uint32

func (s *Sum) Write(b []byte) (int, error) {
	*s = Sum(Update(uint32(*s), b))
	return len(b), nil
}

// Update returns the CRC-32C of what has crc, followed by data.
func Update(crc uint32, data []byte) uint32 {
	if hasKernel && len(data) >= kernelLeast {
		return kernel(crc, data)
	}
	return crc32.Update(crc, castagnoli, data)
}
