package analyse

import (
	"math"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// share is the part of the keys that one of several like stages takes: those with
// certain top bits in their hash.
type share struct {
	mine uint64
	bits int
}

func (s share) takes(h uint64) bool { return h>>(64-s.bits) == s.mine }

// takesPage is takes for what is told by pages. Of each 1<<bits pages side by side a share
// takes one, so that it knows how many it takes of any number of them.
func (s share) takesPage(page uint64) bool { return s.bits == 0 || s.pageOf(page>>s.bits) == page }

// takesAddress takes the start of a page with its page, where h is the address' hash.
func (s share) takesAddress(h, address uint64) bool {
	if address%trace.PageSize == 0 {
		return s.takesPage(address >> trace.PageShift)
	}
	return s.takes(h)
}

// pageOf is the page of a group of 1<<bits that the share takes.
func (s share) pageOf(group uint64) uint64 {
	return group<<s.bits | hash(group)>>(64-s.bits) ^ s.mine
}

// within counts the pages of [low, high) that the share takes.
func (s share) within(low, high uint64) uint64 { return s.below(high) - s.below(low) }

func (s share) below(page uint64) uint64 {
	n := page >> s.bits
	if s.pageOf(n) < page {
		n++
	}
	return n
}

// grown makes v at least n long.
func grown[T any](v []T, n int) []T {
	if n <= len(v) {
		return v
	}
	return append(v, make([]T, n-len(v))...)
}

// counts is the stage behind retention and read_freq: what can be told of a region
// whatever the order of its rows.
type counts struct {
	share
	regions []regionCounts
}

// regionCounts has loads at 0 and stores at 1.
type regionCounts struct {
	n     [2]uint64
	first [2]int64
	last  [2]int64
}

func (s *counts) take(b *block) error {
	for len(s.regions) < b.regions {
		s.regions = append(s.regions, regionCounts{first: [2]int64{math.MaxInt64, math.MaxInt64}})
	}
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

// life is when a region was written first and read last, by the documented rule.
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

// retention is the length of that life in ns, never negative.
func (r *regionCounts) retention() uint64 {
	written, read := r.life()
	return uint64(max(read-written, 0))
}
