// Package wire has the layouts that leave the process: the packet of a stream, the element types, and
// the columns of the index. It does no I/O.
//
// A stream is packets one after another, and nothing else:
//
//	 0        2            6               6+n                6+n+d
//	+--------+------------+---------------+------------------+
//	| n: u16 | d: u32     | name (n)      | payload (d)      |
//	+--------+------------+---------------+------------------+
//	big endian            UTF-8           one LZ4 frame, one zstd frame or raw
//
// Six zero bytes (n = d = 0) are never written. A hole in a file looks like this, so a reader takes them
// for a torn packet.
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
	// MaxPayload is the longest payload in bytes. MaxUint32 means Unfinished.
	MaxPayload = math.MaxUint32 - 1
	// Unfinished is in the length field of a packet while its payload is being written, if its
	// compressed length is not known yet. It claims more bytes than a payload can have. So a file that
	// is cut there ends with a torn packet for every reader of the format.
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

// OverflowSuffix ends the name of the float32 packet that follows a float16 packet whose source had
// finite values beyond float16's range, or values too small for float16 and an error bound.
const OverflowSuffix = "!float32"
