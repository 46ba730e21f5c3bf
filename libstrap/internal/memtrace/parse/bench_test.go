package parse

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
)

// documented writes a line of about 120 bytes with the columns in the documented order.
func documented(b *bytes.Buffer, r *rand.Rand, now int64) {
	event := "cpu/mem-loads,ldlat=30/P"
	if r.IntN(4) == 0 {
		event = "cpu/mem-stores/P"
	}
	fmt.Fprintf(b, "%16s %5d [%03d] %5d.%06d: %10d %24s: %16x %s+0x%x (%s)\n", "llama-cli", 18000+r.IntN(8), r.IntN(16),
		now/1e6, now%1e6, 4000, event, 0x7f0000000000+r.Uint64N(1<<32), symbols[r.IntN(len(symbols))], r.IntN(4096), dsos[r.IntN(len(dsos))])
}

// memRecord writes a line with the columns of `perf mem record`.
func memRecord(b *bytes.Buffer, r *rand.Rand, now int64) {
	fmt.Fprintf(b, "%16s %5d/%-5d %5d.%06d: %10d %24s: %16x %16x |OP LOAD|LVL L1 hit|SNP None|TLB L1 or L2 hit|LCK No|BLK  N/A        %16d %16x %s+0x%x (%s)\n",
		"llama-cli", 18000, 18000+r.IntN(8), now/1e6, now%1e6, 4000, "cpu/mem-loads,ldlat=30/P",
		0x7f0000000000+r.Uint64N(1<<32), 0x68100142, 20+r.IntN(300), 0x550000000000+r.Uint64N(1<<20), symbols[r.IntN(len(symbols))], r.IntN(4096), dsos[r.IntN(len(dsos))])
}

var symbols, dsos = func() ([]string, []string) {
	r := rand.New(rand.NewPCG(1, 2))
	var s []string
	for i := range 500 {
		s = append(s, fmt.Sprintf("ggml_%s_%d", []string{"vec_dot_q4_0_q8_0", "mul_mat", "rope", "add"}[r.IntN(4)], i))
	}
	return s, []string{"/usr/lib/libggml-cpu.so", "/usr/lib/libllama.so", "[kernel.kallsyms]", "/usr/bin/llama"}
}()

func lackeyLine(b *bytes.Buffer, r *rand.Rand, _ int64) {
	fmt.Fprintf(b, "%s %x,%d\n", []string{"I ", " L", " S", " M"}[r.IntN(4)], 0x4000000+r.IntN(1<<24), 1<<r.IntN(4))
}

// generate writes a text of at least size bytes to a file. It returns its bytes and lines.
func generate(t testing.TB, path string, line func(*bytes.Buffer, *rand.Rand, int64), size int64) (written, lines int64) {
	file, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	r := rand.New(rand.NewPCG(3, 4))
	var text bytes.Buffer
	for written < size {
		for range 1000 {
			line(&text, r, 15333_000000+lines*3)
			lines++
		}
		written += int64(text.Len())
		if _, err := text.WriteTo(file); err != nil {
			t.Fatal(err)
		}
	}
	return written, lines
}

func benchmark(b *testing.B, format Format, line func(*bytes.Buffer, *rand.Rand, int64)) {
	path := filepath.Join(b.TempDir(), "text")
	size, lines := generate(b, path, line, 300<<20)
	b.SetBytes(size)
	b.ReportAllocs()
	for b.Loop() {
		s, err := Open(format, path, Options{RunID: "r"})
		if err != nil {
			b.Fatal(err)
		}
		for s.Next() {
		}
		if c := s.Counts(); s.Err() != nil || c.Lines != lines || c.Malformed != 0 {
			b.Fatalf("%+v, %v", c, s.Err())
		}
		s.Release()
	}
	b.ReportMetric(float64(lines)*float64(b.N)/b.Elapsed().Seconds()/1e6, "Mlines/s")
	b.ReportMetric(float64(size)/float64(lines), "B/line")
}

func BenchmarkPerfScriptDocumented(b *testing.B) { benchmark(b, PerfScript, documented) }
func BenchmarkPerfScriptMemRecord(b *testing.B)  { benchmark(b, PerfScript, memRecord) }
func BenchmarkLackey(b *testing.B)               { benchmark(b, Lackey, lackeyLine) }
