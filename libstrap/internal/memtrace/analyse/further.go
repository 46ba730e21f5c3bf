// Makes the tables beyond the ten: histograms, tables over time, and the top regions.

package analyse

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// bin is a row of a histogram.
type bin struct {
	kind      string
	low, high uint64
	n         int64
}

// retentionHistogram has Options.Bins bins of equal width for each type, from 0 to the longest
// retention. Bins are half open, except the last one, which contains the longest retention. If the
// longest retention is 0, there is a single bin [0, 0].
func (r *results) retentionHistogram(c *columns) {
	type bin struct {
		kind      string
		low, high float64
		n         int64
	}
	var bins []bin
	groups := r.group()
	for _, t := range r.byName {
		if len(groups[t]) == 0 {
			continue
		}
		v := r.retentions(groups[t])
		longest := v[len(v)-1]
		if longest == 0 {
			bins = append(bins, bin{r.types[t], 0, 0, int64(len(v))})
			continue
		}
		n := uint64(r.options.Bins)
		of := make([]bin, n)
		for i := range of {
			of[i].kind = r.types[t]
			of[i].low = seconds(longest) * float64(i) / float64(n)
			of[i].high = seconds(longest) * float64(i+1) / float64(n)
		}
		for _, ns := range v {
			hi, lo := bits.Mul64(ns, n)
			at, _ := bits.Div64(hi, lo, longest)
			of[min(at, n-1)].n++
		}
		bins = append(bins, of...)
	}
	c.texts("region_type", each(bins, func(b bin) string { return b.kind }))
	c.floats("bin_low_s", each(bins, func(b bin) float64 { return b.low }))
	c.floats("bin_high_s", each(bins, func(b bin) float64 { return b.high }))
	c.ints("n_regions", each(bins, func(b bin) int64 { return b.n }))
}

// retentionCDF has rows with a retention and the fraction of the type's regions whose retention is
// at most that long. It has a row for each distinct retention of a type. If the type has more than
// Options.CDFPoints regions, it has at most that many rows, at equal distances in rank, and the
// longest retention among them.
func (r *results) retentionCDF(c *columns) {
	var kinds []string
	var at, fraction []float64
	groups := r.group()
	for _, t := range r.byName {
		v := r.retentions(groups[t])
		n := len(v)
		points := min(n, r.options.CDFPoints)
		last := -1
		for i := range points {
			rank := (i+1)*n/points - 1
			// Go on to the last of equal retentions.
			for rank+1 < n && v[rank+1] == v[rank] {
				rank++
			}
			if rank == last {
				continue
			}
			last = rank
			kinds = append(kinds, r.types[t])
			at = append(at, seconds(v[rank]))
			fraction = append(fraction, float64(rank+1)/float64(n))
		}
	}
	c.texts("region_type", kinds)
	c.floats("retention_s", at)
	c.floats("fraction", fraction)
}

// log2Bins returns the bins of counts by bit length, from the first bin that is not empty to the
// last one. The bin of bit length 0 is [0, 1), and the bin of bit length n is [2^(n-1), 2^n).
func log2Bins(kind string, counts []uint64) []bin {
	var bins []bin
	for length, n := range counts {
		if n > 0 || len(bins) > 0 {
			b := bin{kind: kind, high: 1 << length, n: int64(n)}
			if length > 0 {
				b.low = 1 << (length - 1)
			}
			bins = append(bins, b)
		}
	}
	for len(bins) > 0 && bins[len(bins)-1].n == 0 {
		bins = bins[:len(bins)-1]
	}
	return bins
}

// reuseHistogram has the gaps of the table iai in bins [2^n, 2^(n+1)) ns.
func (r *results) reuseHistogram(c *columns) {
	var bins []bin
	for _, t := range r.byName {
		bins = append(bins, log2Bins(r.types[t], append([]uint64{0}, r.gaps[t].log2[:63]...))...)
	}
	c.texts("region_type", each(bins, func(b bin) string { return b.kind }))
	c.unsigned("bin_low_ns", each(bins, func(b bin) uint64 { return b.low }))
	c.unsigned("bin_high_ns", each(bins, func(b bin) uint64 { return b.high }))
	c.ints("n_intervals", each(bins, func(b bin) int64 { return b.n }))
}

