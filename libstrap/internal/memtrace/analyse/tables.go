// Makes the ten tables from the results of the stages.

package analyse

import (
	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
)

// Table is a table of results. Its columns are utf8, int64, uint64 or float64. Columns that may have
// nulls are nullable in the schema.
type Table struct {
	Name   string
	Record arrow.Record
}

// maker has the stages that a table needs, and makes the table from their results.
type maker struct {
	needs need
	make  func(*results, *columns)
}

var makers = map[string]maker{
	RetentionPerRegion:  {needCounts, (*results).retentionPerRegion},
	RetentionSummary:    {needCounts, (*results).retentionSummary},
	WriteOnce:           {needWrites, (*results).writeOnce},
	ReadFreq:            {needCounts, (*results).readFreq},
	WorkingSetPerRegion: {needPages, (*results).workingSetPerRegion},
	WorkingSetSummary:   {needPages, (*results).workingSetSummary},
	LocalityPerRegion:   {needStrides, (*results).localityPerRegion},
	LocalitySummary:     {needStrides, (*results).localitySummary},
	IAI:                 {needGaps, (*results).iai},
	Suitability:         {needCounts | needWrites, (*results).suitability},

	RetentionHistogram:     {needCounts, (*results).retentionHistogram},
	RetentionCDF:           {needCounts, (*results).retentionCDF},
	ReuseHistogram:         {needGaps, (*results).reuseHistogram},
	ReuseDistanceHistogram: {needDistances, (*results).reuseDistanceHistogram},
	WorkingSetOverTime:     {needPageWindows, (*results).workingSetOverTime},
	BandwidthOverTime:      {needBandwidth, (*results).bandwidthOverTime},
	TopRegions:             {needCounts | needPages, (*results).topRegions},
}

func (r *results) tables(names []string) []Table {
	var tables []Table
	for _, name := range names {
		of := r
		if ok, _ := Supports(r.options.Kind, name); !ok {
			of = &results{options: r.options}
		}
		var c columns
		makers[name].make(of, &c)
		tables = append(tables, Table{name, c.record()})
	}
	return tables
}

// columns collects the columns of a table.
type columns struct {
	fields []arrow.Field
	arrays []arrow.Array
	rows   int
}

func (c *columns) add(name string, b array.Builder, nullable bool) {
	defer b.Release()
	a := b.NewArray()
	c.rows = a.Len()
	c.fields = append(c.fields, arrow.Field{Name: name, Type: a.DataType(), Nullable: nullable})
	c.arrays = append(c.arrays, a)
}

func (c *columns) record() arrow.Record {
	r := array.NewRecord(arrow.NewSchema(c.fields, nil), c.arrays, int64(c.rows))
	for _, a := range c.arrays {
		a.Release()
	}
	return r
}

func (c *columns) texts(name string, v []string) {
	b := array.NewStringBuilder(memory.DefaultAllocator)
	b.AppendValues(v, nil)
	c.add(name, b, false)
}

func (c *columns) floats(name string, v []float64) {
	b := array.NewFloat64Builder(memory.DefaultAllocator)
	b.AppendValues(v, nil)
	c.add(name, b, false)
}

func (c *columns) ints(name string, v []int64) {
	b := array.NewInt64Builder(memory.DefaultAllocator)
	b.AppendValues(v, nil)
	c.add(name, b, false)
}

func (c *columns) unsigned(name string, v []uint64) {
	b := array.NewUint64Builder(memory.DefaultAllocator)
	b.AppendValues(v, nil)
	c.add(name, b, false)
}

// intsOrNull adds a column of integers. Negative values become null.
func (c *columns) intsOrNull(name string, v []int64) {
	b := array.NewInt64Builder(memory.DefaultAllocator)
	b.AppendValues(v, each(v, func(x int64) bool { return x >= 0 }))
	c.add(name, b, true)
}

// each returns f of each element.
func each[E, V any](list []E, f func(E) V) []V {
	out := make([]V, len(list))
	for i, e := range list {
		out[i] = f(e)
	}
	return out
}

func (r *results) idColumn(c *columns, regions []uint32) {
	c.ints("region_id", each(regions, func(i uint32) int64 { return r.regions.values[i] }))
}

func (r *results) typeColumn(c *columns, regions []uint32) {
	c.texts("region_type", each(regions, r.typeName))
}

