package analyse

import (
	"math/bits"
	"unsafe"
)

// store is the memory for the values of one stage. Values that do not fit go to the spill.
type store struct {
	limit int64 // most bytes to hold
	held  int64 // bytes held now
	spill *spill
	// memory of the chunks
	narrow pool[uint32]
	wide   pool[uint64]
}

func poolOf[T uint32 | uint64](st *store) *pool[T] {
	if p, ok := any(&st.narrow).(*pool[T]); ok {
		return p
	}
	return any(&st.wide).(*pool[T])
}

// The chunks of a series grow from leastChunk to mostChunk values.
const (
	leastChunk = 8
	mostChunk  = 1 << 12
)

// series is a multiset of integers of one width: chunks in memory and a chain of
// records in the spill.
type series[T uint32 | uint64] struct {
	open  []T    // the chunk that is being filled
	full  [][]T  // the full chunks in memory
	any   T      // bitwise or of all values outside of open: pick needs only these bits
	chain link   // the last record in the spill
	moved uint64 // number of values in the spill
	power int    // each value counts 1 << power times
}

// link is the place of a record in the spill: its offset and its number of values. A record begins
// with the link of the record before it. n = 0 ends the chain.
type link struct{ at, n int64 }

const recordHead = 16

func (s *series[T]) add(v T, st *store) {
	if len(s.open) == cap(s.open) {
		s.extend(st)
	}
	s.open = append(s.open, v)
}

// seal moves the open chunk to the full ones.
func (s *series[T]) seal() {
	if len(s.open) == 0 {
		return
	}
	for _, v := range s.open {
		s.any |= v
	}
	s.full = append(s.full, s.open)
	s.open = nil
}

// n returns the number of values, in memory and in the spill. Each counts 1 << power times.
func (s *series[T]) n() uint64 { return (s.moved + uint64(s.inMemory())) << s.power }

func (s *series[T]) extend(st *store) {
	size := leastChunk
	if cap(s.open) > 0 {
		size = min(2*cap(s.open), mostChunk)
		s.seal()
	}
	s.open = poolOf[T](st).take(size)[:0]
	st.held += int64(size) * int64(unsafe.Sizeof(s.any))
}

func (s *series[T]) inMemory() int64 {
	n := int64(len(s.open))
	for _, c := range s.full {
		n += int64(len(c))
	}
	return n
}

// recordSize returns how many bytes moveTo writes.
func (s *series[T]) recordSize() int64 {
	if n := s.inMemory(); n > 0 {
		return recordHead + n*int64(unsafe.Sizeof(s.any))
	}
	return 0
}

// moveTo writes the values in memory to the spill as one record, and drops their chunks.
func (s *series[T]) moveTo(w *spillWriter) error {
	s.seal()
	n := s.inMemory()
	if n == 0 {
		return nil
	}
	at := w.at()
	if err := w.write(bytesOf([]int64{s.chain.at, s.chain.n})); err != nil {
		return err
	}
	for _, c := range s.full {
		if err := w.write(bytesOf(c)); err != nil {
			return err
		}
	}
	s.chain = link{at, n}
	s.moved += uint64(n)
	s.full = nil
	return nil
}

// scan calls f with all values, in pieces and in any order. A piece is valid until f returns.
func (s *series[T]) scan(sp *spill, f func([]T)) error {
	for _, c := range s.full {
		f(c)
	}
	f(s.open)
	if s.chain.n == 0 {
		return nil
	}
	width := int64(unsafe.Sizeof(s.any))
	piece := make([]T, min(1<<15, int64(s.moved)))
	head := make([]int64, 2)
	for r := s.chain; r.n > 0; r = (link{head[0], head[1]}) {
		if err := sp.read(bytesOf(head), r.at); err != nil {
			return err
		}
		for i := int64(0); i < r.n; {
			p := piece[:min(int64(len(piece)), r.n-i)]
			if err := sp.read(bytesOf(p), r.at+recordHead+i*width); err != nil {
				return err
			}
			f(p)
			i += int64(len(p))
		}
	}
	return nil
}

// values is a multiset of integers of one power. Integers below 2^32, which are nearly all, take four
// bytes each.
type values struct {
	narrow series[uint32]
	wide   *series[uint64]
}

func (v *values) add(x uint64, st *store) {
	if n := len(v.narrow.open); x>>32 == 0 && n < cap(v.narrow.open) {
		v.narrow.open = v.narrow.open[:n+1]
		v.narrow.open[n] = uint32(x)
		return
	}
	v.addSlowly(x, st)
}

