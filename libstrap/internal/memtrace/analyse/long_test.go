// A test that long rows take memory by their number and not by their pages.

package analyse

import (
	"runtime"
	"slices"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// The memory for rows of a terabyte does not grow with their pages.
func TestMemoryIsByRowsAndNotByPages(t *testing.T) {
	const pages = trace.MostLength / trace.PageSize
	row := func(time int64, op trace.Op, first, n uint64) access {
		return access{time: time, address: first * trace.PageSize, page: first, op: op, region: 1, kind: "weight", length: int64(n * trace.PageSize)}
	}
	rows := []access{
		row(0, trace.Store, 0, pages),
		row(10, trace.Load, 0, pages),
		row(30, trace.Load, pages/4, pages/2), // all other pages are accessed in between
		row(40, trace.Store, pages/2, pages),  // pages/4 were accessed at 30, pages/4 at 10, pages/2 are new
	}
	ballast() // allocate it now, so that it does not count below
	for _, workers := range []int{1, 16} {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		got, err := analysed(rows, Options{
			Tables: append(Ten[:len(Ten):len(Ten)], Further...), Workers: workers, SpillDir: t.TempDir(), Windows: 1,
		})
		runtime.ReadMemStats(&after)
		if err != nil {
			t.Fatal(err)
		}
		if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 8<<20 {
			t.Errorf("%d workers: %d MB for four rows", workers, allocated>>20)
		}
		for _, want := range []struct {
			table, column string
			values        []any
		}{
			{WorkingSetPerRegion, "unique_pages", []any{int64(pages + pages/2)}},
			{ReadFreq, "total_accesses", []any{int64(3*pages + pages/2)}},
			{WriteOnce, "n_written_addresses", []any{int64(pages + pages/2)}},
			{WriteOnce, "n_write_once_addresses", []any{int64(pages)}},
			// The gaps: pages of 10 ns, pages/2 of 20 ns, pages/4 of 10 ns and pages/4 of 30 ns.
			{IAI, "n_intervals", []any{int64(2 * pages)}},
			{IAI, "iai_p50_ns", []any{int64(10)}},
			{IAI, "iai_p90_ns", []any{int64(30)}},
			{IAI, "iai_mean_ns", []any{15.0}},
			{WorkingSetOverTime, "unique_pages", []any{int64(pages), int64(pages)}},
			// The distances: none for first accesses, pages/4 - 1, and pages/2 or more.
			{ReuseDistanceHistogram, "bin_low_pages", []any{nil, int64(pages / 8), int64(pages / 4), int64(pages / 2)}},
			{ReuseDistanceHistogram, "n_accesses", []any{int64(pages + pages/2), int64(pages / 4), int64(0), int64(pages + 3*pages/4)}},
		} {
			if g := got[want.table][want.column]; !slices.Equal(g, want.values) {
				t.Errorf("%d workers: %s.%s is %v, not %v", workers, want.table, want.column, g, want.values)
			}
		}
	}
}