func (r *results) retentionPerRegion(c *columns) {
	r.idColumn(c, r.byID)
	r.typeColumn(c, r.byID)
	c.ints("first_write_ns", each(r.byID, func(i uint32) int64 { written, _ := r.counts[i].life(); return written }))
	c.ints("last_read_ns", each(r.byID, func(i uint32) int64 { _, read := r.counts[i].life(); return read }))
	c.ints("retention_ns", each(r.byID, func(i uint32) int64 { return int64(r.counts[i].retention()) }))
	c.floats("retention_s", each(r.byID, func(i uint32) float64 { return seconds(r.counts[i].retention()) }))
}

// typeSummary has the values of a type's regions for the tables by type.
type typeSummary struct {
	name      string
	n         int64                  // regions
	quantiles [len(percents)]float64 // of the retentions, in s
	mean      float64                // of the retentions, in s
	writeOnce mean                   // of the write-once ratios
}

// summaries returns a summary of each type that has regions, sorted by name.
func (r *results) summaries() []typeSummary {
	groups := r.group()
	var out []typeSummary
	for _, t := range r.byName {
		regions := groups[t]
		if len(regions) == 0 {
			continue
		}
		s := typeSummary{name: r.types[t], n: int64(len(regions))}
		v := r.retentions(regions)
		n := uint64(len(v))
		for i, p := range percents {
			lower, weight := place(n, p)
			s.quantiles[i] = lerp(seconds(v[lower]), seconds(v[min(lower+1, n-1)]), weight)
		}
		var total sum
		for _, ns := range v {
			total.add(ns)
		}
		s.mean = total.over(n) / 1e9
		for _, i := range regions {
			if w := r.writes[i]; w.written > 0 {
				s.writeOnce.add(w.ratio())
			}
		}
		out = append(out, s)
	}
	return out
}

func (r *results) retentionSummary(c *columns) {
	s := r.summaries()
	c.texts("region_type", each(s, func(s typeSummary) string { return s.name }))
	c.ints("n_regions", each(s, func(s typeSummary) int64 { return s.n }))
	c.floats("retention_p50_s", each(s, func(s typeSummary) float64 { return s.quantiles[0] }))
	c.floats("retention_p90_s", each(s, func(s typeSummary) float64 { return s.quantiles[1] }))
	c.floats("retention_p99_s", each(s, func(s typeSummary) float64 { return s.quantiles[2] }))
	c.floats("retention_mean_s", each(s, func(s typeSummary) float64 { return s.mean }))
}

func (w regionWrites) ratio() float64 { return float64(w.once) / float64(w.written) }

func (r *results) writeOnce(c *columns) {
	var written []uint32
	for _, i := range r.byID {
		if r.writes[i].written > 0 {
			written = append(written, i)
		}
	}
	r.idColumn(c, written)
	r.typeColumn(c, written)
	c.ints("n_written_addresses", each(written, func(i uint32) int64 { return int64(r.writes[i].written) }))
	c.ints("n_write_once_addresses", each(written, func(i uint32) int64 { return int64(r.writes[i].once) }))
	c.floats("write_once_ratio", each(written, func(i uint32) float64 { return r.writes[i].ratio() }))
}

func (r *results) readFreq(c *columns) {
	loads := func(i uint32) uint64 { return r.counts[i].n[0] }
	stores := func(i uint32) uint64 { return r.counts[i].n[1] }
	r.idColumn(c, r.byID)
	r.typeColumn(c, r.byID)
	c.ints("total_reads", each(r.byID, func(i uint32) int64 { return int64(loads(i)) }))
	c.ints("total_writes", each(r.byID, func(i uint32) int64 { return int64(stores(i)) }))
	c.ints("total_accesses", each(r.byID, func(i uint32) int64 { return int64(loads(i) + stores(i)) }))
	c.floats("read_fraction", each(r.byID, func(i uint32) float64 { return float64(loads(i)) / float64(loads(i)+stores(i)) }))
	c.floats("reads_per_write", each(r.byID, func(i uint32) float64 {
		if stores(i) == 0 {
			return 0
		}
		return float64(loads(i)) / float64(stores(i))
	}))
}

func (r *results) workingSetPerRegion(c *columns) {
	r.idColumn(c, r.byID)
	c.ints("unique_pages", each(r.byID, func(i uint32) int64 { return int64(r.unique[i]) }))
	r.typeColumn(c, r.byID)
	c.ints("working_set_bytes", each(r.byID, func(i uint32) int64 { return int64(r.unique[i] * pageSize) }))
}

