package codec

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"sort"
	"testing"
	"unsafe"
)

// convertAll converts src with the portable twin and every kernel, and compares the results. It
// does so with fewer bits of mantissa too, and returns the words with all bits.
func convertAll(t testing.TB, src []float32) []uint16 {
	t.Helper()
	for _, bits := range []int{1, 5, 9} {
		convertTo(t, bits, src)
	}
	return convertTo(t, 10, src)
}

func convertTo(t testing.TB, bits int, src []float32) []uint16 {
	t.Helper()
	r := Float16.rounding(bits)
	return compareKernels(t, r, src, func(x float32) float64 { return float64(x) },
		func(dst []uint16, st *Stats) { convertPortable(dst, src, r, st) },
		func(kernel int, dst, from unsafe.Pointer, st *Stats) {
			convertKernel(kernel, dst, from, len(src), r, st)
		})
}

// compareKernels runs the portable loop and every kernel over src. All must give the same words,
// and the right error.
func compareKernels[T float32 | uint16](t testing.TB, r rounding, src []T, value func(T) float64,
	portable func([]uint16, *Stats), kernel func(int, unsafe.Pointer, unsafe.Pointer, *Stats)) []uint16 {
	t.Helper()
	want := make([]uint16, len(src))
	var st Stats
	portable(want, &st)
	exact := exactStats(r, src, value, want)
	checkStats(t, levelPortable, st, exact)
	for k, name := range kernels {
		got := make([]uint16, len(src)+1)
		got[len(src)] = 0xABCD
		var st Stats
		kernel(k, unsafe.Pointer(unsafe.SliceData(got)), unsafe.Pointer(unsafe.SliceData(src)), &st)
		if got[len(src)] != 0xABCD {
			t.Fatalf("%s wrote behind its output", name)
		}
		for i, x := range src {
			if got[i] != want[i] {
				t.Fatalf("%x: %s %04x, portable %04x", x, name, got[i], want[i])
			}
		}
		checkStats(t, name, st, exact)
	}
	return want
}

// exactStats returns the Stats that a loop must report if it stores src as words.
func exactStats[T float32 | uint16](r rounding, src []T, value func(T) float64, words []uint16) (st Stats) {
	var squareError, squareSum exactSum
	for i, x := range src {
		x, y := value(x), r.value(words[i])
		switch {
		case words[i]&r.exponent != r.exponent:
			e := x - y // exact: x and y have at most 24 bits; its square is exact too
			st.Count++
			squareError.add(e * e)
			squareSum.add(x * x)
			st.MaxError = max(st.MaxError, math.Abs(e))
		case math.Abs(x) <= math.MaxFloat64:
			st.Overflow++
		}
	}
	st.SquareError, st.SquareSum = squareError.value(), squareSum.value()
	return st
}

// exactSum sums with twice the bits of a double.
type exactSum struct{ high, low float64 }

func (s *exactSum) add(x float64) {
	sum := s.high + x
	of := sum - s.high
	s.low += (s.high - (sum - of)) + (x - of) // the rounding error of this addition
	s.high = sum
}

func (s *exactSum) value() float64 { return s.high + s.low }

// checkStats checks that counts and the largest error are exact, and that sums are as exact as
// Stats promises.
func checkStats(t testing.TB, name string, got, exact Stats) {
	t.Helper()
	if got.Count != exact.Count || got.Overflow != exact.Overflow || got.MaxError != exact.MaxError {
		t.Fatalf("%s: %+v, it is %+v", name, got, exact)
	}
	checkSum(t, name+": square error", got.SquareError, exact.SquareError, exact.Count, 0)
	checkSum(t, name+": squares", got.SquareSum, exact.SquareSum, exact.Count, 0)
}

// checkSum checks a sum of n squares. It may be below the true sum only by the rounding of doubles,
// and above it by the share sumExcess plus vanished.
func checkSum(t testing.TB, name string, got, exact float64, n int64, vanished float64) {
	t.Helper()
	rounding := float64(n) * 0x1p-53
	if got < exact*(1-rounding) || got > exact*(1+sumExcess)+vanished || math.IsNaN(got) {
		t.Fatalf("%s of %d values: %g, the true sum is %g (%+.1e of it)", name, n, got, exact, got/exact-1)
	}
}

