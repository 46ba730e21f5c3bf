package analyse

import "github.com/libstrap/strap/libstrap/internal/memtrace/trace"

// pages is the stage behind the working set: the distinct pages of each region.
type pages struct {
	share
	seen    pairs // by page and region
	regions []regionPages
}

type regionPages struct {
	unique uint64
	latest uint64 // a page of the region that is counted, + 1: most rows stay on it
}

func (s *pages) take(b *block) error {
	s.regions = grown(s.regions, b.regions)
	for i, region := range b.region[:b.n] {
		s.access(b.pageOf(i), region)
		if b.pages != nil {
			first := b.address[i] >> trace.PageShift
			for page := range b.pages[i] - 1 {
				s.access(first+page+1, region)
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
	h := hashPair(page, region)
	if !s.takes(h) {
		return
	}
	r.latest = page + 1
	if n := s.seen.at(h, page, region); *n == 0 {
		*n = 1
		r.unique++
	}
}
