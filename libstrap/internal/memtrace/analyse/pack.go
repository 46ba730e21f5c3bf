// Packs the rows of a block into few bytes, and unpacks them.

package analyse

import (
	"encoding/binary"
	"math/bits"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// packed holds the rows of a block, in memory or in the spill. A column takes as many bytes a row as
// the difference of its largest and least value needs. A row of a real trace takes about ten bytes.
type packed struct {
	n       int // rows
	columns [packedColumns]packedColumn
	data    []byte // nil: the data is in the spill
	at      int64  // offset in the spill
	size    int    // bytes of data
}

const packedColumns = 6

// packedColumn describes a packed column: each value is stored as its difference to base, in width
// bytes, little-endian.
type packedColumn struct {
	base  uint64
	width int
}

// row is one unpacked row.
type row struct {
	time        int64
	address     uint64
	page, pages uint64
	region, tag uint32
}

// slack is the number of unused bytes after the data, so that every value can be read and written as
// eight bytes.
const slack = 8

// packer packs rows, and owns the memory that holds them.
type packer struct {
	difference []uint64   // memory for the differences of address_page to the page of the address
	data       pool[byte] // the packed rows
}

// pack packs the rows of a block.
func (p *packer) pack(b *block) packed {
	n := b.n
	out := packed{n: n}
	var page []uint64
	if b.page != nil {
		p.difference = slices.Grow(p.difference[:0], n)[:n]
		page = p.difference
		for i, at := range b.page[:n] {
			page[i] = at - b.address[i]>>trace.PageShift
		}
	}
	pages := packedColumn{base: 1}
	if b.pages != nil {
		pages = columnOf(b.pages[:n])
	}
	out.columns = [packedColumns]packedColumn{
		columnOf(b.time[:n]), columnOf(b.address[:n]), columnOf(page), pages,
		columnOf(b.region[:n]), columnOf(b.tag[:n]),
	}
	for _, c := range out.columns {
		out.size += n * c.width
	}
	data := p.data.take(out.size + slack)
	out.data = data[:out.size]
	data = put(data, out.columns[0], b.time[:n])
	data = put(data, out.columns[1], b.address[:n])
	data = put(data, out.columns[2], page)
	if b.pages != nil {
		data = put(data, out.columns[3], b.pages[:n])
	}
	data = put(data, out.columns[4], b.region[:n])
	put(data, out.columns[5], b.tag[:n])
	return out
}

// columnOf returns how values are packed. If all values are the same, the width is 0.
func columnOf[T int64 | uint64 | uint32](v []T) packedColumn {
	if len(v) == 0 {
		return packedColumn{}
	}
	low, high := v[0], v[0]
	for _, x := range v {
		low, high = min(low, x), max(high, x)
	}
	return packedColumn{uint64(low), (bits.Len64(uint64(high)-uint64(low)) + 7) / 8}
}

// put packs values into data, and returns the rest of data after them. Widths 1, 2 and 4, which nearly
// all columns have, are written exactly. Other widths are written as eight bytes each, of which the
// next value overwrites the excess.
func put[T int64 | uint64 | uint32](data []byte, c packedColumn, v []T) []byte {
	size := c.width * len(v)
	switch c.width {
	case 0:
	case 1:
		to := data[:len(v)]
		for i, x := range v {
			to[i] = byte(uint64(x) - c.base)
		}
	case 2:
		to := data[:size]
		for i, x := range v {
			binary.LittleEndian.PutUint16(to[2*i:], uint16(uint64(x)-c.base))
		}
	case 4:
		to := data[:size]
		for i, x := range v {
			binary.LittleEndian.PutUint32(to[4*i:], uint32(uint64(x)-c.base))
		}
	default:
		for i, x := range v {
			binary.LittleEndian.PutUint64(data[i*c.width:], uint64(x)-c.base)
		}
	}
	return data[size:]
}

// unpack appends the rows to v and returns it. buffer is memory to reuse.
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