// nearestFloat16 rounds by the definition. It takes the nearest binary16 value, with 65536 in place
// of infinity. Of two that are equally near it takes the one with an even last bit.
func nearestFloat16(x float32) uint16 {
	sign := uint16(math.Float32bits(x) >> 16 & 0x8000)
	value := func(h int) float64 {
		if h == 0x7C00 {
			return 65536
		}
		return float64(float16Value(uint16(h)))
	}
	v := min(math.Abs(float64(x)), 65536)
	above := sort.Search(0x7C00, func(h int) bool { return value(h) >= v })
	if above == 0 {
		return sign
	}
	down, up := v-value(above-1), value(above)-v
	if down < up || down == up && above%2 == 1 {
		above--
	}
	return sign | uint16(above)
}

func TestFloat32ToFloat16AtEveryBoundary(t *testing.T) {
	inf := float32(math.Inf(1))
	var src []float32
	for h := range uint16(0x7C00) {
		x := float16Value(h)
		next := float16Value(h + 1)
		if h == 0x7BFF {
			next = 65536
		}
		middle := x + (next-x)/2
		for _, v := range []float32{x, math.Nextafter32(x, inf), math.Nextafter32(middle, 0), middle,
			math.Nextafter32(middle, inf), math.Nextafter32(next, 0)} {
			src = append(src, v, -v)
		}
	}
	src = append(src, 65519.996, 65520, 65536, 1e38, math.MaxFloat32, inf, -inf, 1e-45, 2.9802322e-08)
	for i, got := range convertAll(t, src) {
		if want := nearestFloat16(src[i]); got != want {
			t.Fatalf("%x (%g): %04x, want %04x", math.Float32bits(src[i]), src[i], got, want)
		}
	}
}

func TestFloat32ToFloat16OfEveryExponent(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	each := 1 << 12
	if testing.Short() {
		each = 1 << 6
	}
	src := make([]float32, 256*each)
	for exponent := range uint32(256) {
		for i := range each {
			src[int(exponent)*each+i] = math.Float32frombits(rng.Uint32()&0x807FFFFF | exponent<<23)
		}
	}
	convertAll(t, src) // one exponent in each block
	rng.Shuffle(len(src), func(i, j int) { src[i], src[j] = src[j], src[i] })
	convertAll(t, src) // all exponents in every block
}

// Blocks with and without values that do not stay finite, at every length and alignment.
func TestFloat32ToFloat16InPieces(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	memory := make([]float32, 9000)
	for _, odd := range []float32{1, 1e9, float32(math.Inf(-1)), float32(math.NaN())} {
		for i := range memory {
			memory[i] = float32(rng.NormFloat64())
		}
		memory[4500] = odd
		starts := 70
		if testing.Short() {
			starts = 3
		}
		for start := range starts {
			convertAll(t, memory[start:])
			convertAll(t, memory[4480:4480+start])
			convertAll(t, memory[start:start+4096+32])
		}
	}
}

func TestFloat32ToFloat16KeepsNaN(t *testing.T) {
	for bits, want := range map[uint32]uint16{
		0x7FC00000: 0x7E00, // quiet
		0x7F800001: 0x7E00, // signalling; its payload is in bits that float16 lacks
		0xFFC12345: 0xFE09, // the sign and the upper bits of the payload stay
		0x7FFFFFFF: 0x7FFF,
		0xFF802000: 0xFE01,
	} {
		if got := convertAll(t, []float32{math.Float32frombits(bits)})[0]; got != want {
			t.Errorf("NaN %08x became %04x, want %04x", bits, got, want)
		}
	}
}

