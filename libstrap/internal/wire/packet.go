// Package wire holds the layouts that leave the process: the packet of a
// stream, the element types and the columns of the index. It does no I/O.
//
// A stream is packets back to back and nothing else:
//
//	 0        2            6               6+n                6+n+d
//	+--------+------------+---------------+------------------+
//	| n: u16 | d: u32     | name (n)      | payload (d)      |
//	+--------+------------+---------------+------------------+
//	big endian            UTF-8           one LZ4 frame, one zstd frame or raw
//
// Six zero bytes (n = d = 0) are never written: they are what a hole in a file
// looks like, so a reader takes them for a tear.
package wire

import (
	"encoding/binary"
	"math"
)

const (
	// HeaderSize is the length of a packet header, Python's struct "!HI".
	HeaderSize = 6
	// MaxName is the longest packet name in bytes.
	MaxName = math.MaxUint16
	// MaxPayload is the longest payload. MaxUint32 itself is Unfinished.
	MaxPayload = math.MaxUint32 - 1
	// Unfinished stands in the length field of a packet whose compressed length
	// is not known yet, while its payload is being written. It claims more
	// bytes than any payload may have, so a file cut there ends in a torn
	// packet for every reader of the format.
	Unfinished = math.MaxUint32
)

// PutHeader writes the header of a packet into dst[:HeaderSize].
func PutHeader(dst []byte, nameLen int, payloadLen uint32) {
	binary.BigEndian.PutUint16(dst, uint16(nameLen))
	binary.BigEndian.PutUint32(dst[2:], payloadLen)
}

// Header reads the lengths from src[:HeaderSize].
func Header(src []byte) (nameLen int, payloadLen uint32) {
	return int(binary.BigEndian.Uint16(src)), binary.BigEndian.Uint32(src[2:])
}

// OverflowSuffix marks the float32 packet that follows a float16 packet whose
// source held finite values beyond float16's range, or too small for it and an error bound.
const OverflowSuffix = "!float32"
