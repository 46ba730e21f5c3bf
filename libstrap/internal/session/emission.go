package session

import (
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// emission is the progress of one Enqueue: the next packet of the tensor, and how much of it is
// handed over. It outlives the call after a Timeout, once something of the tensor is taken.
type emission struct {
	running mutex[emissionRank] // held by the call that works on it
	layer   *layer
	elems   int64
	stored  wire.DType
	twin    bool  // now the float32 packets behind the float16 ones
	part    int64 // next or current packet
	fed     int64 // elements of it that the feed has
	feed    *feed
	begun   bool        // something is in the queue
	stats   codec.Stats // of the tensor so far
	own     codec.Stats // of the current packet
	bits    int         // the most bits of mantissa that a part of the packet was rounded to
	tiny    bool        // a packet so far lost its values as float16; see packer.measure
	about   Tensor      // what the index says of it, without the data
	place   uint64      // in the line, while no call works on it

	conversion *Conversion // of the caller, nil: none
	fromIntake bool        // see Tensor.FromIntake
}

// startPacket records that the current packet is in the queue, and begins its measurement.
func (e *emission) startPacket() { e.begun, e.own, e.bits = true, codec.Stats{}, 0 }

// whyTwin says what float16 did to the values.
func (e *emission) whyTwin() string {
	if e.stats.Overflow > 0 {
		return "float32 values beyond float16 are stored as infinities"
	}
	return "float32 values too small for float16 are stored with an error above the bound"
}

// lost joins what the library measured of count elements with the caller's conversion.
func (e *emission) lost(own codec.Stats, count int64) codec.Stats {
	if e.conversion == nil || count == 0 {
		return own
	}
	return e.conversion.joined(float64(count)/float64(e.elems), &own)
}

// giveUp tells the writer that no further piece comes.
func (e *emission) giveUp() {
	if f := e.feed; f != nil {
		e.feed = nil
		close(f.gaveUp)
		f.release()
	}
}

// part is one packet of a tensor: the elements [start, start+count).
type part struct {
	start, count int64
	parts        int64 // of the tensor
	name         string
	kind         codec.Kind
	size         int64 // bytes of the elements as stored
	room         int64 // bytes that the staged packet takes, with its row
}

// packetBytes returns the bytes that the packet may take while it is made.
func (p *part) packetBytes() int64 {
	return int64(wire.HeaderSize+len(p.name)) + p.size + int64(codec.Headroom(p.kind, int(p.size)))
}
