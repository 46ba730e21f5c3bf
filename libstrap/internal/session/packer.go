package session

import (
	"math"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// packer fills in entries from tensors.
type packer struct {
	opts  *Options
	names *names
	pool  *sync.Pool // of entries
}

// newEntry returns an entry with what its row says of the tensor.
func (p *packer) newEntry(is entryKind, l *layer, t *Tensor) *entry {
	it := p.pool.Get().(*entry)
	request, _ := p.names.request(t.Request) // known since the tensor began
	it.is = is
	it.shape = append(it.shape[:0], t.Shape...)
	it.row = wire.Row{
		Offset: -1, Parts: 1,
		Model: l.model, Layer: l.name, Path: l.path,
		Call: t.Call, Step: t.Step, Token: t.Token, Request: request, Rank: p.opts.Rank, Thread: t.Thread,
		Shape: it.shape, Source: t.source(), Codec: codec.None.String(),
		Transform: t.Transform, Parameters: t.Parameters,
		TimeNS: t.TimeNS, MSE: math.NaN(), MeanSquare: math.NaN(),
	}
	if !t.DType.Valid() {
		it.row.Shape = nil // unknown, which an empty shape is not
	}
	return it
}

// newPacket returns the entry of a packet of a tensor. Its memory is the caller's to set.
func (p *packer) newPacket(is entryKind, e *emission, t *Tensor, of *part) *entry {
	it := p.newEntry(is, e.layer, t)
	it.layer, it.name, it.kind = e.layer, of.name, of.kind
	it.source, it.front = int(of.size), codec.Front(of.kind, int(of.size))
	it.row.Stored, it.row.Codec = e.stored, of.kind.String()
	it.row.Part, it.row.Parts = uint32(e.part), uint32(of.parts)
	if e.twin {
		it.row.Transform = wire.TransformOverflow
	}
	return it
}

// copy puts count elements of the current packet from start on into dst. It sets the checksum in
// sum if it learns it; nil: it is not asked for.
func (p *packer) copy(e *emission, t *Tensor, dst []byte, start, count int64, sum *codec.Sum) {
	how := p.opts.copying()
	how.by.Sum = sum
	how.bound = e.conversion.left(how.bound)
	var of codec.Stats
	bits := t.copyElements(dst, e.stored, start, count, how, &of)
	e.stats.Add(&of)
	e.own.Add(&of)
	e.bits = max(e.bits, bits)
}

// measure returns the loss of the current packet, which has count elements. Rounding keeps the
// bound, so float16 alone breaks it: the values are too small.
func (p *packer) measure(e *emission, t *Tensor, count int64) measure {
	made := &e.own
	if e.conversion != nil {
		made = &e.conversion.Loss
	}
	if t.source() != e.stored && !made.Within(p.opts.mostLost()) {
		e.tiny = true
	}
	return measure{e.lost(e.own, count), e.bits}
}
