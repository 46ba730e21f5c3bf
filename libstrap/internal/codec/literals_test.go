package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/klauspost/compress/huff0"
)

// literalsFrame encodes src without match finding, at every level. All levels must write the same
// frame.
func literalsFrame(t testing.TB, src []byte) (frame []byte) {
	t.Helper()
	for i, level := range Levels() {
		before := UseLevel(level)
		got := encodeLiterals(t, src)
		UseLevel(before)
		if i > 0 && !bytes.Equal(got, frame) {
			t.Fatalf("%s writes another frame than %s", level, Levels()[0])
		}
		frame = got
	}
	return frame
}

// encodeLiterals encodes src without match finding, at the level in use.
func encodeLiterals(t testing.TB, src []byte) []byte {
	t.Helper()
	var out bytes.Buffer
	e := newLiteralsEncoder()
	if err := e.begin(&out, int64(len(src))); err != nil {
		t.Fatal(err)
	}
	if err := writeAll(e, src); err != nil {
		t.Fatal(err)
	}
	return out.Bytes()
}

// blockKinds lists the Block_Types of a frame.
func blockKinds(t testing.TB, payload []byte) (kinds []int) {
	t.Helper()
	f, err := openFrame(Zstd, bytes.NewReader(payload))
	if err != nil {
		t.Fatal(err)
	}
	for at := len(f.held); ; {
		h := int(payload[at]) | int(payload[at+1])<<8 | int(payload[at+2])<<16
		kind, size := h>>1&3, h>>3
		kinds = append(kinds, kind)
		if kind == blockRLE {
			size = 1
		}
		if at += zstdBlockHeader + size; h&1 != 0 {
			if at != len(payload) {
				t.Fatalf("the last block ends at %d of %d", at, len(payload))
			}
			return kinds
		}
	}
}

// ofSymbols returns n bytes that have `values` different values, small ones far more often.
func ofSymbols(n, values int) []byte {
	rng := rand.New(rand.NewPCG(uint64(n), uint64(values)))
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(min(rng.IntN(values), rng.IntN(values), rng.IntN(values)))
	}
	for v := range min(values, n) {
		b[rng.IntN(n)] = byte(v)
	}
	return b
}

func TestLiteralsRoundTrip(t *testing.T) {
	sizes := []int{1, 2, 3, 7, 8, 11, 12, 16, 255, 256, 257, 1023, 1024, 1025, 8191, 8192, 8193, 16383, 16384,
		16385, 65791, 65792, 1<<18 - 1, 1<<18 + 1}
	for blocks := 1; blocks <= 2; blocks++ {
		sizes = append(sizes, blocks*literalsBlock-1, blocks*literalsBlock, blocks*literalsBlock+1)
	}
	if testing.Short() {
		sizes = []int{1, 8, 257, 1024, 16385, literalsBlock + 1}
	}
	for _, n := range sizes {
		sources := samples(n)
		for _, values := range []int{1, 2, 129, 255, 256} {
			sources[fmt.Sprintf("%d symbols", values)] = ofSymbols(n, values)
		}
		for _, bits := range []int{3, 5, 6, 7} {
			sources[fmt.Sprintf("float16 of %d bits", bits)] = float16s(n, bits)
		}
		for name, src := range sources {
			payload := literalsFrame(t, src)
			checkDecodes(t, Zstd, payload, src)
			blocks := (n + literalsBlock - 1) / literalsBlock
			if most := n + zstdHeaderMax + zstdBlockHeader*blocks; len(payload) > most {
				t.Errorf("%s: %d bytes became %d", name, n, len(payload))
			}
		}
	}
}

func TestLiteralsTakeTheSmallestBlock(t *testing.T) {
	for name, c := range map[string]struct {
		src  []byte
		want int
	}{
		"one byte":   {[]byte{7}, blockRLE},
		"equal":      {bytes.Repeat([]byte{7}, literalsBlock), blockRLE},
		"random":     {randomBytes(literalsBlock), blockRaw},
		"four bytes": {[]byte("abca"), blockRaw},
		"skewed":     {ofSymbols(literalsBlock, 200), blockCompressed},
		"two values": {ofSymbols(5000, 2), blockCompressed},
		"rare value": {append(make([]byte, 5000), 1), blockCompressed},
	} {
		if got := blockKinds(t, literalsFrame(t, c.src)); len(got) != 1 || got[0] != c.want {
			t.Errorf("%s: blocks of the types %v, want %d", name, got, c.want)
		}
	}
}

