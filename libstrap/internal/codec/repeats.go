package codec

import (
	"encoding/binary"
	"math/bits"
)

const (
	repeatLeast   = 6         // bytes of the shortest repeat that counts
	repeatStride  = 16 << 10  // of which one segment is looked at
	repeatSegment = 256       // bytes
	repeatSpacing = 64        // between the positions that are remembered in between
	repeatWindow  = 256 << 10 // how far back repeats are looked for, and the longest stretch
	repeatWindows = 4         // at most, evenly spread over a payload
	repeatHashLog = 13
)

// repeats estimates how much of a payload stands in it twice.
type repeats struct {
	last [1 << repeatHashLog]uint32 // position + 1 in the window of a hash of repeatLeast bytes
}

// share is the estimated share of src, 0 to 1, in repeats of at least repeatLeast
// bytes within repeatWindow; most is the stretch of src in which it is the largest.
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

// window looks at segments of a stretch; it returns how many bytes they have and how
// many of these repeat.
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

func (r *repeats) remember(window []byte, start, end int) {
	for i := start; i < end && i+8 <= len(window); i += repeatSpacing {
		r.last[repeatHash(binary.LittleEndian.Uint64(window[i:]))] = uint32(i) + 1
	}
}

// count is the number of bytes of [start, end) in repeats.
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

// common is the length of the longest common prefix, at most that of b.
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
