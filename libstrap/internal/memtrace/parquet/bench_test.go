package parquet

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// accesses returns rows like those of perf: rising times, addresses without order, hundreds of
// symbols.
func accesses(firstID, n int) arrow.Record {
	r := rand.New(rand.NewPCG(1, uint64(firstID)))
	b := array.NewRecordBuilder(memory.DefaultAllocator, trace.Schema(trace.Accesses))
	defer b.Release()
	for i := range n {
		address := 0x7f0000000000 + r.Uint64N(1<<32)
		for j, field := range b.Schema().Fields() {
			switch column := b.Field(j).(type) {
			case *array.Uint64Builder:
				column.Append(address)
				address >>= trace.PageShift
			case *array.Int64Builder:
				switch field.Name {
				case "sample_id", "timestamp_ns":
					column.Append(int64(firstID + i))
				case "cpu_id", "thread_id":
					column.Append(r.Int64N(8))
				case "region_id":
					column.Append(0)
				default:
					column.AppendNull()
				}
			case *array.BinaryDictionaryBuilder:
				text := "the same"
				if field.Name == "symbol" {
					text = fmt.Sprintf("ggml_vec_dot_%d", r.IntN(500))
				}
				if err := column.AppendString(text); err != nil {
					panic(err)
				}
			}
		}
	}
	return b.NewRecord()
}

func BenchmarkWriteTrace(b *testing.B) {
	const rows = 1 << 16
	records := make([]arrow.Record, 32)
	for i := range records {
		records[i] = accesses(i*rows, rows)
		defer records[i].Release()
	}
	path := filepath.Join(b.TempDir(), "t.parquet")
	b.ReportAllocs()
	for b.Loop() {
		w, err := NewWriter(path, trace.Schema(trace.Accesses), Options{})
		if err != nil {
			b.Fatal(err)
		}
		for _, record := range records {
			if err := w.Write(record); err != nil {
				b.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			b.Fatal(err)
		}
	}
	info, err := os.Stat(path)
	if err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(rows*float64(len(records)*b.N)/b.Elapsed().Seconds()/1e6, "Mrows/s")
	b.ReportMetric(float64(info.Size())/rows/float64(len(records)), "B/row")
}
