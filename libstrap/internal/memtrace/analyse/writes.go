package analyse

import "github.com/libstrap/strap/libstrap/internal/memtrace/trace"

// writes is the stage behind write_once: how many addresses of a region were stored
// to, and how many of them once.
type writes struct {
	share
	stores  pairs // by address and region; 2 stands for more, too
	regions []regionWrites
	touched uint64
}

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
				s.row(address[i]>>trace.PageShift+1, b.pages[i]-1, region[i])
			}
		}
	}
	return nil
}

// row takes the stores to the further pages of a row.
func (s *writes) row(page, n uint64, region uint32) {
	for ; n > 0; n-- {
		at := page << trace.PageShift
		s.access(hashPair(at, region), at, region)
		page++
	}
}

func (s *writes) access(h, address uint64, region uint32) {
	if !s.takes(h) {
		return
	}
	n := s.stores.at(h, address, region)
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
