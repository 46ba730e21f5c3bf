// Reads FlatBuffers from untrusted bytes.

package index

import "encoding/binary"

// flat reads FlatBuffers (https://flatbuffers.dev/internals) from untrusted bytes. It never reads outside of
// buf: if the bytes claim that, it sets bad and returns zero.
type flat struct {
	buf []byte
	bad bool
}

// table is a FlatBuffers table at pos of f. pos 0 means no table; it has no fields.
type table struct {
	f   *flat
	pos int
}

func (f *flat) at(pos, n int) []byte {
	if pos < 0 || n > len(f.buf) || pos > len(f.buf)-n {
		f.bad = true
		return make([]byte, n)
	}
	return f.buf[pos : pos+n]
}

func (f *flat) u16(pos int) int { return int(binary.LittleEndian.Uint16(f.at(pos, 2))) }
func (f *flat) u32(pos int) int { return int(binary.LittleEndian.Uint32(f.at(pos, 4))) }
func (f *flat) i64(pos int) int64 {
	return int64(binary.LittleEndian.Uint64(f.at(pos, 8)))
}

func (f *flat) root() table { return table{f, f.u32(0)} }

// slot returns the position of field n, or 0 if the table does not have it.
func (t table) slot(n int) int {
	if t.pos == 0 {
		return 0
	}
	vtable := t.pos - int(int32(uint32(t.f.u32(t.pos))))
	if 4+2*n+2 > t.f.u16(vtable) {
		return 0
	}
	if off := t.f.u16(vtable + 4 + 2*n); off != 0 {
		return t.pos + off
	}
	return 0
}

func (t table) u8(n int) byte {
	if p := t.slot(n); p != 0 {
		return t.f.at(p, 1)[0]
	}
	return 0
}

func (t table) i16(n int) int16 {
	if p := t.slot(n); p != 0 {
		return int16(uint16(t.f.u16(p)))
	}
	return 0
}

func (t table) i32(n int) int32 {
	if p := t.slot(n); p != 0 {
		return int32(uint32(t.f.u32(p)))
	}
	return 0
}

func (t table) i64(n int) int64 {
	if p := t.slot(n); p != 0 {
		return t.f.i64(p)
	}
	return 0
}

func (t table) table(n int) table {
	if p := t.slot(n); p != 0 {
		return table{t.f, p + t.f.u32(p)}
	}
	return table{f: t.f}
}

// vector returns the position of the first element of a vector, and the number of elements. All elements,
// size bytes each, are inside the buffer.
func (t table) vector(n, size int) (pos, length int) {
	p := t.slot(n)
	if p == 0 {
		return 0, 0
	}
	p += t.f.u32(p)
	length = t.f.u32(p)
	if length > (len(t.f.buf)-p)/size {
		t.f.bad = true
		return 0, 0
	}
	t.f.at(p+4, length*size)
	if t.f.bad {
		return 0, 0
	}
	return p + 4, length
}

// tables returns the first limit tables of a vector of tables.
func (t table) tables(n, limit int) []table {
	pos, length := t.vector(n, 4)
	if length > limit {
		t.f.bad = true
		return nil
	}
	all := make([]table, length)
	for i := range all {
		p := pos + 4*i
		all[i] = table{t.f, p + t.f.u32(p)}
	}
	return all
}

// text returns a string field. It shares memory with the buffer, because many tables may have the same bytes.
func (t table) text(n int) []byte {
	pos, length := t.vector(n, 1)
	if length == 0 {
		return nil
	}
	return t.f.at(pos, length)
}
