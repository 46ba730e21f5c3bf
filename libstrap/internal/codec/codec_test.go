package codec

import (
	"bytes"
	"errors"
	"fmt"
	"math/rand/v2"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

var kinds = []Kind{None, LZ4, Zstd}

func newEncoder(t testing.TB, k Kind, level int) *Encoder {
	t.Helper()
	e, err := NewEncoder(k, level)
	if err != nil {
		t.Fatal(err)
	}
	return e
}

// samples are sources of every character: constant, textual, random.
func samples(n int) map[string][]byte {
	rng := rand.New(rand.NewPCG(uint64(n), 7))
	random := make([]byte, n)
	for i := range random {
		random[i] = byte(rng.Uint32())
	}
	some := bytes.Clone(random)
	for i := range some {
		if i/4096%2 == 0 {
			some[i] = byte(i % 17)
		}
	}
	return map[string][]byte{"zeros": make([]byte, n), "random": random, "mixed": some}
}

func TestEncodeInPlaceRoundTrip(t *testing.T) {
	sizes := []int{0, 1, 2, 15, 1000, 65535, 65536, 65537, 1 << 17, 1<<17 + 1, 3<<17 - 1,
		1 << 20, 4<<20 - 1, 4 << 20, 4<<20 + 1, 13<<20 + 5}
	for _, k := range kinds {
		e := newEncoder(t, k, 0)
		for _, n := range sizes {
			for name, src := range samples(n) {
				t.Run(fmt.Sprintf("%s/%s/%d", k, name, n), func(t *testing.T) {
					roundTripInPlace(t, e, src)
				})
			}
		}
	}
}

// encodeInPlace returns a copy of the payload.
func encodeInPlace(t testing.TB, e *Encoder, src []byte) []byte {
	t.Helper()
	buf := make([]byte, len(src)+Headroom(e.kind, len(src)))
	copy(buf[len(buf)-len(src):], src)
	n, err := e.EncodeInPlace(buf, len(src))
	if err != nil {
		t.Fatal(err)
	}
	return bytes.Clone(buf[:n])
}

func roundTripInPlace(t testing.TB, e *Encoder, src []byte) {
	t.Helper()
	payload := encodeInPlace(t, e, src)
	checkDecodes(t, e.kind, payload, src)
}

func checkDecodes(t testing.TB, k Kind, payload, src []byte) {
	t.Helper()
	if k != None {
		if got := Detect(payload); got != k {
			t.Fatalf("detected as %s", got)
		}
		if n, err := DecodedSize(k, payload); err != nil || n != int64(len(src)) {
			t.Fatalf("DecodedSize = %d, %v; want %d", n, err, len(src))
		}
	}
	dst := make([]byte, len(src))
	if err := Decode(dst, k, bytes.NewReader(payload)); err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(dst, src) {
		t.Fatal("decoded bytes differ")
	}
}

func TestNewFrameStreams(t *testing.T) {
	for _, k := range kinds {
		e := newEncoder(t, k, 0)
		for _, n := range []int{0, 1, 5_000_000, 9 << 20} {
			src := samples(n)["mixed"]
			var out bytes.Buffer
			w, err := e.NewFrame(&out, int64(n))
			if err != nil {
				t.Fatal(err)
			}
			for rest := src; len(rest) > 0; {
				piece := min(len(rest), 777_777)
				if _, err := w.Write(rest[:piece]); err != nil {
					t.Fatal(err)
				}
				rest = rest[piece:]
			}
			if err := w.Close(); err != nil {
				t.Fatalf("%s of %d bytes: %v", k, n, err)
			}
			checkDecodes(t, k, out.Bytes(), src)
		}
	}
}

func TestNewFrameWantsTheAnnouncedBytes(t *testing.T) {
	for _, k := range kinds {
		e := newEncoder(t, k, 0)
		w, err := e.NewFrame(&bytes.Buffer{}, 10)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, 11)); !errors.Is(err, status.Internal) {
			t.Errorf("%s took 11 of 10 bytes: %v", k, err)
		}
		if err := w.Close(); !errors.Is(err, status.Internal) {
			t.Errorf("%s closed without its bytes: %v", k, err)
		}
	}
}

func TestLevels(t *testing.T) {
	src := samples(300_000)["mixed"]
	for k, levels := range map[Kind][]int{LZ4: {1, 5, 9}, Zstd: {1, 2, 3, 4}} {
		for _, level := range levels {
			roundTripInPlace(t, newEncoder(t, k, level), src)
		}
	}
	for _, bad := range []struct {
		k     Kind
		level int
	}{{None, 1}, {LZ4, -1}, {LZ4, 10}, {Zstd, 5}, {Zstd, -2}, {Kind(9), 0}} {
		if _, err := NewEncoder(bad.k, bad.level); !errors.Is(err, status.InvalidArgument) {
			t.Errorf("%s level %d: %v", bad.k, bad.level, err)
		}
	}
}

