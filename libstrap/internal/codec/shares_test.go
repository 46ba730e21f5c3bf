// Tests of payloads that are decoded in shares.

package codec

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// checkShares decodes parts of payload in shares of least bytes, all at once, and compares them with those of
// whole. It returns the number of shares, 0 if the payload cannot be divided.
func checkShares(t testing.TB, k Kind, payload, whole []byte, parts []Part, least int) (shares int) {
	t.Helper()
	own := slices.Clone(parts)
	for i := range own {
		own[i].To = make([]byte, len(own[i].To))
	}
	s, ok := Divide(own, k, bytes.NewReader(payload), int64(len(payload)), int64(len(whole)), int64(least))
	if !ok {
		return 0
	}
	failed := make([]error, s.Len())
	var all sync.WaitGroup
	for share := range s.Len() {
		all.Go(func() { failed[share] = s.Decode(share) })
	}
	all.Wait()
	if err := errors.Join(failed...); err != nil {
		t.Logf("%s: %v", k, err) // then DecodeParts decodes them
		return 0
	}
	for _, p := range own {
		if !bytes.Equal(p.To, whole[p.First:p.end()]) {
			t.Fatalf("%s: other bytes from %d to %d of %d", k, p.First, p.end(), len(whole))
		}
	}
	if crc, summed := s.Sum(); summed && crc != crc32c.Checksum(payload) {
		t.Fatalf("%s: checksum %08x, not %08x", k, crc, crc32c.Checksum(payload))
	}
	return s.Len()
}

// divisible returns payloads of n decoded bytes that can be divided.
func divisible(t testing.TB, n int) map[Kind][]byte {
	src := float16s(n, 10)
	return map[Kind][]byte{
		LZ4: encodeInPlace(t, newEncoder(t, LZ4, 0), src), Zstd: literalsFrame(t, src),
		Archive: encodeArchive(t, NewArchiveEncoder(ArchiveDefaultBound), src, wire.Float16),
	}
}

func TestSharesOfWholePayloads(t *testing.T) {
	const least = 1 << 20
	n := 9<<20 + 1000
	if testing.Short() {
		n = 4<<20 + 1000
	}
	for k, payload := range divisible(t, n) {
		whole := make([]byte, n)
		if err := Decode(whole, k, bytes.NewReader(payload)); err != nil {
			t.Fatal(err)
		}
		block := least
		if k == LZ4 {
			block = 4 << 20
		}
		want := (n + block - 1) / block
		if got := checkShares(t, k, payload, whole, partsAt([2]int{0, n}), least); got != want {
			t.Errorf("%s: %d shares, not %d", k, got, want)
		}
		// Parts in two halves cover the payload too, so its checksum is known.
		s, ok := Divide(partsAt([2]int{0, n / 2}, [2]int{n / 2, n}), k, bytes.NewReader(payload), int64(len(payload)), int64(n), least)
		if !ok {
			t.Fatalf("%s: cannot be divided", k)
		}
		for share := range s.Len() {
			if err := s.Decode(share); err != nil {
				t.Fatalf("%s: %v", k, err)
			}
		}
		if crc, summed := s.Sum(); !summed || crc != crc32c.Checksum(payload) {
			t.Errorf("%s: checksum %08x %v", k, crc, summed)
		}
	}
}

// A payload with one more byte, or with one less, is not divided: its checksum could not be right.
func TestTornPayloadsAreNotDivided(t *testing.T) {
	const n = 1 << 20
	for k, payload := range divisible(t, n) {
		for _, torn := range [][]byte{payload[:len(payload)-1], append(slices.Clip(payload), 0)} {
			if _, ok := Divide(partsAt([2]int{0, n}), k, bytes.NewReader(torn), int64(len(torn)), n, n/8); ok {
				t.Errorf("%s: %d bytes in place of %d are divided", k, len(torn), len(payload))
			}
		}
	}
}

// A changed byte changes the checksum, or a share fails.
func TestSharesOfDamagedPayloads(t *testing.T) {
	const n = 1 << 20
	rng := rand.New(rand.NewPCG(1, 2))
	draws := 50
	if testing.Short() {
		draws = 3
	}
	for k, payload := range divisible(t, n) {
		for range draws {
			damaged := slices.Clone(payload)
			damaged[rng.IntN(len(damaged))] ^= byte(1 << rng.IntN(8))
			s, ok := Divide(partsAt([2]int{0, n}), k, bytes.NewReader(damaged), int64(len(damaged)), n, n/8)
			if !ok {
				continue
			}
			failed := false
			for share := range s.Len() {
				failed = s.Decode(share) != nil || failed
			}
			if crc, _ := s.Sum(); !failed && crc == crc32c.Checksum(payload) {
				t.Errorf("%s: the damage is not found", k)
			}
		}
	}
}

// A payload of empty blocks is no reason to take memory for all of them.
func TestManyEmptyBlocksAreNotDivided(t *testing.T) {
	const n = 400_000
	src := ofSymbols(n/2, 5)
	payload := appendZstdHeader(nil, n)
	for range 2 {
		for at := 0; at < len(src); at += literalsBlock {
			head, data := newLiteralsEncoder().encode(src[at:min(at+literalsBlock, len(src))], false)
			payload = append(append(payload, head...), data...)
		}
		payload = append(payload, make([]byte, 2_000_000*zstdBlockHeader)...)
	}
	if _, ok := Divide(partsAt([2]int{0, n}), Zstd, bytes.NewReader(payload), int64(len(payload)), n, n/2); ok {
		t.Error("they are divided")
	}
}

// A file that cannot be read fails the share.
func TestSharesOfAFileThatFails(t *testing.T) {
	const n = 1 << 20
	payload := divisible(t, n)[Archive]
	src := &ending{ReaderAt: bytes.NewReader(payload), end: int64(len(payload))}
	s, ok := Divide(partsAt([2]int{0, n}), Archive, src, int64(len(payload)), n, n/4)
	if !ok {
		t.Fatal("it is not divided")
	}
	src.end = int64(len(payload) / 2)
	if first, last := s.Decode(0), s.Decode(s.Len()-1); first != nil || !errors.Is(last, io.ErrUnexpectedEOF) {
		t.Errorf("first share: %v, last share: %v", first, last)
	}
}

// ending is a file that was cut at end.
type ending struct {
	io.ReaderAt
	end int64
}

func (e *ending) ReadAt(b []byte, at int64) (int, error) {
	return io.NewSectionReader(e.ReaderAt, 0, e.end).ReadAt(b, at)
}
