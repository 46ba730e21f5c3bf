// The stage for reuse_distance_histogram.

package analyse

import (
	"math/bits"

	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
)

// distances is the stage for reuse_distance_histogram. The distance of an access is the number of
// distinct pages touched since the previous access to the same page. A cache of pages that evicts
// the least recently used page has a hit if it holds more pages than that. The stage needs the
// rows in the order of time.
//
// Single pages: each access gets the next place, a number that counts up. A place is marked while it
// is the latest place of its page. So the distance is the number of marks after the page's previous
// place. marks has a bit for each place, and a Fenwick tree over its words counts the marks. When
// no place is free, compact renumbers the marked places from 0.
//
// The pages of a long row get no places. Each of these accesses gets a number from the clock, and
// belongs between two places. long has the number of each page's latest access, and order has the
// place that was next at that time. Adjacent pages with consecutive numbers all have the same
// distance: each of them moves to the end of the order in turn.
type distances struct {
	places times    // the latest place + 1 of each page
	live   uint64   // number of marks
	marks  []uint64 // a bit for each place
	tree   []uint64 // Fenwick tree: tree[i] has the marks of the words that index i+1 covers
	next   uint64   // the next place
	latest uint64   // the page of the latest access
	types  []typeDistances

	long  spans.Map[uint64] // by page: the number of its latest access, less the page
	order spans.Map[uint64] // by number of an access: the next place at that time, plus 1
	clock uint64            // the number of the next access of a long row
}

type typeDistances struct {
	first uint64     // accesses to pages that were not accessed before
	log2  [65]uint64 // number of distances by bit length
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

// row processes the accesses to the pages [low, high) of a long row, without its first page.
func (s *distances) row(t *typeDistances, low, high uint64) {
	start := low
	s.long.Each(low, high, func(low, high, base uint64) {
		if base != 0 {
			// The row has accessed low - start pages already. They count too.
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
	// Skip a number between two rows, so that their spans in order are never adjacent. Adjacent spans
	// must have different values, and compact may make the values of two rows equal.
	s.clock = max(s.clock, leastClock) + 1
	s.long.Set(low, high, spans.Span[uint64]{Low: low, High: high, Value: s.clock - low})
	s.order.Set(s.clock, s.clock+high-low, spans.Span[uint64]{Low: s.clock, High: s.clock + high - low, Value: s.next + 1})
	s.clock += high - low
	s.latest = high - 1
}

// leastClock is the least number of an access. It is above every page number, so a number less its
// page is never 0, which means unknown.
const leastClock = 1 << 52

// behind returns the number of distinct pages that were accessed after the access at a place.
func (s *distances) behind(place uint64) uint64 {
	n := s.live - s.upTo(place)
	if s.order.Len() > 0 {
		n += s.order.Behind(func(next uint64) bool { return next > place+1 })
	}
	return n
}

// behindRow returns the number of distinct pages that were accessed after an access of a long row.
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

// upTo returns the number of marks at a place and before it.
func (s *distances) upTo(place uint64) uint64 {
	word := place / 64
	n := uint64(bits.OnesCount64(s.marks[word] << (63 - place%64)))
	for ; word > 0; word &= word - 1 {
		n += s.tree[word-1]
	}
	return n
}

// mark sets the mark of a place (n = 1) or clears it (n = -1, as uint64).
func (s *distances) mark(place, n uint64) {
	s.marks[place/64] ^= 1 << (place % 64)
	for i := place/64 + 1; i <= uint64(len(s.tree)); i += i & -i {
		s.tree[i-1] += n
	}
}

// compact renumbers the marked places from 0, in their order. It then makes as many free places as
// it has visited entries and spans, so its time per access is bounded.
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
