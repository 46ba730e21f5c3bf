// One tensor on its way into packets.

package session

import (
	"math"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// emission is one tensor on its way into packets: what is known of the tensor, the current packet,
// and how much is handed over. Pending keeps it after a Timeout.
type emission struct {
	opts   *Options
	tensor *Tensor // as the call that works on it describes it
	origin

	// What the first call found out about the tensor.
	elems      int64
	text       int         // bytes of the tensor's own text
	source     wire.DType  // of the captured values
	conversion *Conversion // of the caller; nil: none
	bound      float64     // of the error of rounding; 0: values are not rounded
	fromIntake bool        // see Tensor.fromIntake

	// Progress.
	stored wire.DType // the type in the packets now
	twin   bool       // the packets now are the twin: float32 behind the float16 ones
	part   part       // the next or current packet
	feed   *feed      // of the current packet, if it is streamed
	fed    int64      // elements that the feed has
	begun  bool       // something of the tensor is in the order

	// What copying measured.
	lost       codec.Stats // of the tensor so far
	packetLost codec.Stats // of the current packet
	bits       int         // the most bits of mantissa kept in a piece of the packet; 0: not rounded
	tiny       bool        // a packet so far has values that are too small for float16; see measure
}

// part is one packet of a tensor: the elements [start, start+count).
type part struct {
	index, of    int64 // the number of the packet, from 0 on, and of all packets
	start, count int64
	name         string
	kind         codec.Kind
	size         int64 // bytes of the elements as stored
	bytes        int64 // the most that the packet takes while it is made
	record       int   // bytes of its record in the ring file
	beside       int   // bytes that its entry, its row and its text take beside a region
	room         int64 // what it counts in the arena if it is staged: bytes, record, beside
}

// entries makes entries, and keeps used ones for reuse.
type entries struct {
	sync.Pool
	rank int32 // of the process in a distributed run; see wire.Row
}

func newEntries(rank int32) *entries {
	return &entries{Pool: sync.Pool{New: func() any { return &entry{} }}, rank: rank}
}

// get returns an entry whose row describes the tensor. The caller sets row.Source.
func (p *entries) get(is entryKind, from *origin, t *Tensor) *entry {
	it := p.Get().(*entry)
	it.is = is
	shape := append(it.row.Shape[:0], t.Shape...)
	it.row = wire.Row{
		Offset: -1, Parts: 1,
		Model: from.layer.model, Layer: from.layer.name, Path: from.layer.path, Request: from.request,
		Call: t.Call, Step: t.Step, Token: t.Token, Rank: p.rank, Thread: t.Thread,
		Shape: shape, Codec: codec.None.String(),
		Transform: t.Transform, Parameters: t.Parameters,
		TimeNS: t.TimeNS, MSE: math.NaN(), MeanSquare: math.NaN(),
	}
	if !t.DType.Valid() {
		it.row.Shape = nil // unknown, which an empty shape is not
	}
	return it
}

// newPacket returns the entry of the current packet, and begins its measurement. The caller sets the
// memory of the entry.
func (e *emission) newPacket(is entryKind, from *entries) *entry {
	it, p := from.get(is, &e.origin, e.tensor), &e.part
	it.layer, it.name, it.kind = e.layer, p.name, p.kind
	it.source, it.front = int(p.size), codec.Front(p.kind, int(p.size))
	it.row.Source, it.row.Stored, it.row.Codec = e.source, e.stored, p.kind.String()
	it.row.Part, it.row.Parts = uint32(p.index), uint32(p.of)
	if e.twin {
		it.row.Transform = wire.TransformOverflow
	}
	e.packetLost, e.bits = codec.Stats{}, 0
	return it
}

// startTwin goes on with the float32 packets.
func (e *emission) startTwin() { e.twin, e.stored, e.part.index = true, wire.Float32, 0 }

// whyTwin says what float16 did to the values.
func (e *emission) whyTwin() string {
	if e.lost.Overflow > 0 {
		return "float32 values beyond float16 are stored as infinities"
	}
	return "float32 values too small for float16 are stored with an error above the bound"
}

// giveUp tells the writer that no further piece of a streamed packet comes.
func (e *emission) giveUp() {
	if f := e.feed; f != nil {
		e.feed = nil
		close(f.gaveUp)
		f.release()
	}
}