func (r *results) workingSetSummary(c *columns) {
	type summary struct {
		name          string
		n, total, max uint64
	}
	var s []summary
	groups := r.group()
	for _, t := range r.byName {
		if len(groups[t]) == 0 {
			continue
		}
		of := summary{name: r.types[t], n: uint64(len(groups[t]))}
		for _, i := range groups[t] {
			of.total += r.unique[i]
			of.max = max(of.max, r.unique[i])
		}
		s = append(s, of)
	}
	c.texts("region_type", each(s, func(s summary) string { return s.name }))
	c.ints("n_regions", each(s, func(s summary) int64 { return int64(s.n) }))
	c.ints("total_pages", each(s, func(s summary) int64 { return int64(s.total) }))
	c.ints("total_bytes", each(s, func(s summary) int64 { return int64(s.total * pageSize) }))
	c.floats("mean_pages_per_region", each(s, func(s summary) float64 { return sum{lo: s.total}.over(s.n) }))
	c.ints("max_pages_per_region", each(s, func(s summary) int64 { return int64(s.max) }))
}

func (r *results) localityPerRegion(c *columns) {
	r.idColumn(c, r.byID)
	c.texts("region_type", each(r.byID, func(i uint32) string { return r.types[r.strides[i].kind] }))
	c.ints("n_accesses", each(r.byID, func(i uint32) int64 { return int64(r.strides[i].n) }))
	c.floats("mean_stride_bytes", each(r.byID, func(i uint32) float64 { return r.locality[i].mean }))
	c.floats("median_stride_bytes", each(r.byID, func(i uint32) float64 { return r.locality[i].median }))
	c.floats("same_page_fraction", each(r.byID, func(i uint32) float64 { return r.locality[i].samePage }))
}

func (r *results) localitySummary(c *columns) {
	type summary struct {
		name                   string
		mean, median, samePage mean
	}
	all := make([]summary, len(r.types))
	for _, i := range r.byID {
		s, l := &all[r.strides[i].kind], r.locality[i]
		s.mean.add(l.mean)
		s.median.add(l.median)
		s.samePage.add(l.samePage)
	}
	var s []summary
	for _, t := range r.byName {
		if all[t].mean.n > 0 {
			all[t].name = r.types[t]
			s = append(s, all[t])
		}
	}
	c.texts("region_type", each(s, func(s summary) string { return s.name }))
	c.floats("mean_stride_bytes", each(s, func(s summary) float64 { return s.mean.value() }))
	c.floats("median_stride_bytes", each(s, func(s summary) float64 { return s.median.value() }))
	c.floats("same_page_fraction", each(s, func(s summary) float64 { return s.samePage.value() }))
}

func (r *results) iai(c *columns) {
	var types []uint32
	for _, t := range r.byName {
		if r.gaps[t].n > 0 {
			types = append(types, t)
		}
	}
	c.texts("region_type", each(types, func(t uint32) string { return r.types[t] }))
	c.ints("n_intervals", each(types, func(t uint32) int64 { return int64(r.gaps[t].n) }))
	c.ints("iai_p50_ns", each(types, func(t uint32) int64 { return int64(r.gaps[t].quantiles[0]) }))
	c.ints("iai_p90_ns", each(types, func(t uint32) int64 { return int64(r.gaps[t].quantiles[1]) }))
	c.ints("iai_p99_ns", each(types, func(t uint32) int64 { return int64(r.gaps[t].quantiles[2]) }))
	c.floats("iai_mean_ns", each(types, func(t uint32) float64 { return r.gaps[t].mean }))
}

func (r *results) suitability(c *columns) {
	s := r.summaries()
	c.texts("region_type", each(s, func(s typeSummary) string { return s.name }))
	c.floats("write_once_ratio_mean", each(s, func(s typeSummary) float64 { return s.writeOnce.value() }))
	c.floats("retention_p99_s", each(s, func(s typeSummary) float64 { return s.quantiles[2] }))
	c.floats("retention_p50_s", each(s, func(s typeSummary) float64 { return s.quantiles[0] }))
	c.texts("suitability", each(s, typeSummary.class))
}

// class returns the class of suitability for memory that keeps data for long and is rarely rewritten.
// docs/MEMORY_TRACES.md documents the thresholds.
func (s typeSummary) class() string {
	writeOnce, p50, p99 := s.writeOnce.value(), s.quantiles[0], s.quantiles[2]
	switch {
	case writeOnce >= 0.8 && p99 >= 10:
		return "high_mrm"
	case writeOnce >= 0.5 && p50 >= 1:
		return "medium_mrm"
	default:
		return "low_mrm"
	}
}
