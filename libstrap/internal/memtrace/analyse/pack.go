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

// packer packs rows; it is the memory that they are in.
type packer struct {
	difference []uint64   // of the pages given to those of the addresses
	data       pool[byte] // of the packed rows
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

// columnOf says how values are packed: no bytes each where they are all the same.
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

// put packs values, and gives what is left of data behind them. The widths that
// nearly all columns have are written without overlap.
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
