package codec

import (
	"bytes"
	"cmp"
	"encoding/binary"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// counted counts the bytes that are read of a payload.
type counted struct {
	bytes.Reader
	read int
}

func (c *counted) ReadAt(b []byte, at int64) (int, error) {
	n, err := c.Reader.ReadAt(b, at)
	c.read += n
	return n, err
}

func openCounted(payload []byte) *counted { return &counted{Reader: *bytes.NewReader(payload)} }

// partsAt returns parts of the given places, [first, end).
func partsAt(places ...[2]int) (parts []Part) {
	for _, p := range places {
		parts = append(parts, Part{First: int64(p[0]), To: make([]byte, p[1]-p[0])})
	}
	slices.SortFunc(parts, func(a, b Part) int { return cmp.Compare(a.First, b.First) })
	return parts
}

// checkParts decodes parts of payload, and compares them with those of whole. It returns how many bytes it
// read.
func checkParts(t testing.TB, k Kind, payload, whole []byte, parts []Part) (read int) {
	t.Helper()
	src := openCounted(payload)
	sum, all, err := DecodeParts(parts, k, src, int64(len(payload)), int64(len(whole)))
	if err != nil {
		t.Fatalf("%s, %d bytes: %v", k, len(whole), err)
	}
	for _, p := range parts {
		if !bytes.Equal(p.To, whole[p.First:p.end()]) {
			t.Fatalf("%s: other bytes from %d to %d of %d", k, p.First, p.end(), len(whole))
		}
	}
	if all && sum != crc32c.Checksum(payload) {
		t.Fatalf("%s: checksum %08x, not %08x", k, sum, crc32c.Checksum(payload))
	}
	return src.read
}

// checkManyParts decodes parts of all kinds: at edges, across blocks, empty, the same twice, overlapping.
func checkManyParts(t testing.TB, k Kind, payload, whole []byte) {
	t.Helper()
	n := len(whole)
	places := [][2]int{{0, 0}, {n, n}, {0, n}, {0, min(n, 1)}, {max(n-1, 0), n}, {n / 3, n / 2}, {n / 2, n}}
	for _, block := range []int{64 << 10, 128 << 10, 256 << 10, 4 << 20} {
		for at := block; at < n; at += (n/block + 1) / 2 * block {
			places = append(places, [2]int{at, min(at+1, n)}, [2]int{at - 1, at}, [2]int{at - 5, min(at+700, n)})
		}
	}
	rng := rand.New(rand.NewPCG(uint64(n), uint64(k)))
	tries := 8
	if n > 1<<20 {
		tries = 3
	}
	for range tries {
		at := rng.IntN(n + 1)
		places = append(places, [2]int{at, at + rng.IntN(min(n-at, 1<<rng.IntN(20))+1)})
	}
	for _, p := range places {
		checkParts(t, k, payload, whole, partsAt(p))
	}
	for range tries {
		some := make([][2]int, 1+rng.IntN(6))
		for i := range some {
			some[i] = places[rng.IntN(len(places))]
		}
		checkParts(t, k, payload, whole, partsAt(some...))
		checkShares(t, k, payload, whole, partsAt(some...), n/7)
	}
	checkShares(t, k, payload, whole, partsAt([2]int{0, n}), n/7)
}

func TestPartsAreThoseOfTheWholePayload(t *testing.T) {
	sizes := []int{0, 1, 100, 64<<10 - 1, 64 << 10, 300_000, 4<<20 + 12_346}
	if testing.Short() {
		sizes = []int{0, 100, 140_000}
	}
	for _, n := range sizes {
		sources := samples(n)
		sources["float16"] = float16s(n, 10)
		sources["float16 of 5 bits"] = float16s(n, 5)
		repeats := bytes.Repeat(randomBytes(1000), n/1000+1)[:n]
		sources["repeats"] = repeats
		for name, src := range sources {
			for _, of := range []struct {
				kind  Kind
				level int
			}{{None, 0}, {LZ4, 0}, {LZ4, 2}, {Zstd, 0}, {Zstd, 1}, {Zstd, 2}} {
				if n > 1<<20 && of.level > 0 {
					continue
				}
				t.Run(fmt.Sprintf("%s-%d/%s/%d", of.kind, of.level, name, n), func(t *testing.T) {
					checkManyParts(t, of.kind, encodeInPlace(t, newEncoder(t, of.kind, of.level), src), src)
				})
			}
		}
	}
}

func TestPartsOfAnArchive(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for _, dt := range []wire.DType{wire.Float16, wire.BFloat16} {
		sizes := []int{64, archiveChunk, 3*archiveChunk - 3}
		if testing.Short() {
			sizes = []int{64, archiveChunk + 5}
		}
		for _, n := range sizes {
			sources := archiveSources(dt, n, rng)
			for _, name := range []string{"normal", "outlier", "one NaN", "zeros"} {
				src := sources[name]
				t.Run(fmt.Sprintf("%s/%s/%d", dt, name, n), func(t *testing.T) {
					payload := encodeArchive(t, NewArchiveEncoder(ArchiveDefaultBound), src, dt)
					checkManyParts(t, Archive, payload, decodeArchive(t, payload, 2*n))
				})
			}
		}
	}
}

func TestPartsOfFramesOfTheCLibraries(t *testing.T) {
	paths, err := filepath.Glob("testdata/frames/*")
	if err != nil || len(paths) == 0 {
		t.Fatal(err, paths)
	}
	for _, path := range paths {
		payload := readFrame(t, filepath.Base(path))
		kind := Detect(payload)
		whole, err := decodeUnknown(kind, bytes.NewReader(payload), 64<<20)
		if err != nil {
			_, _, err := DecodeParts(partsAt([2]int{0, 1}), kind, bytes.NewReader(payload), int64(len(payload)), 1)
			if err == nil {
				t.Errorf("%s: no error", path)
			}
			continue
		}
		t.Run(filepath.Base(path), func(t *testing.T) { checkManyParts(t, kind, payload, whole) })
	}
}

// zstdBlocks returns a zstd frame of literals. Each source becomes a block.
func zstdBlocks(t testing.TB, sources [][]byte) []byte {
	t.Helper()
	e := newLiteralsEncoder()
	frame := appendZstdHeader(nil, int64(len(slices.Concat(sources...))))
	for i, src := range sources {
		head, data := e.encode(src, i == len(sources)-1)
		frame = append(append(frame, head...), data...)
	}
	return frame
}

// lz4Blocks returns an LZ4 frame with the header of our own. Each source, of at most 64 KiB, becomes a
// block.
func lz4Blocks(t testing.TB, sources [][]byte) []byte {
	t.Helper()
	e := newEncoder(t, LZ4, 0).lz4
	frame := make([]byte, lz4HeaderSize)
	putLZ4Header(frame, 64<<10, int64(len(slices.Concat(sources...))))
	e.w = (*appender)(&frame)
	for _, src := range sources {
		if err := e.put(src, false); err != nil {
			t.Fatal(err)
		}
	}
	return append(frame, 0, 0, 0, 0)
}

// Other encoders may end a block early. Then the places of the blocks are not known before they are decoded.
func TestPartsOfLZ4FramesWithShortBlocks(t *testing.T) {
	for name, lengths := range map[string][]int{
		"full": {64 << 10, 64 << 10, 5000}, "short": {64 << 10, 60 << 10, 30 << 10},
		"many": {64 << 10, 60 << 10, 30 << 10, 1}, "last full": {60 << 10, 64 << 10},
	} {
		for _, random := range []bool{false, true} {
			sources := make([][]byte, len(lengths))
			for i, n := range lengths {
				if sources[i] = bytes.Repeat([]byte{byte(i), 7}, n)[:n]; random {
					sources[i] = randomBytes(n)
				}
			}
			payload, whole := lz4Blocks(t, sources), slices.Concat(sources...)
			t.Run(fmt.Sprintf("%s/%v", name, random), func(t *testing.T) { checkManyParts(t, LZ4, payload, whole) })
		}
	}
}

func TestPartsOfSmallZstdBlocks(t *testing.T) {
	sources := [][]byte{ofSymbols(3000, 5), make([]byte, 9000), randomBytes(700), ofSymbols(900, 3), make([]byte, 1), ofSymbols(20_000, 90)}
	checkManyParts(t, Zstd, zstdBlocks(t, sources), slices.Concat(sources...))
}

// One line of a payload of 9 MiB takes no more than the block that has it, and the headers of the blocks.
func TestPartsReadOnlyTheirBlocks(t *testing.T) {
	if testing.Short() {
		t.Skip("payloads of 9 MiB, and no goroutines")
	}
	const n, at = 9<<20 + 1000, 5 << 20
	src := float16s(n, 10)
	repeats := bytes.Repeat(src[:5000], n/5000+1)[:n]
	archived := encodeArchive(t, NewArchiveEncoder(ArchiveDefaultBound), src, wire.Float16)
	for name, of := range map[string]struct {
		kind           Kind
		payload, whole []byte
		most           int
	}{
		"none":        {None, src, src, 768},
		"lz4, raw":    {LZ4, encodeInPlace(t, newEncoder(t, LZ4, 0), src), src, 4000},
		"lz4":         {LZ4, encodeInPlace(t, newEncoder(t, LZ4, 0), repeats), repeats, 100_000},
		"zstd":        {Zstd, literalsFrame(t, src), src, 150_000},
		"archive":     {Archive, archived, decodeArchive(t, archived, n), 150_000},
		"zstd, raw":   {Zstd, literalsFrame(t, randomBytes(n)), randomBytes(n), 40_000},
		"zstd, zeros": {Zstd, literalsFrame(t, make([]byte, n)), make([]byte, n), 2000},
	} {
		if read := checkParts(t, of.kind, of.payload, of.whole, partsAt([2]int{at, at + 768})); read > of.most {
			t.Errorf("%s: read %d bytes of %d, more than %d", name, read, len(of.payload), of.most)
		}
	}
}

// After damage the rest of the payload is read too, so that its checksum says whether it was damaged.
func TestADamagedPayloadIsReadToItsEnd(t *testing.T) {
	src := float16s(3*partsBuffer, 10)
	payload := encodeInPlace(t, newEncoder(t, LZ4, 0), src)
	binary.LittleEndian.PutUint32(payload[lz4HeaderSize:], 1<<30) // the length of the first block
	sum, whole, err := DecodeParts(partsAt([2]int{0, 100}), LZ4, bytes.NewReader(payload), int64(len(payload)), int64(len(src)))
	if status.CodeOf(err) != status.Corrupt || !whole || sum != crc32c.Checksum(payload) {
		t.Errorf("checksum %08x, read to the end: %t, %v", sum, whole, err)
	}
}

// A payload of many short blocks takes memory for its parts alone.
func TestPartsOfManyShortBlocksTakeLittleMemory(t *testing.T) {
	const n = 200_000
	payload, whole := binary.LittleEndian.AppendUint32(nil, zstdMagic), make([]byte, n)
	payload = append(payload, 0, 7<<3)
	for i := range whole {
		whole[i] = byte(i)
		payload = append(appendBlockHeader(payload, blockRaw, 1, i == n-1), byte(i))
	}
	parts := partsAt([2]int{100, n - 100})
	if most := allocated(func() { checkParts(t, Zstd, payload, whole, parts) }); most > 1<<20 {
		t.Errorf("%d bytes of memory for parts of %d bytes", most, n)
	}
}

// FuzzDecodeParts compares parts of any payload that Decode accepts with those of all its bytes.
func FuzzDecodeParts(f *testing.F) {
	add := func(k Kind, payload []byte) { f.Add(byte(k), payload, uint32(7), uint16(3), uint16(5000)) }
	for _, k := range kinds {
		for _, n := range []int{0, 1000, 10_000} {
			for _, src := range samples(n) {
				add(k, encodeInPlace(f, newEncoder(f, k, 0), src))
			}
		}
	}
	add(LZ4, lz4Blocks(f, [][]byte{make([]byte, 64<<10), make([]byte, 60<<10), make([]byte, 30<<10)}))
	add(Zstd, zstdBlocks(f, [][]byte{ofSymbols(3000, 5), make([]byte, 9000), randomBytes(700), ofSymbols(900, 3)}))
	add(LZ4, lz4Blocks(f, [][]byte{make([]byte, 64<<10), bytes.Repeat([]byte("ab"), 32<<10), randomBytes(3000)}))
	add(LZ4, lz4Blocks(f, [][]byte{make([]byte, 64<<10), make([]byte, 60<<10), make([]byte, 4000)}))
	add(Archive, encodeArchive(f, NewArchiveEncoder(ArchiveDefaultBound), make([]byte, 500_000), wire.Float16))
	add(Archive, encodeArchive(f, NewArchiveEncoder(ArchiveDefaultBound), float16s(4000, 10), wire.Float16))
	frames, err := os.ReadDir(filepath.Join("testdata", "frames"))
	if err != nil {
		f.Fatal(err)
	}
	for _, file := range frames {
		payload := readFrame(f, file.Name())
		add(Detect(payload), payload)
	}
	for _, h := range hostile {
		add(Detect([]byte(h.payload)), []byte(h.payload))
	}
	f.Fuzz(func(t *testing.T, kind byte, payload []byte, seed uint32, count, most uint16) {
		k := Kind(kind % 4)
		whole, err := decodeUnknown(k, bytes.NewReader(payload), 1<<20)
		if size, claim := DecodedSize(k, payload); err == nil && k != None && (claim != nil || size >= 0 && size != int64(len(whole))) {
			return // Decode refuses it
		}
		n := len(whole)
		if err != nil { // the parts may be read all the same, of any size
			n = int(seed % (1 << 20))
		}
		rng := rand.New(rand.NewPCG(uint64(seed), 0))
		places := make([][2]int, 1+count%64)
		for i := range places {
			at := rng.IntN(n + 1)
			places[i] = [2]int{at, at + rng.IntN(min(n-at, int(most))+1)}
		}
		parts := partsAt(places...)
		if err == nil {
			checkParts(t, k, payload, whole, parts)
			checkShares(t, k, payload, whole, parts, int(most))
			return
		}
		if s, ok := Divide(parts, k, bytes.NewReader(payload), int64(len(payload)), int64(n), int64(most)); ok {
			for share := range s.Len() {
				_ = s.Decode(share)
			}
		}
		_, _, err = DecodeParts(parts, k, bytes.NewReader(payload), int64(len(payload)), int64(n))
		if code := status.CodeOf(err); code != status.OK && code != status.Corrupt && code != status.Unsupported {
			t.Fatal(err)
		}
	})
}