// Counts that grow like Fibonacci numbers would need codes longer than the format allows.
func TestHuffmanLimitsItsCodes(t *testing.T) {
	var src []byte
	for v, a, b := 0, 1, 1; len(src)+a < literalsBlock; v, a, b = v+1, b, a+b {
		src = append(src, bytes.Repeat([]byte{byte(v)}, a)...)
	}
	rand.New(rand.NewPCG(1, 2)).Shuffle(len(src), func(i, j int) { src[i], src[j] = src[j], src[i] })
	e := newLiteralsEncoder()
	if data, _ := e.huff.compress(src, false); data == nil || e.huff.longest() != huffMaxBits {
		t.Fatalf("%d bytes, codes of up to %d bits", len(data), e.huff.longest())
	}
	checkDecodes(t, Zstd, literalsFrame(t, src), src)
}

// The encoder guesses from some words which low bits are zero in all words. Here a few other words
// have those bits set.
func TestHuffmanCodesWordsThatNoGuessSees(t *testing.T) {
	rng := rand.New(rand.NewPCG(5, 6))
	draws := 20
	if testing.Short() {
		draws = 1
	}
	for _, n := range []int{huffWordsMin, huffWordsMin + 1021, 120_003, literalsBlock} {
		for range draws {
			src := float16s(n, 5)
			for range rng.IntN(8) {
				at := rng.IntN(n/2) * 2
				if rng.IntN(3) == 0 {
					at = n/2*2 - 2
				}
				word := uint16(rng.Uint32())
				switch rng.IntN(3) {
				case 0: // with few bits of mantissa, like the others
					word &^= 31
				case 1: // a subnormal number
					word &= 0x83E0
				}
				binary.LittleEndian.PutUint16(src[at:], word)
			}
			checkDecodes(t, Zstd, literalsFrame(t, src), src)
		}
	}
}

// A part of the words is counted. The other words may have bytes that the sample does not have.
func TestHuffmanCodesBytesThatNoSampleHas(t *testing.T) {
	rng := rand.New(rand.NewPCG(7, 8))
	draws := 20
	if testing.Short() {
		draws = 1
	}
	for _, n := range []int{sampleMin, sampleMin + 1021, literalsBlock - 2*sampleStride + 2} {
		for range draws {
			src := float16s(n, 5)
			for range 1 + rng.IntN(8) { // most of them are at words that are not counted
				binary.LittleEndian.PutUint16(src[2*rng.IntN(n/2):], uint16(rng.Uint32())&^31)
			}
			checkDecodes(t, Zstd, literalsFrame(t, src), src)
		}
	}
}

// A sample has words of all columns, also if a row is as long as a stride, or some strides: the payload
// is hardly larger than that of rows of another length.
func TestASampleHasAllColumns(t *testing.T) {
	if testing.Short() {
		t.Skip("payloads of several blocks, and no goroutines")
	}
	rng := rand.New(rand.NewPCG(3, 4))
	size := func(width int) int {
		src := make([]byte, 4*literalsBlock)
		for i := range len(src) / 2 {
			v := float32(rng.NormFloat64()) * 0.01
			if i%width < samplePiece {
				v = float32(rng.NormFloat64()) + 20
			}
			binary.LittleEndian.PutUint16(src[2*i:], float16Bits(v)>>5<<5)
		}
		frame := literalsFrame(t, src)
		checkDecodes(t, Zstd, frame, src)
		return len(frame)
	}
	for _, strides := range []int{1, 2, 4} {
		width := strides * sampleStride
		if of, beside := size(width), size(width+100); float64(of) > 1.02*float64(beside) {
			t.Errorf("rows of %d words take %d bytes, those of %d words %d", width, of, width+100, beside)
		}
	}
}