func (v *values) addSlowly(x uint64, st *store) {
	if x>>32 == 0 {
		v.narrow.add(uint32(x), st)
		return
	}
	if v.wide == nil {
		v.wide = &series[uint64]{power: v.narrow.power}
	}
	v.wide.add(x, st)
}

func (v *values) recordSize() int64 {
	n := v.narrow.recordSize()
	if v.wide != nil {
		n += v.wide.recordSize()
	}
	return n
}

func (v *values) moveTo(w *spillWriter) error {
	if err := v.narrow.moveTo(w); err != nil {
		return err
	}
	if v.wide == nil {
		return nil
	}
	return v.wide.moveTo(w)
}

// relieve moves n multisets to the spill if the store holds more than its limit. at returns each of
// them. They must be all that the store holds.
func (st *store) relieve(n int, at func(int) *values) error {
	if st.held <= st.limit {
		return nil
	}
	size := int64(0)
	for i := range n {
		size += at(i).recordSize()
	}
	w, err := st.spill.writer(size)
	if err != nil {
		return err
	}
	for i := range n {
		if err := at(i).moveTo(w); err != nil {
			return err
		}
	}
	st.held = 0
	st.narrow.reset()
	st.wide.reset()
	return w.flush()
}

// multiset is the union of several multisets. It finds values by their rank.
type multiset struct {
	narrow []*series[uint32]
	wide   []*series[uint64]
	spill  *spill
}

func union(sp *spill, parts ...*values) multiset {
	m := multiset{spill: sp}
	for _, v := range parts {
		if v.narrow.n() > 0 {
			m.narrow = append(m.narrow, &v.narrow)
		}
		if v.wide != nil {
			m.wide = append(m.wide, v.wide)
		}
	}
	return m
}

func count[T uint32 | uint64](parts []*series[T]) uint64 {
	n := uint64(0)
	for _, s := range parts {
		n += s.n()
	}
	return n
}

// pick returns the values at the given ranks of the sorted multiset. Ranks count from 0 and must
// ascend.
func (m *multiset) pick(ranks []uint64, s *scratch) ([]uint64, error) {
	below := count(m.narrow)
	split := 0
	for split < len(ranks) && ranks[split] < below {
		split++
	}
	out := make([]uint64, 0, len(ranks))
	if split > 0 {
		picked, err := pick(m.narrow, m.spill, ranks[:split], &s.narrow)
		if err != nil {
			return nil, err
		}
		for _, v := range picked {
			out = append(out, uint64(v))
		}
	}
	if split < len(ranks) {
		rest := make([]uint64, 0, len(ranks)-split)
		for _, r := range ranks[split:] {
			rest = append(rest, r-below)
		}
		picked, err := pick(m.wide, m.spill, rest, &s.wide)
		if err != nil {
			return nil, err
		}
		out = append(out, picked...)
	}
	return out, nil
}

// run is a value that occurs n times.
type run struct{ value, n uint64 }

// pickAmong is pick for the union of the multiset and the runs. The values of the runs must ascend.
func (m *multiset) pickAmong(runs []run, ranks []uint64, s *scratch) ([]uint64, error) {
	out := make([]uint64, len(ranks))
	var rest []uint64                   // ranks in the multiset alone
	var places []int                    // index in out of each of them
	before := make([]uint64, len(runs)) // values of the multiset below each run
	for i, r := range runs {
		if r.n == 0 {
			continue
		}
		var err error
		if before[i], err = m.less(r.value); err != nil {
			return nil, err
		}
	}
	for place, rank := range ranks {
		within := false
		for i, r := range runs {
			if r.n == 0 || rank < before[i] {
				continue
			}
			if within = rank-before[i] < r.n; within {
				out[place] = r.value
				break
			}
			rank -= r.n
		}
		if !within {
			rest, places = append(rest, rank), append(places, place)
		}
	}
	if len(rest) == 0 {
		return out, nil
	}
	picked, err := m.pick(rest, s)
	for i, v := range picked {
		out[places[i]] = v
	}
	return out, err
}

// less returns the number of values below x.
func (m *multiset) less(x uint64) (uint64, error) {
	if x>>32 == 0 {
		return less(m.narrow, m.spill, uint32(x))
	}
	n, err := less(m.wide, m.spill, x)
	return n + count(m.narrow), err
}

func less[T uint32 | uint64](parts []*series[T], sp *spill, x T) (uint64, error) {
	n := uint64(0)
	for _, s := range parts {
		err := s.scan(sp, func(piece []T) {
			for _, v := range piece {
				if v < x {
					n++
				}
			}
		})
		if err != nil {
			return 0, err
		}
	}
	return n, nil
}

