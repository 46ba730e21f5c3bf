package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/iotest"

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

func randomBytes(n int) []byte {
	b := make([]byte, n)
	if _, err := rand.NewChaCha8([32]byte{byte(n), 7}).Read(b); err != nil {
		panic(err) // it never fails
	}
	return b
}

// samples returns sources of n bytes of many kinds: constant, textual, random.
func samples(n int) map[string][]byte {
	random := randomBytes(n)
	some := bytes.Clone(random)
	for i := range some {
		if i/4096%2 == 0 {
			some[i] = byte(i % 17)
		}
	}
	return map[string][]byte{"zeros": make([]byte, n), "random": random, "mixed": some}
}

func TestEncodeInPlaceRoundTrip(t *testing.T) {
	sizes := []int{0, 1, 2, 15, 255, 256, 1000, 3<<17 - 1, 13<<20 + 5}
	for _, block := range []int{64 << 10, 128 << 10, 256 << 10, 1 << 20, 4 << 20} {
		sizes = append(sizes, block-1, block, block+1)
	}
	if testing.Short() {
		sizes = []int{0, 1, 255, 1000, 64<<10 + 1, 128<<10 + 1}
	}
	encoders := map[Kind]*Encoder{}
	for _, k := range kinds {
		encoders[k] = newEncoder(t, k, 0)
	}
	for _, n := range sizes {
		for name, src := range samples(n) {
			for k, e := range encoders {
				t.Run(fmt.Sprintf("%s/%s/%d", k, name, n), func(t *testing.T) {
					roundTripInPlace(t, e, src)
				})
			}
		}
	}
}

// With bytes that do not compress, encoding in place comes nearest to overwriting its own source.
func TestEncodeInPlaceFitsItsHeadroom(t *testing.T) {
	sizes := []int{5<<20 + 1, 40<<20 - 3}
	rng := rand.New(rand.NewPCG(5, 6))
	for range 40 {
		sizes = append(sizes, rng.IntN(1<<(4+rng.IntN(18))))
	}
	if testing.Short() {
		sizes = []int{5, 3000, 1<<17 + 1}
	}
	encoders := []*Encoder{newEncoder(t, None, 0), newEncoder(t, LZ4, 0), newEncoder(t, LZ4, 1),
		newEncoder(t, Zstd, 0), newEncoder(t, Zstd, 2)}
	for _, n := range sizes {
		src := randomBytes(n)
		for _, e := range encoders {
			payload := encodeInPlace(t, e, src)
			if most := n + Headroom(e.kind, n); len(payload) > most {
				t.Errorf("%s: %d random bytes became %d, more than %d", e.kind, n, len(payload), most)
			}
			checkDecodes(t, e.kind, payload, src)
		}
	}
}

func TestEncodeInPlaceLeavesRawBytes(t *testing.T) {
	buf := []byte("raw bytes..")
	n, err := newEncoder(t, None, 0).EncodeInPlace(buf, 0, 9)
	if n != 9 || err != nil || string(buf) != "raw bytes.." {
		t.Errorf("%d, %v, %q", n, err, buf)
	}
}

// Bytes that LZ4 cannot compress stay in place and become a raw block of the frame.
func TestALZ4FrameOfOneRawBlockIsAroundIt(t *testing.T) {
	src := randomBytes(1000)
	buf := make([]byte, len(src)+Headroom(LZ4, len(src)))
	at := Front(LZ4, len(src))
	copy(buf[at:], src)
	n, err := newEncoder(t, LZ4, 0).EncodeInPlace(buf, at, len(src))
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(buf[at:][:len(src)], src) {
		t.Error("the block has moved")
	}
	again := make([]byte, len(buf))
	copy(again[at:], src)
	if m, ok := Surround(LZ4, again, len(src)); !ok || !bytes.Equal(again[:m], buf[:n]) {
		t.Errorf("without an encoder it is %d bytes, not these %d", m, n)
	}
}

