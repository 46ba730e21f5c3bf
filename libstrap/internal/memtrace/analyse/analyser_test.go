package analyse

import (
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// record returns a batch with the columns that an analysis reads.
func record(rows []access) arrow.Record {
	var fields []arrow.Field
	for _, f := range trace.Fields() {
		switch f.Name {
		case "run_id", "sample_id", "timestamp_ns", "address", "address_page", "op_type", "region_type", "region_id", "length_bytes":
			fields = append(fields, f)
		}
	}
	b := array.NewRecordBuilder(memory.DefaultAllocator, arrow.NewSchema(fields, nil))
	defer b.Release()
	text := func(column int, v string) {
		if err := b.Field(column).(*array.BinaryDictionaryBuilder).AppendString(v); err != nil {
			panic(err)
		}
	}
	for i, r := range rows {
		text(0, "run")
		b.Field(1).(*array.Int64Builder).Append(int64(i))
		b.Field(2).(*array.Int64Builder).Append(r.time)
		b.Field(3).(*array.Uint64Builder).Append(r.address)
		b.Field(4).(*array.Uint64Builder).Append(r.page)
		text(5, [...]string{"load", "store"}[r.op])
		text(6, r.kind)
		b.Field(7).(*array.Int64Builder).Append(r.region)
		if r.length > 0 {
			b.Field(8).(*array.Int64Builder).Append(r.length)
		} else {
			b.Field(8).AppendNull()
		}
	}
	return b.NewRecord()
}

// content returns the columns of a table as plain values.
func content(t Table) cells {
	out := cells{}
	for i, f := range t.Record.Schema().Fields() {
		column := []any(nil)
		for j := range int(t.Record.NumRows()) {
			switch a := t.Record.Column(i).(type) {
			case *array.Int64:
				column = append(column, a.Value(j))
			case *array.Uint64:
				column = append(column, a.Value(j))
			case *array.Float64:
				column = append(column, a.Value(j))
			case *array.String:
				column = append(column, a.Value(j))
			}
			if t.Record.Column(i).IsNull(j) {
				column[j] = nil
			}
		}
		out[f.Name] = column
	}
	return out
}

// analysed returns the tables of rows, added in batches of the given sizes.
func analysed(rows []access, o Options, batches ...int) (map[string]cells, error) {
	a, err := New(o)
	if err != nil {
		return nil, err
	}
	defer a.Close()
	for i := 0; len(rows) > 0; i++ {
		n := len(rows)
		if len(batches) > 0 {
			n = min(n, batches[i%len(batches)])
		}
		r := record(rows[:n])
		err := a.Add(r)
		r.Release()
		if err != nil {
			return nil, err
		}
		rows = rows[n:]
	}
	tables, err := a.Finish()
	if err != nil {
		return nil, err
	}
	out := map[string]cells{}
	for _, t := range tables {
		out[t.Name] = content(t)
		t.Record.Release()
	}
	return out, nil
}

// difference returns an error that names where two sets of tables differ, or nil.
func difference(got, want map[string]cells) error {
	for name, columns := range want {
		for column, v := range columns {
			if g := got[name][column]; !reflect.DeepEqual(g, v) {
				return fmt.Errorf("%s.%s is\n%v, not\n%v", name, column, g, v)
			}
		}
	}
	for name, columns := range got {
		for column, v := range columns {
			if len(v) != len(want[name][column]) {
				return fmt.Errorf("%s.%s has %d rows, not %d", name, column, len(v), len(want[name][column]))
			}
		}
	}
	return nil
}

var kinds = []string{"weight", "kv_cache", "activation", "runtime", "unknown"}

// draw returns a random trace with many equal addresses, times, types and pages.
func draw(r *rand.Rand) []access {
	rows := make([]access, r.IntN(80))
	regions, addresses := 1+r.IntN(6), 1+r.IntN(12)
	types := 1 + r.IntN(len(kinds))
	typeChanges, pageDiffers, late := r.IntN(3) == 0, r.IntN(4) == 0, r.IntN(3) == 0
	step := []int64{1, 3, 1e9, 1 << 55}[r.IntN(4)]
	space := []uint64{8, 64, 4096, 1 << 31, 1 << 58}[r.IntN(5)]
	base := []uint64{0, 0x7f0000000000, 1<<63 - 2048, math.MaxUint64 - 1<<20}[r.IntN(4)]
	lengths := []int64{1, 1, 1, 5000, 40000}[r.IntN(5)]
	now := int64(0)
	for i := range rows {
		now += step * r.Int64N(3)
		a := access{time: now, region: int64(r.IntN(regions)) - 1}
		if late && r.IntN(4) == 0 {
			a.time = r.Int64N(now + 1)
		}
		a.address = base + space*uint64(r.IntN(addresses))
		a.page = a.address >> trace.PageShift
		if pageDiffers {
			a.page = uint64(r.IntN(4))
		}
		a.op = trace.Op(r.IntN(2))
		a.kind = kinds[uint64(a.region+1)%uint64(types)]
		if typeChanges {
			a.kind = kinds[r.IntN(types)]
		}
		if lengths > 1 && r.IntN(2) == 0 {
			a.length = 1 + r.Int64N(lengths)
			a.length = int64(min(uint64(a.length), math.MaxUint64-a.address))
		}
		rows[i] = a
	}
	return rows
}

// TestTables compares the tables of many small traces with the reference.
func TestTables(t *testing.T) {
	dir := t.TempDir()
	seeds := uint64(2000)
	if testing.Short() {
		seeds = 60
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 1))
		rows := draw(r)
		o := Options{Workers: []int{1, 2, 9}[r.IntN(3)], MemoryBytes: []int{1, 200, 0}[r.IntN(3)], SpillDir: dir}
		got, err := analysed(rows, o, 1+r.IntN(10), 1+r.IntN(50))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		if err := difference(got, reference(rows)); err != nil {
			t.Fatalf("seed %d, %d rows %+v: %v", seed, len(rows), rows, err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) > 0 {
		t.Errorf("left in the spill's folder: %v, %v", left, err)
	}
}

// drawLong returns a random trace of rows of up to hundreds of pages that overlap in all ways. Between
// them are accesses to single pages and addresses of the same memory.
func drawLong(r *rand.Rand) []access {
	rows, rare := make([]access, 1+r.IntN(40)), 2
	if r.IntN(30) == 0 {
		rows, rare = make([]access, 3000), 30
	}
	step := []int64{4, 1 << 34}[r.IntN(2)]
	regions, types := 1+r.IntN(3), 1+r.IntN(3)
	space := 1 + r.Uint64N(500)
	base := []uint64{0, 0x7f0000000000, 1<<63 - 2048, math.MaxUint64 - 4<<20}[r.IntN(4)]
	late := r.IntN(3) == 0
	now := int64(0)
	for i := range rows {
		now += r.Int64N(step)
		a := access{time: now, region: int64(r.IntN(regions)), op: trace.Op(r.IntN(2)), kind: kinds[r.IntN(types)]}
		if late && r.IntN(4) == 0 {
			a.time = r.Int64N(now + 1)
		}
		a.address = base + trace.PageSize*r.Uint64N(space) + []uint64{0, 8, 4088}[r.IntN(3)]
		a.page = a.address >> trace.PageShift
		if r.IntN(rare) == 0 {
			a.length = int64(1 + r.Uint64N(min(trace.PageSize*space, math.MaxUint64-a.address)))
		}
		rows[i] = a
	}
	return rows
}

// TestLongRows compares all tables with those of the same trace with a row for each page.
func TestLongRows(t *testing.T) {
	dir := t.TempDir()
	seeds := uint64(300)
	if testing.Short() {
		seeds = 18
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 7))
		rows := drawLong(r)
		o := Options{
			Tables:  append(Ten[:len(Ten):len(Ten)], Further...),
			Workers: []int{1, 4, 70}[seed%3], MemoryBytes: []int{1, 200, 0}[seed/3%3], SpillDir: dir,
			Bins: 3, CDFPoints: 100, Windows: 1 + r.IntN(8), Top: 3,
		}
		got, err := analysed(rows, o, 1+r.IntN(10))
		if err != nil {
			t.Fatalf("seed %d: %v", seed, err)
		}
		want := reference(rows)
		for name, columns := range furtherReference(rows, o) {
			want[name] = columns
		}
		if err := difference(got, want); err != nil {
			t.Fatalf("seed %d, %d workers, %d rows %+v: %v", seed, o.Workers, len(rows), rows, err)
		}
	}
}

