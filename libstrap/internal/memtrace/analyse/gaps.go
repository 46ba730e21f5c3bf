// The stage for iai and reuse_histogram: the times between accesses to the same address.

package analyse

import (
	"math/bits"

	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// gaps is the stage for iai and reuse_histogram. A gap is the time in ns between two accesses to the
// same address by rows of the same type. The stage needs the rows in the order of time.
type gaps struct {
	share
	store
	types   []typeGaps
	edges   bool   // keep the first access to each address, for a partial analysis
	silent  bool   // do not count gaps
	touched uint64 // keeps the compiler from removing the calls of touch
}

type typeGaps struct {
	latest times             // time of the latest access to each address
	long   spans.Map[uint64] // the same for the pages of long rows: the time + 1
	firsts []reach           // the first access to each address, if gaps.edges
	total  sum
	log2   [64]uint64 // number of gaps by bit length less one
	// powers[i] has gaps that count 1 << i times each. A gap of n addresses is in powers[i] for each
	// bit i of n that is set.
	powers [powers]values
}

// powers is the number of bits of the most pages that a row has, one of trace.MostLength bytes.
const powers = 29

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
				low, high := behind(b, from+i)
				if high-low >= longRow {
					s.row(t, low, high, now)
					continue
				}
				for ; low < high; low++ {
					at := low << trace.PageShift
					s.access(t, hash(at), at, now)
				}
			}
		}
	}
	return s.spillOver()
}

// spillOver moves the gaps to the spill if they exceed the memory.
func (s *gaps) spillOver() error {
	return s.relieve(powers*len(s.types), func(i int) *values { return &s.types[i/powers].powers[i%powers] })
}

// row processes the accesses to the pages [low, high) of a long row, without its first page.
func (s *gaps) row(t *typeGaps, low, high, now uint64) {
	t.long.Each(low, high, func(low, high, before uint64) {
		if before != 0 {
			s.gap(t, before, now, s.within(low, high))
			return
		}
		for _, single := range t.latest.within(low, high, trace.PageShift) {
			s.gap(t, single.time, now, 1)
			single.time = goneTime
			page := single.key >> trace.PageShift
			s.first(t, low<<trace.PageShift, page-low, now)
			low = page + 1
		}
		s.first(t, low<<trace.PageShift, high-low, now)
	})
	t.long.Set(low, high, spans.Span[uint64]{Low: low, High: high, Value: now + 1})
}

func (s *gaps) access(t *typeGaps, h, address, now uint64) {
	if !s.takesAddress(h, address) {
		return
	}
	latest := t.latest.at(h, address)
	before := *latest
	*latest = now + 1
	if before == 0 || before == goneTime {
		before = 0
		if address%trace.PageSize == 0 {
			before = lift(&t.long, address>>trace.PageShift)
		}
		if before == 0 {
			s.first(t, address, 1, now)
			return
		}
	}
	s.gap(t, before, now, 1)
}

// first keeps the first accesses to an address, or to the starts of several pages.
func (s *gaps) first(t *typeGaps, address, pages, now uint64) {
	if s.edges && pages > 0 {
		t.firsts = append(t.firsts, reach{low: address, n: pages, value: now})
	}
}

// gap counts a gap of n addresses. before is the time of their latest access + 1, or 0 if there was
// none: then there is no gap. Gaps of 0 ns do not count.
func (s *gaps) gap(t *typeGaps, before, now, n uint64) {
	if before == 0 || before == now+1 || s.silent {
		return
	}
	s.count(t, now+1-before, n)
}

func (s *gaps) count(t *typeGaps, gap, n uint64) {
	t.log2[bits.Len64(gap)-1] += n
	if n == 1 {
		t.total.add(gap)
		t.powers[0].add(gap, &s.store)
		return
	}
	t.total.addTimes(gap, n)
	for ; n != 0; n &= n - 1 {
		power := bits.TrailingZeros64(n)
		v := &t.powers[power]
		v.narrow.power = power
		v.add(gap, &s.store)
	}
}