func TestExtentOfWords(t *testing.T) {
	if len(kernels) == 0 {
		t.Skip("no kernels without cgo")
	}
	for _, src := range [][]byte{
		float16s(1<<16, 0), float16s(1<<16, 1), float16s(1<<16, 5), float16s(1<<16, 10), make([]byte, 128),
	} {
		want := (&huffman{}).extentOf(src)
		for _, wide := range []bool{false, true} {
			if wide && kernels[0] != levelWide {
				continue
			}
			if got := extentKernel(src, wide); got != want {
				t.Errorf("wide %v: %+v, want %+v", wide, got, want)
			}
		}
	}
}

// huff0 must read the streams, and must not write smaller ones.
func TestHuffmanAgainstHuff0(t *testing.T) {
	for _, n := range []int{1024, 5001, 1 << 16, literalsBlock} {
		for name, src := range map[string][]byte{
			"8 symbols": ofSymbols(n, 8), "256 symbols": ofSymbols(n, 256),
			"float16": float16s(n, 10), "rounded": float16s(n, 5),
		} {
			var h huffman
			data, _ := h.compress(src, false)
			if data == nil {
				if _, _, err := huff0.Compress4X(src, nil); !errors.Is(err, huff0.ErrIncompressible) {
					t.Errorf("%s of %d bytes stays raw; huff0: %v", name, n, err)
				}
				continue
			}
			s, rest, err := huff0.ReadTable(data, nil)
			if err != nil {
				t.Fatal(err)
			}
			got, err := s.Decoder().Decompress4X(make([]byte, 0, n), rest)
			if err != nil || !bytes.Equal(got, src) {
				t.Errorf("%s of %d: %v", name, n, err)
			}
			theirs, _, err := huff0.Compress4X(src, nil)
			if errors.Is(err, huff0.ErrIncompressible) {
				theirs, err = src, nil
			}
			if err != nil {
				t.Fatal(err)
			}
			if min(len(data), n) > len(theirs)+len(theirs)/200 {
				t.Errorf("%s of %d bytes: %d, huff0 makes %d", name, n, len(data), len(theirs))
			}
		}
	}
}

// Level 0 is at most about 1 % larger than match finding, whatever the source. Without kernels,
// level 0 always finds matches.
func TestZstdFindsMatchesWhereTheyPay(t *testing.T) { atEveryLevel(t, zstdFindsMatchesWhereTheyPay) }

func zstdFindsMatchesWhereTheyPay(t *testing.T) {
	n := 1 << 20
	if testing.Short() {
		n = 1 << 18
	}
	ids := make([]byte, n)
	rng := rand.New(rand.NewPCG(3, 4))
	for i := 0; i < n; i += 8 {
		binary.LittleEndian.PutUint64(ids[i:], uint64(rng.IntN(30_000)))
	}
	row := float16s(768, 10)
	halfRepeated := float16s(n, 10)
	copy(halfRepeated[n/2:], bytes.Repeat(row, n/2/len(row)))
	mask := make([]byte, n)
	for i := range mask {
		mask[i] = byte(i / 300 % 2)
	}
	_, kernel := kernelInUse()
	for name, c := range map[string]struct {
		src     []byte
		matches bool
	}{
		"activations":     {float16s(n, 10), false},
		"rounded":         {float16s(n, 5), false},
		"random":          {randomBytes(n), false},
		"zeros":           {make([]byte, n), false},
		"token ids":       {ids, true},
		"mask":            {mask, true},
		"repeated rows":   {bytes.Repeat(row, n/len(row)), true},
		"half of it rows": {halfRepeated, true},
		"text":            {bytes.Repeat([]byte("A glacier is snow that fell faster than it melts. "), 90), true},
	} {
		e := newEncoder(t, Zstd, 0)
		payload := encodeInPlace(t, e, c.src)
		checkDecodes(t, Zstd, payload, c.src)
		if matches := e.zstd.frame != e.zstd.literals; matches != (c.matches || !kernel) {
			t.Errorf("%s: match finding %v", name, matches)
		}
		searched := encodeInPlace(t, newEncoder(t, Zstd, 1), c.src)
		if len(payload) > len(searched)+len(searched)/100+64 {
			t.Errorf("%s: %d bytes, with match finding %d", name, len(payload), len(searched))
		}
	}
}

