// An entry of the order: a packet or a note on its way to the file.

package session

import (
	"bytes"
	"sync/atomic"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// rowCost is the bytes that the entry of a packet and its row of the index take. They are no part of the
	// arena, but count against its limit beside each region, so that the limit bounds a flood of tiny packets
	// too.
	rowCost = 768

	// keptCost is rowCost of a packet that a ring keeps: its entry of 512 bytes, its shape and its places in the
	// step and, during a dump, in two queues. They count twice, because the heap of Go grows to twice what is alive.
	keptCost = 2 * 640
)

// errCopy is the error of a packet until its elements are copied.
var errCopy = status.New(status.Internal, "the copy of a tensor did not end")

// entryKind tells the entries of the order apart.
type entryKind uint8

const (
	packetEntry entryKind = iota // a packet in a region of the arena, or, on the inline lane, in a block of the stream
	streamEntry                  // a packet whose elements come in pieces, through a feed
	noteEntry                    // a row of the index without a packet
	rollEntry                    // the entries behind it go to another segment
)

// entry is one entry of the order. The caller of Enqueue or Note fills it in, a worker or helper
// makes the packet, and the sink brings it to the file.
//
// A ring keeps many entries, so the order of the fields leaves no gaps; see keptCost.
type entry struct {
	is       entryKind
	kind     codec.Kind  // of a packet's payload
	isCopied bool        // of an entry in the ring: its elements are in the region
	givenUp  bool        // of an entry in the ring: whoever copies its elements frees it
	made     atomic.Bool // of a packet: a worker or helper has made it, or has failed
	row      wire.Row
	next     *segment // of a rollEntry; nil: the entries behind it wait in the ring

	// Of an entry in the ring.
	kept   *keptStep // nil: it is not there, or no longer
	number uint64    // by when it came
	first  uint64    // the number of the first entry of its step
	record int       // bytes in front of the packet for its record in the ring file; 0: there is no file

	// Of a packet.
	layer     *layer
	name      string
	region    arena.Region  // holds the elements, then the packet
	source    int           // bytes of elements; see elements
	front     int           // bytes between the packet's name and its elements, for the codec
	out       []byte        // the finished packet, in the region
	err       error         // why there is none
	came      time.Duration // when it came to the backlog; see backlog.began
	feed      *feed         // of a streamEntry
	converted codec.Stats   // the loss of its values by conversion to float16 and by rounding
}

// keptStep is a step of the ring.
type keptStep struct {
	step    int64
	entries []*entry
	copying int // entries whose elements are being copied
	packets int // entries that are packets
	ended   bool
}

// packet returns the memory of the packet, with the room that is left behind it.
func (it *entry) packet() []byte { return it.region.Buf[it.record:] }

// payload returns the memory of the payload, with the room that is left behind it.
func (it *entry) payload() []byte { return it.packet()[wire.HeaderSize+len(it.name):] }

// elements returns the source bytes, until they are encoded.
func (it *entry) elements() []byte { return it.payload()[it.front:][:it.source] }

// finish puts the header in front of the payload's n bytes, and returns these.
func (it *entry) finish(n int) (payload []byte) {
	head := wire.HeaderSize + len(it.name)
	it.out = it.packet()[:head+n]
	wire.PutHeader(it.out, len(it.name), uint32(n))
	copy(it.out[wire.HeaderSize:], it.name)
	it.row.Length = uint64(len(it.out))
	return it.out[head:]
}

// surround makes the packet with its elements raw and where they are. Call it where
// codec.Surrounds allows it. sum is the checksum of the elements, if it is known.
func (it *entry) surround(sum *codec.Sum) error {
	n, ok := codec.Surround(it.kind, it.payload(), it.source)
	if !ok {
		return status.New(status.Internal, "%d bytes cannot stay in place as %v", it.source, it.kind)
	}
	payload := it.finish(n)
	if !sum.Known {
		it.row.CRC = crc32c.Checksum(payload)
		return nil
	}
	crc := crc32c.After(it.source).Combine(crc32c.Checksum(payload[:it.front]), sum.CRC)
	it.row.CRC = crc32c.Update(crc, payload[it.front+it.source:])
	return nil
}

// alike reports whether two packets seem to hold the same elements: it compares only the first and the
// last 64 bytes.
func (it *entry) alike(other *entry) bool {
	if it.source != other.source || it.row.Stored != other.row.Stored || it.kind != other.kind || other.err != nil {
		return false
	}
	a, b := it.elements(), other.elements()
	n := min(len(a), 64)
	return n > 0 && bytes.Equal(a[:n], b[:n]) && bytes.Equal(a[len(a)-n:], b[len(b)-n:])
}

// repeat makes the packet from another packet. All elements of the two are equal.
func (it *entry) repeat(of *entry) {
	it.finish(copy(it.payload(), of.out[wire.HeaderSize+len(of.name):]))
	it.row.CRC = of.row.CRC
}
