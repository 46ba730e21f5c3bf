// The stage for write_once and suitability.

package analyse

import (
	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// writes is the stage for write_once and suitability. It counts the addresses of a region that were
// stored to, and those that were stored to exactly once.
type writes struct {
	share
	stores  pairs                         // stores to each address and region; 2 means 2 or more
	long    map[uint32]*spans.Map[uint32] // the same for the pages of long rows, by region
	regions []regionWrites
	states  []spans.Span[uint32] // memory that row reuses
	touched uint64               // keeps the compiler from removing the calls of touch
}

// regionWrites has the addresses that were stored to, and those that were stored to exactly once.
type regionWrites struct{ written, once uint64 }

func (s *writes) take(b *block) error {
	s.regions = grown(s.regions, b.regions)
	address, region, tag := b.address[:b.n], b.region[:b.n], b.tag[:b.n]
	var hashes [ahead]uint64
	var rows [ahead]int
	for i := 0; i < b.n; {
		n := 0
		for ; i < b.n && n < ahead; i++ {
			if trace.Op(tag[i]&1) == trace.Store {
				h := hashPair(address[i], region[i])
				s.touched += s.stores.touch(h)
				rows[n], hashes[n] = i, h
				n++
			}
		}
		for k, i := range rows[:n] {
			s.access(hashes[k], address[i], region[i])
			if b.pages != nil {
				low, high := behind(b, i)
				if high-low >= longRow {
					s.row(low, high, region[i])
					continue
				}
				for ; low < high; low++ {
					at := low << trace.PageShift
					s.access(hashPair(at, region[i]), at, region[i])
				}
			}
		}
	}
	return nil
}

// row processes the stores to the pages [low, high) of a long row, without its first page.
func (s *writes) row(low, high uint64, region uint32) {
	r, long := &s.regions[region], longOf(&s.long, region)
	s.states = s.states[:0]
	to := func(low, high uint64, stores uint32) {
		s.states = spans.Join(s.states, spans.Span[uint32]{Low: low, High: high, Value: stores})
	}
	long.Each(low, high, func(low, high uint64, stores uint32) {
		n := s.within(low, high)
		switch stores {
		case 1:
			r.once -= n
			fallthrough
		case 2:
			to(low, high, 2)
			return
		}
		singles := s.stores.within(low, high, trace.PageShift, region)
		n -= uint64(len(singles))
		r.written += n
		r.once += n
		for _, single := range singles {
			if single.count == 1 {
				r.once--
			}
			single.count = gone
			page := single.key >> trace.PageShift
			to(low, page, 1)
			to(page, page+1, 2)
			low = page + 1
		}
		to(low, high, 1)
	})
	long.Set(low, high, s.states...)
}

func (s *writes) access(h, address uint64, region uint32) {
	if !s.takesAddress(h, address) {
		return
	}
	n := s.stores.at(h, address, region)
	if *n == 0 || *n == gone {
		*n = 0
		if long := s.long[region]; long != nil && address%trace.PageSize == 0 {
			*n = lift(long, address>>trace.PageShift)
		}
	}
	switch *n {
	case 0:
		*n = 1
		s.regions[region].written++
		s.regions[region].once++
	case 1:
		*n = 2
		s.regions[region].once--
	}
}

// lift removes a page from a map and returns its value, or zero if the map does not have the page.
func lift[V comparable](long *spans.Map[V], page uint64) V {
	var none V
	known := long.At(page)
	if known != none {
		long.Set(page, page+1)
	}
	return known
}
