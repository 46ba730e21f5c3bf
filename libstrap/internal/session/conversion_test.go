// Tests of tensors that the caller has converted to float16.

package session

import (
	"bytes"
	"errors"
	"maps"
	"math"
	"math/rand/v2"
	"path/filepath"
	"slices"
	"testing"
	"time"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// convertedBefore returns v as float16, with its Conversion, as from a caller that converted it.
func convertedBefore(layer uint32, v []float32, shape ...int64) *Tensor {
	out, loss := make([]uint16, len(v)), codec.Stats{}
	codec.Float32ToFloat16(unsafe.Pointer(unsafe.SliceData(out)), unsafe.Pointer(unsafe.SliceData(v)), len(v), 10, &loss)
	t := tensorOf(layer, wire.Float16, out, shape...)
	t.Conversion = &Conversion{Source: wire.Float32, Loss: loss}
	return t
}

// both captures v in two sessions, and returns the rows, payloads and statistics of each. Index 0
// is v as float32. Index 1 is v as float16 that the caller converted.
func both(t *testing.T, o Options, v []float32) (rows [2][]wire.Row, payloads [2][][]byte, stats [2]Stats) {
	t.Helper()
	for i, x := range []*Tensor{tensorOf(0, wire.Float32, v), convertedBefore(0, v)} {
		path := filepath.Join(t.TempDir(), "a.packets")
		s := open(t, path, o)
		x.Layer = mustLayer(t, s, "x")
		enqueue(t, s, x)
		finish(t, s)
		rows[i], payloads[i] = read(t, path)
		stats[i] = s.Stats()
	}
	return rows, payloads, stats
}

// near reports whether two sums may be of the same numbers. Each may exceed the true sum by a
// factor of at most 1 + 2e-6.
func near(a, b float64) bool {
	return a == b || math.IsNaN(a) && math.IsNaN(b) || math.Abs(a-b) <= 2e-6*math.Abs(b)
}

// A tensor that the caller converted gives the same bytes, row and statistics as one that the
// library converts.
func TestACallersConversionIsReportedAsTheLibrarysOwn(t *testing.T) {
	atEveryLevelPaired(t, func(t *testing.T, tries func(i, j int) bool) {
		nan, inf := float32(math.NaN()), float32(math.Inf(1))
		v := normals(200_000)
		of := map[string][]float32{
			"normal":     v[:30_000],
			"streamed":   normals(500_000),
			"subnormal":  float32s(5000, func(i int) float32 { return v[i] * 1e-7 }),
			"tiny":       float32s(5000, func(i int) float32 { return v[i] * 1e-20 }),
			"exact":      float32s(5000, func(i int) float32 { return float32(i % 2048) }),
			"zeros":      make([]float32, 1000),
			"not finite": {1.1, nan, inf, -inf, 0, 3.3},
			"all NaN":    {nan, nan},
			"one":        {1.4142135},
			"empty":      {},
		}
		for i, name := range slices.Sorted(maps.Keys(of)) {
			values := of[name]
			for j, k := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd, codec.Archive} {
				if !tries(i, j) {
					continue
				}
				t.Run(name+" "+k.String(), func(t *testing.T) {
					o := options(k)
					o.MaxMemory = 1 << 20
					rows, payloads, stats := both(t, o, values)
					own, told := rows[0][0], rows[1][0]
					if !bytes.Equal(payloads[0][0], payloads[1][0]) || own.CRC != told.CRC || own.Codec != told.Codec {
						t.Error("other bytes are stored")
					}
					if told.Source != wire.Float32 || told.Stored != wire.Float16 {
						t.Errorf("%s stored as %s", told.Source, told.Stored)
					}
					if !near(told.MSE, own.MSE) || !near(told.MeanSquare, own.MeanSquare) || told.Mantissa != 0 {
						t.Errorf("%g of %g, the library's own is %g of %g", told.MSE, told.MeanSquare, own.MSE, own.MeanSquare)
					}
					a, b := stats[0], stats[1]
					if a.RawBytes != b.RawBytes || a.Convert.Count != b.Convert.Count ||
						!near(a.Convert.SquareError, b.Convert.SquareError) || !near(a.Convert.SquareSum, b.Convert.SquareSum) ||
						!near(a.Convert.MaxError, b.Convert.MaxError) {
						t.Errorf("%+v instead of %+v", b, a)
					}
				})
			}
		}
	})
}