// model returns a trace like that of a real generation: one large weight region, many KV blocks that
// are written once and read often, and short-lived activations.
func model(n int, seed uint64) []access {
	r := rand.New(rand.NewPCG(seed, 2))
	rows := make([]access, n)
	now := int64(1e18)
	for i := range rows {
		now += 1 + r.Int64N(200)
		a := access{time: now}
		switch p := r.IntN(10); {
		case p < 4:
			a.region, a.kind, a.address = 1, "weight", 0x7f0000000000+64*uint64(r.IntN(100_000))
			if i < n/20 {
				a.op = trace.Store
			}
		case p < 8:
			block := r.IntN(min(4000, 1+i/100))
			a.region, a.kind, a.address = int64(2+block), "kv_cache", 0x7e0000000000+256*uint64(block*16+r.IntN(16))
			a.op = trace.Op(r.IntN(8) / 7)
		default:
			page := r.IntN(500)
			a.region, a.kind, a.address = int64(10_000+page), "activation", 0x7d0000000000+4096*uint64(page)+64*uint64(r.IntN(64))
			a.op = trace.Op(r.IntN(2))
		}
		a.page = a.address >> trace.PageShift
		rows[i] = a
	}
	return rows
}

// TestLarge analyses several blocks, chunks and sorted runs, with everything in memory and with nearly
// nothing in memory. Each pair of order, memory and workers occurs, and with STRAP_LONG each triple.
func TestLarge(t *testing.T) {
	n := 150_000
	if testing.Short() {
		n = 65_000
	}
	ordered := model(n, 1)
	disordered := slices.Clone(ordered)
	r := rand.New(rand.NewPCG(3, 3))
	for i := 60_000; i < len(disordered); i++ {
		j := i - r.IntN(50_000)
		disordered[i], disordered[j] = disordered[j], disordered[i]
	}
	for o, rows := range [][]access{ordered, disordered} {
		name := []string{"ordered", "disordered"}[o]
		want := reference(rows)
		for m, memory := range []int{0, 100_000, 1} {
			for w, workers := range []int{1, 2, 8} {
				if (o+m+w)%2 == 1 && os.Getenv("STRAP_LONG") == "" {
					continue
				}
				if testing.Short() && m != w {
					continue
				}
				got, err := analysed(rows, Options{Workers: workers, MemoryBytes: memory, SpillDir: t.TempDir()}, 20_000, 70_000)
				if err != nil {
					t.Fatal(err)
				}
				if err := difference(got, want); err != nil {
					t.Errorf("%s, %d workers, %d bytes: %v", name, workers, memory, err)
				}
			}
		}
	}
}

