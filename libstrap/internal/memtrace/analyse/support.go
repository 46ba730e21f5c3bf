// The names of the tables, and which kinds of traces can give them.

package analyse

import (
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// The tables, by their documented names.
const (
	RetentionPerRegion  = "retention_per_region"
	RetentionSummary    = "retention_summary"
	WriteOnce           = "write_once"
	ReadFreq            = "read_freq"
	WorkingSetPerRegion = "working_set_per_region"
	WorkingSetSummary   = "working_set_summary"
	LocalityPerRegion   = "locality_per_region"
	LocalitySummary     = "locality_summary"
	IAI                 = "iai"
	Suitability         = "suitability"

	RetentionHistogram     = "retention_histogram"
	RetentionCDF           = "retention_cdf"
	ReuseHistogram         = "reuse_histogram"
	ReuseDistanceHistogram = "reuse_distance_histogram"
	WorkingSetOverTime     = "working_set_over_time"
	BandwidthOverTime      = "bandwidth_over_time"
	TopRegions             = "top_regions"
)

// Ten are the tables that are made if Options.Tables is nil.
var Ten = []string{
	RetentionPerRegion, RetentionSummary, WriteOnce, ReadFreq, WorkingSetPerRegion,
	WorkingSetSummary, LocalityPerRegion, LocalitySummary, IAI, Suitability,
}

// Further are the tables that are made only if Options.Tables names them. ReuseDistanceHistogram
// takes more time than all others together.
var Further = []string{
	RetentionHistogram, RetentionCDF, ReuseHistogram, ReuseDistanceHistogram,
	WorkingSetOverTime, BandwidthOverTime, TopRegions,
}

// limits has the kinds of traces that do not support every table: the tables that they support, and
// why they do not support the others.
var limits = map[trace.Kind]struct {
	tables []string
	why    string
}{
	trace.FirstTouches: {
		[]string{WorkingSetPerRegion, WorkingSetSummary},
		"first touches show which pages are used, but neither later accesses nor the address within the page",
	},
	trace.WriteSets: {
		// The tables count the written pages. Pages that are only read do not occur in the trace.
		[]string{WorkingSetPerRegion, WorkingSetSummary, WorkingSetOverTime},
		"write sets show which pages are written in each interval, but neither reads nor how often and when within it",
	},
	trace.Allocations: {
		// The retention is the lifetime of an allocation. The working set is its pages.
		[]string{
			RetentionPerRegion, RetentionSummary, RetentionHistogram, RetentionCDF,
			WorkingSetPerRegion, WorkingSetSummary,
		},
		"allocations show when memory is taken and released, but not when it is read and written",
	},
}

// Supports reports whether a trace of a kind can give a table. If not, why is the reason.
//
//	                         accesses  first_touches  write_sets  allocations
//	retention (all tables)      x            -             -           x
//	working_set (the two)       x            x             x           x
//	working_set_over_time       x            -             x           -
//	all others                  x            -             -           -
func Supports(kind trace.Kind, table string) (ok bool, why string) {
	if !slices.Contains(Ten, table) && !slices.Contains(Further, table) {
		return false, "there is no such table"
	}
	if kind == trace.Accesses {
		return true, ""
	}
	limit, known := limits[kind]
	if !known {
		return false, "there is no such kind of trace"
	}
	if slices.Contains(limit.tables, table) {
		return true, ""
	}
	return false, limit.why
}