// After a caller's conversion, the library rounds as far as the bound allows for both errors
// together. The row reports at least the error of both.
func TestRoundingAfterAConversionKeepsTheBound(t *testing.T) {
	atEveryLevelPaired(t, func(t *testing.T, tries func(i, j int) bool) {
		v := normals(500_000)
		of := map[string][]float32{
			"normal":     v[:30_000],
			"streamed":   v,
			"worst case": float32s(5000, func(int) float32 { return 1.015 }),
			"small":      float32s(5000, func(i int) float32 { return v[i] * 2e-5 }), // some are subnormal
			"subnormal":  float32s(5000, func(i int) float32 { return v[i] * 1e-6 }),
		}
		for i, name := range slices.Sorted(maps.Keys(of)) {
			values := of[name]
			for j, bound := range []float64{1e-6, 1e-4, 1e-2} {
				if !tries(i, j) {
					continue
				}
				t.Run(name, func(t *testing.T) {
					o := options(codec.Zstd)
					o.MaxMemory, o.ErrorBound = 1<<20, bound
					rows, payloads, stats := both(t, o, values)
					own, told := rows[0][0], rows[1][0]
					mse, normalised := errorOf(values, payloads[1][0])
					if told.MSE < mse*(1-1e-10) || told.MSE > 5*mse {
						t.Errorf("mse %g, reported %g", mse, told.MSE)
					}
					if told.Mantissa > 0 && (normalised > bound || told.MSE > bound*told.MeanSquare*(1+1e-12)) {
						t.Errorf("normalised error %g, reported %g, bound %g", normalised, told.MSE/told.MeanSquare, bound)
					}
					if told.Mantissa != own.Mantissa && told.Mantissa != own.Mantissa+1 && told.Mantissa != 0 {
						t.Errorf("%d bits of mantissa, the library's own are %d", told.Mantissa, own.Mantissa)
					}
					if c := stats[1].Convert; c.Count != int64(len(values)) || !near(c.SquareError, told.MSE*float64(c.Count)) {
						t.Errorf("%+v, the row says %g", c, told.MSE)
					}
				})
			}
		}
	})
}

// The conversion's error and the error that left allows for rounding stay within the bound
// together. A conversion without an error leaves the whole bound.
func TestWhatABoundLeavesForRounding(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 5))
	for range 10_000 {
		before, bound := math.Exp(-30*rng.Float64()), math.Exp(-20*rng.Float64())
		c := &Conversion{Loss: codec.Stats{Count: 1, SquareError: before, SquareSum: 1}}
		left := c.left(bound)
		if left == 0 {
			if before < bound && math.Sqrt(before)*(1+1e-12) < math.Sqrt(bound) {
				t.Fatalf("nothing is left of %g after %g", bound, before)
			}
			continue
		}
		largest := 1 + math.Sqrt(before) // norm of the converted values
		rounding := codec.Stats{SquareError: left * largest * largest}
		if joined := c.joined(1, &rounding); joined.SquareError > bound*(1+1e-12) {
			t.Fatalf("%g of %g after %g", joined.SquareError, bound, before)
		}
	}
	for _, c := range []*Conversion{nil, {}, {Loss: codec.Stats{Count: 1, SquareSum: 1}}} {
		if c.left(bound) != bound {
			t.Errorf("%+v leaves %g", c, c.left(bound))
		}
	}
}

// Each part of a split tensor reports the tensor's mean errors. The counters count the conversion
// once.
func TestPartsShareAConversionEvenly(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		v := float32s(1000, func(i int) float32 { return float32(math.Sqrt(float64(i))) })
		v[7] = float32(math.NaN())
		o := options(codec.None)
		o.split = 2 * 300
		rows, payloads, stats := both(t, o, v)
		if len(rows[1]) != 4 || !bytes.Equal(bytes.Join(payloads[1], nil), halves(v)) {
			t.Fatalf("%d parts, or others than the elements", len(rows[1]))
		}
		c := stats[0].Convert
		for i, row := range rows[1] {
			// A part's share of the values may not be a whole number, so its count is rounded up.
			if mse, n := c.SquareError/float64(c.Count), float64(len(payloads[1][i])/2); math.Abs(row.MSE-mse) > mse/n ||
				row.Source != wire.Float32 || row.Parts != 4 {
				t.Errorf("part %d of %d: mse %g instead of %g", i, row.Parts, row.MSE, mse)
			}
		}
		if got := stats[1].Convert; got.Count != 999 || !near(got.SquareError, c.SquareError) || stats[1].RawBytes != 4000 {
			t.Errorf("%+v, %d bytes instead of %+v", got, stats[1].RawBytes, c)
		}
	})
}

