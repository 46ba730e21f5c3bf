package analyse

import (
	"math/bits"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
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
type distances struct {
	places times // the place + 1 of each page
	marks  []uint64
	tree   []uint64 // tree[i]: the marks of the words that i+1 stands for in a Fenwick tree
	next   uint64   // place
	latest uint64   // page
	types  []typeDistances
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
			page := b.address[i] >> trace.PageShift
			for n := b.pages[i] - 1; n > 0; n-- {
				page++
				s.access(t, page)
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
	if before := *place; before == 0 {
		t.first++
	} else {
		distance := uint64(s.places.used) - s.upTo(before-1)
		t.log2[bits.Len64(distance)]++
		s.mark(before-1, ^uint64(0))
	}
	*place = s.next + 1
	s.mark(s.next, 1)
	s.next++
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
// ones as there are pages.
func (s *distances) compact() {
	below := make([]uint64, len(s.marks))
	n := uint64(0)
	for i, m := range s.marks {
		below[i] = n
		n += uint64(bits.OnesCount64(m))
	}
	for i := range s.places.slots {
		if p := &s.places.slots[i].time; *p != 0 {
			place := *p - 1
			*p = below[place/64] + uint64(bits.OnesCount64(s.marks[place/64]<<(63-place%64)))
		}
	}
	words := max(16, (2*n+63)/64+1)
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
