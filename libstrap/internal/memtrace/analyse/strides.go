// The stage for the tables of locality: the distances between accesses to a region.

package analyse

import (
	"cmp"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// strides is the stage for the tables of locality. A stride is the distance in bytes between two
// consecutive accesses to a region. The stage needs the rows in the order of time.
type strides struct {
	share
	store
	regions []regionStrides
}

type regionStrides struct {
	n       uint64 // accesses
	start   spot   // of the earliest access
	address uint64 // of the latest access
	page    uint64 // of the latest access
	same    uint64 // accesses to the same page as the access before
	total   sum    // of all strides
	kind    uint32 // type of the earliest access
	// values has the strides, except those of two lengths, which are only counted: the length of the
	// region's first stride, because a sweep over weights has no other, and one page, for the steps
	// within a row of several pages.
	first  uint64 // length of the first stride
	firsts uint64 // strides of that length, without the steps
	steps  uint64 // steps of one page within rows
	others []run  // for a Merger: strides of the lengths that parts have as first
	values
}

// spot is where an access is: its address, and its page as the trace gives it.
type spot struct{ address, page uint64 }

func (s *strides) take(b *block) error {
	s.regions = grown(s.regions, b.regions)
	region, address, tag := b.region[:b.n], b.address[:b.n], b.tag[:b.n]
	for i, number := range region {
		if s.bits != 0 && !s.takes(hash(uint64(number))) {
			continue
		}
		r := &s.regions[number]
		at := address[i]
		page := b.pageOf(i)
		switch r.n {
		case 0:
			r.kind, r.start = tag[i]>>1, spot{at, page}
		case 1:
			r.first = distance(at, r.address)
			fallthrough
		default:
			s.step(r, at, page)
		}
		r.n++
		r.address, r.page = at, page
		if b.pages != nil && b.pages[i] > 1 {
			s.row(r, b.pages[i])
		}
	}
	return s.spillOver()
}

// spillOver moves the strides to the spill if they exceed the memory.
func (s *strides) spillOver() error {
	return s.relieve(len(s.regions), func(i int) *values { return &s.regions[i].values })
}

// step counts the stride from the latest access to the address to.
func (s *strides) step(r *regionStrides, to, page uint64) {
	if page == r.page {
		r.same++
	}
	s.stride(r, distance(to, r.address))
}

func (s *strides) stride(r *regionStrides, stride uint64) {
	r.total.add(stride)
	if stride == r.first {
		r.firsts++
		return
	}
	r.values.add(stride, &s.store)
}

func distance(a, b uint64) uint64 { return max(a, b) - min(a, b) }

// row counts the accesses to the other pages of a row. Its first page is the latest access.
func (s *strides) row(r *regionStrides, pages uint64) {
	next := r.address>>trace.PageShift + 1
	if r.n == 1 {
		r.first = distance(next<<trace.PageShift, r.address)
	}
	s.step(r, next<<trace.PageShift, next)
	steps := pages - 2
	r.steps += steps
	r.total.addTimes(trace.PageSize, steps)
	r.n += pages - 1
	r.page = next + steps
	r.address = r.page << trace.PageShift
}

// median returns the median of the region's strides. The region must have at least one stride.
func (r *regionStrides) median(s *scratch) (float64, error) {
	m := union(&r.values)
	counted := append([]run{{r.first, r.firsts}, {trace.PageSize, r.steps}}, r.others...)
	slices.SortFunc(counted, func(a, b run) int { return cmp.Compare(a.value, b.value) })
	n := r.n - 1
	v, err := m.pickAmong(counted, []uint64{(n - 1) / 2, n / 2}, s)
	if err != nil {
		return 0, err
	}
	return middle(v[0], v[1]), nil
}

// locality has a region's values in the table: mean and median stride in bytes, and the fraction of
// strides that stay on the page.
type locality struct {
	mean, median, samePage float64
}

func (r *regionStrides) locality(s *scratch) (locality, error) {
	if r.n < 2 {
		return locality{}, nil
	}
	median, err := r.median(s)
	if err != nil {
		return locality{}, err
	}
	return locality{
		mean:     r.total.over(r.n - 1),
		median:   median,
		samePage: sum{lo: r.same}.over(r.n - 1),
	}, nil
}
