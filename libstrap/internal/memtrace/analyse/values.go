// Multisets of integers, in chunks of memory and in records of files.

package analyse

import "unsafe"

// store is the memory for the values of one stage. Values that do not fit go to the spill.
type store struct {
	limit int64 // most bytes to hold
	held  int64 // bytes held now
	spill *spill
	// memory of the chunks
	narrow pool[uint32]
	wide   pool[uint64]
	grouper
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

// series is a multiset of integers of one width: chunks in memory and records in files.
type series[T uint32 | uint64] struct {
	open   []T     // the chunk that is being filled
	full   [][]T   // the full chunks in memory
	any    T       // bitwise or of all values outside of open: pick needs only these bits
	chains []chain // the records in files
	power  int     // each value counts 1 << power times
}

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

// n returns the number of values, in memory and in files. Each counts 1 << power times.
func (s *series[T]) n() uint64 {
	n := uint64(s.inMemory())
	for i := range s.chains {
		n += s.chains[i].n
	}
	return n << s.power
}

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

// values is a multiset of integers of one power. Integers below 2^32, which are nearly all, take four
// bytes each in memory.
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
	v.wider().add(x, st)
}

func (v *values) wider() *series[uint64] {
	if v.wide == nil {
		v.wide = &series[uint64]{power: v.narrow.power}
	}
	return v.wide
}

// recordSize returns the most bytes that moveTo writes.
func (v *values) recordSize() int64 {
	n := mostRecordSize(&v.narrow)
	if v.wide != nil {
		n += mostRecordSize(v.wide)
	}
	return n
}

// moveTo moves the values in memory to records.
func (v *values) moveTo(w recordWriter, to records, g *grouper) error {
	if err := v.narrow.moveTo(w, to, g); err != nil || v.wide == nil {
		return err
	}
	return v.wide.moveTo(w, to, g)
}

// copyTo copies all records to another file, and moves the values in memory there.
func (v *values) copyTo(w recordWriter, g *grouper, r *recordReader) error {
	if err := v.narrow.copyTo(w, g, r); err != nil || v.wide == nil {
		return err
	}
	return v.wide.copyTo(w, g, r)
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
		if err := at(i).moveTo(w, st.spill, &st.grouper); err != nil {
			return err
		}
	}
	st.held = 0
	st.narrow.reset()
	st.wide.reset()
	return w.flush()
}
