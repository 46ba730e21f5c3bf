// Estimates how much of a payload repeats earlier bytes of it.

package codec

import (
	"encoding/binary"
	"math/bits"
)

const (
	repeatLeast   = 6         // bytes of the shortest repeat that counts
	repeatStride  = 16 << 10  // bytes from one segment to the next
	repeatSegment = 256       // bytes of a segment, in which repeats are counted
	repeatSpacing = 64        // bytes between the positions that are remembered between segments
	repeatWindow  = 256 << 10 // bytes of a window; repeats are not looked for outside of it
	repeatWindows = 4         // most windows of a payload, evenly spread
	repeatHashLog = 13
)

// repeats estimates how much of a payload repeats earlier bytes of it.
type repeats struct {
	last [1 << repeatHashLog]uint32 // by hash of repeatLeast bytes: their last position in the window, plus 1
}

// share estimates the share of src, 0 to 1, in repeats of at least repeatLeast bytes. most is the
// window of src with the largest share.
func (r *repeats) share(src []byte) (share float64, most []byte) {
	seen, repeated, largest := 0, 0, -1.0
	windows := min((len(src)+repeatWindow-1)/repeatWindow, repeatWindows)
	for i := range windows {
		from := max(len(src)-repeatWindow, 0) * i / max(windows-1, 1)
		window := src[from:min(from+repeatWindow, len(src))]
		s, n := r.window(window)
		seen, repeated = seen+s, repeated+n
		if here := float64(n) / float64(s); here > largest {
			largest, most = here, window
		}
	}
	return float64(repeated) / float64(max(seen, 1)), most
}

// window looks at the segments of a window. It returns how many bytes the segments have, and how many of
// them repeat.
func (r *repeats) window(src []byte) (seen, repeated int) {
	clear(r.last[:])
	for start := 0; start < len(src); start += repeatStride {
		end := min(start+repeatStride, len(src))
		dense := max(start, end-repeatSegment)
		r.remember(src, start, dense)
		seen += end - dense
		repeated += r.count(src, dense, end)
	}
	return seen, repeated
}

// remember stores a position every repeatSpacing bytes of [start, end).
func (r *repeats) remember(window []byte, start, end int) {
	for i := start; i < end && i+8 <= len(window); i += repeatSpacing {
		r.last[repeatHash(binary.LittleEndian.Uint64(window[i:]))] = uint32(i) + 1
	}
}

// count returns how many bytes of [start, end) are in repeats, and stores their positions.
func (r *repeats) count(window []byte, start, end int) (n int) {
	for i := start; i < end && i+8 <= len(window); {
		here := binary.LittleEndian.Uint64(window[i:])
		at := &r.last[repeatHash(here)]
		before := int(*at) - 1
		*at = uint32(i) + 1
		if before < 0 || (binary.LittleEndian.Uint64(window[before:])^here)<<(64-8*repeatLeast) != 0 {
			i++
			continue
		}
		length := common(window[before:], window[i:end])
		n += length
		i += max(length, 1)
	}
	return n
}

// common returns the length of the longest common prefix of a and b.
func common(a, b []byte) (n int) {
	for n+8 <= len(b) && n+8 <= len(a) {
		if d := binary.LittleEndian.Uint64(a[n:]) ^ binary.LittleEndian.Uint64(b[n:]); d != 0 {
			return n + bits.TrailingZeros64(d)/8
		}
		n += 8
	}
	for n < len(a) && n < len(b) && a[n] == b[n] {
		n++
	}
	return n
}

func repeatHash(b uint64) uint32 {
	return uint32(b << (64 - 8*repeatLeast) * 0x9FB21C651E98DF25 >> (64 - repeatHashLog))
}
