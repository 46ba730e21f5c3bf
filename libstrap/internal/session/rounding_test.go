// Tests of rounding within an error bound.

package session

import (
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"path/filepath"
	"testing"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const bound = 1e-4

// rounded captures one tensor with the error bound, and returns its first row and the 16-bit words
// of its first payload.
func rounded(t *testing.T, o Options, x *Tensor) (wire.Row, []uint16) {
	t.Helper()
	o.ErrorBound = bound
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	x.Layer = mustLayer(t, s, "x")
	enqueue(t, s, x)
	finish(t, s)
	rows, payloads := read(t, path)
	stored := make([]uint16, len(payloads[0])/2)
	for i := range stored {
		stored[i] = binary.LittleEndian.Uint16(payloads[0][2*i:])
	}
	return rows[0], stored
}

// float16Of widens a float16 word with the standard library alone, independently of the codecs.
func float16Of(w uint16) float64 {
	sign, exponent, fraction := 1.0, int(w>>10&0x1F), float64(w&0x3FF)/1024
	if w>>15 == 1 {
		sign = -1
	}
	switch exponent {
	case 0:
		return sign * math.Ldexp(fraction, -14)
	case 31:
		return sign * math.Inf(1) * (1 - fraction) // infinity, or NaN
	}
	return sign * math.Ldexp(1+fraction, exponent-15)
}

func bfloat16Of(w uint16) float64 { return float64(math.Float32frombits(uint32(w) << 16)) }

// compare checks that a row tells the error of the stored words against the values, that the error
// is within the bound, and that the words have no more bits of mantissa than the row says. full is
// how many the type has.
func compare(t *testing.T, row wire.Row, values []float64, stored []uint16, widen func(uint16) float64, full int) {
	t.Helper()
	var squareError, square, n float64
	for i, v := range values {
		if math.IsNaN(v) || math.IsInf(v, 0) {
			continue
		}
		e := v - widen(stored[i])
		squareError, square, n = squareError+e*e, square+v*v, n+1
		if low := stored[i] & (1<<(full-int(row.Mantissa)) - 1); low != 0 && row.Mantissa > 0 {
			t.Fatalf("%04x has more than %d bits of mantissa", stored[i], row.Mantissa)
		}
	}
	if squareError > bound*square && row.Mantissa != 0 {
		t.Errorf("normalised error %g", squareError/square)
	}
	if !justAbove(row.MSE*n, squareError) || !justAbove(row.MeanSquare*n, square) {
		t.Errorf("the row says %g of %g, it is %g of %g", row.MSE, row.MeanSquare, squareError/n, square/n)
	}
}

// justAbove reports whether a sum exceeds the exact one by a factor of at most 1 + 2e-6, as the
// index promises. A factor of 1 - 1e-10 is allowed too, because both sums are rounded to double.
func justAbove(sum, exact float64) bool { return sum >= exact*(1-1e-10) && sum <= exact*(1+2e-6) }

func wide(v []float32) []float64 {
	w := make([]float64, len(v))
	for i, x := range v {
		w[i] = float64(x)
	}
	return w
}

// float32 values are rounded to as few bits of mantissa as the bound allows; 0 bits means that they
// are not rounded.
func TestRoundingKeepsTheBound(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(1, 1))
		normal := func(int) float32 { return float32(rng.NormFloat64()) }
		for name, c := range map[string]struct {
			values []float32
			bits   int8
		}{
			"normal":        {float32s(100_000, normal), 5},
			"one value":     {[]float32{1.4142135}, 5},
			"a few large":   {float32s(5000, func(i int) float32 { return normal(i) * float32(1+i%1000/999*1000) }), 5},
			"worst case":    {float32s(5000, func(int) float32 { return 1.015 }), 6},
			"zeros":         {make([]float32, 100), 5},
			"whole numbers": {float32s(500, func(i int) float32 { return float32(i % 32) }), 5},
			"subnormal":     {float32s(5000, func(i int) float32 { return normal(i) * 1e-6 }), 0},
			"not finite": {float32s(5000, func(i int) float32 {
				return []float32{normal(i), 1, float32(math.NaN()), float32(math.Inf(-1))}[i%4]
			}), 5},
		} {
			t.Run(name, func(t *testing.T) {
				row, stored := rounded(t, options(codec.Zstd), tensorOf(0, wire.Float32, c.values))
				compare(t, row, wide(c.values), stored, float16Of, 10)
				if row.Mantissa != c.bits {
					t.Errorf("%d bits of mantissa, not %d", row.Mantissa, c.bits)
				}
			})
		}
	})
}

