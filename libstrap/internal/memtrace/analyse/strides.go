package analyse

import "github.com/libstrap/strap/libstrap/internal/memtrace/trace"

// strides is the stage behind locality: it follows each region from access to access,
// and needs them in the order of time.
type strides struct {
	share
	store
	regions []regionStrides
}

type regionStrides struct {
	n       uint64 // accesses
	address uint64 // of the latest
	page    uint64
	same    uint64 // accesses to the page of the access before
	total   sum
	kind    uint32 // type of the earliest
	steps   uint64 // strides of one page within rows of several: counted, not kept
	values
}

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
		if r.n == 0 {
			r.kind = tag[i] >> 1
		} else {
			s.step(r, at, page)
		}
		r.n++
		r.address, r.page = at, page
		if b.pages != nil && b.pages[i] > 1 {
			s.row(r, b.pages[i])
		}
	}
	return s.relieve(len(s.regions), func(i int) *values { return &s.regions[i].values })
}

// step counts the stride from the latest access to the next.
func (s *strides) step(r *regionStrides, to, page uint64) {
	stride := max(to, r.address) - min(to, r.address)
	if page == r.page {
		r.same++
	}
	r.total.add(stride)
	r.values.add(stride, &s.store)
}

// row counts the further pages of a row whose first access is the latest.
func (s *strides) row(r *regionStrides, pages uint64) {
	next := r.address>>trace.PageShift + 1
	s.step(r, next<<trace.PageShift, next)
	steps := pages - 2
	r.steps += steps
	r.total.addTimes(trace.PageSize, steps)
	r.n += pages - 1
	r.page = next + steps
	r.address = r.page << trace.PageShift
}

// median of the region's strides, of which it has some.
func (r *regionStrides) median(sp *spill, s *scratch) (float64, error) {
	m := union(sp, &r.values)
	n := r.n - 1
	low, high := (n-1)/2, n/2
	if r.steps == 0 {
		v, err := m.pick([]uint64{low, high}, s)
		if err != nil {
			return 0, err
		}
		return middle(v[0], v[1]), nil
	}
	below, err := m.less(trace.PageSize)
	if err != nil {
		return 0, err
	}
	var pair [2]uint64
	for i, rank := range [...]uint64{low, high} {
		switch {
		case rank >= below && rank < below+r.steps:
			pair[i] = trace.PageSize
			continue
		case rank >= below:
			rank -= r.steps
		}
		v, err := m.pick([]uint64{rank}, s)
		if err != nil {
			return 0, err
		}
		pair[i] = v[0]
	}
	return middle(pair[0], pair[1]), nil
}

// locality is what the table says of the region.
type locality struct {
	mean, median, samePage float64
}

func (r *regionStrides) locality(sp *spill, s *scratch) (locality, error) {
	if r.n < 2 {
		return locality{}, nil
	}
	median, err := r.median(sp, s)
	if err != nil {
		return locality{}, err
	}
	return locality{
		mean:     r.total.over(r.n - 1),
		median:   median,
		samePage: sum{lo: r.same}.over(r.n - 1),
	}, nil
}
