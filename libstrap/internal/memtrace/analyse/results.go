// Joins the results of all stages.

package analyse

import (
	"cmp"
	"slices"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// results joins the results of all stages. Its slices have an element for each region or type, by
// number.
type results struct {
	names
	options Options
	byID    []uint32 // the numbers of the regions, sorted by id
	byName  []uint32 // the numbers of the types, sorted by name

	counts   []regionCounts
	writes   []regionWrites
	unique   []uint64
	strides  []regionStrides
	locality []locality
	gaps     []gapSummary

	bandwidth   *bandwidth
	pageWindows *pageWindows
	distances   *distances
}

type gapSummary struct {
	n         uint64
	mean      float64
	quantiles [len(percents)]uint64
	log2      [64]uint64
}

func (a *Analyser) results() (*results, error) {
	r := &results{
		names:       a.filler.names,
		options:     a.options,
		bandwidth:   a.stages.bandwidth,
		pageWindows: a.stages.pageWindows,
		distances:   a.stages.distances,
	}
	n := len(r.regions.values)
	r.byID = upTo(n)
	id := func(a, b uint32) int { return cmp.Compare(r.regions.values[a], r.regions.values[b]) }
	if !slices.IsSortedFunc(r.byID, id) {
		slices.SortFunc(r.byID, id)
	}
	r.byName = upTo(len(r.types))
	slices.SortFunc(r.byName, func(a, b uint32) int { return strings.Compare(r.types[a], r.types[b]) })

	s := &a.stages
	if a.needs&needCounts != 0 {
		r.counts = chosen(n, s.counts, func(s *counts) []regionCounts { return s.regions })
	}
	r.writes = make([]regionWrites, n)
	for _, s := range s.writes {
		for i, w := range s.regions {
			r.writes[i].written += w.written
			r.writes[i].once += w.once
		}
	}
	r.unique = make([]uint64, n)
	for _, s := range s.pages {
		for i, p := range s.regions {
			r.unique[i] += p.unique
		}
	}
	if a.needs&needStrides != 0 {
		r.strides = chosen(n, s.strides, func(s *strides) []regionStrides { return s.regions })
	}
	return r, a.quantiles(r)
}

func upTo(n int) []uint32 {
	v := make([]uint32, n)
	for i := range v {
		v[i] = uint32(i)
	}
	return v
}

// chosen returns the elements of n regions, each from the share that has the region.
func chosen[S interface{ takes(uint64) bool }, R any](n int, shares []S, regions func(S) []R) []R {
	if len(shares) == 1 {
		return grown(regions(shares[0]), n)
	}
	out := make([]R, n)
	for _, s := range shares {
		for i, r := range regions(s) {
			if s.takes(hash(uint64(i))) {
				out[i] = r
			}
		}
	}
	return out
}

// quantiles computes the medians of the regions' strides and the quantiles of the types' gaps, in
// parallel.
func (a *Analyser) quantiles(r *results) error {
	r.locality = make([]locality, len(r.strides))
	scratches := make([]scratch, a.options.Workers)
	var jobs []func(*scratch) error
	if a.needs&needGaps != 0 {
		r.gaps = make([]gapSummary, len(r.types))
		for t := range r.types {
			jobs = append(jobs, func(s *scratch) (err error) {
				r.gaps[t], err = a.gapsOf(t, s)
				return err
			})
		}
	}
	// A large region is a job of its own. Many small regions are one job. The large ones come first:
	// a large one at the end would leave the other workers idle.
	const large, many = 1 << 16, 256
	var small []int
	for i := range r.strides {
		if r.strides[i].n < large {
			small = append(small, i)
			continue
		}
		jobs = append(jobs, func(s *scratch) error { return a.localityOf(r, i, s) })
	}
	for some := range slices.Chunk(small, many) {
		jobs = append(jobs, func(s *scratch) error {
			for _, i := range some {
				if err := a.localityOf(r, i, s); err != nil {
					return err
				}
			}
			return nil
		})
	}
	return parallel(a.options.Workers, len(jobs), func(worker, i int) error {
		if err := a.open(); err != nil {
			return err
		}
		return jobs[i](&scratches[worker])
	})
}

func (a *Analyser) localityOf(r *results, i int, s *scratch) (err error) {
	r.locality[i], err = r.strides[i].locality(s)
	return err
}

func (a *Analyser) gapsOf(t int, s *scratch) (gapSummary, error) {
	var out gapSummary
	var parts []*values
	var total sum
	for _, s := range a.stages.gaps {
		if t >= len(s.types) {
			continue
		}
		g := &s.types[t]
		for i := range g.powers {
			parts = append(parts, &g.powers[i])
		}
		total.merge(g.total)
		for i, n := range g.log2 {
			out.log2[i] += n
			out.n += n
		}
	}
	if out.n == 0 {
		return out, nil
	}
	out.mean = total.over(out.n)
	var ranks []uint64
	for _, p := range percents {
		lower, _ := place(out.n, p)
		ranks = append(ranks, lower, min(lower+1, out.n-1))
	}
	slices.Sort(ranks)
	ranks = slices.Compact(ranks)
	m := union(parts...)
	v, err := m.pick(ranks, s)
	if err != nil {
		return out, err
	}
	for i, p := range percents {
		lower, _ := place(out.n, p)
		at, _ := slices.BinarySearch(ranks, lower)
		out.quantiles[i] = wholeQuantile(v[at], v[min(at+1, len(v)-1)], out.n, p)
	}
	return out, nil
}

// typeName returns the type of a region's first row, which the tables show.
func (r *results) typeName(region uint32) string { return r.types[r.regionType[region]] }

// group returns the regions of each type, sorted by id.
func (r *results) group() [][]uint32 {
	groups := make([][]uint32, len(r.types))
	for _, region := range r.byID {
		t := r.regionType[region]
		groups[t] = append(groups[t], region)
	}
	return groups
}

// retentions returns the retentions of some regions in ns, ascending.
func (r *results) retentions(regions []uint32) []uint64 {
	v := make([]uint64, len(regions))
	for i, region := range regions {
		v[i] = r.counts[region].retention()
	}
	slices.Sort(v)
	return v
}

const pageSize = trace.PageSize
