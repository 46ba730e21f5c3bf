package analyse

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// packed holds rows in as few bytes as their columns' spans need, in memory or in the
// spill: about ten bytes a row of a real trace.
type packed struct {
	n       int
	columns [packedColumns]packedColumn
	data    []byte // nil: in the spill at `at`
	at      int64
	size    int
}

const packedColumns = 6

// packedColumn is a column as differences to its least value, width bytes each.
type packedColumn struct {
	base  uint64
	width int
}

// row is one row out of its block.
type row struct {
	time        int64
	address     uint64
	page, pages uint64
	region, tag uint32
}

// slack lets every value be read and written as eight bytes.
const slack = 8

// packer packs rows; it is memory to reuse.
type packer struct {
	columns [packedColumns][]uint64
	spare   [][]byte // the data of blocks that went to the spill
}

// grow makes room for n rows.
func (p *packer) grow(n int) {
	for i := range p.columns {
		p.columns[i] = slices.Grow(p.columns[i][:0], n)[:n]
	}
}

// put sets a row.
func (p *packer) put(i int, r *row) {
	p.columns[0][i] = uint64(r.time)
	p.columns[1][i] = r.address
	p.columns[2][i] = r.page - r.address>>trace.PageShift
	p.columns[3][i] = r.pages
	p.columns[4][i] = uint64(r.region)
	p.columns[5][i] = uint64(r.tag)
}

// putBlock sets the rows of a block.
func (p *packer) putBlock(b *block) {
	p.grow(b.n)
	for i, t := range b.time[:b.n] {
		p.columns[0][i] = uint64(t)
	}
	copy(p.columns[1], b.address)
	clear(p.columns[2])
	if b.page != nil {
		for i, page := range b.page[:b.n] {
			p.columns[2][i] = page - b.address[i]>>trace.PageShift
		}
	}
	for i := range p.columns[3] {
		p.columns[3][i] = 1
	}
	if b.pages != nil {
		copy(p.columns[3], b.pages)
	}
	for i, region := range b.region[:b.n] {
		p.columns[4][i] = uint64(region)
	}
	for i, tag := range b.tag[:b.n] {
		p.columns[5][i] = uint64(tag)
	}
}

// pack packs the rows set.
func (p *packer) pack() packed {
	n := len(p.columns[0])
	out := packed{n: n}
	for c, column := range p.columns {
		low, high := column[0], column[0]
		for _, x := range column {
			low, high = min(low, x), max(high, x)
		}
		width := (bits.Len64(high-low) + 7) / 8
		out.columns[c] = packedColumn{low, width}
		out.size += n * width
	}
	var data []byte
	if last := len(p.spare) - 1; last >= 0 {
		data, p.spare = p.spare[last], p.spare[:last]
	}
	if cap(data) < out.size+slack {
		data = make([]byte, out.size+slack)
	}
	data = data[:out.size+slack]
	out.data = data[:out.size]
	for c, to := range out.columns {
		if to.width == 0 {
			continue
		}
		at := 0
		for _, x := range p.columns[c] {
			binary.LittleEndian.PutUint64(data[at:], x-to.base)
			at += to.width
		}
		data = data[at:]
	}
	return out
}

// unpack appends the rows to v.
func (p *packed) unpack(v []row, sp *spill, buffer *[]byte) ([]row, error) {
	*buffer = slices.Grow((*buffer)[:0], p.size+slack)[:p.size+slack]
	data := *buffer
	if p.data != nil {
		copy(data, p.data)
	} else if err := sp.read(data[:p.size], p.at); err != nil {
		return nil, err
	}
	start := len(v)
	v = slices.Grow(v, p.n)[:start+p.n]
	rows := v[start:]
	for c, column := range p.columns {
		mask := uint64(1)<<(8*column.width) - 1
		for i := range rows {
			x := column.base + binary.LittleEndian.Uint64(data[i*column.width:])&mask
			r := &rows[i]
			switch c {
			case 0:
				r.time = int64(x)
			case 1:
				r.address = x
			case 2:
				r.page = r.address>>trace.PageShift + x
			case 3:
				r.pages = x
			case 4:
				r.region = uint32(x)
			case 5:
				r.tag = uint32(x)
			}
		}
		data = data[p.n*column.width:]
	}
	return v, nil
}