// TestColumns checks the documented columns and their types, on an empty trace.
func TestColumns(t *testing.T) {
	want := map[string]string{
		RetentionPerRegion:  "region_id: int64, region_type: utf8, first_write_ns: int64, last_read_ns: int64, retention_ns: int64, retention_s: float64",
		RetentionSummary:    "region_type: utf8, n_regions: int64, retention_p50_s: float64, retention_p90_s: float64, retention_p99_s: float64, retention_mean_s: float64",
		WriteOnce:           "region_id: int64, region_type: utf8, n_written_addresses: int64, n_write_once_addresses: int64, write_once_ratio: float64",
		ReadFreq:            "region_id: int64, region_type: utf8, total_reads: int64, total_writes: int64, total_accesses: int64, read_fraction: float64, reads_per_write: float64",
		WorkingSetPerRegion: "region_id: int64, unique_pages: int64, region_type: utf8, working_set_bytes: int64",
		WorkingSetSummary:   "region_type: utf8, n_regions: int64, total_pages: int64, total_bytes: int64, mean_pages_per_region: float64, max_pages_per_region: int64",
		LocalityPerRegion:   "region_id: int64, region_type: utf8, n_accesses: int64, mean_stride_bytes: float64, median_stride_bytes: float64, same_page_fraction: float64",
		LocalitySummary:     "region_type: utf8, mean_stride_bytes: float64, median_stride_bytes: float64, same_page_fraction: float64",
		IAI:                 "region_type: utf8, n_intervals: int64, iai_p50_ns: int64, iai_p90_ns: int64, iai_p99_ns: int64, iai_mean_ns: float64",
		Suitability:         "region_type: utf8, write_once_ratio_mean: float64, retention_p99_s: float64, retention_p50_s: float64, suitability: utf8",
	}
	checkColumns(t, Ten, want)
}