// If a frame comes in pieces, the first piece decides whether the encoder finds matches.
func TestZstdInPieces(t *testing.T) {
	for name, src := range map[string][]byte{
		"rounded": float16s(3<<20+5, 5), "rows": bytes.Repeat(float16s(768, 10), 4000),
	} {
		for _, size := range []int{1, 1000, literalsBlock, literalsBlock + 1, 1 << 20} {
			e := newEncoder(t, Zstd, 0)
			part := src[:min(len(src), size*1000)]
			var out bytes.Buffer
			w, err := e.NewFrame(&out, int64(len(part)))
			if err != nil {
				t.Fatal(err)
			}
			for rest := part; len(rest) > 0; rest = rest[min(size, len(rest)):] {
				if _, err := w.Write(rest[:min(size, len(rest))]); err != nil {
					t.Fatalf("%s in pieces of %d: %v", name, size, err)
				}
			}
			if err := w.Close(); err != nil {
				t.Fatal(err)
			}
			checkDecodes(t, Zstd, out.Bytes(), part)
		}
	}
}

// Slow: inputs are repeated to up to three blocks, which each set of loops encodes, and which are decoded
// twice.
func FuzzLiterals(f *testing.F) {
	for _, n := range []int{1, 2, 100, 1024, 9000} {
		for _, src := range samples(n) {
			f.Add(src, uint16(1), uint8(0))
		}
		f.Add(float16s(n, 5), uint16(20), uint8(5))
		f.Add(ofSymbols(n, 200), uint16(3), uint8(0))
	}
	f.Fuzz(func(t *testing.T, src []byte, repeat uint16, zeros uint8) {
		src = bytes.Repeat(src, int(repeat)%2048+1)
		src = src[:min(len(src), 3*literalsBlock)]
		if len(src) == 0 {
			return
		}
		for i := 0; i+1 < len(src); i += 2 { // clear the last bits of each word
			word := binary.LittleEndian.Uint16(src[i:])
			binary.LittleEndian.PutUint16(src[i:], word>>(zeros%17)<<(zeros%17))
		}
		checkDecodes(t, Zstd, literalsFrame(t, src), src)
	})
}

// float16s returns n bytes of normally distributed float16 values with `mantissa` bits of mantissa.
func float16s(n, mantissa int) []byte {
	rng := rand.New(rand.NewPCG(8, uint64(mantissa)))
	out := make([]byte, n)
	for i := 0; i+1 < n; i += 2 {
		h := float16Bits(float32(rng.NormFloat64()))
		binary.LittleEndian.PutUint16(out[i:], h>>(10-mantissa)<<(10-mantissa))
	}
	return out
}

// BenchmarkZstd compares level 0 with level 1, which always looks for matches.
func BenchmarkZstd(b *testing.B) {
	for _, n := range []int{768, 128 << 10, 2 << 20} {
		for _, mantissa := range []int{10, 5} {
			src := float16s(n, mantissa)
			for level := range 2 {
				b.Run(fmt.Sprintf("%d/mantissa=%d/level=%d", n, mantissa, level), func(b *testing.B) {
					e := newEncoder(b, Zstd, level)
					buf := make([]byte, n+Headroom(Zstd, n))
					b.SetBytes(int64(n))
					b.ReportAllocs()
					m := 0
					for b.Loop() {
						copy(buf[Front(Zstd, n):], src)
						var err error
						if m, err = e.EncodeInPlace(buf, Front(Zstd, n), n); err != nil {
							b.Fatal(err)
						}
					}
					b.ReportMetric(float64(n)/float64(m), "ratio")
				})
			}
		}
	}
}

func BenchmarkRepeats(b *testing.B) {
	for _, n := range []int{768, 2 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			src, r := float16s(n, 10), &repeats{}
			b.SetBytes(int64(n))
			for b.Loop() {
				r.share(src)
			}
		})
	}
}
