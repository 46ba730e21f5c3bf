package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/iotest"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

var archived = []wire.DType{wire.Float16, wire.BFloat16}

// halves returns values as 16-bit floats of type t.
func halves(t wire.DType, values ...float32) []byte {
	b := make([]byte, 0, 2*len(values))
	for _, v := range values {
		b = binary.LittleEndian.AppendUint16(b, narrow(v, t))
	}
	return b
}

// archiveSources returns sources of n values of many kinds.
func archiveSources(t wire.DType, n int, rng *rand.Rand) map[string][]byte {
	sources := map[string][]byte{"bits": make([]byte, 2*n)}
	for i := range sources["bits"] {
		sources["bits"][i] = byte(rng.Uint32())
	}
	each := func(name string, f func(i int) float32) {
		values := make([]float32, n)
		for i := range values {
			values[i] = f(i)
		}
		sources[name] = halves(t, values...)
	}
	normal := func() float32 { return float32(rng.NormFloat64()) }
	each("zeros", func(int) float32 { return 0 })
	each("constant", func(int) float32 { return -3.25 })
	each("normal", func(int) float32 { return normal() })
	each("rows", func(i int) float32 { return normal() * float32(i/384+1) })
	each("heavy tails", func(int) float32 { return float32(math.Sinh(3 * rng.NormFloat64())) })
	each("outlier", func(i int) float32 {
		if i%128 == 77 {
			return 3e4
		}
		return normal()
	})
	each("relu", func(int) float32 { return max(normal(), 0) })
	each("subnormal", func(int) float32 { return normal() * 1e-6 })
	each("vanishing", func(int) float32 { return normal() * 1e-30 })
	each("largest", func(int) float32 { return 65504 - 32*float32(rng.IntN(8)) })
	each("one NaN", func(i int) float32 {
		if i == n/2 {
			return float32(math.NaN())
		}
		return normal()
	})
	each("an infinity", func(i int) float32 {
		if i == n-1 {
			return float32(math.Inf(-1))
		}
		return normal()
	})
	if t == wire.BFloat16 {
		each("huge", func(int) float32 { return normal() * 1e37 })
		each("tiny", func(int) float32 { return normal() * 1e-39 })
		each("far apart", func(i int) float32 { return normal() * float32(math.Pow(2, float64(i/128%200-120))) })
	}
	return sources
}

func encodeArchive(t testing.TB, e *ArchiveEncoder, src []byte, dt wire.DType) []byte {
	t.Helper()
	buf := make([]byte, Headroom(Archive, len(src))+len(src))
	copy(buf[Front(Archive, len(src)):], src)
	n, err := e.EncodeInPlace(buf, Front(Archive, len(src)), len(src), dt)
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Clone(buf[:n])
}

func decodeArchive(t testing.TB, payload []byte, n int) []byte {
	t.Helper()
	dst := make([]byte, n)
	if err := Decode(dst, Archive, bytes.NewReader(payload)); err != nil {
		t.Fatal(err)
	}
	return dst
}

// lossOf computes the error of decoded values by its definition. same reports whether all values
// that are not finite are unchanged.
func lossOf(src, back []byte, dt wire.DType) (l Loss, same bool) {
	x, y := make([]float32, len(src)/2), make([]float32, len(src)/2)
	widen(x, src, dt)
	widen(y, back, dt)
	same = true
	var squareError, squareSum exactSum
	for i, v := range x {
		if !(abs32(v) <= math.MaxFloat32) {
			same = same && bytes.Equal(src[2*i:2*i+2], back[2*i:2*i+2])
			continue
		}
		e := float64(v) - float64(y[i])
		l.Count++
		squareError.add(e * e)
		squareSum.add(float64(v) * float64(v))
		l.MaxError = max(l.MaxError, math.Abs(e))
	}
	l.SquareError, l.SquareSum = squareError.value(), squareSum.value()
	return l, same
}

