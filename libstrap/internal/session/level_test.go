package session

import (
	"bytes"
	"os"
	"path/filepath"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// atEveryLevel runs a test once for each level of the codecs' loops that this processor supports.
func atEveryLevel(t *testing.T, test func(t *testing.T)) {
	for _, level := range codec.Levels() {
		t.Run(level, func(t *testing.T) {
			defer codec.UseLevel(codec.UseLevel(level))
			test(t)
		})
	}
}

// atEveryLevelPaired runs a test as atEveryLevel does. tries reports whether to try the i-th value of an option
// with the j-th value of another one at this level. Each value occurs at each level, and each pair of values
// at one level; with STRAP_LONG, each pair occurs at each level.
func atEveryLevelPaired(t *testing.T, test func(t *testing.T, tries func(i, j int) bool)) {
	levels, level := codec.Levels(), 0
	atEveryLevel(t, func(t *testing.T) {
		at := level
		level++
		test(t, func(i, j int) bool { return os.Getenv("STRAP_LONG") != "" || (i+j+at)%len(levels) == 0 })
	})
}

// Without an error bound a capture is the same on every processor that has kernels. With a bound it
// is the same too, unless the error of a packet is within 2e-6 of the bound. The sums of squared
// errors differ between the levels by that much, and they decide how many bits are kept. The values
// here are not so close to the bound.
func TestEveryLevelWritesTheSameStream(t *testing.T) {
	values := normals(50_000)
	words := make([]uint16, len(values))
	for i, v := range values {
		words[i] = uint16(i) ^ uint16(v*1000)
	}
	for _, k := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd, codec.Archive} {
		for _, bound := range []float64{0, 1e-3} {
			var first []byte
			var firstRows []wire.Row
			for i, level := range codec.Levels() {
				if k == codec.Zstd && level == "portable" {
					continue // "portable" encodes zstd payloads in another way; see codec.NewEncoder
				}
				before := codec.UseLevel(level)
				o := options(k)
				o.ErrorBound = bound
				path := filepath.Join(t.TempDir(), "a.packets")
				s := open(t, path, o)
				layer := mustLayer(t, s, "x")
				enqueue(t, s, tensorOf(layer, wire.Float32, values))
				enqueue(t, s, tensorOf(layer, wire.Float16, words))
				enqueue(t, s, tensorOf(layer, wire.BFloat16, words))
				finish(t, s)
				codec.UseLevel(before)
				stream, err := os.ReadFile(path)
				if err != nil {
					t.Fatal(err)
				}
				rows, _ := read(t, path)
				if i == 0 {
					first, firstRows = stream, rows
					continue
				}
				if !bytes.Equal(stream, first) {
					t.Errorf("%s, bound %g: %s writes another stream than %s", k, bound, level, codec.Levels()[0])
				}
				for i, row := range rows {
					if of := firstRows[i]; row.CRC != of.CRC || row.Mantissa != of.Mantissa || !near(row.MSE, of.MSE) {
						t.Errorf("%s, bound %g: %s says %+v, %s %+v", k, bound, level, row, codec.Levels()[0], of)
					}
				}
			}
		}
	}
}
