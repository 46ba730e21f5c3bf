// Finds the largest magnitude of values.

package codec

import (
	"encoding/binary"
	"math"

	"github.com/libstrap/strap/libstrap/internal/wire"
)

// HasLargest reports whether Largest takes the type: a float of 16 bits or more.
func HasLargest(t wire.DType) bool {
	switch t {
	case wire.Float16, wire.BFloat16, wire.Float32, wire.Float64:
		return true
	}
	return false
}

// Largest returns the largest magnitude of the elements of b, all of which are finite. It is 0 if there
// are none. b has whole elements of type t; HasLargest(t) is true.
func Largest(t wire.DType, b []byte) float64 {
	// Without their signs, finite floats have the order of their words.
	var word [8]byte
	switch t.Size() {
	case 2:
		binary.NativeEndian.PutUint16(word[:], largest16(b))
	case 4:
		binary.NativeEndian.PutUint32(word[:], largest32(b))
	default:
		binary.NativeEndian.PutUint64(word[:], largest64(b))
	}
	return ValueOf(t, word[:t.Size()], 0)
}

// FirstOfMagnitude returns the number of the first element with this magnitude, and -1 if there is none.
func FirstOfMagnitude(t wire.DType, b []byte, magnitude float64) int {
	for i := range len(b) / t.Size() {
		if math.Abs(ValueOf(t, b, i)) == magnitude {
			return i
		}
	}
	return -1
}

func largest16(b []byte) (most uint16) {
	if whole := len(b) / 64 * 64; whole > 0 {
		_, kernel := kernelInUse()
		most, b = extentOf(b[:whole], kernel, usesWide()).most, b[whole:]
	}
	for ; len(b) > 0; b = b[2:] {
		most = max(most, binary.NativeEndian.Uint16(b)&^(1<<15))
	}
	return most
}

func largest32(b []byte) uint32 {
	const magnitude = 1<<31 - 1
	var a0, a1, a2, a3 uint32 // which do not wait for one another
	for ; len(b) >= 16; b = b[16:] {
		x, y := binary.NativeEndian.Uint64(b), binary.NativeEndian.Uint64(b[8:])
		a0, a1 = max(a0, uint32(x)&magnitude), max(a1, uint32(x>>32)&magnitude)
		a2, a3 = max(a2, uint32(y)&magnitude), max(a3, uint32(y>>32)&magnitude)
	}
	for ; len(b) > 0; b = b[4:] {
		a0 = max(a0, binary.NativeEndian.Uint32(b)&magnitude)
	}
	return max(a0, a1, a2, a3)
}

func largest64(b []byte) (most uint64) {
	for ; len(b) > 0; b = b[8:] {
		most = max(most, binary.NativeEndian.Uint64(b)&^(1<<63))
	}
	return most
}
