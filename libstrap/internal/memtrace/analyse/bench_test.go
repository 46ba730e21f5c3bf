package analyse

import (
	"fmt"
	"math/rand/v2"
	"syscall"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// BenchmarkTen makes the ten tables of traces like those of a real generation (see model). The traces
// are in memory, in batches of a million rows.
func BenchmarkTen(b *testing.B) {
	for _, millions := range []int{1, 20} {
		for _, ordered := range []bool{false, true} {
			b.Run(fmt.Sprintf("rows=%dM/ordered=%v", millions, ordered), func(b *testing.B) {
				batches := modelBatches(millions)
				defer release(batches)
				b.ReportAllocs()
				before := processTime(b)
				for b.Loop() {
					analyseBatches(b, Options{Ordered: ordered}, batches)
				}
				b.ReportMetric(float64(processTime(b)-before)/float64(b.N)/float64(millions*1e6), "cpu-ns/row")
				b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N)/float64(millions*1e6), "ns/row")
			})
		}
	}
}

// BenchmarkEach makes one table at a time.
func BenchmarkEach(b *testing.B) {
	batches := modelBatches(1)
	defer release(batches)
	for _, name := range append(Ten[:len(Ten):len(Ten)], Further...) {
		b.Run(name, func(b *testing.B) {
			for b.Loop() {
				analyseBatches(b, Options{Tables: []string{name}, Ordered: true}, batches)
			}
		})
	}
}

// processTime returns the processor time of the process in ns. Unlike wall time it is comparable on a
// machine that others use too.
func processTime(b *testing.B) int64 {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		b.Fatal(err)
	}
	return u.Utime.Nano() + u.Stime.Nano()
}

func analyseBatches(b *testing.B, o Options, batches []arrow.Record) {
	a, err := New(o)
	if err != nil {
		b.Fatal(err)
	}
	defer a.Close()
	for _, r := range batches {
		if err := a.Add(r); err != nil {
			b.Fatal(err)
		}
	}
	tables, err := a.Finish()
	if err != nil {
		b.Fatal(err)
	}
	for _, t := range tables {
		t.Record.Release()
	}
}

func modelBatches(millions int) []arrow.Record {
	var batches []arrow.Record
	for i := range millions {
		rows := model(1e6, uint64(i))
		for j := range rows {
			rows[j].time += int64(i) * 1e9
		}
		batches = append(batches, record(rows))
	}
	return batches
}

func release(batches []arrow.Record) {
	for _, r := range batches {
		r.Release()
	}
}

// BenchmarkTables compares the tables of hash.go with Go's maps.
func BenchmarkTables(b *testing.B) {
	r := rand.New(rand.NewPCG(1, 1))
	keys := make([]uint64, 1_000_000)
	for i := range keys {
		keys[i] = 0x7f0000000000 + 64*uint64(r.IntN(200_000))
	}
	b.Run("own", func(b *testing.B) {
		for b.Loop() {
			var t times
			for i, k := range keys {
				*t.at(hash(k), k) = uint64(i) + 1
			}
		}
	})
	b.Run("map", func(b *testing.B) {
		for b.Loop() {
			t := map[uint64]uint64{}
			for i, k := range keys {
				t[k] = uint64(i) + 1
			}
		}
	})
}

// BenchmarkLengths makes all tables of a trace whose rows are whole tensors, like those of the torch
// tracer: weights that each token reads, a cache that grows, and short-lived activations.
func BenchmarkLengths(b *testing.B) {
	for _, pages := range []uint64{16, 80, 1000} {
		b.Run(fmt.Sprintf("pages=%d", pages), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 1))
			var rows []access
			add := func(kind string, region int64, address, pages uint64, op trace.Op) {
				rows = append(rows, access{
					time: int64(len(rows)), address: address, page: address >> trace.PageShift, op: op,
					region: region, kind: kind, length: int64(pages * trace.PageSize),
				})
			}
			for token := range 40 {
				for layer := range uint64(50) {
					add("weight", 1, 1<<40+layer*pages*trace.PageSize, pages, trace.Load)
					cache := 1<<41 + layer<<30
					add("kv_cache", int64(2+layer), cache+64*uint64(token), 1, trace.Store)
					add("kv_cache", int64(2+layer), cache, pages/4*(1+uint64(token)/8), trace.Load)
					at := 1<<42 + r.Uint64N(4*pages)*trace.PageSize
					add("activation", int64(100+r.IntN(50)), at, pages/2, trace.Store)
					add("activation", int64(100+r.IntN(50)), at, pages/2, trace.Load)
				}
			}
			batch := record(rows)
			defer batch.Release()
			o := Options{Tables: append(Ten[:len(Ten):len(Ten)], Further...), Ordered: true}
			for b.Loop() {
				analyseBatches(b, o, []arrow.Record{batch})
			}
		})
	}
}

// BenchmarkCutRow makes the reuse distances of the longest row, which single accesses then cut into
// pieces.
func BenchmarkCutRow(b *testing.B) {
	for _, millions := range []int{1, 2, 4} {
		b.Run(fmt.Sprintf("rows=%dM", millions), func(b *testing.B) {
			r := rand.New(rand.NewPCG(1, 1))
			rows := []access{{kind: "weight", region: 1, length: trace.MostLength}}
			for i := range millions * 1_000_000 {
				page := r.Uint64N(trace.MostLength / trace.PageSize)
				rows = append(rows, access{
					time: int64(i) + 1, address: page * trace.PageSize, page: page, kind: "weight", region: 1,
				})
			}
			batch := record(rows)
			defer batch.Release()
			b.ReportAllocs()
			before := processTime(b)
			for b.Loop() {
				analyseBatches(b, Options{Tables: []string{ReuseDistanceHistogram}, Ordered: true}, []arrow.Record{batch})
			}
			b.ReportMetric(float64(processTime(b)-before)/float64(b.N)/float64(len(rows)), "cpu-ns/row")
		})
	}
}
