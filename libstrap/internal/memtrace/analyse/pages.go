// The stage that counts the distinct pages of each region.

package analyse

import (
	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// pages is the stage for the tables of the working set by region. It counts the distinct pages of
// each region.
type pages struct {
	share
	seen    pairs                       // 1 for each page and region
	long    map[uint32]*spans.Map[bool] // by region: the pages of long rows
	regions []regionPages
}

type regionPages struct {
	unique uint64
	latest uint64 // the page counted last, + 1; the next row is usually on the same page
}

func (s *pages) take(b *block) error {
	s.regions = grown(s.regions, b.regions)
	for i, region := range b.region[:b.n] {
		s.access(b.pageOf(i), region)
		if b.pages != nil {
			low, high := behind(b, i)
			if high-low >= longRow {
				s.row(low, high, region)
				continue
			}
			for ; low < high; low++ {
				s.access(low, region)
			}
		}
	}
	return nil
}

func (s *pages) access(page uint64, region uint32) {
	r := &s.regions[region]
	if page+1 == r.latest && r.latest != 0 {
		return
	}
	if !s.takesPage(page) {
		return
	}
	r.latest = page + 1
	if n := s.seen.at(hashPair(page, region), page, region); *n == 0 {
		*n = 1
		if long := s.long[region]; long == nil || !long.At(page) {
			r.unique++
		}
	}
}

// row processes the pages [low, high) of a long row, without its first page.
func (s *pages) row(low, high uint64, region uint32) {
	long := longOf(&s.long, region)
	long.Each(low, high, func(low, high uint64, seen bool) {
		if !seen {
			s.regions[region].unique += s.within(low, high) - uint64(len(s.seen.within(low, high, 0, region)))
		}
	})
	long.Set(low, high, spans.Span[bool]{Low: low, High: high, Value: true})
}

// longRow is the least number of pages, without the first one, that are kept as a span. Fewer pages
// are cheaper to process one by one.
const longRow = 64

// behind returns the pages [low, high) of row i, without its first page.
func behind(b *block, i int) (low, high uint64) {
	low = b.address[i]>>trace.PageShift + 1
	return low, low + b.pages[i] - 1
}

// longOf returns the map of a region or type, and makes one if there is none.
func longOf[V comparable](of *map[uint32]*spans.Map[V], number uint32) *spans.Map[V] {
	m := (*of)[number]
	if m == nil {
		m = &spans.Map[V]{}
		if *of == nil {
			*of = map[uint32]*spans.Map[V]{}
		}
		(*of)[number] = m
	}
	return m
}
