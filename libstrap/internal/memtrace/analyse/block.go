// A block of rows of the trace, in columns, and how batches fill it.

package analyse

import "github.com/libstrap/strap/libstrap/internal/memtrace/trace"

// blockRows is the most rows of a block, whatever the size of the trace's batches. A block fits into
// a core's cache.
const blockRows = 1 << 14

// block is a piece of the trace: columns of n rows.
type block struct {
	n       int
	time    []int64
	address []uint64
	region  []uint32 // numbers of regions, by first occurrence
	tag     []uint32 // number of the type << 1 | op
	page    []uint64 // address_page; nil: address >> PageShift in every row
	pages   []uint64 // number of pages that a row touches; nil: one in every row
	length  []uint64 // length_bytes; nil: 0 in every row
	regions int      // number of regions known at the end of the block
	types   int      // number of types known at the end of the block
	late    bool     // this block or an earlier one has a late row

	spare struct{ page, pages, length []uint64 } // memory for the columns that are nil
}

func newBlock() *block {
	return &block{
		time:    make([]int64, blockRows),
		address: make([]uint64, blockRows),
		region:  make([]uint32, blockRows),
		tag:     make([]uint32, blockRows),
	}
}

func (b *block) pageOf(i int) uint64 {
	if b.page != nil {
		return b.page[i]
	}
	return b.address[i] >> trace.PageShift
}

// append adds an unpacked row.
func (b *block) append(r *row) {
	i := b.n
	b.time[i], b.address[i], b.region[i], b.tag[i] = r.time, r.address, r.region, r.tag
	b.setPage(i, r.page)
	b.setPages(i, r.pages)
	b.n++
}

func (b *block) setPage(i int, page uint64) {
	if b.page == nil {
		if page == b.address[i]>>trace.PageShift {
			return
		}
		b.page = column(&b.spare.page)
		for j := range i {
			b.page[j] = b.address[j] >> trace.PageShift
		}
	}
	b.page[i] = page
}

func (b *block) setPages(i int, pages uint64) {
	if b.pages == nil {
		if pages == 1 {
			return
		}
		b.pages = column(&b.spare.pages)
		for j := range i {
			b.pages[j] = 1
		}
	}
	b.pages[i] = pages
}

func (b *block) setLength(i int, length uint64) {
	if b.length == nil {
		if length == 0 {
			return
		}
		b.length = column(&b.spare.length)
		clear(b.length[:i])
	}
	b.length[i] = length
}

func column(spare *[]uint64) []uint64 {
	if *spare == nil {
		*spare = make([]uint64, blockRows)
	}
	return *spare
}

// clear empties a block for reuse.
func (b *block) clear() {
	b.n, b.late, b.page, b.pages, b.length = 0, false, nil, nil, nil
}

// names gives numbers to the regions and types of a trace.
type names struct {
	regions    ids
	regionType []uint32 // the type of each region's first row
	types      []string
	typeNumber map[string]uint32
}

func (n *names) typeOf(name string) uint32 {
	number, ok := n.typeNumber[name]
	if !ok {
		number = uint32(len(n.types))
		n.types = append(n.types, name)
		n.typeNumber[name] = number
	}
	return number
}

// filler turns batches into blocks.
type filler struct {
	names
	block  *block
	rows   uint64
	latest int64 // time of the last row
	late   bool
}

// fill copies rows of a batch into the block, from row `from` on, until the batch ends or the block
// is full. It returns the next row of the batch. codes maps the batch's codes of types to numbers of
// types; -1 means that the code has not occurred yet.
func (f *filler) fill(batch *trace.Batch, from int, codes []int32) int {
	b := f.block
	n := min(batch.Rows-from, blockRows-b.n)
	to := from + n
	at := b.n
	copy(b.time[at:], batch.Time[from:to])
	copy(b.address[at:], batch.Address[from:to])

	region, tag := b.region[at:at+n], b.tag[at:at+n]
	op, code := batch.Op[from:to], batch.Type.Codes[from:to]
	var last int64
	var number uint32
	known := false
	for i, id := range batch.Region[from:to] {
		kind := codes[code[i]]
		if kind < 0 {
			kind = int32(f.typeOf(batch.Type.Values[code[i]]))
			codes[code[i]] = kind
		}
		if id != last || !known {
			var fresh bool
			if number, fresh = f.regions.number(id); fresh {
				f.regionType = append(f.regionType, uint32(kind))
			}
			last, known = id, true
		}
		region[i] = number
		tag[i] = uint32(kind)<<1 | uint32(op[i])
	}

	latest, late := f.latest, false
	for _, t := range batch.Time[from:to] {
		late = late || t < latest
		latest = t
	}
	f.latest, f.late = latest, f.late || late

	foreign := uint64(0)
	for i, page := range batch.Page[from:to] {
		foreign |= page ^ batch.Address[from+i]>>trace.PageShift
	}
	if foreign != 0 || b.page != nil {
		for i, page := range batch.Page[from:to] {
			b.setPage(at+i, page)
		}
	}

	b.fillLengths(batch, from, to)
	b.n += n
	f.rows += uint64(n)
	b.regions, b.types, b.late = len(f.regions.values), len(f.types), f.late
	return to
}

func (b *block) fillLengths(batch *trace.Batch, from, to int) {
	any := uint64(0)
	if batch.Length != nil {
		for _, length := range batch.Length[from:to] {
			any |= length
		}
	}
	if any == 0 && b.length == nil {
		return
	}
	for i := from; i < to; i++ {
		pages, length := uint64(1), uint64(0)
		if batch.Length != nil {
			length = batch.Length[i]
		}
		if length > 0 {
			first := batch.Address[i]
			pages = (first+length-1)>>trace.PageShift - first>>trace.PageShift + 1
		}
		b.setPages(b.n+i-from, pages)
		b.setLength(b.n+i-from, length)
	}
}
