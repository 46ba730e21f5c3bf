// Computes the tables from single accesses, for tests to compare with.

package analyse

import (
	"cmp"
	"maps"
	"math/big"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// The reference is the analysis in its simplest form: the rows expanded to pages and sorted, and Go's
// maps. It computes with rational numbers.

// access is a row of a test's trace.
type access struct {
	time    int64
	address uint64
	page    uint64
	op      trace.Op
	region  int64
	kind    string
	length  int64
}

// expanded returns the accesses to single pages that rows stand for.
func expanded(rows []access) []access {
	var out []access
	for _, r := range rows {
		first, last := r.address>>trace.PageShift, r.address>>trace.PageShift
		if r.length > 0 {
			last = (r.address + uint64(r.length) - 1) >> trace.PageShift
		}
		r.length = 0
		out = append(out, r)
		for page := first + 1; page <= last; page++ {
			r.address, r.page = page<<trace.PageShift, page
			out = append(out, r)
		}
	}
	return out
}

func byTime(rows []access) []access {
	out := slices.Clone(rows)
	slices.SortStableFunc(out, func(a, b access) int { return cmp.Compare(a.time, b.time) })
	return out
}

// cells is a table: the values of each column, by its name.
type cells map[string][]any

func sortedKeys[K cmp.Ordered, V any](m map[K]V) []K { return slices.Sorted(maps.Keys(m)) }

func ratio(total *big.Int, n int) float64 {
	f, _ := new(big.Rat).SetFrac(total, big.NewInt(int64(n))).Float64()
	return f
}

func total(v []uint64) *big.Int {
	t := new(big.Int)
	for _, x := range v {
		t.Add(t, new(big.Int).SetUint64(x))
	}
	return t
}

// kahan returns the mean of a group, summed as in pandas, or 0 if the group is empty.
func kahan(v []float64) float64 {
	var sum, lost float64
	for _, x := range v {
		y := x - lost
		t := sum + y
		lost = float64(t-sum) - y
		sum = t
	}
	if len(v) == 0 {
		return 0
	}
	return sum / float64(len(v))
}

// interpolate returns numpy's linear quantile of sorted floats.
func interpolate(v []float64, q float64) float64 {
	at := float64(len(v)-1) * q
	i := int(at)
	a, b, t := v[i], v[min(i+1, len(v)-1)], at-float64(i)
	if t >= 0.5 {
		return b - float64((b-a)*(1-t))
	}
	return a + float64((b-a)*t)
}

// interpolateWhole returns the linear quantile of sorted integers, truncated to an integer. It is exact
// for integers that a float cannot hold.
func interpolateWhole(v []uint64, percent int64) int64 {
	hundredths := new(big.Int).Mul(big.NewInt(int64(len(v)-1)), big.NewInt(percent))
	place, part := new(big.Int).DivMod(hundredths, big.NewInt(100), new(big.Int))
	i := int(place.Int64())
	a, b := v[i], v[min(i+1, len(v)-1)]
	if b < 1<<53 {
		return int64(interpolate([]float64{float64(a), float64(b)}, float64(float64(len(v)-1)*(float64(percent)/100))-float64(i)))
	}
	d := new(big.Int).SetUint64(b - a)
	d.Mul(d, part).Div(d, big.NewInt(100))
	return int64(a) + d.Int64()
}

type referenceRegion struct {
	id                int64
	kind              string // of the first row
	n                 [2]int
	first, last       [2]int64
	pages             map[uint64]bool
	stores            map[uint64]int
	retention         int64
	earliest          string // type of the earliest access
	strides           []uint64
	samePage          int
	mean, median, fit float64
}

// reference returns the ten tables.
func reference(rows []access) map[string]cells {
	rows = expanded(rows)
	regions := map[int64]*referenceRegion{}
	for _, a := range rows {
		r := regions[a.region]
		if r == nil {
			r = &referenceRegion{id: a.region, kind: a.kind, pages: map[uint64]bool{}, stores: map[uint64]int{}}
			regions[a.region] = r
		}
		if r.n[a.op] == 0 || a.time < r.first[a.op] {
			r.first[a.op] = a.time
		}
		if r.n[a.op] == 0 || a.time > r.last[a.op] {
			r.last[a.op] = a.time
		}
		r.n[a.op]++
		r.pages[a.page] = true
		if a.op == trace.Store {
			r.stores[a.address]++
		}
	}

	type address struct {
		address uint64
		kind    string
	}
	latest := map[address]int64{}
	before := map[int64]access{}
	gaps := map[string][]uint64{}
	for _, a := range byTime(rows) {
		if t, ok := latest[address{a.address, a.kind}]; ok && a.time > t {
			gaps[a.kind] = append(gaps[a.kind], uint64(a.time-t))
		}
		latest[address{a.address, a.kind}] = a.time
		r := regions[a.region]
		if b, ok := before[a.region]; ok {
			r.strides = append(r.strides, max(a.address, b.address)-min(a.address, b.address))
			if a.page == b.page {
				r.samePage++
			}
		} else {
			r.earliest = a.kind
		}
		before[a.region] = a
	}

	out := map[string]cells{}
	put := func(table, column string, v any) {
		if out[table] == nil {
			out[table] = cells{}
		}
		out[table][column] = append(out[table][column], v)
	}
	byType, byEarliest := map[string][]*referenceRegion{}, map[string][]*referenceRegion{}
	for _, id := range sortedKeys(regions) {
		r := regions[id]
		byType[r.kind] = append(byType[r.kind], r)
		byEarliest[r.earliest] = append(byEarliest[r.earliest], r)

		written := r.first[1]
		if r.n[1] == 0 {
			written = r.first[0]
		}
		read := r.last[0]
		if r.n[0] == 0 {
			read = written
		}
		r.retention = max(read-written, 0)
		put(RetentionPerRegion, "region_id", id)
		put(RetentionPerRegion, "region_type", r.kind)
		put(RetentionPerRegion, "first_write_ns", written)
		put(RetentionPerRegion, "last_read_ns", read)
		put(RetentionPerRegion, "retention_ns", r.retention)
		put(RetentionPerRegion, "retention_s", ratio(big.NewInt(r.retention), 1e9))

		if len(r.stores) > 0 {
			put(WriteOnce, "region_id", id)
			put(WriteOnce, "region_type", r.kind)
			put(WriteOnce, "n_written_addresses", int64(len(r.stores)))
			put(WriteOnce, "n_write_once_addresses", int64(r.once()))
			put(WriteOnce, "write_once_ratio", float64(r.once())/float64(len(r.stores)))
		}

		put(ReadFreq, "region_id", id)
		put(ReadFreq, "region_type", r.kind)
		put(ReadFreq, "total_reads", int64(r.n[0]))
		put(ReadFreq, "total_writes", int64(r.n[1]))
		put(ReadFreq, "total_accesses", int64(r.n[0]+r.n[1]))
		put(ReadFreq, "read_fraction", float64(r.n[0])/float64(r.n[0]+r.n[1]))
		perWrite := 0.0
		if r.n[1] > 0 {
			perWrite = float64(r.n[0]) / float64(r.n[1])
		}
		put(ReadFreq, "reads_per_write", perWrite)

		put(WorkingSetPerRegion, "region_id", id)
		put(WorkingSetPerRegion, "unique_pages", int64(len(r.pages)))
		put(WorkingSetPerRegion, "region_type", r.kind)
		put(WorkingSetPerRegion, "working_set_bytes", int64(4096*len(r.pages)))

		if n := len(r.strides); n > 0 {
			r.mean = ratio(total(r.strides), n)
			r.fit = float64(r.samePage) / float64(n)
			slices.Sort(r.strides)
			r.median = ratio(total([]uint64{r.strides[(n-1)/2], r.strides[n/2]}), 2)
		}
		put(LocalityPerRegion, "region_id", id)
		put(LocalityPerRegion, "region_type", r.earliest)
		put(LocalityPerRegion, "n_accesses", int64(r.n[0]+r.n[1]))
		put(LocalityPerRegion, "mean_stride_bytes", r.mean)
		put(LocalityPerRegion, "median_stride_bytes", r.median)
		put(LocalityPerRegion, "same_page_fraction", r.fit)
	}

	for _, kind := range sortedKeys(byType) {
		of := byType[kind]
		var seconds []float64
		var retentions []uint64
		var writeOnce []float64
		var pages, most int
		for _, r := range of {
			seconds = append(seconds, ratio(big.NewInt(r.retention), 1e9))
			retentions = append(retentions, uint64(r.retention))
			pages, most = pages+len(r.pages), max(most, len(r.pages))
			if len(r.stores) > 0 {
				writeOnce = append(writeOnce, float64(r.once())/float64(len(r.stores)))
			}
		}
		slices.Sort(seconds)
		p50, p90, p99 := interpolate(seconds, 0.50), interpolate(seconds, 0.90), interpolate(seconds, 0.99)
		put(RetentionSummary, "region_type", kind)
		put(RetentionSummary, "n_regions", int64(len(of)))
		put(RetentionSummary, "retention_p50_s", p50)
		put(RetentionSummary, "retention_p90_s", p90)
		put(RetentionSummary, "retention_p99_s", p99)
		put(RetentionSummary, "retention_mean_s", ratio(total(retentions), len(of))/1e9)
		put(WorkingSetSummary, "region_type", kind)
		put(WorkingSetSummary, "n_regions", int64(len(of)))
		put(WorkingSetSummary, "total_pages", int64(pages))
		put(WorkingSetSummary, "total_bytes", int64(4096*pages))
		put(WorkingSetSummary, "mean_pages_per_region", float64(pages)/float64(len(of)))
		put(WorkingSetSummary, "max_pages_per_region", int64(most))
		class := "low_mrm"
		switch ratio := kahan(writeOnce); {
		case ratio >= 0.8 && p99 >= 10:
			class = "high_mrm"
		case ratio >= 0.5 && p50 >= 1:
			class = "medium_mrm"
		}
		put(Suitability, "region_type", kind)
		put(Suitability, "write_once_ratio_mean", kahan(writeOnce))
		put(Suitability, "retention_p99_s", p99)
		put(Suitability, "retention_p50_s", p50)
		put(Suitability, "suitability", class)
	}

	for _, kind := range sortedKeys(byEarliest) {
		var mean, median, fit []float64
		for _, r := range byEarliest[kind] {
			mean, median, fit = append(mean, r.mean), append(median, r.median), append(fit, r.fit)
		}
		put(LocalitySummary, "region_type", kind)
		put(LocalitySummary, "mean_stride_bytes", kahan(mean))
		put(LocalitySummary, "median_stride_bytes", kahan(median))
		put(LocalitySummary, "same_page_fraction", kahan(fit))
	}

	for _, kind := range sortedKeys(gaps) {
		v := gaps[kind]
		slices.Sort(v)
		put(IAI, "region_type", kind)
		put(IAI, "n_intervals", int64(len(v)))
		put(IAI, "iai_p50_ns", interpolateWhole(v, 50))
		put(IAI, "iai_p90_ns", interpolateWhole(v, 90))
		put(IAI, "iai_p99_ns", interpolateWhole(v, 99))
		put(IAI, "iai_mean_ns", ratio(total(v), len(v)))
	}
	return out
}

func (r *referenceRegion) once() int {
	n := 0
	for _, stores := range r.stores {
		if stores == 1 {
			n++
		}
	}
	return n
}
