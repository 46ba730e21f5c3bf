package analyse

import (
	"cmp"
	"math"
	"math/bits"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// furtherReference returns the further tables, computed from the rows and the ten tables. The width of
// the windows is the least power of two that gives no more windows than allowed.
func furtherReference(rows []access, o Options) map[string]cells {
	ten := reference(rows)
	bytes := map[int]uint64{}
	var all []access
	for i, r := range rows {
		for j, a := range expanded([]access{r}) {
			if j == 0 {
				bytes[len(all)] = uint64(r.length)
			}
			a.length = int64(i)
			all = append(all, a)
		}
	}
	out := map[string]cells{}
	put := func(table, column string, v any) {
		if out[table] == nil {
			out[table] = cells{}
		}
		out[table][column] = append(out[table][column], v)
	}

	// Retentions by type.
	retentions := map[string][]uint64{}
	per := ten[RetentionPerRegion]
	for i, kind := range per["region_type"] {
		retentions[kind.(string)] = append(retentions[kind.(string)], uint64(per["retention_ns"][i].(int64)))
	}
	for _, kind := range sortedKeys(retentions) {
		v := retentions[kind]
		slices.Sort(v)
		longest := v[len(v)-1]
		bins := o.Bins
		if longest == 0 {
			bins = 1
		}
		for bin := range bins {
			put(RetentionHistogram, "region_type", kind)
			put(RetentionHistogram, "bin_low_s", seconds(longest)*float64(bin)/float64(bins))
			put(RetentionHistogram, "bin_high_s", seconds(longest)*float64(bin+1)/float64(bins))
			n := 0
			for _, ns := range v {
				at := 0
				if longest > 0 {
					hi, lo := bits.Mul64(ns, uint64(bins))
					q, _ := bits.Div64(hi, lo, longest)
					at = min(int(q), bins-1)
				}
				if at == bin {
					n++
				}
			}
			put(RetentionHistogram, "n_regions", int64(n))
		}
		for i, ns := range v {
			if i+1 == len(v) || v[i+1] != ns {
				put(RetentionCDF, "region_type", kind)
				put(RetentionCDF, "retention_s", seconds(ns))
				put(RetentionCDF, "fraction", float64(i+1)/float64(len(v)))
			}
		}
	}

	// Regions by their accesses.
	freq, sets := ten[ReadFreq], ten[WorkingSetPerRegion]
	var order []int
	for i := range freq["region_id"] {
		order = append(order, i)
	}
	slices.SortStableFunc(order, func(a, b int) int {
		return cmp.Compare(freq["total_accesses"][b].(int64), freq["total_accesses"][a].(int64))
	})
	for _, i := range order[:min(len(order), o.Top)] {
		put(TopRegions, "region_id", freq["region_id"][i])
		put(TopRegions, "region_type", freq["region_type"][i])
		put(TopRegions, "n_accesses", freq["total_accesses"][i])
		put(TopRegions, "reads", freq["total_reads"][i])
		put(TopRegions, "writes", freq["total_writes"][i])
		put(TopRegions, "unique_pages", sets["unique_pages"][i])
		put(TopRegions, "retention_s", per["retention_s"][i])
	}

	// Gaps and distances, by bit length.
	type key struct {
		at   uint64
		kind string
	}
	gaps, distances := map[string]map[int]int{}, map[string]map[int]int{}
	count := func(m map[string]map[int]int, kind string, bin int) {
		if m[kind] == nil {
			m[kind] = map[int]int{}
		}
		m[kind][bin]++
	}
	latest := map[key]int64{}
	var stack []uint64
	for _, a := range byTime(all) {
		k := key{a.address, a.kind}
		if t, ok := latest[k]; ok && a.time > t {
			count(gaps, a.kind, bits.Len64(uint64(a.time-t)))
		}
		latest[k] = a.time
		depth := slices.Index(stack, a.page)
		if depth < 0 {
			count(distances, a.kind, -1)
		} else {
			count(distances, a.kind, bits.Len(uint(depth)))
			stack = slices.Delete(stack, depth, depth+1)
		}
		stack = slices.Insert(stack, 0, a.page)
	}
	filled := func(m map[int]int) []int {
		var bins []int
		for b := range m {
			if b >= 0 {
				bins = append(bins, b)
			}
		}
		if len(bins) == 0 {
			return nil
		}
		first, last := slices.Min(bins), slices.Max(bins)
		bins = nil
		for b := first; b <= last; b++ {
			bins = append(bins, b)
		}
		return bins
	}
	for _, kind := range sortedKeys(gaps) {
		for _, b := range filled(gaps[kind]) {
			put(ReuseHistogram, "region_type", kind)
			put(ReuseHistogram, "bin_low_ns", uint64(1)<<b>>1)
			put(ReuseHistogram, "bin_high_ns", uint64(1)<<b)
			put(ReuseHistogram, "n_intervals", int64(gaps[kind][b]))
		}
	}
	for _, kind := range sortedKeys(distances) {
		if n := distances[kind][-1]; n > 0 {
			put(ReuseDistanceHistogram, "region_type", kind)
			put(ReuseDistanceHistogram, "bin_low_pages", nil)
			put(ReuseDistanceHistogram, "bin_high_pages", nil)
			put(ReuseDistanceHistogram, "n_accesses", int64(n))
		}
		for _, b := range filled(distances[kind]) {
			put(ReuseDistanceHistogram, "region_type", kind)
			put(ReuseDistanceHistogram, "bin_low_pages", int64(1)<<b>>1)
			put(ReuseDistanceHistogram, "bin_high_pages", int64(1)<<b)
			put(ReuseDistanceHistogram, "n_accesses", int64(distances[kind][b]))
		}
	}

	// Windows.
	if len(all) == 0 {
		return out
	}
	first, last := uint64(math.MaxUint64), uint64(0)
	for _, a := range all {
		first, last = min(first, uint64(a.time)), max(last, uint64(a.time))
	}
	shift := 0
	for last>>shift-first>>shift >= uint64(2*o.Windows) {
		shift++
	}
	type window struct {
		n    uint64
		kind string
	}
	type content struct {
		pages map[uint64]bool
		n     [2]int64
		bytes [2]int64
	}
	contents := map[window]*content{}
	for i, a := range all {
		k := window{uint64(a.time) >> shift, a.kind}
		c := contents[k]
		if c == nil {
			c = &content{pages: map[uint64]bool{}}
			contents[k] = c
		}
		c.pages[a.page] = true
		c.n[a.op]++
		c.bytes[a.op] += int64(bytes[i])
	}
	var order2 []window
	for k := range contents {
		order2 = append(order2, k)
	}
	slices.SortFunc(order2, func(a, b window) int {
		return cmp.Or(cmp.Compare(a.n, b.n), strings.Compare(a.kind, b.kind))
	})
	for _, k := range order2 {
		c := contents[k]
		for _, table := range []string{WorkingSetOverTime, BandwidthOverTime} {
			put(table, "window_start_ns", int64(k.n<<shift))
			put(table, "window_end_ns", int64(min((k.n+1)<<shift, math.MaxInt64)))
			put(table, "region_type", k.kind)
		}
		put(WorkingSetOverTime, "unique_pages", int64(len(c.pages)))
		put(WorkingSetOverTime, "working_set_bytes", int64(len(c.pages)*4096))
		put(BandwidthOverTime, "read_bytes", c.bytes[0])
		put(BandwidthOverTime, "written_bytes", c.bytes[1])
		put(BandwidthOverTime, "reads", c.n[0])
		put(BandwidthOverTime, "writes", c.n[1])
	}
	return out
}

func TestFurtherTables(t *testing.T) {
	seeds := uint64(1000)
	if testing.Short() {
		seeds = 40
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 4))
		rows := draw(r)
		o := Options{Tables: Further, Bins: 1 + r.IntN(5), Windows: 1 + r.IntN(5), Top: 1 + r.IntN(4), Workers: 1 + r.IntN(3)}
		got, err := analysed(rows, o, 1+r.IntN(10), 1+r.IntN(50))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if err := difference(got, furtherReference(rows, o)); err != nil {
			t.Fatalf("seed %d, %+v, %d rows %+v: %v", seed, o, len(rows), rows, err)
		}
	}
}

