// Holds a column of rows in as few bytes as its values need.

package index

import (
	"bytes"
	"encoding/binary"
	"math/bits"
	"slices"
	"unicode/utf8"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/bitutil"
	arrowmemory "github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memory"
)

// cells has a column of a batch, in as few bytes as its values need. It shares no memory.
type cells struct {
	rows, nulls int
	valid       []byte // a bit for each row; nil if no row or each row is null
	numbers     ints   // the values; for texts and lists their numbers in distinct
	distinct    distinct
}

// ints has integers as distances from a line, in as few bytes as the largest distance needs. Integer i is
// base + slope*i + distance i. All arithmetic is modulo 2^64, so it cannot overflow.
type ints struct {
	base, slope uint64
	width       int    // bytes of a distance, 0 to 8
	data        []byte // the distances, and 8 bytes more, so that one load reads a distance
}

// distinct has different texts or lists, one after another: text k is bytes[ends[k]:ends[k+1]].
type distinct struct {
	bytes string
	ends  []uint32
}

// size returns how many bytes c keeps beside the struct.
func (c *cells) size() int64 {
	size := len(c.valid) + len(c.distinct.bytes) + 4*len(c.distinct.ends)
	if c.numbers.width > 0 {
		size += len(c.numbers.data)
	}
	return int64(size)
}

func (c *cells) isNull(i int) bool {
	if c.valid == nil {
		return c.nulls > 0
	}
	return !bitutil.BitIsSet(c.valid, i)
}

func (c *cells) number(i int) uint64 { return c.numbers.at(i) }
func (c *cells) text(i int) string   { return c.distinct.at(c.number(i)) }

// appendList appends the elements of list i to list.
func (c *cells) appendList(list []int64, i int) []int64 {
	for b := c.text(i); len(b) > 0; b = b[8:] {
		list = append(list, int64(binary.LittleEndian.Uint64([]byte(b[:8]))))
	}
	return list
}

func (d *distinct) at(k uint64) string { return d.bytes[d.ends[k]:d.ends[k+1]] }

func (v *ints) at(i int) uint64 {
	distance := binary.LittleEndian.Uint64(v.data[i*v.width:]) & (1<<(8*v.width) - 1)
	return v.base + v.slope*uint64(i) + distance
}

// slice returns the cells of rows [from, to). Only their texts and lists share memory with c.
func (c *cells) slice(from, to int) cells {
	s := cells{rows: to - from, nulls: c.nulls, numbers: c.numbers, distinct: c.distinct}
	s.numbers.base += s.numbers.slope * uint64(from)
	if w := s.numbers.width; w > 0 {
		s.numbers.data = bytes.Clone(s.numbers.data[from*w : to*w+8])
	}
	switch {
	case c.valid != nil:
		valid := make([]byte, (s.rows+7)/8)
		bitutil.CopyBitmap(c.valid, from, s.rows, valid, 0)
		if s.nulls = s.rows - bitutil.CountSetBits(valid, 0, s.rows); s.nulls > 0 && s.nulls < s.rows {
			s.valid = valid
		}
	case c.nulls > 0:
		s.nulls = s.rows
	}
	return s
}

// noDistance is the data of integers that are on their line.
var noDistance = make([]byte, 8)

// packed returns values as ints. The line is flat, or goes from the first value to the last.
func packed(values []uint64) ints {
	if len(values) == 0 {
		return ints{data: noDistance}
	}
	first, slope := values[0], uint64(0)
	if n := len(values) - 1; n > 0 {
		slope = uint64(int64(values[n]-first) / int64(n))
	}
	flat, steep := reach(values, 0), reach(values, slope)
	if flat.width() <= steep.width() {
		slope, steep = 0, flat
	}
	v := ints{base: uint64(steep.least), slope: slope, width: steep.width(), data: noDistance}
	if v.width > 0 {
		v.data = make([]byte, len(values)*v.width+8)
		line := v.base
		for i, value := range values {
			binary.LittleEndian.PutUint64(v.data[i*v.width:], value-line) // the next store overwrites its zeros
			line += slope
		}
	}
	return v
}

// bounds has the least and the largest distance from a line through zero.
type bounds struct{ least, most int64 }

func (b bounds) width() int { return (bits.Len64(uint64(b.most)-uint64(b.least)) + 7) / 8 }

func reach(values []uint64, slope uint64) bounds {
	b, line := bounds{int64(values[0]), int64(values[0])}, uint64(0)
	for _, value := range values {
		distance := int64(value - line)
		b.least, b.most = min(b.least, distance), max(b.most, distance)
		line += slope
	}
	return b
}

