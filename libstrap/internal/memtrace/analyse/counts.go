// Shares of a stage, and the stage that counts the loads and stores of each region.

package analyse

import (
	"math"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// share selects the keys that one of 1<<bits equal stages processes: those whose hash has the top
// bits mine.
type share struct {
	mine uint64
	bits int
}

// takes reports whether the share has the key with hash h.
func (s share) takes(h uint64) bool { return h>>(64-s.bits) == s.mine }

// takesPage reports whether the share has a page. In each group of 1<<bits adjacent pages it has
// exactly one, so within can count its pages in a range.
func (s share) takesPage(page uint64) bool { return s.bits == 0 || s.pageOf(page>>s.bits) == page }

// takesAddress reports whether the share has an address with hash h. An address that is the start of
// a page belongs to the share of that page.
func (s share) takesAddress(h, address uint64) bool {
	if address%trace.PageSize == 0 {
		return s.takesPage(address >> trace.PageShift)
	}
	return s.takes(h)
}

// pageOf returns the page that the share has in a group of 1<<bits adjacent pages.
func (s share) pageOf(group uint64) uint64 {
	return group<<s.bits | hash(group)>>(64-s.bits) ^ s.mine
}

// within returns how many pages of [low, high) the share has.
func (s share) within(low, high uint64) uint64 { return s.below(high) - s.below(low) }

// below returns how many pages of [0, page) the share has.
func (s share) below(page uint64) uint64 {
	n := page >> s.bits
	if s.pageOf(n) < page {
		n++
	}
	return n
}

// grown returns v with zeros appended until it has at least n elements.
func grown[T any](v []T, n int) []T {
	if n <= len(v) {
		return v
	}
	return append(v, make([]T, n-len(v))...)
}

// counts is the stage for the tables of retention, read_freq and top_regions. It does not depend on
// the order of the rows.
type counts struct {
	share
	regions []regionCounts
}

// regionCounts has the number of accesses to a region and their first and last time in ns. Index 0
// is loads, index 1 is stores.
type regionCounts struct {
	n     [2]uint64
	first [2]int64
	last  [2]int64
}

func (s *counts) take(b *block) error {
	s.grow(b.regions)
	region, tag, time := b.region[:b.n], b.tag[:b.n], b.time[:b.n]
	for i, number := range region {
		if s.bits != 0 && !s.takes(hash(uint64(number))) {
			continue
		}
		r := &s.regions[number]
		op := tag[i] & 1
		if b.pages == nil {
			r.n[op]++
		} else {
			r.n[op] += b.pages[i]
		}
		r.first[op] = min(r.first[op], time[i])
		r.last[op] = max(r.last[op], time[i])
	}
	return nil
}

func (s *counts) grow(regions int) {
	for len(s.regions) < regions {
		s.regions = append(s.regions, regionCounts{first: [2]int64{math.MaxInt64, math.MaxInt64}})
	}
}

// life returns the times of the first write and the last read of a region. Without stores the first
// access is the first write. Without loads the last read is the first write.
func (r *regionCounts) life() (written, read int64) {
	written, read = r.first[1], r.last[0]
	if r.n[1] == 0 {
		written = r.first[0]
	}
	if r.n[0] == 0 {
		read = written
	}
	return written, read
}

// retention returns the time from the first write to the last read in ns, or 0 if it is negative.
func (r *regionCounts) retention() uint64 {
	written, read := r.life()
	return uint64(max(read-written, 0))
}
