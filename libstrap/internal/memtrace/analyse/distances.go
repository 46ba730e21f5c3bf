package analyse

import (
	"math/bits"

	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
)

// distances is the stage behind reuse_distance_histogram: for each access the number
// of distinct pages touched since the access to the same page before, which is the
// size that a cache of pages with the oldest thrown out needs for a hit. It needs the
// rows in the order of time.
//
// Each access takes the next place in a row of places, and only the latest place of a
// page is marked: the distance is the number of marks behind the page's place. A bit a
// place and a Fenwick tree over words of them count the marks; when the places run out,
// the marked ones move together.
//
// The pages of a long row stand outside of that row of places, one behind the other, between
// two places: long says which row a page was in, and in what order they were accessed. Pages
// side by side in both have the same distance, for each moves behind the others in its turn.
type distances struct {
	places times  // the place + 1 of each page
	live   uint64 // marks
	marks  []uint64
	tree   []uint64 // tree[i]: the marks of the words that i+1 stands for in a Fenwick tree
	next   uint64   // place
	latest uint64   // page
	types  []typeDistances

	// The accesses of long rows have numbers, the clock. long has the number of the latest
	// access to a page, less the page; order, by these numbers, the next place at that time,
	// plus 1.
	long  spans.Map[uint64]
	order spans.Map[uint64]
	clock uint64
}

type typeDistances struct {
	first uint64     // accesses to pages not seen before
	log2  [65]uint64 // distances of each bit length
}

func (s *distances) take(b *block) error {
	s.types = grown(s.types, b.types)
	for i, tag := range b.tag[:b.n] {
		t := &s.types[tag>>1]
		s.access(t, b.pageOf(i))
		if b.pages != nil {
			low, high := behind(b, i)
			if high-low >= longRow {
				s.row(t, low, high)
				continue
			}
			for ; low < high; low++ {
				s.access(t, low)
			}
		}
	}
	return nil
}

func (s *distances) forget() { *s = distances{} }

func (s *distances) access(t *typeDistances, page uint64) {
	if s.next > 0 && page == s.latest {
		t.log2[0]++
		return
	}
	s.latest = page
	if s.next == uint64(len(s.marks))*64 {
		s.compact()
	}
	place := s.places.at(hash(page), page)
	switch before := *place; {
	case before != 0 && before != goneTime:
		t.log2[bits.Len64(s.behind(before-1))]++
		s.unmark(before - 1)
	default:
		if base := lift(&s.long, page); base != 0 {
			t.log2[bits.Len64(s.behindRow(page+base))]++
			s.order.Set(page+base, page+base+1)
		} else {
			t.first++
		}
	}
	*place = s.next + 1
	s.mark(s.next, 1)
	s.live++
	s.next++
}

// row takes the accesses to the further pages [low, high) of a long row.
func (s *distances) row(t *typeDistances, low, high uint64) {
	start := low
	s.long.Each(low, high, func(low, high, base uint64) {
		if base != 0 {
			// The pages of the row up to here are behind these by now.
			distance := s.behindRow(low+base) + low - start
			t.log2[bits.Len64(distance)] += high - low
			s.order.Set(low+base, high+base)
			return
		}
		singles := s.places.within(low, high, 0)
		t.first += high - low - uint64(len(singles))
		for _, single := range singles {
			t.log2[bits.Len64(s.behind(single.time-1)+single.key-start)]++
			s.unmark(single.time - 1)
			single.time = goneTime
		}
	})
	// A number is left out between two rows, so that no two of them look like one.
	s.clock = max(s.clock, leastClock) + 1
	s.long.Set(low, high, spans.Span[uint64]{Low: low, High: high, Value: s.clock - low})
	s.order.Set(s.clock, s.clock+high-low, spans.Span[uint64]{Low: s.clock, High: s.clock + high - low, Value: s.next + 1})
	s.clock += high - low
	s.latest = high - 1
}

// leastClock is beyond every page, so that none is equal to the number of its access.
const leastClock = 1 << 52

// behind counts the distinct pages accessed after the one at a place.
func (s *distances) behind(place uint64) uint64 {
	n := s.live - s.upTo(place)
	if s.order.Len() > 0 {
		n += s.order.Behind(func(next uint64) bool { return next > place+1 })
	}
	return n
}

// behindRow is that of a page of a long row, by the number of its access.
func (s *distances) behindRow(number uint64) uint64 {
	pages, next := s.order.From(number)
	n := s.live + pages - 1
	if next > 1 {
		n -= s.upTo(next - 2)
	}
	return n
}

func (s *distances) unmark(place uint64) {
	s.mark(place, ^uint64(0))
	s.live--
}

// upTo counts the marks up to a place and on it.
func (s *distances) upTo(place uint64) uint64 {
	word := place / 64
	n := uint64(bits.OnesCount64(s.marks[word] << (63 - place%64)))
	for ; word > 0; word &= word - 1 {
		n += s.tree[word-1]
	}
	return n
}

// mark sets a mark (n = 1) or takes it away (-1).
func (s *distances) mark(place, n uint64) {
	s.marks[place/64] ^= 1 << (place % 64)
	for i := place/64 + 1; i <= uint64(len(s.tree)); i += i & -i {
		s.tree[i-1] += n
	}
}

// compact moves the marked places to the front, in their order, and makes as many free
// ones as it looks at entries and spans. So its cost for each access has a bound.
func (s *distances) compact() {
	below := make([]uint64, len(s.marks))
	n := uint64(0)
	for i, m := range s.marks {
		below[i] = n
		n += uint64(bits.OnesCount64(m))
	}
	for i := range s.places.slots {
		if p := &s.places.slots[i].time; *p != 0 && *p != goneTime {
			place := *p - 1
			*p = below[place/64] + uint64(bits.OnesCount64(s.marks[place/64]<<(63-place%64)))
		}
	}
	s.order.All(func(o *spans.Span[uint64]) {
		if next := o.Value - 1; next/64 < uint64(len(below)) {
			o.Value = below[next/64] + uint64(bits.OnesCount64(s.marks[next/64]&(1<<(next%64)-1))) + 1
		} else {
			o.Value = n + 1
		}
	})
	looked := uint64(len(s.places.slots) + s.order.Len())
	words := max(16, (n+looked)/64+1)
	s.marks, s.tree = make([]uint64, words), make([]uint64, words)
	s.next = n
	for i := range s.marks {
		marks := uint64(0)
		if at := uint64(i) * 64; at < n {
			marks = min(n-at, 64)
			s.marks[i] = ^uint64(0) >> (64 - marks)
		}
		s.tree[i] += marks
		if up := i + 1 + (i+1)&-(i+1); up <= len(s.tree) {
			s.tree[up-1] += s.tree[i]
		}
	}
}