// room is memory that the columns of a batch use one after another.
type room struct {
	budget  *memory.Budget
	buffers [3][]byte // of a column, decompressed
	values  []uint64
	known   map[string]uint64 // the number of each text in found
	found   []byte            // the distinct texts
}

func (r *room) take(n int) []uint64 {
	if cap(r.values) < n {
		r.values = make([]uint64, n)
	}
	return r.values[:n]
}

// validCells returns cells of n rows without values, with their validity bitmap.
func validCells(n, nulls int, validity []byte) cells {
	c := cells{rows: n, nulls: nulls, numbers: ints{data: noDistance}}
	if nulls > 0 && nulls < n {
		c.valid = bytes.Clone(validity[:(n+7)/8])
	}
	return c
}

// nullCells returns n cells that are null.
func nullCells(n int) cells {
	return cells{rows: n, nulls: n, numbers: ints{data: noDistance}, distinct: distinct{ends: []uint32{0, 0}}}
}

// setNumbers sets the numbers from values, which have width bytes each.
func (c *cells) setNumbers(values []byte, width int, r *room) {
	n := c.rows
	if n == 0 {
		return
	}
	load := func(i int) uint64 {
		switch width {
		case 1:
			return uint64(values[i])
		case 4:
			return uint64(binary.LittleEndian.Uint32(values[4*i:]))
		default:
			return binary.LittleEndian.Uint64(values[8*i:])
		}
	}
	if bytes.Equal(values[width:n*width], values[:(n-1)*width]) { // all are the same
		c.numbers.base = load(0)
		return
	}
	wide := r.take(n)
	for i := range wide {
		wide[i] = load(i)
	}
	c.numbers = packed(wide)
}

// setTexts sets texts (unit is 1), or lists of elements of unit bytes. The offsets must be checked.
func (c *cells) setTexts(offsets, values []byte, unit int, r *room) *fault {
	n, text := c.rows, unit == 1
	c.distinct.ends = []uint32{0}
	if n == 0 {
		return nil
	}
	if from := offset(offsets, 0) * unit; areOne(offsets, values, n, unit) {
		one := values[from : offset(offsets, 1)*unit]
		if text && !utf8.Valid(one) {
			return wrong("its text is not UTF-8")
		}
		c.distinct = distinct{string(one), []uint32{0, uint32(len(one))}}
		return nil
	}
	if r.known == nil {
		r.known = map[string]uint64{}
	}
	clear(r.known)
	places, known, found := r.take(n), r.known, r.found[:0]
	var last []byte
	from := offset(offsets, 0) * unit
	for i := range n {
		to := offset(offsets, i+1) * unit
		one := values[from:to]
		from = to
		if i > 0 && bytes.Equal(one, last) {
			places[i] = places[i-1]
			continue
		}
		last = one
		place, ok := known[string(one)]
		if !ok {
			if text && !utf8.Valid(one) {
				return wrong("its text is not UTF-8")
			}
			place = uint64(len(known))
			known[string(one)] = place
			found = append(found, one...)
			c.distinct.ends = append(c.distinct.ends, uint32(len(found)))
		}
		places[i] = place
	}
	c.numbers, c.distinct.bytes, c.distinct.ends = packed(places), string(found), slices.Clip(c.distinct.ends)
	r.found = found
	return nil
}

// areOne reports whether all n texts or lists are the same. In most columns they are.
func areOne(offsets, values []byte, n, unit int) bool {
	first, second, last := offset(offsets, 0), offset(offsets, 1), offset(offsets, n)
	length := second - first
	if last-first != n*length {
		return false
	}
	for i := 1; i < n; i++ {
		if offset(offsets, i+1)-offset(offsets, i) != length {
			return false
		}
	}
	return bytes.Equal(values[second*unit:last*unit], values[first*unit:(last-length)*unit])
}

// cellsOf returns the cells of an array that Record made.
func cellsOf(d arrow.ArrayData, r *room) cells {
	bytesOf := func(d arrow.ArrayData, k int) []byte {
		if b := d.Buffers()[k]; b != nil {
			return b.Bytes()
		}
		return nil
	}
	c := validCells(d.Len(), d.NullN(), bytesOf(d, 0))
	switch t := d.DataType().(type) {
	case arrow.FixedWidthDataType:
		c.setNumbers(bytesOf(d, 1), t.Bytes(), r)
	case *arrow.StringType:
		_ = c.setTexts(bytesOf(d, 1), bytesOf(d, 2), 1, r) // a row's texts are UTF-8
	case *arrow.ListType:
		_ = c.setTexts(bytesOf(d, 1), bytesOf(d.Children()[0], 1), 8, r)
	}
	return c
}