func TestStatsCountWhatStaysFinite(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		inf := float32(math.Inf(1))
		var st Stats
		src := []float32{70000, 1, inf, -inf, float32(math.NaN()), 1.0002441, -70000, 3}
		dst := make([]uint16, len(src))
		Float32ToFloat16(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), len(src), 10, &st)
		want := Stats{Count: 3, Overflow: 2, SquareSum: 11.0004883, SquareError: 5.96e-8, MaxError: 2.441e-4}
		if st.Count != want.Count || st.Overflow != want.Overflow ||
			math.Abs(st.SquareSum-want.SquareSum) > 1e-6 || math.Abs(st.SquareError-want.SquareError) > 1e-10 ||
			math.Abs(st.MaxError-want.MaxError) > 1e-7 {
			t.Errorf("%+v, want %+v", st, want)
		}
		before := st
		Float32ToFloat16(unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), len(src), 10, &st)
		if st.Count != 2*before.Count || st.SquareSum != 2*before.SquareSum || st.MaxError != before.MaxError {
			t.Errorf("the second time it became %+v", st)
		}
		Float32ToFloat16(nil, nil, 0, 10, &st)
	})
}

func TestFloat16KnownValues(t *testing.T) {
	for x, want := range map[float32]uint16{
		0: 0, 1: 0x3C00, -2: 0xC000, 65504: 0x7BFF, 65520: 0x7C00, 5.9604645e-08: 1,
		2.9802322e-08: 0, 2.9802326e-08: 1, 6.1035156e-05: 0x0400, 0.33325195: 0x3555,
	} {
		if got := float16Bits(x); got != want {
			t.Errorf("float16Bits(%g) = %04x, want %04x", x, got, want)
		}
	}
}