// checkArchive encodes and decodes src. It compares the error with the bound, and with the error
// that the encoder reports.
func checkArchive(t testing.TB, e *ArchiveEncoder, bound float64, src []byte, dt wire.DType) []byte {
	t.Helper()
	payload := encodeArchive(t, e, src, dt)
	if n, err := DecodedSize(Archive, payload[:archiveHeader]); err != nil || n != int64(len(src)) {
		t.Fatalf("the payload of %d bytes says %d, %v", len(src), n, err)
	}
	if got := ArchiveType(payload); got != dt {
		t.Fatalf("the payload says %v, not %v", got, dt)
	}
	want, same := lossOf(src, decodeArchive(t, payload, len(src)), dt)
	if !same {
		t.Fatal("NaN or infinities have changed")
	}
	if want.SquareError > bound*want.SquareSum {
		t.Fatalf("normalised error %g, bound %g", want.SquareError/want.SquareSum, bound)
	}
	got := e.Loss()
	if got.SquareCoded < 0 || got.SquareCoded > got.SquareSum {
		t.Fatalf("of %g, %g are coded", got.SquareSum, got.SquareCoded)
	}
	if got.Count != want.Count || got.MaxError != want.MaxError {
		t.Fatalf("the encoder says %+v, it is %+v", got, want)
	}
	// Squares below 2^-126 are rounded, up or down, by 2^-150 at most; atMost makes up for that.
	vanished := float64(blocksOf(len(src)/2)) * archiveBlock * 2 * 0x1p-150
	checkSum(t, "square error", got.SquareError, want.SquareError, got.Count, vanished)
	checkSum(t, "squares", got.SquareSum, want.SquareSum, got.Count, vanished)
	return payload
}

func TestArchiveKeepsItsBound(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, bound := range []float64{1e-9, 1e-4, 5e-4, 1e-2} {
		e := NewArchiveEncoder(bound)
		sizes := []int{64, 65, 127, 128, 129, 1000, 5000}
		if testing.Short() {
			sizes = []int{65, 128}
		}
		if bound == 5e-4 && !testing.Short() {
			sizes = append(sizes, archiveChunk-1, archiveChunk, 2*archiveChunk+1)
		}
		for _, dt := range archived {
			for _, n := range sizes {
				for name, src := range archiveSources(dt, n, rng) {
					t.Run(fmt.Sprintf("%g/%v/%d/%s", bound, dt, n, name), func(t *testing.T) {
						payload := checkArchive(t, e, bound, src, dt)
						if name == "normal" && bound == 5e-4 && n >= 1000 {
							// The ratio counts from float32, which has twice as many bytes as the
							// source.
							if ratio := 2 * float64(len(src)) / float64(len(payload)); ratio < 4.7 {
								t.Errorf("%d bytes of %d: ratio %.2f", len(payload), len(src), ratio)
							}
						}
					})
				}
			}
		}
	}
}

// An outlier is kept exactly, and costs the other values of its block no precision.
func TestArchiveOfOutliers(t *testing.T) {
	rng := rand.New(rand.NewPCG(19, 20))
	values := make([]float32, 40*archiveBlock)
	for i := range values {
		values[i] = float32(rng.NormFloat64())
		if i%archiveBlock == 5 {
			values[i] = 900
		}
	}
	src := halves(wire.Float16, values...)
	payload := checkArchive(t, NewArchiveEncoder(1e-5), 1e-5, src, wire.Float16)
	back := decodeArchive(t, payload, len(src))
	for i := 5; i < len(values); i += archiveBlock {
		if !bytes.Equal(back[2*i:2*i+2], src[2*i:2*i+2]) {
			t.Fatalf("outlier %d has changed", i)
		}
	}
	if ratio := 2 * float64(len(src)) / float64(len(payload)); ratio < 6 {
		t.Errorf("ratio %.2f", ratio)
	}
}

// If eight bits cannot keep the bound, the values are stored exactly, in no more bytes than the
// source.
func TestArchiveOfATinyBoundIsLossless(t *testing.T) {
	src := archiveSources(wire.Float16, 5000, rand.New(rand.NewPCG(21, 22)))["normal"]
	payload := encodeArchive(t, NewArchiveEncoder(1e-9), src, wire.Float16)
	if back := decodeArchive(t, payload, len(src)); !bytes.Equal(back, src) || len(payload) > len(src) {
		t.Errorf("%d bytes became %d", len(src), len(payload))
	}
}

// With bytes that do not compress, encoding in place comes nearest to overwriting its own source.
func TestArchiveFitsItsHeadroom(t *testing.T) {
	rng := rand.New(rand.NewPCG(3, 4))
	var sizes []int
	for n := archiveLeast; n < 600; n++ {
		sizes = append(sizes, n)
	}
	for range 60 {
		sizes = append(sizes, archiveLeast+rng.IntN(1<<(4+rng.IntN(16))))
	}
	sizes = append(sizes, 20*archiveChunk+1, 20*archiveChunk-1)
	if testing.Short() {
		sizes = []int{archiveLeast, 599, archiveChunk + 1}
	}
	e := NewArchiveEncoder(ArchiveDefaultBound)
	for _, n := range sizes {
		for _, dt := range archived {
			src := make([]byte, 2*n)
			for i := range src {
				src[i] = byte(rng.Uint32())
			}
			binary.LittleEndian.PutUint16(src, 0x7FFF) // NaN
			if back := decodeArchive(t, encodeArchive(t, e, src, dt), len(src)); dt == wire.Float16 &&
				n <= archiveChunk && !bytes.Equal(back, src) {
				t.Fatalf("%d values with NaN have changed", n)
			}
		}
	}
}