// slots is memory for the arrays of a record. The next record uses it again.
type slots struct {
	all  [][]byte
	next int
}

// take returns n bytes with undefined contents, and with room for 8 more.
func (s *slots) take(n int) []byte {
	b := s.slot()
	if cap(*b) < n+8 {
		*b = make([]byte, n+8)
	}
	return (*b)[:n]
}

func (s *slots) slot() *[]byte {
	if s.next == len(s.all) {
		s.all = append(s.all, nil)
	}
	s.next++
	return &s.all[s.next-1]
}

// array makes an Arrow array of rows [from, to). t is the column's type, or a dictionary of texts.
func (c *cells) array(t arrow.DataType, from, to int, s *slots) arrow.Array {
	n, nulls := to-from, 0
	var validity []byte
	if c.nulls > 0 {
		validity = s.take((n + 7) / 8)
		clear(validity)
		if c.valid != nil {
			bitutil.CopyBitmap(c.valid, from, n, validity, 0)
		}
		nulls = n - bitutil.CountSetBits(validity, 0, n)
	}
	switch t := t.(type) {
	case *arrow.DictionaryType:
		places, ends, chars := c.used(from, to, s)
		texts := array.MakeFromData(dataOf(t.ValueType, len(ends)/4-1, 0, nil, nil, ends, chars))
		return array.NewDictionaryArray(t, array.MakeFromData(dataOf(t.IndexType, n, nulls, nil, validity, places)), texts)
	case *arrow.StringType:
		ends, chars := c.spread(from, to, 1, s)
		return array.MakeFromData(dataOf(t, n, nulls, nil, validity, ends, chars))
	case *arrow.ListType:
		ends, values := c.spread(from, to, 8, s)
		child := dataOf(t.Elem(), len(values)/8, 0, nil, nil, values)
		return array.MakeFromData(dataOf(t, n, nulls, []arrow.ArrayData{child}, validity, ends))
	}
	width := t.(arrow.FixedWidthDataType).Bytes()
	values := s.take(n * width)
	for i := range n { // each store writes 8 bytes, and the next one overwrites those beyond width
		binary.LittleEndian.PutUint64(values[i*width:i*width+8], c.number(from+i))
	}
	return array.MakeFromData(dataOf(t, n, nulls, nil, validity, values))
}

func dataOf(t arrow.DataType, n, nulls int, children []arrow.ArrayData, buffers ...[]byte) arrow.ArrayData {
	shared := make([]*arrowmemory.Buffer, len(buffers))
	for i, b := range buffers {
		if b != nil {
			shared[i] = arrowmemory.NewBufferBytes(b)
		}
	}
	return array.NewData(t, n, shared, children, nulls, 0)
}

// used returns the distinct texts of rows [from, to) in Arrow's layout, in the order of their first row.
// places has the number of each row's text.
func (c *cells) used(from, to int, s *slots) (places, ends, chars []byte) {
	places = s.take(4 * (to - from))
	ends, chars = binary.LittleEndian.AppendUint32(nil, 0), []byte{}
	if c.valid == nil && c.numbers.width == 0 && c.numbers.slope == 0 { // as most columns of texts
		clear(places)
		if c.nulls == 0 && from < to {
			chars = append(chars, c.text(from)...)
			ends = binary.LittleEndian.AppendUint32(ends, uint32(len(chars)))
		}
		return places, ends, chars
	}
	place := make([]uint32, len(c.distinct.ends)) // from 1 on; 0: not used
	for i := from; i < to; i++ {
		k := c.number(i)
		if place[k] == 0 && !c.isNull(i) {
			chars = append(chars, c.distinct.at(k)...)
			ends = binary.LittleEndian.AppendUint32(ends, uint32(len(chars)))
			place[k] = uint32(len(ends)/4 - 1)
		}
		binary.LittleEndian.PutUint32(places[4*(i-from):], max(place[k], 1)-1)
	}
	return places, ends, chars
}

// spread returns the texts or lists of rows [from, to) in Arrow's layout, repeated for each row.
func (c *cells) spread(from, to, unit int, s *slots) (ends, values []byte) {
	ends = s.take(4 * (to - from + 1))
	binary.LittleEndian.PutUint32(ends, 0)
	slot := s.slot()
	values = (*slot)[:0]
	for i := from; i < to; i++ {
		values = append(values, c.text(i)...)
		binary.LittleEndian.PutUint32(ends[4*(i-from+1):], uint32(len(values)/unit))
	}
	*slot = values
	return ends, values
}