// FuzzFloat32ToFloat16 compares each kernel with its portable twin.
//
// Slow: every kernel also converts the input repeated to 7,000 values, whose sums round in another way.
func FuzzFloat32ToFloat16(f *testing.F) {
	f.Add([]byte("\x00\x00\x80\x7f\x00\x00\xc0\x7f\x00\xe0\x7f\x47\x00\xf0\x7f\x47"))
	f.Add(make([]byte, 4*33))
	f.Add([]byte("some activations of a model, more than sixteen of them, so that there is a tail....."))
	f.Fuzz(func(t *testing.T, data []byte) {
		src := make([]float32, len(data)/4)
		for i := range src {
			src[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
		}
		convertAll(t, src)
		convertAll(t, manyOf(src))
	})
}

// manyOf repeats values to several blocks, because long sums round differently from short ones.
func manyOf[T any](src []T) []T { return slices.Repeat(src, 7000/max(len(src), 1)) }

// gatherBoth gathers with the kernel and its twin, and compares the results.
func gatherBoth(t testing.TB, memory []byte, origin, item int, shape, strides []int64, start, count int64) []byte {
	t.Helper()
	fast, portable := make([]byte, count*int64(item)), make([]byte, count*int64(item))
	at := unsafe.Add(unsafe.Pointer(unsafe.SliceData(memory)), origin)
	Gather(unsafe.Pointer(unsafe.SliceData(fast)), at, item, shape, strides, start, count)
	gatherPortable(unsafe.Pointer(unsafe.SliceData(portable)), at, item, shape, strides, start, count)
	if string(fast) != string(portable) {
		t.Fatalf("shape %v, strides %v, item %d, [%d, +%d): kernel and twin differ", shape, strides, item, start, count)
	}
	return fast
}

func TestGatherTransposesAndReverses(t *testing.T) {
	memory := []byte("abcdef") // [[a b c] [d e f]]
	for want, v := range map[string]struct {
		origin         int
		shape, strides []int64
	}{
		"adbecf": {0, []int64{3, 2}, []int64{1, 3}},
		"fedcba": {5, []int64{6}, []int64{-1}},
		"aaaa":   {0, []int64{2, 2}, []int64{0, 0}},
		"ace":    {0, []int64{3, 1}, []int64{2, 99}},
		"abcdef": {0, []int64{1, 2, 3}, []int64{0, 3, 1}},
		"abbccd": {0, []int64{3, 2}, []int64{1, 1}}, // windows overlap
		"c":      {2, nil, nil},                     // a scalar
	} {
		n := int64(len(want))
		if got := gatherBoth(t, memory, v.origin, 1, v.shape, v.strides, 0, n); string(got) != want {
			t.Errorf("shape %v, strides %v: %s, want %s", v.shape, v.strides, got, want)
		}
		if n < 3 {
			continue
		}
		if got := gatherBoth(t, memory, v.origin, 1, v.shape, v.strides, 1, n-2); string(got) != want[1:n-1] {
			t.Errorf("shape %v, strides %v, inner part: %s", v.shape, v.strides, got)
		}
	}
}

// Transposed matrices are gathered in tiles: whole tiles, ragged tiles, and from the middle of a
// row.
func TestGatherTransposesMatrices(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	for _, item := range []int{1, 2, 4, 8, 16} {
		for _, m := range [][2]int64{{64, 64}, {130, 70}, {5, 300}, {300, 5}, {33, 17}} {
			rows, columns := m[0], m[1]
			memory := make([]byte, 3*rows*columns*int64(item))
			for i := range memory {
				memory[i] = byte(rng.Uint32())
			}
			shape, strides := []int64{3, rows, columns}, []int64{rows * columns, 1, rows}
			gatherBoth(t, memory, 0, item, shape, strides, 0, 3*rows*columns)
			gatherBoth(t, memory, 0, item, shape, strides, 7, 2*rows*columns+3)
			// The same columns, from the last to the first.
			gatherBoth(t, memory, int((columns-1)*rows)*item, item, shape, []int64{rows * columns, 1, -rows}, 1, 3*rows*columns-2)
		}
	}
}

func FuzzGather(f *testing.F) {
	f.Add(uint8(2), []byte{3, 1, 4, 200}, int64(2), int64(5))
	f.Add(uint8(0), []byte{1, 0}, int64(0), int64(1))
	f.Add(uint8(4), []byte{5, 255, 2, 0, 3, 10, 1, 7}, int64(1), int64(29))
	f.Add(uint8(2), []byte{70, 1, 40, 71}, int64(3), int64(2800))
	f.Fuzz(func(t *testing.T, itemLog uint8, dims []byte, start, count int64) {
		item := 1 << (itemLog % 5)
		var shape, strides []int64
		total, low, high := int64(1), int64(0), int64(0)
		for i := 0; i+1 < len(dims) && len(shape) < 8; i += 2 {
			length, stride := int64(dims[i]%90)+1, int64(int8(dims[i+1]))
			shape, strides = append(shape, length), append(strides, stride)
			if total *= length; total > 1<<20 {
				return
			}
			low, high = low+min(0, stride*(length-1)), high+max(0, stride*(length-1))
		}
		if start < 0 || start >= total || count < 1 || count > min(total-start, 20_000) {
			return
		}
		memory := make([]byte, (high-low+1)*int64(item))
		for i := range memory {
			memory[i] = byte(i * 31)
		}
		gatherBoth(t, memory, int(-low)*item, item, shape, strides, start, count)
	})
}

func BenchmarkFloat32ToFloat16(b *testing.B) {
	for _, n := range []int{384, 64 << 10, 16 << 20} {
		src, dst := make([]float32, n), make([]uint16, n)
		for i := range src {
			src[i] = rand.Float32()*8 - 4
		}
		masked := slices.Clone(src)
		for i := 0; i < n; i += 1000 {
			masked[i] = float32(math.Inf(-1))
		}
		for _, v := range []struct {
			kind string
			src  []float32
			bits int
		}{{"finite", src, 10}, {"masked", masked, 10}, {"rounded", src, 5}, {"masked and rounded", masked, 5}} {
			how := Float16.rounding(v.bits)
			for kernel, name := range kernels {
				b.Run(fmt.Sprintf("%s/%s/%d", name, v.kind, n), func(b *testing.B) {
					var st Stats
					b.SetBytes(int64(4 * n))
					for b.Loop() {
						convertKernel(kernel, unsafe.Pointer(unsafe.SliceData(dst)), unsafe.Pointer(unsafe.SliceData(v.src)), n, how, &st)
					}
				})
			}
			b.Run(fmt.Sprintf("portable/%s/%d", v.kind, n), func(b *testing.B) {
				var st Stats
				b.SetBytes(int64(4 * n))
				for b.Loop() {
					convertPortable(dst, v.src, how, &st)
				}
			})
		}
	}
}

func BenchmarkRound(b *testing.B) {
	n := 64 << 10
	src, dst := words(n, func(int) uint16 { return uint16(0x3800 + rand.Uint32()%0x800) }), make([]uint16, n)
	for kernel, name := range kernels {
		for _, m := range []Mantissa{Float16, BFloat16} {
			b.Run(fmt.Sprintf("%s/%d bits", name, m), func(b *testing.B) {
				var st Stats
				b.SetBytes(int64(2 * n))
				for b.Loop() {
					roundKernel(kernel, unsafe.Pointer(&dst[0]), unsafe.Pointer(&src[0]), n, m.rounding(5), &st)
				}
			})
		}
	}
}

func BenchmarkGather(b *testing.B) {
	for name, v := range map[string]struct {
		item           int
		shape, strides []int64
	}{
		"contiguous":    {4, []int64{4096, 4096}, []int64{4096, 1}},
		"heads":         {2, []int64{32, 1024, 64}, []int64{64, 2048, 1}},
		"channels last": {4, []int64{256, 56, 56}, []int64{1, 56 * 256, 256}},
		"transposed":    {4, []int64{4096, 4096}, []int64{1, 4096}},
		"transposed2":   {2, []int64{4096, 4096}, []int64{1, 4096}},
		"every second":  {4, []int64{4 << 20}, []int64{2}},
		"broadcast":     {4, []int64{4096, 4096}, []int64{1, 0}},
	} {
		memory, dst := make([]byte, 64<<20), make([]byte, 64<<20)
		count := int64(1)
		for _, length := range v.shape {
			count *= length
		}
		b.Run(name, func(b *testing.B) {
			b.SetBytes(count * int64(v.item))
			for b.Loop() {
				Gather(unsafe.Pointer(&dst[0]), unsafe.Pointer(&memory[0]), v.item, v.shape, v.strides, 0, count)
			}
		})
	}
}

// Each source makes the sums of a float32 lane round in another way: many equal steps whose
// roundings add up, growing and falling steps, and squares outside of float32's range.
func TestSumsAreNotBelowTheTrueOnes(t *testing.T) {
	rng := rand.New(rand.NewPCG(17, 18))
	of := func(value func(i int) float64) []float32 {
		src := make([]float32, 9000)
		for i := range src {
			src[i] = float32(value(i))
		}
		return src
	}
	sources := map[string][]float32{
		"growing":           of(func(i int) float64 { return math.Exp(float64(i)/500 - 9) }),
		"falling":           of(func(i int) float64 { return math.Exp(9 - float64(i)/500) }),
		"one large":         of(func(i int) float64 { return 1e4 / (1 + float64(i%64)*1e4) }),
		"zeros":             of(func(int) float64 { return 0 }),
		"saturated softmax": of(func(i int) float64 { return map[bool]float64{true: 1, false: 1e-24}[i%700 == 0] }),
		"not finite":        of(func(i int) float64 { return rng.NormFloat64() / float64(i%900) }),
		"beyond float16":    of(func(i int) float64 { return 1e5 * rng.NormFloat64() }),
	}
	for _, scale := range []float64{1, 1e-9, 1e-19, 1e-25, 1e-37, 1e-42} {
		sources[fmt.Sprintf("normal, times %g", scale)] = of(func(int) float64 { return scale * rng.NormFloat64() })
	}
	draws := 50
	if testing.Short() {
		draws = 2
	}
	for range draws {
		x := 1 + rng.Float64()
		sources[fmt.Sprintf("%g", x)] = of(func(int) float64 { return x })
	}
	for name, src := range sources {
		t.Run(name, func(t *testing.T) { convertAll(t, src) })
	}
}