func checkColumns(t *testing.T, names []string, want map[string]string) {
	for _, empty := range []bool{true, false} {
		a, err := New(Options{Tables: names})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		if !empty {
			r := record(model(100, 1))
			defer r.Release()
			if err := a.Add(r); err != nil {
				t.Fatal(err)
			}
		}
		tables, err := a.Finish()
		if err != nil {
			t.Fatal(err)
		}
		for i, table := range tables {
			if table.Name != names[i] {
				t.Errorf("table %d is %s", i, table.Name)
			}
			if empty != (table.Record.NumRows() == 0) {
				t.Errorf("%s has %d rows", table.Name, table.Record.NumRows())
			}
			var got []string
			for _, f := range table.Record.Schema().Fields() {
				got = append(got, f.Name+": "+f.Type.String())
			}
			if strings.Join(got, ", ") != want[table.Name] {
				t.Errorf("%s has columns %s", table.Name, strings.Join(got, ", "))
			}
			table.Record.Release()
		}
	}
}

// TestKnownTruth is the documented example: weights that are written once and read for 30 seconds are
// high_mrm.
func TestKnownTruth(t *testing.T) {
	var rows []access
	for i := range 100 {
		rows = append(rows, access{time: 0, address: uint64(i) * 4096, page: uint64(i), op: trace.Store, region: 1, kind: "weight"})
	}
	for i := range 100 {
		rows = append(rows, access{time: 30e9, address: uint64(i) * 4096, page: uint64(i), region: 1, kind: "weight"})
	}
	got, err := analysed(rows, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for table, want := range map[string]cells{
		Suitability: {
			"region_type": {"weight"}, "write_once_ratio_mean": {1.0}, "retention_p99_s": {30.0}, "retention_p50_s": {30.0},
			"suitability": {"high_mrm"},
		},
		IAI: {
			"region_type": {"weight"}, "n_intervals": {int64(100)}, "iai_p50_ns": {int64(30e9)}, "iai_p90_ns": {int64(30e9)},
			"iai_p99_ns": {int64(30e9)}, "iai_mean_ns": {30e9},
		},
	} {
		if !reflect.DeepEqual(got[table], want) {
			t.Errorf("%s is %v", table, got[table])
		}
	}
}

// TestBeyondFloats has integers that no float64 holds exactly.
func TestBeyondFloats(t *testing.T) {
	const base = 1 << 62
	rows := []access{
		{time: base + 1, address: 1, op: trace.Store, region: 1, kind: "weight"},
		{time: base + 3, address: math.MaxUint64, page: math.MaxUint64 >> trace.PageShift, region: 1, kind: "weight"},
		{time: math.MaxInt64, address: 1, region: 1, kind: "weight"},
	}
	got, err := analysed(rows, Options{})
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range []struct {
		table, column string
		want          any
	}{
		{RetentionPerRegion, "first_write_ns", int64(base + 1)},
		{RetentionPerRegion, "last_read_ns", int64(math.MaxInt64)},
		{RetentionPerRegion, "retention_ns", int64(math.MaxInt64 - base - 1)},
		{IAI, "iai_p99_ns", int64(math.MaxInt64 - base - 1)},
		{LocalityPerRegion, "median_stride_bytes", float64(math.MaxUint64 - 1)},
	} {
		if g := got[v.table][v.column][0]; g != v.want {
			t.Errorf("%s.%s = %v, not %v", v.table, v.column, g, v.want)
		}
	}
}

func TestKinds(t *testing.T) {
	for kind, full := range map[trace.Kind][]string{
		trace.FirstTouches: {WorkingSetPerRegion, WorkingSetSummary},
		trace.WriteSets:    {WorkingSetPerRegion, WorkingSetSummary},
		trace.Allocations:  {RetentionPerRegion, RetentionSummary, WorkingSetPerRegion, WorkingSetSummary},
		trace.Accesses:     Ten,
	} {
		got, err := analysed(model(1000, 1), Options{Kind: kind})
		if err != nil {
			t.Fatal(err)
		}
		for name, columns := range got {
			ok, why := Supports(kind, name)
			if ok != slices.Contains(full, name) || ok != (why == "") {
				t.Errorf("%s supports %s: %v, %q", kind, name, ok, why)
			}
			for column, v := range columns {
				if (len(v) > 0) != ok {
					t.Errorf("%s: %s.%s has %d rows", kind, name, column, len(v))
				}
			}
		}
	}
}

func TestOptionsAreChecked(t *testing.T) {
	for want, o := range map[string]Options{
		`"life_of_brian"`: {Tables: []string{"life_of_brian"}},
		`"dreams"`:        {Kind: "dreams"},
		"Workers = -1":    {Workers: -1},
		"Workers = 1000":  {Workers: 1000},
		"Bins = -2":       {Bins: -2},
	} {
		if _, err := New(o); !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestSomeTables(t *testing.T) {
	rows := model(1000, 1)
	want := reference(rows)
	for _, name := range Ten {
		got, err := analysed(rows, Options{Tables: []string{name}})
		if err != nil {
			t.Fatal(err)
		}
		if err := difference(got, map[string]cells{name: want[name]}); err != nil {
			t.Error(err)
		}
	}
}

func TestOrdered(t *testing.T) {
	rows := model(40_000, 1)
	got, err := analysed(rows, Options{Ordered: true})
	if err != nil {
		t.Fatal(err)
	}
	if err := difference(got, reference(rows)); err != nil {
		t.Error(err)
	}
	rows[30_000].time = 0
	if _, err := analysed(rows, Options{Ordered: true}); !errors.Is(err, ErrLate) || !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a late row of an ordered trace: %v", err)
	}
}

func TestBadRows(t *testing.T) {
	for want, row := range map[string]access{
		"timestamp_ns, row 1": {time: -1},
		"length_bytes, row 1": {length: trace.MostLength + 1},
	} {
		if _, err := analysed([]access{{kind: "weight"}, row}, Options{}); !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), want) {
			t.Errorf("%+v: %v", row, err)
		}
	}
}