func TestArchiveRefusesWhatItCannotHold(t *testing.T) {
	e := NewArchiveEncoder(ArchiveDefaultBound)
	if _, err := e.EncodeInPlace(make([]byte, 256+Headroom(Archive, 256)-1), Front(Archive, 256), 256, wire.Float16); !errors.Is(err, status.Internal) {
		t.Errorf("too little room: %v", err)
	}
	for _, dt := range []wire.DType{0, wire.Float32, wire.Int16, wire.Bool} {
		if _, err := e.EncodeInPlace(make([]byte, 1000), Front(Archive, 256), 256, dt); !errors.Is(err, status.Internal) {
			t.Errorf("%v: %v", dt, err)
		}
	}
	if _, err := NewEncoder(Archive, 0); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("an encoder without loss: %v", err)
	}
}

func TestArchiveInPieces(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	e := NewArchiveEncoder(ArchiveDefaultBound)
	src := archiveSources(wire.Float16, 3*archiveChunk+77, rng)["rows"]
	want := encodeArchive(t, e, src, wire.Float16)
	pieces := []int{2, 1000, 2 * archiveChunk, 5 << 17, len(src)}
	if testing.Short() {
		pieces = []int{1000, 5 << 17}
	}
	for _, piece := range pieces {
		var got bytes.Buffer
		w, err := e.NewFrame(&got, int64(len(src)), wire.Float16)
		if err != nil {
			t.Fatal(err)
		}
		for part := range slices.Chunk(src, piece) {
			if _, err := w.Write(part); err != nil {
				t.Fatal(err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got.Bytes(), want) {
			t.Errorf("in pieces of %d bytes the payload is another one", piece)
		}
	}
	w, err := e.NewFrame(&bytes.Buffer{}, 1000, wire.Float16)
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); !errors.Is(err, status.Internal) {
		t.Errorf("closed without its elements: %v", err)
	}
}

func TestArchiveFromAnyReader(t *testing.T) {
	src := archiveSources(wire.BFloat16, archiveChunk+500, rand.New(rand.NewPCG(7, 8)))["normal"]
	payload := encodeArchive(t, NewArchiveEncoder(ArchiveDefaultBound), src, wire.BFloat16)
	want := decodeArchive(t, payload, len(src))
	got := make([]byte, len(src))
	if err := Decode(got, Archive, iotest.OneByteReader(bytes.NewReader(payload))); err != nil || !bytes.Equal(got, want) {
		t.Errorf("byte by byte: %v", err)
	}
	got, err := decodeUnknown(Archive, iotest.HalfReader(bytes.NewReader(payload)), int64(len(src)))
	if err != nil || !bytes.Equal(got, want) {
		t.Errorf("of unknown length: %v", err)
	}
}

func TestArchiveRefusesOtherBytes(t *testing.T) {
	rng := rand.New(rand.NewPCG(9, 10))
	src := archiveSources(wire.Float16, 300, rng)["normal"]
	payload := encodeArchive(t, NewArchiveEncoder(ArchiveDefaultBound), src, wire.Float16)
	dst := make([]byte, len(src))
	refused := func(what string, b []byte, code error) {
		t.Helper()
		if err := Decode(dst, Archive, bytes.NewReader(b)); !errors.Is(err, code) {
			t.Errorf("%s: %v", what, err)
		}
	}
	for n := range payload {
		refused(fmt.Sprintf("cut to %d bytes", n), payload[:n], status.Corrupt)
	}
	refused("a byte more", append(bytes.Clone(payload), 0), status.Corrupt)
	changed := func(at int, value byte) []byte {
		b := bytes.Clone(payload)
		b[at] = value
		return b
	}
	refused("other magic", changed(0, 'X'), status.Corrupt)
	refused("later version", changed(4, 2), status.Unsupported)
	refused("of float32", changed(5, byte(wire.Float32)), status.Corrupt)
	refused("other blocks", changed(6, 64), status.Corrupt)
	refused("other count", changed(8, payload[8]+1), status.Corrupt)
	refused("more chunks", changed(10, 200), status.Corrupt)
	refused("long scales", changed(15, 0xFF), status.Corrupt)
	refused("long codes", changed(19, 0xFF), status.Corrupt)
	refused("exact elements of which none are", changed(20, 9), status.Corrupt)
	refused("shorter scales", changed(12, payload[12]-1), status.Corrupt)
	for range 2000 { // only the index has a checksum: Decode may return other values, but must not panic
		b := bytes.Clone(payload)
		b[rng.IntN(len(b))] ^= byte(1 + rng.IntN(255))
		_ = Decode(dst, Archive, bytes.NewReader(b))
	}
}

// A payload of the first release must always decode to the same values.
func TestArchiveOfTheFirstRelease(t *testing.T) {
	const n = 1000
	for _, dt := range archived {
		name := "archive-1-" + dt.String()
		payload, err := os.ReadFile(filepath.Join("testdata", "archive", name+".payload"))
		if err != nil {
			t.Fatal(err)
		}
		want, err := os.ReadFile(filepath.Join("testdata", "archive", name+".elements"))
		if err != nil {
			t.Fatal(err)
		}
		if got := decodeArchive(t, payload, 2*n); !bytes.Equal(got, want) {
			t.Errorf("%s decodes to other values", name)
		}
	}
}

// quantiseBoth compares the kernel in C with its portable twin.
func quantiseBoth(t testing.TB, src []byte, dt wire.DType, spread float64) {
	t.Helper()
	n := len(src) / 2
	if !quantiseInC || n == 0 {
		return
	}
	run := func(f func(*codeBuffers, []byte, wire.DType, float64, *quantised)) (*codeBuffers, quantised) {
		b, q := newCodeBuffers(n+2*archiveBlock), quantised{}
		for _, room := range [][]byte{b.codes[n:], b.scales[2*blocksOf(n):], b.exact[2*n:]} {
			for i := range room {
				room[i] = 0xAB
			}
		}
		f(b.of(n), src[:2*n], dt, spread, &q)
		return b, q
	}
	c, inC := run(quantiseKernel)
	twin, inGo := run(quantisePortable)
	if inC.finite != inGo.finite || inC.finite && inC != inGo {
		t.Fatalf("%v: C %+v, its twin %+v", dt, inC, inGo)
	}
	if inC.finite && (!bytes.Equal(c.codes, twin.codes) || !bytes.Equal(c.scales, twin.scales) ||
		!bytes.Equal(c.exact, twin.exact)) {
		t.Fatalf("%v of %d values: C and its twin give other codes", dt, n)
	}
}

func TestQuantiseTwins(t *testing.T) {
	rng := rand.New(rand.NewPCG(11, 12))
	draws := 30
	if testing.Short() {
		draws = 2
	}
	for _, dt := range archived {
		for range draws {
			n := 1 + rng.IntN(3000)
			spread := math.Pow(10, -7*rng.Float64())
			for _, src := range archiveSources(dt, n, rng) {
				quantiseBoth(t, src, dt, spread)
			}
		}
		// Every bit pattern, next to its neighbours.
		src := make([]byte, 0, 1<<17)
		for b := range 1 << 16 {
			src = binary.LittleEndian.AppendUint16(src, uint16(b))
		}
		for block := range slices.Chunk(src, 2*archiveBlock) {
			quantiseBoth(t, block, dt, 6e-3)
		}
	}
}

// Each value gets the nearest code of its block's scale.
func TestQuantiseTakesTheNearestCode(t *testing.T) {
	rng := rand.New(rand.NewPCG(13, 14))
	src := archiveSources(wire.Float16, archiveBlock, rng)["normal"]
	b := newCodeBuffers(archiveBlock)
	quantise(b, src, wire.Float16, 6e-3)
	var x [archiveBlock]float32
	widen(x[:], src, wire.Float16)
	step := float64(math.Float32frombits(uint32(binary.LittleEndian.Uint16(b.scales)) << 16))
	for i, v := range x {
		if want := math.RoundToEven(float64(v) / step); float64(int8(b.codes[i])) != want {
			t.Errorf("%g / %g has the code %d, not %g", v, step, int8(b.codes[i]), want)
		}
	}
}

// The loop in C and its twin in Go restore the same bits for all codes and all scales, also for those that no
// archive has.
func TestRestoringIsTheSameInCAndInGo(t *testing.T) {
	if !quantiseInC {
		t.Skip("this processor or build has no strapk_quantise")
	}
	codes := make([]byte, 3*archiveBlock-5)
	for i := range codes {
		codes[i] = byte(i)
	}
	scales := make([]byte, 2*blocksOf(len(codes)))
	want, got := make([]byte, 2*len(codes)), make([]byte, 2*len(codes))
	for _, dt := range []wire.DType{wire.Float16, wire.BFloat16} {
		step := 1
		if testing.Short() {
			step = 257
		}
		for scale := 0; scale < 1<<16; scale += step {
			for i := 0; i < len(scales); i += 2 {
				binary.LittleEndian.PutUint16(scales[i:], uint16(scale+i))
			}
			n := len(codes) - scale%200
			restorePortable(want[:2*n], codes[:n], scales, dt)
			restoreKernel(got[:2*n], codes[:n], scales, dt)
			if !bytes.Equal(want, got) {
				t.Fatalf("%s, scale %#04x, %d codes: other bits", dt, scale, n)
			}
		}
	}
}

func FuzzQuantise(f *testing.F) {
	f.Add(halves(wire.Float16, 1, -2, 0.5), 6e-3, false)
	f.Add(halves(wire.BFloat16, 1e38, 1e-38, 0), 1e-4, true)
	f.Fuzz(func(t *testing.T, src []byte, spread float64, bfloat bool) {
		if !(spread >= 0 && spread <= 12*ArchiveMaxBound) {
			return
		}
		dt := wire.Float16
		if bfloat {
			dt = wire.BFloat16
		}
		quantiseBoth(t, src, dt, spread)
	})
}

// FuzzArchive decodes any bytes, and also archives the bytes as values.
func FuzzArchive(f *testing.F) {
	rng := rand.New(rand.NewPCG(15, 16))
	for _, dt := range archived {
		for _, src := range archiveSources(dt, 200, rng) {
			f.Add(src)
			f.Add(encodeArchive(f, NewArchiveEncoder(ArchiveDefaultBound), src, dt))
		}
	}
	e := NewArchiveEncoder(ArchiveDefaultBound)
	f.Fuzz(func(t *testing.T, b []byte) {
		if size, err := DecodedSize(Archive, b); err == nil && size <= 1<<22 {
			dst := make([]byte, size)
			err := Decode(dst, Archive, bytes.NewReader(b))
			if err != nil && !errors.Is(err, status.Corrupt) {
				t.Fatal(err)
			}
			again, unknown := decodeUnknown(Archive, bytes.NewReader(b), 1<<22)
			if (err == nil) != (unknown == nil) || err == nil && !bytes.Equal(dst, again) {
				t.Fatalf("%v, and of unknown length %v", err, unknown)
			}
		}
		b = b[:len(b)&^1]
		for _, dt := range archived {
			if Archives(dt, int64(len(b)/2)) {
				checkArchive(t, e, ArchiveDefaultBound, b, dt)
			}
		}
	})
}

func BenchmarkArchive(b *testing.B) {
	rng := rand.New(rand.NewPCG(17, 18))
	for _, size := range []int{1536, 64 << 10, 2 << 20} {
		src := archiveSources(wire.Float16, size/2, rng)["normal"]
		e := NewArchiveEncoder(ArchiveDefaultBound)
		buf := make([]byte, Headroom(Archive, size)+size)
		var n int
		b.Run(fmt.Sprintf("encode/%d", size), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				copy(buf[Front(Archive, size):], src)
				var err error
				if n, err = e.EncodeInPlace(buf, Front(Archive, size), size, wire.Float16); err != nil {
					b.Fatal(err)
				}
			}
			b.ReportMetric(2*float64(size)/float64(n), "ratio")
		})
		payload := encodeArchive(b, e, src, wire.Float16)
		b.Run(fmt.Sprintf("decode/%d", size), func(b *testing.B) {
			b.SetBytes(int64(size))
			for b.Loop() {
				if err := Decode(src, Archive, bytes.NewReader(payload)); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
	src := archiveSources(wire.Float16, archiveChunk, rng)["normal"]
	c := newCodeBuffers(archiveChunk)
	var q quantised
	b.Run("quantise", func(b *testing.B) {
		b.SetBytes(int64(len(src)))
		for b.Loop() {
			q = quantise(c, src, wire.Float16, 6e-3)
		}
	})
	b.Run("quantise/portable", func(b *testing.B) {
		b.SetBytes(int64(len(src)))
		for b.Loop() {
			q = quantised{}
			quantisePortable(c, src, wire.Float16, 6e-3, &q)
		}
	})
}