// reuseDistanceHistogram has for each type a row with null bounds that counts the first accesses to
// pages, then the distances in bins [0, 1), [1, 2), [2, 4) and so on.
func (r *results) reuseDistanceHistogram(c *columns) {
	const unbounded = math.MaxUint64 // as int64 it is negative, which is null
	var bins []bin
	for _, t := range r.byName {
		d := &r.distances.types[t]
		if d.first > 0 {
			bins = append(bins, bin{r.types[t], unbounded, unbounded, int64(d.first)})
		}
		bins = append(bins, log2Bins(r.types[t], d.log2[:63])...)
	}
	c.texts("region_type", each(bins, func(b bin) string { return b.kind }))
	c.intsOrNull("bin_low_pages", each(bins, func(b bin) int64 { return int64(b.low) }))
	c.intsOrNull("bin_high_pages", each(bins, func(b bin) int64 { return int64(b.high) }))
	c.ints("n_accesses", each(bins, func(b bin) int64 { return b.n }))
}

// windowColumns adds the columns that all tables over time have. It returns the cells that are not
// empty, by window and type, one for each row.
func windowColumns[C any](c *columns, r *results, w *windows[C], empty func(*C) bool) []*C {
	var cells []*C
	var starts, ends []int64
	var kinds []string
	if w.some {
		for window := w.low; window <= w.high; window++ {
			for _, t := range r.byName {
				s := &w.types[t]
				if i := window - s.first; i < uint64(len(s.cells)) && !empty(&s.cells[i]) {
					cells = append(cells, &s.cells[i])
					kinds = append(kinds, r.types[t])
					start := window << w.shift
					starts = append(starts, int64(start))
					ends = append(ends, int64(min(start+1<<w.shift, math.MaxInt64)))
				}
			}
		}
	}
	c.ints("window_start_ns", starts)
	c.ints("window_end_ns", ends)
	c.texts("region_type", kinds)
	return cells
}

// workingSetOverTime has the number of distinct pages of each type that were accessed in each window.
func (r *results) workingSetOverTime(c *columns) {
	w := &windows[arrivals]{}
	if r.pageWindows != nil {
		w = &r.pageWindows.windows
	}
	unique := func(a *arrivals) uint64 { return a.unique(w.shift) }
	cells := windowColumns(c, r, w, func(a *arrivals) bool { return unique(a) == 0 })
	c.ints("unique_pages", each(cells, func(a *arrivals) int64 { return int64(unique(a)) }))
	c.ints("working_set_bytes", each(cells, func(a *arrivals) int64 { return int64(unique(a) * pageSize) }))
}

// bandwidthOverTime has the bytes and accesses that each type read and wrote in each window.
func (r *results) bandwidthOverTime(c *columns) {
	w := &windows[traffic]{}
	if r.bandwidth != nil {
		w = &r.bandwidth.windows
	}
	cells := windowColumns(c, r, w, func(t *traffic) bool { return t.accesses == [2]uint64{} })
	c.ints("read_bytes", each(cells, func(t *traffic) int64 { return int64(t.bytes[0]) }))
	c.ints("written_bytes", each(cells, func(t *traffic) int64 { return int64(t.bytes[1]) }))
	c.ints("reads", each(cells, func(t *traffic) int64 { return int64(t.accesses[0]) }))
	c.ints("writes", each(cells, func(t *traffic) int64 { return int64(t.accesses[1]) }))
}

// topRegions has the Options.Top regions with the most accesses, in falling order. Regions with
// equally many accesses are in the order of their ids.
func (r *results) topRegions(c *columns) {
	accesses := func(i uint32) uint64 { return r.counts[i].n[0] + r.counts[i].n[1] }
	top := slices.Clone(r.byID)
	slices.SortStableFunc(top, func(a, b uint32) int { return cmp.Compare(accesses(b), accesses(a)) })
	top = top[:min(len(top), r.options.Top)]
	r.idColumn(c, top)
	r.typeColumn(c, top)
	c.ints("n_accesses", each(top, func(i uint32) int64 { return int64(accesses(i)) }))
	c.ints("reads", each(top, func(i uint32) int64 { return int64(r.counts[i].n[0]) }))
	c.ints("writes", each(top, func(i uint32) int64 { return int64(r.counts[i].n[1]) }))
	c.ints("unique_pages", each(top, func(i uint32) int64 { return int64(r.unique[i]) }))
	c.floats("retention_s", each(top, func(i uint32) float64 { return seconds(r.counts[i].retention()) }))
}
