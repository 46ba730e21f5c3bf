package codec

import (
	"fmt"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// roundAll rounds src with the portable twin and every kernel, and compares the results.
func roundAll(t testing.TB, m Mantissa, bits int, src []uint16) []uint16 {
	t.Helper()
	r := m.rounding(bits)
	return compareKernels(t, r, src, r.value,
		func(dst []uint16, st *Stats) { roundPortable(dst, src, r, st) },
		func(kernel int, dst, from unsafe.Pointer, st *Stats) {
			roundKernel(kernel, dst, from, len(src), r, st)
		})
}

func words(n int, word func(int) uint16) []uint16 {
	w := make([]uint16, n)
	for i := range w {
		w[i] = word(i)
	}
	return w
}

// nearestWord rounds by the definition. Of all finite words of the same sign with zeros in the
// dropped bits, it takes the nearest. Of two that are equally near it takes the one with an even
// last bit.
func nearestWord(r rounding, w uint16) uint16 {
	step := uint16(1) << r.drop
	down := w &^ (step - 1)
	up := down + step
	if up&r.exponent == r.exponent {
		return down
	}
	below, above := math.Abs(r.value(w)-r.value(down)), math.Abs(r.value(up)-r.value(w))
	if below < above || below == above && down>>r.drop&1 == 0 {
		return down
	}
	return up
}

func TestRoundEveryWord(t *testing.T) {
	all := words(1<<16, func(i int) uint16 { return uint16(i) })
	for _, m := range []Mantissa{Float16, BFloat16} {
		for bits := 1; bits < int(m); bits++ {
			r := m.rounding(bits)
			for w, got := range roundAll(t, m, bits, all) {
				want := uint16(w)
				if want&r.exponent != r.exponent {
					want = nearestWord(r, want)
				}
				if got != want {
					t.Fatalf("%d of %d bits: %04x became %04x, not %04x", bits, m, w, got, want)
				}
			}
		}
	}
}

func TestRoundAtEveryLength(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	all := words(9000, func(int) uint16 { return uint16(rng.Uint32()) })
	lengths := 70
	if testing.Short() {
		lengths = 9
	}
	for n := range lengths {
		roundAll(t, Float16, 5, all[n:])
		roundAll(t, BFloat16, 5, all[:n])
		roundAll(t, Float16, 5, all[n:n+4096+8])
	}
}

func TestRoundAddsUpItsError(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		for _, v := range []struct {
			m     Mantissa
			words []uint16
			want  Stats
		}{
			// 1 + 3/1024, infinity, 65504, NaN: 1 and 64512 stay.
			{Float16, []uint16{0x3C03, 0x7C00, 0x7BFF, 0x7E01}, Stats{Count: 2,
				SquareError: 9./1048576 + 992*992, SquareSum: 1027.*1027/1048576 + 65504*65504, MaxError: 992}},
			// 3 * 2^126 has no square in float32; 1 + 1/128 becomes 1.
			{BFloat16, []uint16{0x7F40, 0x3F81}, Stats{Count: 2,
				SquareError: 1. / 16384, SquareSum: math.Ldexp(9, 252), MaxError: 1. / 128}},
		} {
			var got Stats
			dst := make([]uint16, len(v.words))
			v.m.Round(unsafe.Pointer(&dst[0]), unsafe.Pointer(&v.words[0]), len(dst), 5, &got)
			if got.Count != v.want.Count || math.Abs(got.SquareError/v.want.SquareError-1) > 1e-6 ||
				math.Abs(got.SquareSum/v.want.SquareSum-1) > 1e-6 || got.MaxError != v.want.MaxError {
				t.Errorf("%d bits: %x became %x, %+v, want %+v", v.m, v.words, dst, got, v.want)
			}
		}
	})
}

// LeastBits is right for values distributed like activations: the bound holds with these bits, and
// would not with one bit less.
func TestLeastBits(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(9, 10))
		src := make([]float32, 1<<16)
		for i := range src {
			src[i] = float32(rng.NormFloat64())
		}
		for _, bound := range []float64{1e-2, 1e-3, 1e-4, 1e-5, 1e-6} {
			share := func(bits int) float64 {
				var st Stats
				dst := make([]uint16, len(src))
				Float32ToFloat16(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), len(src), bits, &st)
				return st.SquareError / st.SquareSum
			}
			bits := Float16.LeastBits(bound)
			if share(bits) > 1.3*bound {
				t.Errorf("bound %g: %d bits give %g", bound, bits, share(bits))
			}
			if share(bits-1) < bound {
				t.Errorf("bound %g: %d bits, but one less gives %g", bound, bits, share(bits-1))
			}
		}
		for _, v := range []struct {
			m     Mantissa
			bound float64
			want  int
		}{{Float16, 1e-4, 5}, {BFloat16, 1e-4, 5}, {Float16, 0.99, 1}, {Float16, 1e-12, 10}, {BFloat16, 1e-12, 7}} {
			if got := v.m.LeastBits(v.bound); got != v.want {
				t.Errorf("%d bits, bound %g: %d, want %d", v.m, v.bound, got, v.want)
			}
		}
	})
}

func FuzzRound(f *testing.F) {
	f.Add([]byte{0xFF, 0x7B, 0x01, 0x7C, 0x01, 0x80}, uint8(5), true)
	f.Fuzz(func(t *testing.T, data []byte, bits uint8, bfloat16 bool) {
		m := Float16
		if bfloat16 {
			m = BFloat16
		}
		src := words(len(data)/2, func(i int) uint16 { return uint16(data[2*i]) | uint16(data[2*i+1])<<8 })
		if bits >= 1 && int(bits) < int(m) {
			roundAll(t, m, int(bits), src)
			roundAll(t, m, int(bits), manyOf(src))
		}
	})
}

func TestSumsOfRoundingAreNotBelowTheTrueOnes(t *testing.T) {
	rng := rand.New(rand.NewPCG(19, 20))
	for _, m := range []Mantissa{Float16, BFloat16} {
		sources := map[string][]uint16{
			"all words": words(1<<16, func(i int) uint16 { return uint16(i) }),
			"largest":   words(9000, func(i int) uint16 { return m.rounding(0).exponent - 1 - uint16(i%9) }),
			"least":     words(9000, func(i int) uint16 { return uint16(i % 9) }),
		}
		draws := 50
		if testing.Short() {
			draws = 2
		}
		for range draws {
			word := uint16(rng.Uint32())
			sources[fmt.Sprintf("%04x", word)] = words(9000, func(int) uint16 { return word })
			sources[fmt.Sprintf("near %04x", word)] = words(9000, func(i int) uint16 { return word ^ uint16(i%32) })
		}
		for name, src := range sources {
			t.Run(fmt.Sprintf("%d bits, %s", m, name), func(t *testing.T) {
				for bits := 1; bits < int(m); bits++ {
					roundAll(t, m, bits, src)
				}
			})
		}
	}
}
