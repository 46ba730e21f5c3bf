// Carries the elements of a streamed packet from the caller to the writer.

package session

import (
	"sync/atomic"

	"github.com/libstrap/strap/libstrap/internal/arena"
)

// maxPiece is the most bytes that a feed hands over at a time.
const maxPiece = 8 << 20

// feed carries the elements of a streamed packet from Enqueue to the writer, through the two halves
// of a region: one is filled while the other is written.
type feed struct {
	arena  *arena.Arena
	region arena.Region
	owners atomic.Int32 // Enqueue and the writer; the last one frees the region
	size   int64        // source bytes of the packet
	full   chan []byte
	empty  chan []byte
	gaveUp chan struct{} // closed when no further piece comes
	loss   packetLoss    // of the packet, set before the last piece is sent
}

// newFeed returns a feed with the memory of a region.
func newFeed(a *arena.Arena, region arena.Region, half int, size int64) *feed {
	f := &feed{
		arena: a, region: region, size: size,
		full: make(chan []byte, 2), empty: make(chan []byte, 2),
		gaveUp: make(chan struct{}),
	}
	f.owners.Store(2)
	f.empty <- region.Buf[:half:half]
	f.empty <- region.Buf[half : 2*half : 2*half]
	return f
}

// release ends the part of one owner.
func (f *feed) release() {
	if f.owners.Add(-1) == 0 {
		f.arena.Free(f.region)
	}
}
