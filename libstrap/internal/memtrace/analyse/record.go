// The records of values in a file: their format, writer and readers.

package analyse

import (
	"encoding/binary"
	"slices"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// A record has values of one series in a file: in the spill, or in a partial analysis. It begins with the
// place of the record before it. Small or scattered values follow as they are. Many values below 2^32 follow
// as groups. A group has the values whose upper 16 bits are equal. The record lists the upper bits and the
// number of values of each group, in ascending order, and then has the lower 16 bits of all values. So a
// value takes two bytes in place of four, and counting the values of a range reads at most two groups.
// Numbers are little-endian.

// records is a file with records.
type records interface {
	// read fills p with the bytes at an offset of the file.
	read(p []byte, at int64) error
	// name returns what an error calls the file.
	name() string
}

// recordPlace is where a record is: its offset, the number of its values, and of its groups (0: none).
type recordPlace struct {
	at        int64
	n, groups uint32
}

const (
	placeBytes  = 16
	groupBytes  = 8
	lowBytes    = 2
	mostRecord  = 1 << 22 // values
	groupValues = 1 << 16 // the values that a group can have differ in 16 bits
)

func (p recordPlace) bytes() []byte {
	b := binary.LittleEndian.AppendUint64(make([]byte, 0, placeBytes), uint64(p.at))
	return binary.LittleEndian.AppendUint32(binary.LittleEndian.AppendUint32(b, p.n), p.groups)
}

func placeOf(b []byte) recordPlace {
	return recordPlace{int64(binary.LittleEndian.Uint64(b)), binary.LittleEndian.Uint32(b[8:]), binary.LittleEndian.Uint32(b[12:])}
}

// size returns the bytes of the record, whose values take width bytes each if it has no groups.
func (p recordPlace) size(width int64) int64 {
	if p.groups > 0 {
		width = lowBytes
	}
	return placeBytes + int64(p.groups)*groupBytes + int64(p.n)*width
}

// chain is the values of a series in one file. It takes the same memory however many records there are.
type chain struct {
	from records
	last recordPlace
	n    uint64 // values in all records
}

// group is a group of a record: the upper bits, and the number of values.
type group struct{ high, n uint32 }

// recordWriter writes one record after the other to a file.
type recordWriter interface {
	// at returns the file offset of the next byte.
	at() int64
	write(p []byte) error
}

// chainIn returns the chain of the series in a file.
func (s *series[T]) chainIn(from records) *chain {
	for i := range s.chains {
		if s.chains[i].from == from {
			return &s.chains[i]
		}
	}
	s.chains = append(s.chains, chain{from: from})
	return &s.chains[len(s.chains)-1]
}

// mostRecordSize returns the most bytes that moveTo writes.
func mostRecordSize[T uint32 | uint64](s *series[T]) int64 {
	n := s.inMemory()
	records := n/(mostRecord-mostChunk) + 1 // a record that has no room for the next chunk has that many values
	return records*placeBytes + n*int64(unsafe.Sizeof(s.any))
}

// moveTo writes the values in memory to a file as records, and drops their chunks.
func (s *series[T]) moveTo(w recordWriter, to records, g *grouper) error {
	s.seal()
	for len(s.full) > 0 {
		chunks, n := 0, 0
		for chunks < len(s.full) && n+len(s.full[chunks]) <= mostRecord {
			n += len(s.full[chunks])
			chunks++
		}
		if err := s.writeRecord(w, s.chainIn(to), s.full[:chunks], n, g); err != nil {
			return err
		}
		s.full = s.full[chunks:]
	}
	s.full = nil
	return nil
}

func (s *series[T]) writeRecord(w recordWriter, to *chain, chunks [][]T, n int, g *grouper) error {
	var groups []group
	if narrow, ok := any(chunks).([][]uint32); ok {
		groups = g.group(narrow, n, uint32(s.any))
	}
	before := to.last
	to.last = recordPlace{at: w.at(), n: uint32(n), groups: uint32(len(groups))}
	to.n += uint64(n)
	if err := w.write(before.bytes()); err != nil {
		return err
	}
	if groups != nil {
		if err := w.write(asBytes(groups)); err != nil {
			return err
		}
		return w.write(asBytes(g.lows[:n]))
	}
	for _, c := range chunks {
		if err := w.write(asBytes(c)); err != nil {
			return err
		}
	}
	return nil
}

// copyTo copies the records of the series to another file, and moves the values in memory there. Then the
// series has one chain, in that file, and cannot be read.
func (s *series[T]) copyTo(w recordWriter, g *grouper, r *recordReader) error {
	old, width := s.chains, int64(unsafe.Sizeof(s.any))
	s.chains = nil
	var places []recordPlace
	for i := range old {
		c := &old[i]
		places = places[:0]
		if err := r.each(c, width, func(p recordPlace) error { places = append(places, p); return nil }); err != nil {
			return err
		}
		for _, p := range slices.Backward(places) {
			copied := s.chainIn(nil)
			before := copied.last
			copied.last = recordPlace{at: w.at(), n: p.n, groups: p.groups}
			copied.n += uint64(p.n)
			if err := w.write(before.bytes()); err != nil {
				return err
			}
			end := p.at + p.size(width)
			for at := p.at + placeBytes; at < end; {
				piece, err := r.bytes(c.from, at, int(min(end-at, windowBytes)), end)
				if err != nil {
					return err
				}
				if err := w.write(piece); err != nil {
					return err
				}
				at += int64(len(piece))
			}
		}
	}
	return s.moveTo(w, nil, g)
}

// grouper sorts values into groups. Its memory is reused.
type grouper struct {
	counts []uint32
	groups []group
	lows   []uint16
}

// group sorts n values into groups and returns them, and sets lows to the lower bits of all values. all has
// the bits of all values. If groups would take more bytes than the values, group returns nil.
func (g *grouper) group(chunks [][]uint32, n int, all uint32) []group {
	highs := int(all>>16) + 1
	if highs > 1 && highs > n {
		return nil
	}
	g.counts = slices.Grow(g.counts[:0], highs)[:highs]
	clear(g.counts)
	for _, c := range chunks {
		for _, v := range c {
			g.counts[v>>16]++
		}
	}
	g.groups = g.groups[:0]
	at := uint32(0)
	for high, many := range g.counts {
		if many > 0 {
			g.groups = append(g.groups, group{uint32(high), many})
			g.counts[high] = at
			at += many
		}
	}
	if len(g.groups)*groupBytes+n*lowBytes >= n*4 {
		return nil
	}
	g.lows = slices.Grow(g.lows[:0], n)[:n]
	for _, c := range chunks {
		for _, v := range c {
			g.lows[g.counts[v>>16]] = uint16(v)
			g.counts[v>>16]++
		}
	}
	return g.groups
}

// recordReader reads records. Its memory is reused. It holds a window of the file, so that a small record is
// read with one call of the system.
type recordReader struct {
	from   records
	first  int64 // offset of the window
	window []byte
	groups []group
	narrow []uint32
	wide   []uint64
}

const (
	windowBytes = 1 << 16 // a multiple of the size of a head and of all values
	pieceValues = windowBytes / lowBytes
)

// bytes returns n bytes at an offset, at most windowBytes. The record ends at end. The bytes are valid until
// the next call.
func (r *recordReader) bytes(from records, at int64, n int, end int64) ([]byte, error) {
	if r.from != from || at < r.first || at+int64(n) > r.first+int64(len(r.window)) {
		r.window = slices.Grow(r.window[:0], windowBytes)[:min(end-at, windowBytes)]
		if err := from.read(r.window, at); err != nil {
			r.from = nil
			return nil, err
		}
		r.from, r.first = from, at
	}
	return r.window[at-r.first:][:n], nil
}

// pieceOf returns memory for pieceValues values.
func pieceOf[T uint32 | uint64](r *recordReader) []T {
	if r.narrow == nil {
		r.narrow, r.wide = make([]uint32, pieceValues), make([]uint64, pieceValues)
	}
	if v, ok := any(r.narrow).([]T); ok {
		return v
	}
	return any(r.wide).([]T)
}

// each calls f with the place of each record of a chain, from the last one to the first. Values without
// groups take width bytes each.
func (r *recordReader) each(c *chain, width int64, f func(recordPlace) error) error {
	n := uint64(0)
	for p := c.last; p.n > 0; {
		if n += uint64(p.n); p.n > mostRecord || p.groups > min(p.n, groupValues) || p.at < 0 || n > c.n {
			return damaged(c, p)
		}
		head, err := r.bytes(c.from, p.at, placeBytes, p.at+p.size(width))
		if err != nil {
			return err
		}
		before := placeOf(head)
		if before.n > 0 && before.at >= p.at {
			return damaged(c, p)
		}
		if err := f(p); err != nil {
			return err
		}
		p = before
	}
	if n != c.n {
		return damaged(c, c.last)
	}
	return nil
}

func damaged(c *chain, p recordPlace) error {
	return status.New(status.Corrupt, "%q has a damaged record of values at byte %d", c.from.name(), p.at)
}

// scan calls f with the values of a series, in pieces and in any order. A piece is valid until f returns.
// For each group in a file it calls wants before, with the least and the greatest value that the group can
// have and the number of its values. If wants returns false, f does not get the values of the group.
func scan[T uint32 | uint64](s *series[T], r *recordReader, wants func(low, high T, n uint64) bool, f func([]T)) error {
	for _, c := range s.full {
		f(c)
	}
	f(s.open)
	for i := range s.chains {
		c := &s.chains[i]
		err := r.each(c, int64(unsafe.Sizeof(s.any)), func(p recordPlace) error {
			if p.groups == 0 {
				return scanFlat(c.from, p, r, f)
			}
			return scanGroups(c, p, r, wants, f)
		})
		if err != nil {
			return err
		}
	}
	return nil
}

func scanFlat[T uint32 | uint64](from records, p recordPlace, r *recordReader, f func([]T)) error {
	var one T
	width := int(unsafe.Sizeof(one))
	piece := pieceOf[T](r)
	end := p.at + p.size(int64(width))
	for at := p.at + placeBytes; at < end; {
		b, err := r.bytes(from, at, int(min(end-at, windowBytes-placeBytes)), end)
		if err != nil {
			return err
		}
		at += int64(len(b))
		n := len(b) / width
		for i := range piece[:n] {
			if width == 4 {
				piece[i] = T(binary.LittleEndian.Uint32(b[4*i:]))
			} else {
				piece[i] = T(binary.LittleEndian.Uint64(b[8*i:]))
			}
		}
		f(piece[:n])
	}
	return nil
}

func scanGroups[T uint32 | uint64](c *chain, p recordPlace, r *recordReader, wants func(low, high T, n uint64) bool, f func([]T)) error {
	end := p.at + p.size(0)
	if err := r.readGroups(c, p, end); err != nil {
		return err
	}
	at := p.at + placeBytes + int64(p.groups)*groupBytes
	for i := 0; i < len(r.groups); {
		first, many := i, int64(0)
		for ; i < len(r.groups); i++ {
			low := T(r.groups[i].high) << 16
			if !wants(low, low|(groupValues-1), uint64(r.groups[i].n)) {
				break
			}
			many += int64(r.groups[i].n)
		}
		if err := scanLows(c.from, at, r.groups[first:i], many, end, r, f); err != nil {
			return err
		}
		at += many * lowBytes
		if i < len(r.groups) { // the group that is not wanted
			at += int64(r.groups[i].n) * lowBytes
			i++
		}
	}
	return nil
}

// scanLows calls f with the n values of adjacent groups, whose lower bits begin at an offset.
func scanLows[T uint32 | uint64](from records, at int64, groups []group, n, end int64, r *recordReader, f func([]T)) error {
	out := pieceOf[T](r)
	left := uint32(0)
	if len(groups) > 0 {
		left = groups[0].n
	}
	for n > 0 {
		piece := out[:min(n, pieceValues)]
		lows, err := r.bytes(from, at, len(piece)*lowBytes, end)
		if err != nil {
			return err
		}
		for done := 0; done < len(piece); {
			for left == 0 {
				groups = groups[1:]
				left = groups[0].n
			}
			some := piece[done:min(done+int(left), len(piece))]
			high := T(groups[0].high) << 16
			for i := range some {
				some[i] = high | T(binary.LittleEndian.Uint16(lows[lowBytes*(done+i):]))
			}
			done += len(some)
			left -= uint32(len(some))
		}
		f(piece)
		at += int64(len(lows))
		n -= int64(len(piece))
	}
	return nil
}

// readGroups reads the groups of a record, which ends at end, and checks them.
func (r *recordReader) readGroups(c *chain, p recordPlace, end int64) error {
	r.groups = slices.Grow(r.groups[:0], int(p.groups))
	at, n := p.at+placeBytes, uint64(0)
	for left := int(p.groups); left > 0; {
		some := min(left, windowBytes/groupBytes)
		b, err := r.bytes(c.from, at, some*groupBytes, end)
		if err != nil {
			return err
		}
		for ; len(b) > 0; b = b[groupBytes:] {
			g := group{binary.LittleEndian.Uint32(b), binary.LittleEndian.Uint32(b[4:])}
			if last := len(r.groups) - 1; g.high >= groupValues || g.n == 0 || last >= 0 && r.groups[last].high >= g.high {
				return damaged(c, p)
			}
			n += uint64(g.n)
			r.groups = append(r.groups, g)
		}
		left -= some
		at += int64(some) * groupBytes
	}
	if n != uint64(p.n) {
		return damaged(c, p)
	}
	return nil
}

// asBytes returns the memory of v as bytes. All machines that libstrap is built for are little-endian.
func asBytes[T uint16 | uint32 | uint64 | group](v []T) []byte {
	if len(v) == 0 {
		return nil
	}
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(v[0])))
}