// float16 and bfloat16 values are rounded too, contiguous or transposed.
func TestRoundingOfHalfPrecisionTensors(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(2, 2))
		for d, c := range map[wire.DType]struct {
			widen func(uint16) float64
			full  int
		}{wire.Float16: {float16Of, 10}, wire.BFloat16: {bfloat16Of, 7}} {
			words := float32s(10_000, func(int) float32 { return float32(rng.NormFloat64()) })
			source := make([]uint16, len(words))
			values := make([]float64, len(words))
			for i, v := range words {
				if source[i] = uint16(math.Float32bits(v) >> 16); d == wire.Float16 {
					source[i] = binary.LittleEndian.Uint16(halves([]float32{v}))
				}
				values[i] = c.widen(source[i])
			}
			x := &Tensor{DType: d, Shape: []int64{100, 100}, Step: -1, Token: -1,
				Data: unsafe.Pointer(unsafe.SliceData(source))}
			row, stored := rounded(t, options(codec.Zstd), x)
			compare(t, row, values, stored, c.widen, c.full)
			if row.Mantissa != 5 {
				t.Errorf("%s: %d bits of mantissa", d, row.Mantissa)
			}
			x.Strides = []int64{1, 100}
			row, turned := rounded(t, options(codec.Zstd), x)
			for i := range stored {
				if turned[i] != stored[i%100*100+i/100] {
					t.Fatalf("%s: transposed, element %d is %04x", d, i, turned[i])
				}
			}
			if row.Mantissa != 5 {
				t.Errorf("%s: %d bits of mantissa, transposed", d, row.Mantissa)
			}
		}
	})
}

func TestRoundingLargerThanTheArena(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(3, 3))
		o := options(codec.Zstd)
		o.MaxMemory = 1 << 20
		values := float32s(2<<20, func(i int) float32 { return float32(rng.NormFloat64()) * float32(i>>16) })
		row, stored := rounded(t, o, tensorOf(0, wire.Float32, values))
		compare(t, row, wide(values), stored, float16Of, 10)
		if row.Mantissa != 5 {
			t.Errorf("%d bits of mantissa", row.Mantissa)
		}
	})
}

// Integers, float64 values and the float32 twin of an overflow are stored exactly.
func TestNothingElseIsRounded(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		integers := []int64{1 << 40, -7, 1<<62 + 1}
		doubles := []float64{math.Pi, math.E, 1e300}
		large := float32s(1000, func(i int) float32 { return 1e5 + float32(i)/3 })
		o := options(codec.Zstd)
		o.ErrorBound = bound
		path := filepath.Join(t.TempDir(), "a.stream")
		s := open(t, path, o)
		layer := mustLayer(t, s, "x")
		enqueue(t, s, tensorOf(layer, wire.Int64, integers))
		enqueue(t, s, tensorOf(layer, wire.Float64, doubles))
		enqueue(t, s, tensorOf(layer, wire.Float32, large))
		finish(t, s)
		rows, payloads := read(t, path)
		if string(payloads[0]) != string(bytesOf(integers)) || string(payloads[1]) != string(bytesOf(doubles)) {
			t.Error("integers or doubles were changed")
		}
		if len(rows) != 4 || string(payloads[3]) != string(bytesOf(large)) {
			t.Error("the float32 twin was changed")
		}
		for i, row := range rows {
			if (row.Mantissa != 0) != (i == 2) || math.IsNaN(row.MSE) != math.IsNaN(row.MeanSquare) {
				t.Errorf("row %d says %d bits, %g of %g", i, row.Mantissa, row.MSE, row.MeanSquare)
			}
		}
	})
}

func TestInvalidErrorBoundsAreRefused(t *testing.T) {
	for _, b := range []float64{-1e-9, 1, 2, math.NaN(), math.Inf(1)} {
		o := options(codec.Zstd)
		o.ErrorBound = b
		if _, err := Open(filepath.Join(t.TempDir(), "a.stream"), o); !errors.Is(err, status.InvalidArgument) {
			t.Errorf("error_bound = %g: %v", b, err)
		}
	}
}

// The row of each part of a split tensor tells the error of that part alone.
func TestAPartOfATensorHasItsOwnError(t *testing.T) {
	const perPart = 1000
	values := float32s(3*perPart, func(i int) float32 {
		return []float32{1e4, 1e-3, 3e4}[i/perPart] * (1 + float32(i%perPart)/perPart)
	})
	o := options(codec.None)
	o.split = 2 * perPart
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, values))
	finish(t, s)
	rows, payloads := read(t, path)
	for i, row := range rows {
		mse, _ := errorOf(values[i*perPart:][:perPart], payloads[i])
		if !justAbove(row.MSE, mse) {
			t.Errorf("part %d: mse %g, reported %g", i, mse, row.MSE)
		}
	}
	if len(rows) != 3 {
		t.Errorf("%d parts", len(rows))
	}
}
