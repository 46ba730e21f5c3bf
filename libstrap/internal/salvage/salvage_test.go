package salvage_test

import (
	"bytes"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/salvage"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// capture builds a stream and its index, packet by packet.
type capture struct {
	stream []byte
	rows   []wire.Row
}

func (c *capture) add(t testing.TB, layer string, kind codec.Kind, step int64, values []byte) {
	payload := encode(t, kind, values)
	at := len(c.stream)
	head := make([]byte, wire.HeaderSize)
	wire.PutHeader(head, len(layer), uint32(len(payload)))
	c.stream = append(append(append(c.stream, head...), layer...), payload...)
	c.rows = append(c.rows, wire.Row{
		Sequence: uint64(len(c.rows)), Offset: int64(at), Length: uint64(len(c.stream) - at), Parts: 1,
		Model: "m", Layer: layer, Step: step, Token: step, Shape: []int64{int64(len(values))},
		Source: wire.UInt8, Stored: wire.UInt8, Codec: kind.String(),
		CRC: crc32.Checksum(payload, crc32.MakeTable(crc32.Castagnoli)), TimeNS: 1, MSE: math.NaN(),
	})
}

// note appends a row without a packet.
func (c *capture) note(layer, why string) {
	c.rows = append(c.rows, wire.Row{
		Sequence: uint64(len(c.rows)), Offset: -1, Parts: 1, Layer: layer, Step: 1, Token: 2,
		Codec: "none", MSE: math.NaN(), Error: why,
	})
}

// packet returns the bytes of a row's packet.
func (c *capture) packet(row int) []byte {
	r := &c.rows[row]
	return c.stream[r.Offset:][:r.Length]
}

func encode(t testing.TB, kind codec.Kind, values []byte) []byte {
	t.Helper()
	e, err := codec.NewEncoder(kind, 0)
	check(t, err)
	var out bytes.Buffer
	w, err := e.NewFrame(&out, int64(len(values)))
	check(t, err)
	_, err = w.Write(values)
	check(t, err)
	check(t, w.Close())
	return out.Bytes()
}

// folder makes a folder, in memory if the system has /dev/shm: each salvage waits for the disk.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "strap-salvage-*")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	return dir
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// noise returns n bytes that do not compress.
func noise(seed uint64, n int) []byte {
	b, rng := make([]byte, n), rand.NewPCG(seed, 1)
	for i := range b {
		b[i] = byte(rng.Uint64())
	}
	return b
}

// sample returns a capture of a few steps, with every codec and a note.
func sample(t testing.TB) *capture {
	c := &capture{}
	for step := range int64(4) {
		c.add(t, "embed", codec.LZ4, step, bytes.Repeat(noise(uint64(step), 100), 9))
		c.add(t, "h.0", codec.Zstd, step, noise(uint64(10+step), 700))
		if step == 1 {
			c.note("h.1", "no room")
		}
		c.add(t, "h.2", codec.None, step, noise(uint64(20+step), 900))
		c.add(t, "", codec.None, step, noise(uint64(30+step), 300))
	}
	return c
}

// save writes a stream and, unless rows is nil, its index in batches of five rows.
func save(t testing.TB, stream []byte, rows []wire.Row) (path string) {
	t.Helper()
	path = filepath.Join(folder(t), "a.stream")
	check(t, os.WriteFile(path, stream, 0o666))
	if rows != nil {
		saveIndex(t, path, rows)
	}
	return path
}

func saveIndex(t testing.TB, path string, rows []wire.Row) {
	w, err := index.Create(index.PathOf(path), "00112233445566778899aabbccddeeff")
	check(t, err)
	for i := range rows {
		check(t, w.Append(&rows[i]))
		if i%5 == 4 {
			check(t, w.Flush())
		}
	}
	check(t, w.Close())
}

// result is a salvaged stream with its rows.
type result struct {
	salvage.Report
	stream []byte
	rows   []wire.Row
}

func run(t testing.TB, src string) result {
	t.Helper()
	r, err := attempt(t, src)
	check(t, err)
	return r
}

// attempt salvages a stream into a new folder, and checks that the new stream is complete.
func attempt(t testing.TB, src string) (result, error) {
	t.Helper()
	return attemptIn(t, src, folder(t))
}

// attemptIn is attempt with a given folder, which must be empty.
func attemptIn(t testing.TB, src, dir string) (result, error) {
	t.Helper()
	dst := filepath.Join(dir, "b.stream")
	before := contents(t, src)
	report, err := salvage.Salvage(src, dst, salvage.Options{})
	if !bytes.Equal(before, contents(t, src)) {
		t.Error("the source was changed")
	}
	if err != nil {
		return result{}, err
	}
	opened, err := reader.Open(dst, reader.Options{})
	check(t, err)
	defer opened.Close()
	info := opened.Info()
	if info.Problem != "" || info.Scanned != 0 || info.Packets != report.Packets || info.FileBytes != report.Bytes {
		t.Fatalf("the new stream is not whole: %+v, %+v", info, report)
	}
	res := result{Report: report, stream: contents(t, dst)}
	kept := int64(0)
	for i := range opened.NumRows() {
		row, err := opened.Row(i)
		check(t, err)
		if row.Offset >= 0 {
			kept += int64(row.Length)
		}
		res.rows = append(res.rows, row)
	}
	if end := int64(0); report.LostBytes+kept != int64(len(before)) {
		t.Fatalf("%d bytes kept and %d lost of %d", kept, report.LostBytes, len(before))
	} else {
		for _, r := range report.Ranges {
			if r.Offset < end || r.Length <= 0 {
				t.Fatalf("ranges %v", report.Ranges)
			}
			end = r.Offset + r.Length
		}
	}
	left, err := os.ReadDir(filepath.Dir(dst))
	check(t, err)
	if len(left) != 2 {
		t.Errorf("it left %v", left)
	}
	return res, nil
}

func contents(t testing.TB, path string) []byte {
	t.Helper()
	b, err := os.ReadFile(path)
	check(t, err)
	return b
}

func (r *result) packet(row int) []byte {
	w := &r.rows[row]
	return r.stream[w.Offset:][:w.Length]
}

// expect checks that the result has exactly the rows of c. A row in lost must have a note, every
// other its packet.
func (r *result) expect(t *testing.T, c *capture, lost ...int) {
	t.Helper()
	if len(r.rows) != len(c.rows) || int(r.Packets) != packets(c)-len(lost) || len(r.Lost) != len(lost) || r.Unlisted != 0 {
		t.Fatalf("%d rows of %d, %+v", len(r.rows), len(c.rows), r.Report)
	}
	for i := range c.rows {
		want, got := c.rows[i], r.rows[i]
		switch {
		case slices.Contains(lost, i):
			if got.Offset >= 0 || !strings.HasPrefix(got.Error, fmt.Sprintf("lost in the damaged stream, at byte %d: ", want.Offset)) {
				t.Errorf("row %d is %+v", i, got)
			}
		case want.Offset >= 0 && (got.Offset < 0 || !bytes.Equal(r.packet(i), c.packet(i))):
			t.Errorf("packet %d is another", i)
		}
		if want.Offset >= 0 {
			want.Offset, want.Length, want.Error = got.Offset, got.Length, got.Error
			if got.Offset < 0 {
				want.CRC = 0
			}
		}
		if want.MSE, got.MSE = 0, 0; !reflect.DeepEqual(want, got) {
			t.Errorf("row %d is %+v, not %+v", i, got, want)
		}
	}
}

func packets(c *capture) (n int) {
	for i := range c.rows {
		if c.rows[i].Offset >= 0 {
			n++
		}
	}
	return n
}

func TestAWholeStreamIsCopied(t *testing.T) {
	c := sample(t)
	r := run(t, save(t, c.stream, c.rows))
	r.expect(t, c)
	if !bytes.Equal(r.stream, c.stream) || r.LostBytes != 0 || r.Problem != "" || r.Verified != r.Packets {
		t.Errorf("%+v", r.Report)
	}
}

// Captures have less text in a row, but the index has room for this much.
func TestARowWithMuchTextIsKept(t *testing.T) {
	c := one(t, codec.None)
	c.rows[0].Parameters = strings.Repeat("x", 5<<20)
	r := run(t, save(t, c.stream, c.rows))
	r.expect(t, c)
}

func TestADamagedPayloadIsLeftOut(t *testing.T) {
	c := sample(t)
	for i := range c.rows {
		if c.rows[i].Offset < 0 {
			continue
		}
		b := bytes.Clone(c.stream)
		b[c.rows[i].Offset+int64(c.rows[i].Length)-10] ^= 4
		r := run(t, save(t, b, c.rows))
		r.expect(t, c, i)
		want := salvage.Range{Offset: c.rows[i].Offset, Length: int64(c.rows[i].Length)}
		if len(r.Ranges) != 1 || r.Ranges[0] != want || r.Lost[0].Range != want || r.Lost[0].Name != c.rows[i].Layer ||
			!strings.Contains(r.Lost[0].Reason, "checksum") {
			t.Fatalf("row %d: %+v", i, r.Report)
		}
	}
}

// The index has all that a header has, and the checksum of the payload.
func TestADamagedHeaderIsRepaired(t *testing.T) {
	c := sample(t)
	for i := range c.rows {
		if c.rows[i].Offset < 0 {
			continue
		}
		b := bytes.Clone(c.stream)
		clear(b[c.rows[i].Offset:][:wire.HeaderSize+len(c.rows[i].Layer)])
		r := run(t, save(t, b, c.rows))
		r.expect(t, c)
		if r.Repaired != 1 || !bytes.Equal(r.stream, c.stream) {
			t.Fatalf("row %d: %+v", i, r.Report)
		}
	}
}

func TestPacketsThatMovedAreFound(t *testing.T) {
	c := sample(t)
	for name, b := range map[string][]byte{
		"garbage in front":  slices.Concat(noise(1, 77), c.stream),
		"garbage between":   slices.Insert(bytes.Clone(c.stream), int(c.rows[7].Offset), noise(1, 12345)...),
		"zeros between":     slices.Insert(bytes.Clone(c.stream), int(c.rows[7].Offset), make([]byte, 4096)...),
		"a later packet":    slices.Insert(bytes.Clone(c.stream), int(c.rows[7].Offset), c.packet(13)...),
		"several stretches": slices.Concat(c.stream[:c.rows[2].Offset], noise(1, 50), c.stream[c.rows[2].Offset:c.rows[9].Offset], noise(2, 500), c.stream[c.rows[9].Offset:]),
	} {
		r := run(t, save(t, b, c.rows))
		if name == "a later packet" {
			if r.Packets != uint64(packets(c))+1 || len(r.Lost) > 0 {
				t.Errorf("%s: %+v", name, r.Report)
			}
			continue
		}
		r.expect(t, c)
		if r.LostBytes != int64(len(b)-len(c.stream)) || t.Failed() {
			t.Fatalf("%s: %+v", name, r.Report)
		}
	}
	cut := slices.Delete(bytes.Clone(c.stream), int(c.rows[7].Offset)+100, int(c.rows[7].Offset)+200)
	r := run(t, save(t, cut, c.rows))
	r.expect(t, c, 7)
}

func TestAStreamCutShort(t *testing.T) {
	c := sample(t)
	r := run(t, save(t, c.stream[:c.rows[14].Offset+20], c.rows))
	r.expect(t, c, 14, 15, 16)
	if r.LostBytes != 20 {
		t.Errorf("%+v", r.Report)
	}
}

func TestWhatTheIndexHasNotReachedIsKept(t *testing.T) {
	c := sample(t)
	r := run(t, save(t, append(bytes.Clone(c.stream), 1, 2, 3), c.rows[:10]))
	if r.Packets != 16 || r.Unlisted != 7 || r.LostBytes != 3 || r.Verified != 9 || !bytes.Equal(r.stream, c.stream) {
		t.Errorf("%+v", r.Report)
	}
	if last := r.rows[16]; last.Sequence != 16 || last.Shape != nil || last.Codec != "none" {
		t.Errorf("%+v", last)
	}
}

func TestBatchesBehindADamagedOneAreUsed(t *testing.T) {
	c := sample(t)
	path := save(t, c.stream, c.rows)
	b := contents(t, index.PathOf(path))
	marks := 0
	for at := 0; ; marks++ { // message 0 is the schema, message 2 the second batch
		k := bytes.Index(b[at:], []byte{0xff, 0xff, 0xff, 0xff})
		if at += k; marks == 2 {
			clear(b[at : at+64])
			break
		}
		at += 4
	}
	for _, damaged := range [][]byte{b, slices.Concat([]byte("abc"), b)} { // the second one moves all messages to odd offsets
		check(t, os.WriteFile(index.PathOf(path), damaged, 0o666))
		r := run(t, path)
		if !bytes.Equal(r.stream, c.stream) || r.Packets != 16 || r.Unlisted == 0 || r.Verified < 10 || !strings.Contains(r.Problem, "rows behind that place can be read") {
			t.Fatalf("%+v", r.Report)
		}
		if !slices.IsSortedFunc(r.rows, func(a, b wire.Row) int { return int(a.Sequence) - int(b.Sequence) }) {
			t.Errorf("%+v", r.rows)
		}
	}
}

func TestAnIndexThatIsNotThisStreamsIsIgnored(t *testing.T) {
	c, other := sample(t), &capture{}
	for i := range c.rows { // the same names and lengths; only the first packet has the same values
		if w := &c.rows[i]; w.Offset >= 0 {
			kind, err := codec.ParseKind(w.Codec)
			check(t, err)
			values := noise(uint64(100+i), int(w.Shape[0]))
			if w.Layer == "embed" {
				values = bytes.Repeat(noise(uint64(100+i), 100), 9)
			}
			if i == 0 {
				values = bytes.Repeat(noise(0, 100), 9)
			}
			other.add(t, w.Layer, kind, w.Step, values)
		}
	}
	path := save(t, other.stream, c.rows)
	r := run(t, path)
	if !bytes.Equal(r.stream, other.stream) || len(r.Lost) > 0 || r.Unlisted != r.Packets || !strings.Contains(r.Problem, "the index is ignored") {
		t.Errorf("%+v", r.Report)
	}
	for name, b := range map[string][]byte{"zeros": make([]byte, 100), "nothing": {}, "text": []byte("no index at all, no")} {
		check(t, os.WriteFile(index.PathOf(path), b, 0o666))
		r := run(t, path)
		if !bytes.Equal(r.stream, other.stream) || r.Problem == "" {
			t.Errorf("%s: %+v", name, r.Report)
		}
	}
}

// ---- without an index --------------------------------------------------------------

// one returns a capture of several layers with one codec.
func one(t testing.TB, kind codec.Kind) *capture {
	c := &capture{}
	for step := range int64(12) {
		for layer := range 3 {
			n := 400
			if step > 8 { // lengths that no other packet has
				n += int(step)*10 + layer
			}
			c.add(t, fmt.Sprintf("h.%d", layer), kind, step, noise(uint64(step)*3+uint64(layer), n))
		}
	}
	return c
}

var kinds = []codec.Kind{codec.None, codec.LZ4, codec.Zstd}

func TestPacketsBehindATearAreFoundWithoutAnIndex(t *testing.T) {
	for _, kind := range kinds {
		c := one(t, kind)
		for _, at := range []int{0, 5, 20, 30} {
			for name, damage := range map[string]func(b []byte) []byte{
				"a hole":           func(b []byte) []byte { clear(b[c.rows[at].Offset:][:50]); return b },
				"a length too big": func(b []byte) []byte { b[c.rows[at].Offset+3]++; return b },
				"a length smaller": func(b []byte) []byte { b[c.rows[at].Offset+4]--; return b },
				"unfinished": func(b []byte) []byte {
					copy(b[c.rows[at].Offset+2:], "\xff\xff\xff\xff")
					return b
				},
				"garbage": func(b []byte) []byte { return slices.Insert(b, int(c.rows[at].Offset)+20, noise(9, 333)...) },
				"a cut":   func(b []byte) []byte { return slices.Delete(b, int(c.rows[at].Offset)+20, int(c.rows[at].Offset)+60) },
			} {
				r := run(t, save(t, damage(bytes.Clone(c.stream)), nil))
				// Of the damaged packet, bytes that look like a packet may be kept.
				before, behind := c.stream[:c.rows[at].Offset], c.stream[c.rows[at+1].Offset:]
				if !bytes.HasPrefix(r.stream, before) || !bytes.HasSuffix(r.stream, behind) || r.Packets > 36 {
					t.Errorf("%v, %s at packet %d: %+v", kind, name, at, r.Report)
				}
			}
		}
	}
}

func TestAFrameThatDoesNotDecodeIsLeftOutByName(t *testing.T) {
	c := one(t, codec.LZ4)
	b := bytes.Clone(c.stream)
	b[c.rows[4].Offset+wire.HeaderSize+3+8] ^= 0x40 // damage the header of the frame
	r := run(t, save(t, b, nil))
	if r.Packets != 35 || len(r.Lost) != 1 || r.Lost[0].Name != "h.1" || len(r.Ranges) != 1 || r.Lost[0].Range != r.Ranges[0] {
		t.Errorf("%+v", r.Report)
	}
}

func TestTheEndOfAKilledCapture(t *testing.T) {
	for _, kind := range kinds {
		c := one(t, kind)
		for _, tail := range [][]byte{{}, {0}, make([]byte, 5000), c.stream[:300], append([]byte{0, 3, 255, 255, 255, 255}, "h.0 and more"...)} {
			if kind != codec.None || len(tail) != 300 { // such a tail would be a valid raw packet
				r := run(t, save(t, slices.Concat(c.stream, tail), nil))
				if !bytes.Equal(r.stream, c.stream) || int(r.LostBytes) != len(tail) || r.Problem != "" {
					t.Errorf("%v, % .20x: %+v", kind, tail, r.Report)
				}
			}
		}
		// A resumed capture moves what it cuts off to a file of its own. This file begins with a
		// packet and has no index.
		tail := c.stream[c.rows[20].Offset : len(c.stream)-7]
		if r := run(t, save(t, tail, nil)); r.Packets != 15 {
			t.Errorf("%v: %+v", kind, r.Report)
		}
	}
}

// The header 0003 00010017 "abc", read from its third byte on, is the header 0001 00176162 "c". The
// frame begins at the same byte for both.
func TestAHeaderInAHeaderIsNoPacket(t *testing.T) {
	c := &capture{}
	c.add(t, "abc", codec.LZ4, 0, noise(1, 1<<16))
	if n := c.rows[0].Length; n != 6+3+0x10017 {
		t.Fatalf("a frame of %#x bytes", n-9)
	}
	unfinished := slices.Concat([]byte("\x00\x03\xff\xff\xff\xffabc"), noise(2, 2<<20))
	if r := run(t, save(t, slices.Concat(c.stream, unfinished), nil)); !bytes.Equal(r.stream, c.stream) {
		t.Errorf("%+v", r.Report)
	}
}

func TestAnEmptyStreamStaysEmpty(t *testing.T) {
	if r := run(t, save(t, nil, []wire.Row{})); r.Packets != 0 || len(r.rows) != 0 {
		t.Errorf("%+v", r.Report)
	}
}

// ---- any damage --------------------------------------------------------------------

// damaged changes a stream at random places. origin has the old offset of each byte, or -1 for a
// new byte.
func damaged(rng *rand.Rand, stream []byte) (b []byte, origin []int) {
	b, origin = bytes.Clone(stream), make([]int, len(stream))
	for i := range origin {
		origin[i] = i
	}
	for range 1 + rng.IntN(4) {
		if len(b) == 0 {
			break
		}
		at, n := rng.IntN(len(b)), 1+rng.IntN(1+rng.IntN(3000))
		end := min(len(b), at+n)
		switch rng.IntN(6) {
		case 0:
			b[at] ^= 1 << rng.IntN(8)
			origin[at] = -1
		case 1: // bytes that were zero already keep their origin
			for i := at; i < end; i++ {
				if b[i] != 0 {
					b[i], origin[i] = 0, -1
				}
			}
		case 2:
			b, origin = slices.Delete(b, at, end), slices.Delete(origin, at, end)
		case 3:
			b, origin = slices.Insert(b, at, noise(rng.Uint64(), n)...), slices.Insert(origin, at, slices.Repeat([]int{-1}, n)...)
		case 4:
			at = len(b) - rng.IntN(1+len(b)/4)
			b, origin = b[:at], origin[:at]
		case 5: // a second copy of a piece of the stream
			from := rng.IntN(len(stream))
			piece := stream[from:min(len(stream), from+n)]
			b, origin = slices.Insert(b, at, piece...), slices.Insert(origin, at, slices.Repeat([]int{-1}, len(piece))...)
		}
	}
	return b, origin
}

// untouched reports whether the bytes [from, to) of the old stream are together somewhere.
func untouched(origin []int, from, to int) bool {
	at := slices.Index(origin, from)
	if at < 0 || at+to-from > len(origin) {
		return false
	}
	for i := from; i < to; i++ {
		if origin[at+i-from] != i {
			return false
		}
	}
	return true
}

// random returns a capture of a few layers with random codecs and lengths.
func random(t testing.TB, rng *rand.Rand) *capture {
	c := &capture{}
	names := []string{"", "h.0", "h.0.attention", strings.Repeat("long.", 60)}
	for step := range int64(1 + rng.IntN(8)) {
		for _, name := range names[:1+rng.IntN(len(names))] {
			kind := kinds[rng.IntN(len(kinds))]
			values := noise(rng.Uint64(), rng.IntN(1+rng.IntN(5000)))
			switch rng.IntN(4) {
			case 0:
				clear(values)
			case 1:
				for i := range values {
					values[i] = byte(i / 9)
				}
			}
			if kind == codec.None && name == "" && len(values) == 0 {
				continue // its packet would be six zero bytes, which no capture writes
			}
			c.add(t, name, kind, step, values)
			if rng.IntN(9) == 0 {
				c.note(name, "dropped")
			}
		}
	}
	return c
}

// Whatever happens to a stream, a packet that the index lists and whose bytes are untouched is in
// the new stream. A packet that is kept as listed has the bytes that were written.
func TestNothingIntactIsLost(t *testing.T) {
	seeds := uint64(400)
	if testing.Short() {
		seeds = 30
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 7))
		c := random(t, rng)
		b, origin := damaged(rng, c.stream)
		r, err := attempt(t, save(t, b, c.rows))
		if err != nil {
			for i := range c.rows {
				if w := &c.rows[i]; w.Offset >= 0 && untouched(origin, int(w.Offset), int(w.Offset)+int(w.Length)) {
					t.Fatalf("seed %d: %v, and packet %d is intact", seed, err, i)
				}
			}
			if !errors.Is(err, status.Corrupt) {
				t.Fatalf("seed %d: %v", seed, err)
			}
			continue
		}
		bySequence := map[uint64]int{}
		for i := range r.rows {
			if r.rows[i].Source != 0 {
				bySequence[r.rows[i].Sequence] = i
			}
		}
		for i := range c.rows {
			w := &c.rows[i]
			if w.Offset < 0 {
				continue
			}
			k, listed := bySequence[uint64(i)]
			switch intact := untouched(origin, int(w.Offset), int(w.Offset)+int(w.Length)); {
			case listed && r.rows[k].Offset >= 0:
				if !bytes.Equal(r.packet(k), c.packet(i)) {
					t.Fatalf("seed %d: packet %d is another: %+v", seed, i, r.Report)
				}
			case intact && (listed || !bytes.Contains(r.stream, c.packet(i))):
				t.Fatalf("seed %d: packet %d is intact and lost: %+v", seed, i, r.Report)
			}
		}
	}
}

