package codec

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"
)

// convertBoth converts with the kernel and its portable twin and compares.
func convertBoth(t testing.TB, src []float32) []uint16 {
	t.Helper()
	fast, portable := make([]uint16, len(src)+1), make([]uint16, len(src))
	fast[len(src)] = 0xABCD
	var a, b Stats
	Float32ToFloat16(unsafe.Pointer(unsafe.SliceData(fast)), unsafe.Pointer(unsafe.SliceData(src)), len(src), &a)
	convertPortable(portable, src, &b)
	if fast[len(src)] != 0xABCD {
		t.Fatal("the kernel wrote behind its output")
	}
	for i, x := range src {
		if fast[i] != portable[i] {
			t.Fatalf("%x (%g): kernel %04x, portable %04x", math.Float32bits(x), x, fast[i], portable[i])
		}
	}
	if a.Count != b.Count || a.Overflow != b.Overflow {
		t.Fatalf("counts: kernel %+v, portable %+v", a, b)
	}
	for _, pair := range [][2]float64{{a.SquareError, b.SquareError}, {a.SquareSum, b.SquareSum}, {a.MaxError, b.MaxError}} {
		// Squares of values below 2^-63 vanish in float; a quarter of a float's
		// smallest normal number per value is far below any use.
		if math.Abs(pair[0]-pair[1]) > 1e-5*pair[1]+float64(len(src))*1e-38 {
			t.Fatalf("sums: kernel %+v, portable %+v", a, b)
		}
	}
	return fast[:len(src)]
}

func TestFloat32ToFloat16AtEveryBoundary(t *testing.T) {
	var src []float32
	for h := range uint32(0x8000) {
		x := float16Value(uint16(h))
		next := float16Value(uint16(h + 1))
		middle := x + (next-x)/2
		for _, v := range []float32{x, middle, math.Nextafter32(middle, 0), math.Nextafter32(middle, 1e9)} {
			src = append(src, v, -v)
		}
	}
	src = append(src, 65504, 65519.996, 65520, 1e38, float32(math.Inf(1)), float32(math.NaN()),
		math.Float32frombits(0x7F800001), math.Float32frombits(0xFFC12345), 1e-45, 2.9802322e-08)
	convertBoth(t, src)
	for n := range 70 { // every tail length
		convertBoth(t, src[1000:1000+n])
	}
}

func TestFloat32ToFloat16OnAllExponents(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	src := make([]float32, 4<<20)
	for i := range src {
		src[i] = math.Float32frombits(rng.Uint32())
	}
	convertBoth(t, src)
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
	var st Stats
	convertPortable(make([]uint16, 4), []float32{70000, 1, float32(math.Inf(1)), float32(math.NaN())}, &st)
	if st.Overflow != 1 || st.Count != 1 || st.SquareSum != 1 || st.SquareError != 0 {
		t.Errorf("stats %+v", st)
	}
}

func FuzzFloat32ToFloat16(f *testing.F) {
	f.Add([]byte("\x00\x00\x80\x7f\x00\x00\xc0\x7f\x00\xe0\x7f\x47\x00\xf0\x7f\x47"))
	f.Add(make([]byte, 4*33))
	f.Add([]byte("some activations of a model, more than sixteen of them, so that there is a tail....."))
	f.Fuzz(func(t *testing.T, data []byte) {
		src := make([]float32, len(data)/4)
		for i := range src {
			src[i] = math.Float32frombits(binary.LittleEndian.Uint32(data[4*i:]))
		}
		convertBoth(t, src)
	})
}

// gatherBoth gathers with the kernel and its twin and compares.
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
	} {
		n := int64(len(want))
		if got := gatherBoth(t, memory, v.origin, 1, v.shape, v.strides, 0, n); string(got) != want {
			t.Errorf("shape %v, strides %v: %s, want %s", v.shape, v.strides, got, want)
		}
		if got := gatherBoth(t, memory, v.origin, 1, v.shape, v.strides, 1, n-2); string(got) != want[1:n-1] {
			t.Errorf("shape %v, strides %v, inner part: %s", v.shape, v.strides, got)
		}
	}
}

func FuzzGather(f *testing.F) {
	f.Add(uint8(2), []byte{3, 1, 4, 200}, int64(2), int64(5))
	f.Add(uint8(0), []byte{1, 0}, int64(0), int64(1))
	f.Add(uint8(4), []byte{5, 255, 2, 0, 3, 10, 1, 7}, int64(1), int64(29))
	f.Fuzz(func(t *testing.T, itemLog uint8, dims []byte, start, count int64) {
		item := 1 << (itemLog % 5)
		var shape, strides []int64
		total, low, high := int64(1), int64(0), int64(0)
		for i := 0; i+1 < len(dims) && len(shape) < 8; i += 2 {
			length, stride := int64(dims[i]%7)+1, int64(int8(dims[i+1]))
			shape, strides = append(shape, length), append(strides, stride)
			total *= length
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
	src := make([]float32, 64<<10)
	for i := range src {
		src[i] = rand.Float32()*8 - 4
	}
	dst := make([]uint16, len(src))
	b.Run("kernel", func(b *testing.B) {
		var st Stats
		b.SetBytes(int64(4 * len(src)))
		for b.Loop() {
			Float32ToFloat16(unsafe.Pointer(unsafe.SliceData(dst)), unsafe.Pointer(unsafe.SliceData(src)), len(src), &st)
		}
	})
	b.Run("portable", func(b *testing.B) {
		var st Stats
		b.SetBytes(int64(4 * len(src)))
		for b.Loop() {
			convertPortable(dst, src, &st)
		}
	})
}