func TestDecodeRefusesWhatIsNotOneFrame(t *testing.T) {
	src := samples(100_000)["mixed"]
	for _, k := range []Kind{LZ4, Zstd} {
		whole := encodeInPlace(t, newEncoder(t, k, 0), src)
		for name, payload := range map[string][]byte{
			"empty":     nil,
			"torn":      whole[:len(whole)-1],
			"half":      whole[:len(whole)/2],
			"no magic":  whole[1:],
			"two":       append(bytes.Clone(whole), whole...),
			"a byte on": append(bytes.Clone(whole), 7),
		} {
			if err := Decode(make([]byte, len(src)), k, bytes.NewReader(payload)); !errors.Is(err, status.Corrupt) {
				t.Errorf("%s, %s: %v", k, name, err)
			}
		}
		for _, n := range []int{len(src) - 1, len(src) + 1} {
			if err := Decode(make([]byte, n), k, bytes.NewReader(whole)); !errors.Is(err, status.Corrupt) {
				t.Errorf("%s into %d bytes: %v", k, n, err)
			}
		}
	}
}

func TestAnEmptyPayloadIsNoFrame(t *testing.T) {
	for _, k := range []Kind{LZ4, Zstd} {
		if err := Decode(nil, k, bytes.NewReader(nil)); !errors.Is(err, status.Corrupt) {
			t.Errorf("%s: %v", k, err)
		}
	}
}

func TestDecodeUnknown(t *testing.T) {
	src := samples(100_000)["mixed"]
	for _, k := range kinds {
		payload := encodeInPlace(t, newEncoder(t, k, 0), src)
		got, err := DecodeUnknown(k, bytes.NewReader(payload), 1<<20)
		if err != nil || !bytes.Equal(got, src) {
			t.Errorf("%s: %d bytes, %v", k, len(got), err)
		}
		if _, err := DecodeUnknown(k, bytes.NewReader(payload), 1000); !errors.Is(err, status.Corrupt) {
			t.Errorf("%s beyond the limit: %v", k, err)
		}
	}
}

func TestNames(t *testing.T) {
	for _, k := range kinds {
		if got, err := ParseKind(k.String()); err != nil || got != k {
			t.Errorf("ParseKind(%q) = %v, %v", k, got, err)
		}
	}
	if _, err := ParseKind("snappy"); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("snappy: %v", err)
	}
}

func fuzzRoundTrip(f *testing.F, k Kind) {
	for _, n := range []int{0, 1, 100, 70_000} {
		for _, src := range samples(n) {
			f.Add(src, uint8(3))
		}
	}
	e := newEncoder(f, k, 0)
	f.Fuzz(func(t *testing.T, src []byte, repeat uint8) {
		// Repetition reaches beyond the block sizes.
		src = bytes.Repeat(src, int(repeat)%64+1)
		if len(src) > 8<<20 {
			src = src[:8<<20]
		}
		roundTripInPlace(t, e, src)
	})
}

func FuzzNoneRoundTrip(f *testing.F) { fuzzRoundTrip(f, None) }
func FuzzLZ4RoundTrip(f *testing.F)  { fuzzRoundTrip(f, LZ4) }
func FuzzZstdRoundTrip(f *testing.F) { fuzzRoundTrip(f, Zstd) }

// fuzzDecode: no bytes crash the decoder or make it hand out too much.
func fuzzDecode(f *testing.F, k Kind) {
	e := newEncoder(f, k, 0)
	f.Add([]byte{}, 0)
	for _, n := range []int{0, 1, 1000, 70_000} {
		for _, src := range samples(n) {
			f.Add(encodeInPlace(f, e, src), n)
		}
	}
	f.Fuzz(func(t *testing.T, payload []byte, n int) {
		if n < 0 || n > 1<<20 {
			return
		}
		known := Decode(make([]byte, n), k, bytes.NewReader(payload))
		data, unknown := DecodeUnknown(k, bytes.NewReader(payload), 1<<20)
		if known == nil && (unknown != nil || len(data) != n) {
			t.Fatalf("%d bytes decode, but without the length %d: %v", n, len(data), unknown)
		}
		if size, err := DecodedSize(k, payload); known == nil && (err != nil || size >= 0 && size != int64(n)) {
			t.Fatalf("a frame of %d bytes says %d, %v", n, size, err)
		}
	})
}

func FuzzDecodeLZ4(f *testing.F)  { fuzzDecode(f, LZ4) }
func FuzzDecodeZstd(f *testing.F) { fuzzDecode(f, Zstd) }

func BenchmarkEncodeInPlace(b *testing.B) {
	for _, k := range kinds {
		for _, n := range []int{1536, 1 << 20} {
			b.Run(fmt.Sprintf("%s/%d", k, n), func(b *testing.B) {
				e := newEncoder(b, k, 0)
				src := samples(n)["random"]
				buf := make([]byte, n+Headroom(k, n))
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					copy(buf[len(buf)-n:], src)
					if _, err := e.EncodeInPlace(buf, n); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
}
