// The counters of a session.

package session

import (
	"sync/atomic"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/stopwatch"
)

// counters are the counters of a session; see strap_stats_t in strap.h.
type counters struct {
	packets, storedBytes                     atomic.Uint64
	tensors, rawBytes                        atomic.Uint64 // without those of the intake
	dropped, droppedBytes, noted, overflowed atomic.Uint64
	stalls, queuedPackets, fileBytes, lost   atomic.Uint64
	repeated, underflowed                    atomic.Uint64
	stalled, yielded                         stopwatch.Stopwatch
	writerThread                             atomic.Int32
	queuedNotes                              atomic.Int64

	lossMu mutex[leafRank]
	loss   codec.Stats // of all values that were converted, rounded or archived
}

// packetLoss is what the values of a packet lost.
type packetLoss struct {
	stats codec.Stats
	bits  int // of mantissa that values were rounded to; 0: no value was rounded
}

// addLoss adds to the loss of the whole capture.
func (c *counters) addLoss(l *codec.Stats) {
	c.lossMu.Lock()
	defer c.lossMu.Unlock()
	c.loss.Add(l)
}

// lossSoFar returns the loss of the whole capture.
func (c *counters) lossSoFar() codec.Stats {
	c.lossMu.Lock()
	defer c.lossMu.Unlock()
	return c.loss
}
