package session

import (
	"bytes"
	"math"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libstrap/strap/libstrap/internal/arena"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// rowCost is what a queued packet costs beside its region, in bytes: its entry and its row of the
// index. It is counted in the region, so that a flood of tiny packets is bounded too.
const rowCost = 768

// errCopy is the error of a packet until its elements are copied.
var errCopy = status.New(status.Internal, "the copy of a tensor did not end")

// entryKind tells the entries of the order apart.
type entryKind uint8

const (
	packetEntry entryKind = iota // a packet in a region of the arena, or in the stream's memory
	streamEntry                  // a packet whose elements come in pieces, through a feed
	noteEntry                    // a row of the index without a packet
)

// entry is one entry of the order. The caller of Enqueue or Note fills it in, a worker or helper
// makes the packet, and the sink brings it to the file.
type entry struct {
	is    entryKind
	row   wire.Row
	shape []int64 // backs row.Shape

	// Of a packet.
	layer     *layer
	name      string
	kind      codec.Kind   // of the payload
	region    arena.Region // holds the elements, then the packet
	source    int          // bytes of elements; see elements
	front     int          // bytes between the packet's name and its elements, for the codec
	out       []byte       // the finished packet, in the region
	err       error        // why there is none
	made      atomic.Bool  // a worker or helper is through with it
	came      time.Time    // to the backlog
	feed      *feed        // of a streamEntry
	converted codec.Stats  // what its values lost as float16 of float32
}

// entries makes entries, and keeps used ones for reuse.
type entries struct {
	rank int32 // for the rows
	pool sync.Pool
}

func newEntries(rank int32) *entries {
	return &entries{rank: rank, pool: sync.Pool{New: func() any { return &entry{} }}}
}

// get returns an entry whose row describes the tensor. The caller sets row.Source.
func (p *entries) get(is entryKind, from *origin, t *Tensor) *entry {
	it := p.pool.Get().(*entry)
	it.is = is
	it.shape = append(it.shape[:0], t.Shape...)
	it.row = wire.Row{
		Offset: -1, Parts: 1,
		Model: from.layer.model, Layer: from.layer.name, Path: from.layer.path, Request: from.request,
		Call: t.Call, Step: t.Step, Token: t.Token, Rank: p.rank, Thread: t.Thread,
		Shape: it.shape, Codec: codec.None.String(),
		Transform: t.Transform, Parameters: t.Parameters,
		TimeNS: t.TimeNS, MSE: math.NaN(), MeanSquare: math.NaN(),
	}
	if !t.DType.Valid() {
		it.row.Shape = nil // unknown, which an empty shape is not
	}
	return it
}

// put takes an entry back for reuse.
func (p *entries) put(it *entry) {
	*it = entry{shape: it.shape}
	p.pool.Put(it)
}

// payload returns the memory of the payload, with the room that is left behind it.
func (it *entry) payload() []byte { return it.region.Buf[wire.HeaderSize+len(it.name):] }

// elements returns the source bytes, until they are encoded.
func (it *entry) elements() []byte { return it.payload()[it.front:][:it.source] }

// finish puts the header in front of the payload's n bytes, and returns these.
func (it *entry) finish(n int) (payload []byte) {
	head := wire.HeaderSize + len(it.name)
	it.out = it.region.Buf[:head+n]
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

// alike reports whether two packets seem to hold the same elements: their ends are equal.
func (it *entry) alike(other *entry) bool {
	if it.source != other.source || it.row.Stored != other.row.Stored || it.kind != other.kind || other.err != nil {
		return false
	}
	a, b := it.elements(), other.elements()
	n := min(len(a), 64)
	return n > 0 && bytes.Equal(a[:n], b[:n]) && bytes.Equal(a[len(a)-n:], b[len(b)-n:])
}

// repeat makes the packet from another one of the same elements.
func (it *entry) repeat(of *entry) {
	it.finish(copy(it.payload(), of.out[wire.HeaderSize+len(of.name):]))
	it.row.CRC = of.row.CRC
}