func TestWhatIsSurrounded(t *testing.T) {
	for _, of := range []struct {
		kind  Kind
		bytes int
		ok    bool
	}{
		{None, 0, true}, {None, 5 << 20, true},
		{LZ4, 0, false}, {LZ4, 1, true}, {LZ4, 65_536, true}, {LZ4, 65_537, true},
		{LZ4, 4 << 20, true}, {LZ4, 4<<20 + 1, false},
		{Zstd, 100, false}, {Archive, 100, false},
	} {
		src := randomBytes(of.bytes)
		buf := make([]byte, of.bytes+Headroom(of.kind, of.bytes))
		copy(buf[Front(of.kind, of.bytes):], src)
		n, ok := Surround(of.kind, buf, of.bytes)
		if ok != of.ok {
			t.Errorf("%s of %d bytes: %v", of.kind, of.bytes, ok)
		} else if ok {
			checkDecodes(t, of.kind, buf[:n], src)
		}
	}
}

func TestEncodeInPlaceRefusesToOvertake(t *testing.T) {
	for _, k := range []Kind{LZ4, Zstd} {
		n := 1000
		if _, err := newEncoder(t, k, 0).EncodeInPlace(make([]byte, n+Headroom(k, n)-1), Front(k, n), n); !errors.Is(err, status.Internal) {
			t.Errorf("%s with a byte too little: %v", k, err)
		}
		if _, err := newEncoder(t, k, 0).EncodeInPlace(make([]byte, n+Headroom(k, n)), Front(k, n)-1, n); !errors.Is(err, status.Internal) {
			t.Errorf("%s with a byte too little in front: %v", k, err)
		}
	}
	var p inPlace
	if err := p.begin(None, make([]byte, 10), 4, 6); err != nil {
		t.Fatal(err)
	}
	if _, err := p.Write(make([]byte, 4)); err != nil {
		t.Error(err)
	}
	if _, err := p.Write(make([]byte, 1)); !errors.Is(err, status.Internal) {
		t.Errorf("a byte over what was read: %v", err)
	}
}