// Without an index, frames are recognised by their own bytes.
func TestNothingIntactIsLostWithoutAnIndex(t *testing.T) {
	seeds := uint64(200)
	if testing.Short() {
		seeds = 15
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 8))
		c := one(t, kinds[1+rng.IntN(2)])
		b, origin := damaged(rng, c.stream)
		r, err := attempt(t, save(t, b, nil))
		check(t, err)
		for i := range c.rows {
			w := &c.rows[i]
			if untouched(origin, int(w.Offset), int(w.Offset)+int(w.Length)) && !bytes.Contains(r.stream, c.packet(i)) {
				t.Fatalf("seed %d: packet %d is intact and lost: %+v", seed, i, r.Report)
			}
		}
	}
}

// FuzzSalvage salvages any stream with any index. It must not crash. The result is Corrupt, or a
// new stream that is complete.
//
// Slow: each input that can be salvaged is written to two files, one with Arrow's schema, and read
// back.
func FuzzSalvage(f *testing.F) {
	c := sample(f)
	path := save(f, c.stream, c.rows)
	idx := contents(f, index.PathOf(path))
	f.Add(c.stream, idx)
	f.Add(c.stream, []byte{})
	f.Add(c.stream[100:], idx)
	f.Add(c.stream[:3000], []byte{})
	f.Add(slices.Concat(make([]byte, 64), c.stream), idx)
	f.Add(one(f, codec.None).stream[200:], []byte{})
	f.Add(one(f, codec.Zstd).stream[200:], []byte{})
	for _, stream := range hostile {
		f.Add(stream(2000), []byte{})
	}
	from, to := folder(f), folder(f)
	f.Fuzz(func(t *testing.T, stream, idx []byte) {
		path := filepath.Join(from, "a.stream")
		check(t, os.WriteFile(path, stream, 0o666))
		check(t, os.WriteFile(index.PathOf(path), idx, 0o666))
		if _, err := attemptIn(t, path, to); err != nil && status.CodeOf(err) != status.Corrupt {
			t.Fatal(err)
		}
		for _, name := range []string{"b.stream", index.PathOf("b.stream")} {
			if err := os.Remove(filepath.Join(to, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
				t.Fatal(err)
			}
		}
	})
}

// ---- the new files -----------------------------------------------------------------

func TestNothingIsReplacedUnlessForced(t *testing.T) {
	c := sample(t)
	src := save(t, c.stream, c.rows)
	dir := folder(t)
	taken, indexed, dst := filepath.Join(dir, "taken"), filepath.Join(dir, "indexed"), filepath.Join(dir, "dst")
	check(t, os.WriteFile(taken, nil, 0o666))
	check(t, os.WriteFile(index.PathOf(indexed), nil, 0o666))
	check(t, os.Link(src, filepath.Join(dir, "link")))
	for name, test := range map[string]struct {
		src, dst string
		force    bool
		want     status.Code
	}{
		"a stream is there":   {src, taken, false, status.InvalidArgument},
		"an index is there":   {src, indexed, false, status.InvalidArgument},
		"itself":              {src, src, true, status.InvalidArgument},
		"its other name":      {src, filepath.Join(dir, "link"), true, status.InvalidArgument},
		"its index":           {src, index.PathOf(src), true, status.InvalidArgument},
		"a directory":         {src, dir, true, status.InvalidArgument},
		"no source":           {filepath.Join(dir, "none"), dst, false, status.NotFound},
		"no directory":        {src, filepath.Join(dir, "no", "b"), false, status.NotFound},
		"nothing intact":      {save(t, make([]byte, 100), nil), dst, false, status.Corrupt},
		"the source is a dir": {dir, dst, false, status.InvalidArgument},
	} {
		if _, err := salvage.Salvage(test.src, test.dst, salvage.Options{Force: test.force}); status.CodeOf(err) != test.want {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 3 {
		t.Errorf("%v, want only the files from before", left)
	}
	for _, path := range []string{taken, indexed} {
		_, err := salvage.Salvage(src, path, salvage.Options{Force: true})
		check(t, err)
		if !bytes.Equal(contents(t, path), c.stream) {
			t.Errorf("%s is not the new stream", path)
		}
	}
}

func TestACaptureUnderWayIsNotReplaced(t *testing.T) {
	c := sample(t)
	src := save(t, c.stream, c.rows)
	dst := filepath.Join(folder(t), "live")
	f, err := os.Create(dst)
	check(t, err)
	defer f.Close()
	check(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
	if _, err := salvage.Salvage(src, dst, salvage.Options{Force: true}); status.CodeOf(err) != status.Busy {
		t.Errorf("%v", err)
	}
}

func TestProgressEndsTheWork(t *testing.T) {
	c := &capture{}
	for i := range int64(5) {
		c.add(t, "big", codec.None, i, noise(uint64(i), 5<<20))
	}
	src := save(t, c.stream, c.rows)
	dir := folder(t)
	stop := errors.New("enough")
	for calls := range 5 {
		last := int64(0)
		_, err := salvage.Salvage(src, filepath.Join(dir, "b"), salvage.Options{Progress: func(done, total int64) error {
			if done <= last || done > total {
				t.Errorf("%d of %d behind %d", done, total, last)
			}
			if last = done; calls == 0 {
				return stop
			}
			calls--
			return nil
		}})
		if !errors.Is(err, stop) {
			t.Fatalf("%v", err)
		}
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
		t.Errorf("it left %v", left)
	}
}

func BenchmarkSalvage(b *testing.B) {
	c := &capture{}
	for i := range int64(64) {
		c.add(b, "h.0", codec.None, i, noise(uint64(i), 1<<20))
	}
	whole := save(b, c.stream, c.rows)
	moved := save(b, slices.Concat(make([]byte, 3), c.stream), c.rows)
	for name, src := range map[string]string{"in place": whole, "moved": moved} {
		b.Run(name, func(b *testing.B) {
			b.SetBytes(int64(len(c.stream)))
			for b.Loop() {
				_, err := salvage.Salvage(src, filepath.Join(b.TempDir(), "b"), salvage.Options{})
				check(b, err)
			}
		})
	}
}