// TestFurtherLarge has so many rows that places run out and windows double many times, with and without
// late rows.
func TestFurtherLarge(t *testing.T) {
	n := 60_000
	if testing.Short() {
		n = 10_000
	}
	rows := model(n, 1)
	for range 2 {
		o := Options{Tables: Further, Bins: 100, Windows: 50, Top: 20}
		got, err := analysed(rows, o)
		if err != nil {
			t.Fatal(err)
		}
		if err := difference(got, furtherReference(rows, o)); err != nil {
			t.Error(err)
		}
		n := len(slices.Compact(slices.Clone(got[BandwidthOverTime]["window_start_ns"])))
		if n < 50 || n > 100 {
			t.Errorf("%d windows", n)
		}
		slices.Reverse(rows)
	}
}

// TestCDFPoints has more regions than points. The points are spread evenly, and the last one is the
// longest retention.
func TestCDFPoints(t *testing.T) {
	var rows []access
	for i := range int64(1000) {
		rows = append(rows, access{op: trace.Store, region: i, kind: "kv_cache"}, access{time: i * 1e6, region: i, kind: "kv_cache"})
	}
	got, err := analysed(rows, Options{Tables: []string{RetentionCDF}, CDFPoints: 4})
	if err != nil {
		t.Fatal(err)
	}
	if err := difference(got, map[string]cells{RetentionCDF: {
		"region_type": {"kv_cache", "kv_cache", "kv_cache", "kv_cache"},
		"retention_s": {0.249, 0.499, 0.749, 0.999},
		"fraction":    {0.25, 0.5, 0.75, 1.0},
	}}); err != nil {
		t.Error(err)
	}
}

func TestFurtherColumns(t *testing.T) {
	want := map[string]string{
		RetentionHistogram:     "region_type: utf8, bin_low_s: float64, bin_high_s: float64, n_regions: int64",
		RetentionCDF:           "region_type: utf8, retention_s: float64, fraction: float64",
		ReuseHistogram:         "region_type: utf8, bin_low_ns: uint64, bin_high_ns: uint64, n_intervals: int64",
		ReuseDistanceHistogram: "region_type: utf8, bin_low_pages: int64, bin_high_pages: int64, n_accesses: int64",
		WorkingSetOverTime:     "window_start_ns: int64, window_end_ns: int64, region_type: utf8, unique_pages: int64, working_set_bytes: int64",
		BandwidthOverTime:      "window_start_ns: int64, window_end_ns: int64, region_type: utf8, read_bytes: int64, written_bytes: int64, reads: int64, writes: int64",
		TopRegions:             "region_id: int64, region_type: utf8, n_accesses: int64, reads: int64, writes: int64, unique_pages: int64, retention_s: float64",
	}
	checkColumns(t, Further, want)
}