// encodeInPlace encodes src in place, and returns a copy of the payload.
func encodeInPlace(t testing.TB, e *Encoder, src []byte) []byte {
	t.Helper()
	buf := make([]byte, len(src)+Headroom(e.kind, len(src)))
	copy(buf[Front(e.kind, len(src)):], src)
	n, err := e.EncodeInPlace(buf, Front(e.kind, len(src)), len(src))
	if err != nil {
		t.Fatalf("%d bytes: %v", len(src), err)
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
	clear(dst)
	if k != Archive && (!DecodeSmall(dst, k, payload) || !bytes.Equal(dst, src)) {
		t.Fatal("in memory it decodes otherwise")
	}
}

func TestNewFrameStreams(t *testing.T) {
	sizes := []int{0, 1, 5_000_000, 9 << 20}
	if testing.Short() {
		sizes = []int{0, 1, 800_000}
	}
	for _, k := range kinds {
		e := newEncoder(t, k, 0)
		for _, n := range sizes {
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
	n := 300_000
	if testing.Short() {
		n = 20_000
	}
	src := samples(n)["mixed"]
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

func TestEncoderGoesOnAfterAnUnfinishedFrame(t *testing.T) {
	src := samples(300_000)["mixed"]
	for _, k := range kinds {
		e := newEncoder(t, k, 0)
		w, err := e.NewFrame(&bytes.Buffer{}, int64(len(src)))
		if err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(src[:99_999]); err != nil {
			t.Fatal(err)
		}
		roundTripInPlace(t, e, src)
	}
}

type failingWriter struct{ after int }

var errFull = errors.New("full")

func (w *failingWriter) Write(b []byte) (int, error) {
	if w.after -= len(b); w.after < 0 {
		return 0, errFull
	}
	return len(b), nil
}

func TestNewFrameReportsTheWriter(t *testing.T) {
	src := samples(300_000)["random"]
	for _, k := range kinds {
		for _, after := range []int{0, 20, 150_000, 299_999} {
			w, err := newEncoder(t, k, 0).NewFrame(&failingWriter{after}, int64(len(src)))
			if err == nil {
				_, err = w.Write(src)
			}
			if err == nil {
				err = w.Close()
			}
			if !errors.Is(err, errFull) {
				t.Errorf("%s with room for %d bytes: %v", k, after, err)
			}
		}
	}
}

func TestDecodeRefusesWhatIsNotOneFrame(t *testing.T) {
	src := samples(100_000)["mixed"]
	skippable := []byte("\x50\x2a\x4d\x18\x03\x00\x00\x00abc")
	for _, k := range []Kind{LZ4, Zstd} {
		e := newEncoder(t, k, 0)
		whole := encodeInPlace(t, e, src)
		empty := encodeInPlace(t, e, nil)
		for name, payload := range map[string][]byte{
			"empty":            nil,
			"torn":             whole[:len(whole)-1],
			"half":             whole[:len(whole)/2],
			"header alone":     whole[:lz4HeaderSize],
			"no magic":         whole[1:],
			"two":              slices.Concat(whole, whole),
			"halves":           slices.Concat(encodeInPlace(t, e, src[:50_000]), encodeInPlace(t, e, src[50_000:])),
			"empty one before": slices.Concat(empty, whole),
			"empty one behind": slices.Concat(whole, empty),
			"skip before":      slices.Concat(skippable, whole),
			"skip behind":      slices.Concat(whole, skippable),
			"a byte on":        slices.Concat(whole, []byte{7}),
			"zeros":            make([]byte, 1000),
		} {
			if err := Decode(make([]byte, len(src)), k, bytes.NewReader(payload)); !errors.Is(err, status.Corrupt) {
				t.Errorf("%s, %s: %v", k, name, err)
			}
			if DecodeSmall(make([]byte, len(src)), k, payload) {
				t.Errorf("%s, %s: it decodes in memory", k, name)
			}
			if _, err := decodeUnknown(k, bytes.NewReader(payload), 1<<20); !errors.Is(err, status.Corrupt) {
				t.Errorf("%s, %s, length unknown: %v", k, name, err)
			}
			// The pooled decoder still works after the error.
			checkDecodes(t, k, whole, src)
		}
		for _, n := range []int{0, len(src) - 1, len(src) + 1} {
			if err := Decode(make([]byte, n), k, bytes.NewReader(whole)); !errors.Is(err, status.Corrupt) {
				t.Errorf("%s into %d bytes: %v", k, n, err)
			}
		}
	}
	for _, n := range []int{len(src) - 1, len(src) + 1} {
		if err := Decode(make([]byte, n), None, bytes.NewReader(src)); !errors.Is(err, status.Corrupt) {
			t.Errorf("raw into %d bytes: %v", n, err)
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

func TestDecodeNoticesFlippedBytes(t *testing.T) {
	// In a frame with checksums, any change is refused or has no effect.
	whole, want := readFrame(t, "checksums.lz4"), frameSource()
	for at := 0; at < len(whole); at += 37 {
		bad := bytes.Clone(whole)
		bad[at] ^= 0x10
		dst := make([]byte, len(want))
		if err := Decode(dst, LZ4, bytes.NewReader(bad)); err == nil && !bytes.Equal(dst, want) {
			t.Errorf("byte %d flipped: other bytes came out", at)
		}
	}
}

// Decode works with readers that return bytes in every way that io.Reader permits.
func TestDecodeFromAnyReader(t *testing.T) {
	src := samples(100_000)["mixed"]
	for _, k := range kinds {
		payload := encodeInPlace(t, newEncoder(t, k, 0), src)
		for name, r := range map[string]io.Reader{
			"buffer":   bytes.NewBuffer(bytes.Clone(payload)),
			"bytewise": iotest.OneByteReader(bytes.NewReader(payload)),
			"eager":    iotest.DataErrReader(bytes.NewReader(payload)),
			"halves":   iotest.HalfReader(bytes.NewReader(payload)),
		} {
			dst := make([]byte, len(src))
			if err := Decode(dst, k, r); err != nil || !bytes.Equal(dst, src) {
				t.Errorf("%s, %s: %v", k, name, err)
			}
		}
		broken := io.MultiReader(bytes.NewReader(payload[:len(payload)/2]), iotest.ErrReader(errFull))
		if err := Decode(make([]byte, len(src)), k, broken); !errors.Is(err, errFull) {
			t.Errorf("%s from a reader that fails: %v", k, err)
		}
	}
}

// frameSource returns the content of the frames in testdata/frames. Python's lz4.frame and
// zstandard, which use the C libraries, made them with the options in their names.
func frameSource() []byte {
	src := make([]byte, 200_000)
	for i := range src {
		src[i] = byte(i >> 9 * (i % 13))
	}
	return src
}

func readFrame(t testing.TB, name string) []byte {
	t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", "frames", name))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func TestDecodeFramesOfTheCLibraries(t *testing.T) {
	want := frameSource()
	for name, size := range map[string]int64{
		"checksums.lz4":        200_000,
		"linked.lz4":           -1,
		"linked-checksums.lz4": 200_000,
		"default.zst":          200_000,
		"checksum.zst":         200_000,
		"level19.zst":          200_000,
		"streamed.zst":         -1,
		"window-1k.zst":        -1,
	} {
		t.Run(name, func(t *testing.T) {
			payload := readFrame(t, name)
			k := Detect(payload)
			if n, err := DecodedSize(k, payload[:19]); n != size || err != nil {
				t.Errorf("DecodedSize = %d, %v; want %d", n, err, size)
			}
			dst := make([]byte, len(want))
			if err := Decode(dst, k, bytes.NewReader(payload)); err != nil || !bytes.Equal(dst, want) {
				t.Errorf("Decode: %v", err)
			}
			if n, err := DecodedLen(k, payload); n != int64(len(want)) || err != nil {
				t.Errorf("DecodedLen = %d, %v", n, err)
			}
			if n, err := Count(k, bytes.NewReader(payload), int64(len(payload))); n != int64(len(want)) || err != nil {
				t.Errorf("Count = %d, %v", n, err)
			}
			got, err := decodeUnknown(k, bytes.NewReader(payload), int64(len(want)))
			if err != nil || !bytes.Equal(got, want) {
				t.Errorf("decodeUnknown: %d bytes, %v", len(got), err)
			}
			if _, err := decodeUnknown(k, bytes.NewReader(payload), int64(len(want))-1); !errors.Is(err, status.Corrupt) {
				t.Errorf("decodeUnknown beyond its limit: %v", err)
			}
		})
	}
}

// hostile has frames that claim more than they hold, or need something that is missing.
var hostile = map[string]struct {
	payload string
	want    status.Code
}{
	"lz4 of 2^62 bytes":      {"\x04\x22\x4d\x18\x68\x70\x00\x00\x00\x00\x00\x00\x00\x40\xcc\x05\x00\x00\x80hello\x00\x00\x00\x00", status.Corrupt},
	"lz4 of 2^63 bytes":      {"\x04\x22\x4d\x18\x68\x70\x00\x00\x00\x00\x00\x00\x00\x80\x0b\x00\x00\x00\x00", status.Corrupt},
	"lz4 with a dictionary":  {"\x04\x22\x4d\x18\x61\x40\x01\x00\x00\x00\xd0\x00\x00\x00\x00", status.Unsupported},
	"lz4 with a long block":  {"\x04\x22\x4d\x18\x60\x40\x82\xff\xff\xff\xff", status.Corrupt},
	"legacy lz4":             {"\x02\x21\x4c\x18\x01\x00\x00\x00\x10", status.Corrupt},
	"zstd of 2^63 bytes":     {"\x28\xb5\x2f\xfd\xc0\x00\x00\x00\x00\x00\x00\x00\x00\x80\x01\x00\x00", status.Corrupt},
	"zstd, segment of 1 TiB": {"\x28\xb5\x2f\xfd\xe0\x00\x00\x00\x00\x00\x01\x00\x00\x03\x00\x00a", status.Unsupported},
	"zstd, window of 2 TiB":  {"\x28\xb5\x2f\xfd\x00\xff\x0b\x00\x00a", status.Unsupported},
	"zstd, window of 96 MiB": {"\x28\xb5\x2f\xfd\x00\x84\x2b\x00\x00a", status.OK},
	"zstd, no dictionary":    {"\x28\xb5\x2f\xfd\x21\x00\x05\x29\x00\x00hello", status.OK}, // its number is 0, in one byte
	"zstd, dictionary":       {"\x28\xb5\x2f\xfd\x01\x00\x05\x01\x00\x00", status.Unsupported},
	"zstd, reserved bit":     {"\x28\xb5\x2f\xfd\x08\x00\x01\x00\x00", status.Corrupt},
	"zstd, reserved block":   {"\x28\xb5\x2f\xfd\x00\x00\x07\x00\x00", status.Corrupt},
}

func TestDecodeRefusesHostileFrames(t *testing.T) {
	for name, h := range hostile {
		t.Run(name, func(t *testing.T) {
			k := Zstd
			if strings.Contains(name, "lz4") {
				k = LZ4
			}
			// A decoder needs at most its tables, and two LZ4 blocks of 64 KiB, or a zstd window
			// and blocks of 128 KiB.
			if used := allocated(func() {
				if err := Decode(make([]byte, 5), k, strings.NewReader(h.payload)); status.CodeOf(err) != h.want {
					t.Errorf("Decode: %v", err)
				}
				if _, err := Count(k, strings.NewReader(h.payload), int64(len(h.payload))); status.CodeOf(err) != h.want {
					t.Errorf("Count: %v", err)
				}
				if _, err := DecodedLen(k, []byte(h.payload)); status.CodeOf(err) != h.want {
					t.Errorf("DecodedLen: %v", err)
				}
			}); used > 8<<20 {
				t.Errorf("%d bytes were allocated", used)
			}
			if _, err := decodeUnknown(k, strings.NewReader(h.payload), math.MaxInt64); status.CodeOf(err) != h.want {
				t.Errorf("decodeUnknown: %v", err)
			}
		})
	}
	if err := Decode(make([]byte, 300), Zstd, bytes.NewReader(readFrame(t, "dictionary.zst"))); !errors.Is(err, status.Unsupported) {
		t.Errorf("a frame with a dictionary: %v", err)
	}
}

func TestDecodeInParallel(t *testing.T) {
	src := samples(100_000)["mixed"]
	for _, k := range kinds {
		payload := encodeInPlace(t, newEncoder(t, k, 0), src)
		for i := range 4 {
			t.Run(fmt.Sprintf("%s/%d", k, i), func(t *testing.T) {
				t.Parallel()
				for range 20 {
					checkDecodes(t, k, payload, src)
				}
			})
		}
	}
}

// decodeUnknown decodes a payload of unknown decoded length, of at most limit bytes.
func decodeUnknown(k Kind, payload io.Reader, limit int64) (data []byte, err error) {
	err = withDecoder(k, payload, limit, func(r io.Reader, _ int64) error {
		if data, err = io.ReadAll(io.LimitReader(r, limit)); err != nil {
			return corrupt(err, "the payload breaks off after %d bytes", len(data))
		}
		return checkEnd(r, limit)
	})
	if err != nil {
		return nil, err
	}
	return data, nil
}

func TestDecodeWithoutLength(t *testing.T) {
	src := samples(100_000)["mixed"]
	for _, k := range kinds {
		payload := encodeInPlace(t, newEncoder(t, k, 0), src)
		got, err := decodeUnknown(k, bytes.NewReader(payload), 1<<20)
		if err != nil || !bytes.Equal(got, src) {
			t.Errorf("%s: %d bytes, %v", k, len(got), err)
		}
		if _, err := decodeUnknown(k, bytes.NewReader(payload), 1000); !errors.Is(err, status.Corrupt) {
			t.Errorf("%s beyond the limit: %v", k, err)
		}
	}
}

func TestNames(t *testing.T) {
	for _, k := range append(kinds, Archive) {
		if got, err := ParseKind(k.String()); err != nil || got != k {
			t.Errorf("ParseKind(%q) = %v, %v", k, got, err)
		}
	}
	if _, err := ParseKind("snappy"); !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "none, lz4, zstd or archive") {
		t.Errorf("snappy: %v", err)
	}
	if err := Decode(nil, Kind(9), &bytes.Buffer{}); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("Decode of kind 9: %v", err)
	}
}

// A small payload must not touch the memory of a large one.
func TestSmallPayloadsCostLittleMemory(t *testing.T) {
	src := samples(1536)["random"]
	for _, k := range kinds {
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		encodeInPlace(t, newEncoder(t, k, 0), src)
		runtime.ReadMemStats(&after)
		if used := after.TotalAlloc - before.TotalAlloc; used > 1<<20 {
			t.Errorf("%s: an encoder and 1.5 kB took %d bytes", k, used)
		}
	}
}

func fuzzRoundTrip(f *testing.F, k Kind) {
	for _, n := range []int{0, 1, 100, 5_000} {
		for _, src := range samples(n) {
			f.Add(src, uint8(3))
		}
	}
	f.Add(samples(70_000)["mixed"], uint8(1))
	e := newEncoder(f, k, 0)
	f.Fuzz(func(t *testing.T, src []byte, repeat uint8) {
		// Repeat the input, so that it is larger than a block.
		src = bytes.Repeat(src, int(repeat)%64+1)
		if len(src) > 8<<20 {
			src = src[:8<<20]
		}
		roundTripInPlace(t, e, src)
	})
}

func FuzzNoneRoundTrip(f *testing.F) { fuzzRoundTrip(f, None) }
func FuzzLZ4RoundTrip(f *testing.F)  { fuzzRoundTrip(f, LZ4) }

// Slow: inputs are repeated to more than the largest block, and zstd compresses them for
// milliseconds.
func FuzzZstdRoundTrip(f *testing.F) { fuzzRoundTrip(f, Zstd) }

// fuzzDecode decodes any bytes. They must not crash the decoder, nor make it return too much.
func fuzzDecode(f *testing.F, k Kind) {
	e := newEncoder(f, k, 0)
	f.Add([]byte{}, 0)
	for _, n := range []int{0, 1, 1000, 70_000} {
		for _, src := range samples(n) {
			f.Add(encodeInPlace(f, e, src), n)
		}
	}
	frames, err := os.ReadDir(filepath.Join("testdata", "frames"))
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range frames {
		f.Add(readFrame(f, file.Name()), 200_000)
	}
	for _, h := range hostile {
		f.Add([]byte(h.payload), 5)
	}
	f.Fuzz(func(t *testing.T, payload []byte, n int) {
		if n < 0 || n > 1<<20 {
			return
		}
		dst, small := make([]byte, n), make([]byte, n)
		known := Decode(dst, k, bytes.NewReader(payload))
		if DecodeSmall(small, k, payload) && (known != nil || !bytes.Equal(small, dst)) {
			t.Fatalf("in memory %d bytes decode to others, or should not: %v", n, known)
		}
		data, unknown := decodeUnknown(k, bytes.NewReader(payload), 1<<20)
		if known == nil && (unknown != nil || len(data) != n) {
			t.Fatalf("%d bytes decode, but without the length %d: %v", n, len(data), unknown)
		}
		if count, err := Count(k, bytes.NewReader(payload), int64(len(payload))); known == nil && (err != nil || count != int64(n)) {
			t.Fatalf("%d bytes decode, counted are %d: %v", n, count, err)
		}
		if known == nil && k != None {
			// Every byte of the payload is needed.
			if err := Decode(make([]byte, n), k, bytes.NewReader(payload[:len(payload)-1])); err == nil {
				t.Fatal("a torn frame decodes")
			}
		}
		if size, err := DecodedSize(k, payload); known == nil && (err != nil || size >= 0 && size != int64(n)) {
			t.Fatalf("a frame of %d bytes says %d, %v", n, size, err)
		}
	})
}

func FuzzDecodeLZ4(f *testing.F)  { fuzzDecode(f, LZ4) }
func FuzzDecodeZstd(f *testing.F) { fuzzDecode(f, Zstd) }

// activations returns float16 values, normally distributed in each channel, rounded to 5 bits of
// mantissa.
func activations(n int) []byte {
	rng := rand.New(rand.NewPCG(8, 9))
	scale := make([]float64, 768)
	for i := range scale {
		scale[i] = math.Exp(rng.NormFloat64() * 0.7)
	}
	out := make([]byte, n&^1, n)
	for i := 0; i < len(out); i += 2 {
		h := float16Bits(float32(rng.NormFloat64() * scale[i/2%len(scale)]))
		binary.LittleEndian.PutUint16(out[i:], (h+16)&^31)
	}
	return out[:n]
}

func BenchmarkEncodeInPlace(b *testing.B) {
	for _, k := range kinds {
		for _, n := range []int{1536, 1 << 20, 16 << 20} {
			for name, src := range map[string][]byte{"random": samples(n)["random"], "activations": activations(n)} {
				b.Run(fmt.Sprintf("%s/%s/%d", k, name, n), func(b *testing.B) {
					e := newEncoder(b, k, 0)
					buf := make([]byte, n+Headroom(k, n))
					b.SetBytes(int64(n))
					b.ReportAllocs()
					m := 0
					for b.Loop() {
						copy(buf[Front(k, n):], src)
						var err error
						if m, err = e.EncodeInPlace(buf, Front(k, n), n); err != nil {
							b.Fatal(err)
						}
					}
					b.ReportMetric(float64(n)/float64(m), "ratio")
				})
			}
		}
	}
}

func BenchmarkDecode(b *testing.B) {
	for _, k := range kinds {
		for _, n := range []int{1536, 16 << 20} {
			b.Run(fmt.Sprintf("%s/%d", k, n), func(b *testing.B) {
				payload := encodeInPlace(b, newEncoder(b, k, 0), activations(n))
				dst := make([]byte, n)
				b.SetBytes(int64(n))
				b.ReportAllocs()
				for b.Loop() {
					if err := Decode(dst, k, bytes.NewReader(payload)); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
		b.Run(fmt.Sprintf("%s/128 in memory", k), func(b *testing.B) {
			payload := encodeInPlace(b, newEncoder(b, k, 0), activations(128))
			dst := make([]byte, 128)
			b.ReportAllocs()
			for b.Loop() {
				if !DecodeSmall(dst, k, payload) {
					b.Fatal("it does not decode")
				}
			}
		})
	}
}

// After a frame of linked blocks, the next frame must not be able to refer to its content.
func TestLZ4FramesShareNoWindow(t *testing.T) {
	frame := func(flags byte, blocks string) []byte {
		head := []byte{flags, 0x40}
		return append(append([]byte("\x04\x22\x4d\x18"), head[0], head[1], lz4HeaderChecksum(head)), blocks...)
	}
	linked := frame(lz4Version, "\x09\x00\x00\x80secretive\x00\x00\x00\x00")
	// One literal, then a match that begins nine bytes earlier.
	reaching := frame(lz4Version|lz4Independent, "\x05\x00\x00\x00\x10a\x09\x00\x00\x00\x00\x00\x00")
	for range 100 {
		if data, err := decodeUnknown(LZ4, bytes.NewReader(linked), 100); err != nil || string(data) != "secretive" {
			t.Fatalf("%q, %v", data, err)
		}
		if data, err := decodeUnknown(LZ4, bytes.NewReader(reaching), 100); status.CodeOf(err) != status.Corrupt {
			t.Fatalf("a match before the start decodes to %q, %v", data, err)
		}
	}
}