// Once a part of the tensor is taken, repeated calls need not give the loss again.
func TestAConversionOutlivesATimeout(t *testing.T) {
	o := options(codec.None)
	o.MaxMemory = 1 << 20
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	v := normals(4_000_000)
	x := convertedBefore(mustLayer(t, s, "x"), v)
	loss := x.Conversion.Loss
	calls := 0
	for err := status.New(status.Timeout, ""); err != nil; calls++ {
		if err = s.Enqueue(x, 0); err != nil && !errors.Is(err, status.Timeout) {
			t.Fatal(err)
		}
		if x.Cursor&1 != 0 { // a part of the tensor is taken
			x.Conversion = &Conversion{Source: wire.Float32} // the session knows the loss
		}
		time.Sleep(100 * time.Microsecond)
	}
	finish(t, s)
	if calls < 2 {
		t.Skip("it went in at once")
	}
	rows, _ := read(t, path)
	if got := s.Stats(); got.Convert != loss || got.RawBytes != 16_000_000 || rows[0].Source != wire.Float32 ||
		!near(rows[0].MSE, loss.SquareError/float64(loss.Count)) {
		t.Errorf("%+v, row %+v after %d calls", got.Convert, rows[0], calls)
	}
}

// A dropped tensor that the caller converted counts with the size and type of its float32 values.
func TestADroppedConversionCountsItsSource(t *testing.T) {
	o := options(codec.None)
	o.MaxMemory, o.DropOnFull = 1<<20, true
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	layer := mustLayer(t, s, "x")
	v := normals(100_000)
	for s.Stats().Dropped == 0 {
		if err := s.Enqueue(convertedBefore(layer, v), forever); err != nil && !errors.Is(err, ErrDropped) {
			t.Fatal(err)
		}
	}
	finish(t, s)
	rows, _ := read(t, path)
	if st, last := s.Stats(), rows[len(rows)-1]; st.DroppedBytes != 400_000 || last.Source != wire.Float32 || last.Error == "" {
		t.Errorf("%d bytes dropped, %+v", st.DroppedBytes, last)
	}
}

func TestInvalidConversionsAreRefused(t *testing.T) {
	o := options(codec.None)
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), o)
	o.KeepFloat32 = true
	keeps := open(t, filepath.Join(t.TempDir(), "b.stream"), o)
	good := func(s *Session) *Tensor { return convertedBefore(mustLayer(t, s, "x"), []float32{1, 2.2}) }
	for name, change := range map[string]func(x *Tensor){
		"type":   func(x *Tensor) { x.DType = wire.BFloat16 },
		"source": func(x *Tensor) { x.Conversion.Source = wire.Float64 },
		"more":   func(x *Tensor) { x.Conversion.Loss.Count = 3 },
		"less":   func(x *Tensor) { x.Conversion.Loss.Count = -1 },
		"none":   func(x *Tensor) { x.Conversion.Loss.Count = 0 },
		"error":  func(x *Tensor) { x.Conversion.Loss.SquareError = math.NaN() },
		"sum":    func(x *Tensor) { x.Conversion.Loss.SquareSum = math.Inf(1) },
		"max":    func(x *Tensor) { x.Conversion.Loss.MaxError = -1e-300 },
	} {
		x := good(s)
		change(x)
		if err := s.Enqueue(x, forever); !errors.Is(err, status.InvalidArgument) {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := keeps.Enqueue(good(keeps), forever); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a session that keeps float32: %v", err)
	}
	if n := s.Stats().Tensors + keeps.Stats().Tensors; n != 0 {
		t.Errorf("%d tensors were counted", n)
	}
	enqueue(t, s, good(s))
	finish(t, s)
}