// scratch is memory that a worker reuses for its selections.
type scratch struct {
	narrow []uint32
	wide   []uint64
}

// gathered is the most values that a selection copies into memory.
const gathered = 1 << 16

const digitBits = 11

// cell is the range of the values whose bits above the next digit are prefix. It contains at least
// one of the wanted ranks.
type cell[T uint32 | uint64] struct {
	prefix T
	n      uint64                 // values in the cell
	ranks  []uint64               // the wanted ranks, from 0 at the cell's least value
	counts [1 << digitBits]uint64 // values by their next digit
}

// pick returns the values at the given ranks, which ascend. It is a radix selection from the top
// digit down. Each pass counts the next digit of the values in the cells with a wanted rank. When few
// enough values are left, gather copies them and selects among them. Values are only read, so
// spilled values cost passes over the file and no memory.
func pick[T uint32 | uint64](parts []*series[T], sp *spill, ranks []uint64, buffer *[]T) ([]T, error) {
	var any T
	for _, s := range parts {
		s.seal()
		any |= s.any
	}
	cells := []*cell[T]{{n: count(parts), ranks: ranks}}
	shift := bits.Len64(uint64(any))
	for {
		left := uint64(0)
		for _, c := range cells {
			left += c.n
		}
		if left <= gathered {
			return gather(parts, sp, cells, shift, buffer)
		}
		if shift == 0 {
			var out []T
			for _, c := range cells {
				for range c.ranks {
					out = append(out, c.prefix)
				}
			}
			return out, nil
		}
		width := min(digitBits, shift)
		shift -= width
		for _, s := range parts {
			if err := s.scan(sp, func(piece []T) { tally(cells, piece, shift, width, 1<<s.power) }); err != nil {
				return nil, err
			}
		}
		var finer []*cell[T]
		for _, c := range cells {
			finer = append(finer, c.split(width)...)
		}
		cells = finer
	}
}

// tally counts the digit at shift of the values that are in a cell. Each value counts `times` times.
func tally[T uint32 | uint64](cells []*cell[T], piece []T, shift, width int, times uint64) {
	if len(cells) == 1 && cells[0].prefix == 0 && cells[0].n > 0 {
		c := cells[0]
		for _, v := range piece {
			if d := v >> shift; d < 1<<width {
				c.counts[d&(1<<digitBits-1)] += times
			}
		}
		return
	}
	for _, v := range piece {
		d := v >> shift
		for _, c := range cells {
			if d>>width == c.prefix {
				c.counts[d&(1<<width-1)&(1<<digitBits-1)] += times
				break
			}
		}
	}
}

// split returns the cells that are one digit finer and contain a wanted rank.
func (c *cell[T]) split(width int) []*cell[T] {
	var out []*cell[T]
	below, digit := uint64(0), 0
	for _, r := range c.ranks {
		for r >= below+c.counts[digit] {
			below += c.counts[digit]
			digit++
		}
		prefix := c.prefix<<width | T(digit)
		if len(out) == 0 || out[len(out)-1].prefix != prefix {
			out = append(out, &cell[T]{prefix: prefix, n: c.counts[digit]})
		}
		last := out[len(out)-1]
		last.ranks = append(last.ranks, r-below)
	}
	return out
}

// gather copies the values of each cell to buffer and returns the values at the cells' ranks.
func gather[T uint32 | uint64](parts []*series[T], sp *spill, cells []*cell[T], shift int, buffer *[]T) ([]T, error) {
	room := 0
	for _, c := range cells {
		room += int(c.n)
	}
	if cap(*buffer) < room {
		*buffer = make([]T, max(room, 2*cap(*buffer)))
	}
	rest := (*buffer)[:room]
	found := make([][]T, len(cells))
	for i, c := range cells {
		found[i], rest = rest[:0:c.n], rest[c.n:]
	}
	all := len(cells) == 1 && cells[0].n == count(parts)
	for _, s := range parts {
		err := s.scan(sp, func(piece []T) {
			if all && s.power == 0 {
				found[0] = append(found[0], piece...)
				return
			}
			for _, x := range piece {
				for i, c := range cells {
					if x>>shift == c.prefix {
						for range 1 << s.power {
							found[i] = append(found[i], x)
						}
					}
				}
			}
		})
		if err != nil {
			return nil, err
		}
	}
	var out []T
	for i, c := range cells {
		start := 0
		for _, r := range c.ranks {
			out = append(out, nth(found[i][start:], int(r)-start))
			start = int(r)
		}
	}
	return out, nil
}
