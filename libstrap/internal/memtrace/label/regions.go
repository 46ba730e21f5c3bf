package label

import (
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

const weightID = 1

// regions counts ids out and keeps the books of regions and of the KV cache's pages.
// A region is known by its place in all; places stand in other tables with 1 added, so
// that 0 is none.
type regions struct {
	all        []region
	blocks     []block
	weights    int32
	addresses  table[int32] // of the KV cache
	ids        table[int32] // those that came with rows and ranges; 0: not met yet
	ranges     []Range
	byRange    []int32
	next       int64
	renumbered int64
}

type region struct {
	id               int64
	pageMin, pageMax uint64
	firstNS, lastNS  int64
	accesses         int64
	kind             int32
}

// block is a page of the KV cache.
type block struct {
	id                       int64
	address, page            uint64
	stored, evicted          bool
	writeNS, readNS, evictNS int64
	reads                    int64
}

func newRegions(ranges []Range) regions {
	r := regions{next: weightID + 1, ranges: ranges, byRange: make([]int32, len(ranges))}
	for _, known := range ranges {
		if known.ID > weightID {
			r.ids.at(uint64(known.ID))
		}
	}
	return r
}

// newID is the next id that nothing has.
func (r *regions) newID() int64 {
	for r.ids.find(uint64(r.next)) != nil {
		r.next++
	}
	r.next++
	return r.next - 1
}

// enter begins a region with a row. Its place + 1.
func (r *regions) enter(id int64, kind int32, b *trace.Batch, i int) int32 {
	page, ns := b.Page[i], b.Time[i]
	r.all = append(r.all, region{id: id, kind: kind, pageMin: page, pageMax: page, firstNS: ns, lastNS: ns})
	return int32(len(r.all))
}

func (r *regions) ofWeights(b *trace.Batch, i int) int32 {
	if r.weights == 0 {
		r.weights = r.enter(weightID, weightKind, b, i)
	}
	return r.weights - 1
}

// ofAddress is the region of an address of the KV cache.
func (r *regions) ofAddress(b *trace.Batch, i int) int32 {
	place := r.addresses.at(b.Address[i])
	if *place == 0 {
		*place = r.enter(r.newID(), kvKind, b, i)
	}
	return *place - 1
}

// ofPage is the region of a page of activations, runtime or a type of the rows' own.
func (r *regions) ofPage(p *page, kind int32, b *trace.Batch, i int) int32 {
	if p.region == 0 {
		p.region = r.enter(r.newID(), kind, b, i)
	}
	return p.region - 1
}

// ofRange is the region of a known range.
func (r *regions) ofRange(number, kind int32, b *trace.Batch, i int) int32 {
	place := &r.byRange[number]
	if *place == 0 {
		switch id := r.ranges[number].ID; {
		case id > weightID:
			*place = r.given(id, id, kind, b, i)
		case kind == weightKind:
			*place = r.ofWeights(b, i) + 1
		default:
			*place = r.enter(r.newID(), kind, b, i)
		}
	}
	return *place - 1
}

// ofID is the region of a row that came with an id.
func (r *regions) ofID(id int64, kind int32, b *trace.Batch, i int) int32 {
	if id == weightID && kind == weightKind {
		return r.ofWeights(b, i)
	}
	if place := r.ids.find(uint64(id)); place != nil && *place != 0 {
		return *place - 1
	} else if place != nil || id < weightID || id >= r.next {
		return r.given(id, id, kind, b, i) - 1
	}
	r.renumbered++
	return r.given(id, r.newID(), kind, b, i) - 1
}

// given is the region that came with an id, and goes on with another where that was taken.
func (r *regions) given(came, goes int64, kind int32, b *trace.Batch, i int) int32 {
	place := r.ids.at(uint64(came))
	if *place == 0 {
		*place = r.enter(goes, kind, b, i)
	}
	return *place
}

// touch counts a row for its region, and gives the region's id.
func (r *regions) touch(place int32, b *trace.Batch, i int) int64 {
	found, page := &r.all[place], b.Page[i]
	last := page
	if b.Length != nil && b.Length[i] > 0 {
		last += (b.Address[i]+b.Length[i]-1)>>trace.PageShift - b.Address[i]>>trace.PageShift
	}
	found.accesses++
	found.lastNS = max(found.lastNS, b.Time[i])
	found.pageMin, found.pageMax = min(found.pageMin, page), max(found.pageMax, last)
	return found.id
}

// touchBlock counts a row for its page of the KV cache.
func (r *regions) touchBlock(p *page, id int64, b *trace.Batch, i int) {
	if p.block == 0 {
		r.blocks = append(r.blocks, block{id: id, address: b.Address[i], page: b.Page[i]})
		p.block = int32(len(r.blocks))
	}
	found, ns := &r.blocks[p.block-1], b.Time[i]
	switch {
	case b.Op[i] == trace.Load:
		found.reads++
		found.readNS = max(found.readNS, ns)
	case !found.stored:
		found.stored, found.writeNS = true, ns
	case !found.evicted && ns != found.writeNS:
		found.evicted, found.evictNS = true, ns
	}
}
