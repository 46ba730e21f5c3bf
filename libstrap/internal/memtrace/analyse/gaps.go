package analyse

import (
	"math/bits"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// gaps is the stage behind iai: the time between accesses to the same address and
// type, which it needs in the order of time.
type gaps struct {
	share
	store
	types   []typeGaps
	touched uint64
}

type typeGaps struct {
	latest times // by address
	total  sum
	log2   [64]uint64 // gaps of each bit length less one
	values
}

func (s *gaps) take(b *block) error {
	s.types = grown(s.types, b.types)
	address, tag, time := b.address[:b.n], b.tag[:b.n], b.time[:b.n]
	var hashes [ahead]uint64
	for from := 0; from < b.n; from += ahead {
		to := min(from+ahead, b.n)
		for i, at := range address[from:to] {
			h := hash(at)
			hashes[i] = h
			s.touched += s.types[tag[from+i]>>1].latest.touch(h)
		}
		for i, at := range address[from:to] {
			t := &s.types[tag[from+i]>>1]
			now := uint64(time[from+i])
			s.access(t, hashes[i], at, now)
			if b.pages != nil {
				s.row(t, at>>trace.PageShift+1, b.pages[from+i]-1, now)
			}
		}
	}
	return s.relieve(len(s.types), func(i int) *values { return &s.types[i].values })
}

// row takes the accesses to the further pages of a row.
func (s *gaps) row(t *typeGaps, page, n, now uint64) {
	for ; n > 0; n-- {
		at := page << trace.PageShift
		s.access(t, hash(at), at, now)
		page++
	}
}

func (s *gaps) access(t *typeGaps, h, address, now uint64) {
	if !s.takes(h) {
		return
	}
	latest := t.latest.at(h, address)
	before := *latest
	*latest = now + 1
	if before == 0 || before == now+1 {
		return
	}
	gap := now + 1 - before
	t.total.add(gap)
	t.log2[bits.Len64(gap)-1]++
	t.values.add(gap, &s.store)
}