func TestStates(t *testing.T) {
	r := record(model(10, 1))
	defer r.Release()
	a, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	tables, err := a.Finish()
	if err != nil {
		t.Fatal(err)
	}
	for _, table := range tables {
		table.Record.Release()
	}
	if err := a.Add(r); !errors.Is(err, status.InvalidState) {
		t.Errorf("Add after Finish: %v", err)
	}
	if _, err := a.Finish(); !errors.Is(err, status.InvalidState) {
		t.Errorf("Finish after Finish: %v", err)
	}
	a.Close()
	a.Close()
	if err := a.Add(r); !errors.Is(err, status.InvalidState) {
		t.Errorf("Add after Close: %v", err)
	}
}

// TestRowsThatFillAQuarterOfTheMemoryStayThere analyses rows with as much memory as they need, and a little less.
func TestRowsThatFillAQuarterOfTheMemoryStayThere(t *testing.T) {
	r := record(model(20_000, 1))
	defer r.Release()
	journalOf := func(memory int) *journal {
		a, err := New(Options{MemoryBytes: memory, SpillDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		defer a.Close()
		j := a.journal
		if err := a.Add(r); err != nil {
			t.Fatal(err)
		}
		tables, err := a.Finish()
		if err != nil {
			t.Fatal(err)
		}
		for _, table := range tables {
			table.Record.Release()
		}
		return j
	}
	need := int(4 * journalOf(1<<30).held)
	if journalOf(need).moved > 0 {
		t.Error("rows are in a file that fit the memory")
	}
	if journalOf(need-4).moved == 0 {
		t.Error("more than a quarter of the memory has rows")
	}
}

// TestSpillFails checks that the error of a failed spill names the folder and a way out, whichever
// stage spills first.
func TestSpillFails(t *testing.T) {
	n := 100_000
	if testing.Short() {
		n = 20_000
	}
	ordered, late := model(n, 1), model(n, 1)
	slices.Reverse(late)
	for name, rows := range map[string][]access{"ordered": ordered, "late": late} {
		dir := t.TempDir() + "/gone"
		_, err := analysed(rows, Options{MemoryBytes: 1, SpillDir: dir})
		if !errors.Is(err, status.NotFound) || !strings.Contains(err.Error(), dir) || !strings.Contains(err.Error(), "more memory") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestSpillIsFull replaces the spill by /dev/full, where writes fail as on a full disk.
func TestSpillIsFull(t *testing.T) {
	a, err := New(Options{MemoryBytes: 1, SpillDir: t.TempDir(), Ordered: true})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	full, err := os.OpenFile("/dev/full", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no /dev/full on this system")
	}
	a.spill.file = full
	n := 100_000
	if testing.Short() {
		n = 20_000
	}
	r := record(model(n, 1))
	defer r.Release()
	if err = a.Add(r); err == nil {
		_, err = a.Finish()
	}
	if !errors.Is(err, status.NoSpace) || !strings.Contains(err.Error(), a.options.SpillDir) {
		t.Errorf("full disk: %v", err)
	}
}

// TestCloseAnyTime calls Close while rows are added and sorted and quantiles are selected.
func TestCloseAnyTime(t *testing.T) {
	before := runtime.NumGoroutine()
	n := 200_000
	if testing.Short() {
		n = 40_000
	}
	rows := model(n, 1)
	slices.Reverse(rows)
	r := record(rows)
	defer r.Release()
	for after := time.Duration(0); after < 200*time.Millisecond; after = after*2 + time.Millisecond/4 {
		a, err := New(Options{MemoryBytes: 1000, SpillDir: t.TempDir()})
		if err != nil {
			t.Fatal(err)
		}
		closed := make(chan struct{})
		go func() {
			defer close(closed)
			time.Sleep(after)
			a.Close()
		}()
		err = a.Add(r)
		if err == nil {
			var tables []Table
			tables, err = a.Finish()
			for _, table := range tables {
				table.Record.Release()
			}
		}
		if err != nil && !errors.Is(err, status.InvalidState) {
			t.Errorf("closed after %v: %v", after, err)
		}
		<-closed
	}
	for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}

type panics struct{}

func (panics) take(*block) error { panic("out of luck") }

// TestPanic checks that a panic in a stage becomes an error.
func TestPanic(t *testing.T) {
	p := newPipeline([]stage{panics{}}, 1)
	defer p.stop()
	b, err := p.block()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.put(b); err != nil {
		t.Fatal(err)
	}
	if err := p.drain(); !errors.Is(err, status.Internal) || !strings.Contains(err.Error(), "out of luck") {
		t.Errorf("drain after a panic: %v", err)
	}
}
