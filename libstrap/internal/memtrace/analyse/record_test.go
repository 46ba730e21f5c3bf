package analyse

import (
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// drawValues returns n values that are close together, scattered, beyond 32 bits, or all of these.
func drawValues(r *rand.Rand, n int) []uint64 {
	bits := []int{1, 3, 16, 17, 20, 31, 32, 33, 63, 64}[r.IntN(10)]
	base := uint64(0)
	if r.IntN(2) == 0 {
		base = r.Uint64() >> (r.IntN(33) + 31)
	}
	v := make([]uint64, n)
	for i := range v {
		v[i] = base + r.Uint64()>>(64-bits)
		if r.IntN(1000) == 0 {
			v[i] = r.Uint64() >> r.IntN(64)
		}
	}
	return v
}

// ranksOf returns some ranks of n values, ascending.
func ranksOf(r *rand.Rand, n int) []uint64 {
	ranks := []uint64{0, uint64(n-1) / 2, uint64(n) / 2, uint64(n - 1)}
	for range r.IntN(5) {
		ranks = append(ranks, r.Uint64N(uint64(n)))
	}
	slices.Sort(ranks)
	return slices.Compact(ranks)
}

// file is a file of records that a test writes and reads.
type file struct {
	*os.File
	size int64
}

func (f *file) at() int64 { return f.size }
func (f *file) write(p []byte) error {
	_, err := f.WriteAt(p, f.size)
	f.size += int64(len(p))
	return err
}
func (f *file) name() string { return f.Name() }
func (f *file) read(p []byte, at int64) error {
	_, err := f.ReadAt(p, at)
	return err
}

// TestPick draws values, of which some are in memory and some in records of the spill or of other files, and
// compares the values at some ranks, and the number of values below some value, with those of a sorted slice.
func TestPick(t *testing.T) {
	dir := t.TempDir()
	grouped := false
	seeds := uint64(200)
	if testing.Short() {
		seeds = 20
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 7))
		sp := &spill{dir: dir}
		st := &store{limit: []int64{1, 1 << 10, 1 << 18, 1 << 40}[r.IntN(4)], spill: sp}
		f, err := os.Create(filepath.Join(dir, "records"))
		if err != nil {
			t.Fatal(err)
		}
		to := &file{File: f}
		n := []int{1, 2, 100, 5000, 70_000}[r.IntN(5)]
		if st.limit == 1 {
			n = min(n, 5000)
		}
		drawn := drawValues(r, n)
		kept, copied := &values{}, &values{}
		kept.narrow.power = r.IntN(3)
		copied.narrow.power = kept.narrow.power
		all := make([]uint64, 0, n<<kept.narrow.power)
		for _, x := range drawn {
			v := kept
			if r.IntN(3) == 0 {
				v = copied
			}
			v.add(x, st)
			for range 1 << kept.narrow.power {
				all = append(all, x)
			}
			if err := st.relieve(2, func(i int) *values { return []*values{kept, copied}[i] }); err != nil {
				t.Fatal(err)
			}
		}
		if err := copied.copyTo(to, &grouper{}, &recordReader{}); err != nil {
			t.Fatal(err)
		}
		readable(copied, to)
		grouped = grouped || hasGroups(kept) || hasGroups(copied)

		slices.Sort(all)
		m := union(kept, copied)
		ranks := ranksOf(r, len(all))
		picked, err := m.pick(ranks, &scratch{})
		if err != nil {
			t.Fatal(err)
		}
		for i, rank := range ranks {
			if picked[i] != all[rank] {
				t.Fatalf("seed %d, %d values: rank %d is %d, not %d", seed, n, rank, picked[i], all[rank])
			}
			below, err := m.less(all[rank], &recordReader{})
			if want, _ := slices.BinarySearch(all, all[rank]); err != nil || below != uint64(want) {
				t.Fatalf("seed %d, %d values: %d are below %d, not %d: %v", seed, n, below, all[rank], want, err)
			}
		}
		sp.close()
		f.Close()
	}
	if !grouped {
		t.Error("no record has groups")
	}
}

// readable lets the chains of a multiset be read from the file that they were written to.
func readable(v *values, from records) {
	for i := range v.narrow.chains {
		v.narrow.chains[i].from = from
	}
	if v.wide != nil {
		for i := range v.wide.chains {
			v.wide.chains[i].from = from
		}
	}
}

func hasGroups(v *values) bool {
	return slices.ContainsFunc(v.narrow.chains, func(c chain) bool { return c.last.groups > 0 })
}

// TestLargeRecords has more values than a record may have.
func TestLargeRecords(t *testing.T) {
	if testing.Short() {
		t.Skip("millions of values, and no goroutines")
	}
	f, err := os.Create(filepath.Join(t.TempDir(), "records"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	to, st, v := &file{File: f}, &store{limit: 1 << 40}, &values{}
	const n = mostRecord + mostRecord/2
	for i := range uint64(n) {
		v.add(i*40503&(1<<22-1)<<3, st) // 40503 is odd: all numbers below 2^22, in another order
	}
	if err := v.moveTo(to, to, &st.grouper); err != nil {
		t.Fatal(err)
	}
	if v.narrow.inMemory() != 0 || v.narrow.n() != n || to.size > n*lowBytes+1<<20 {
		t.Errorf("%d values in memory, %d in all, in %d bytes", v.narrow.inMemory(), v.narrow.n(), to.size)
	}
	m := union(v)
	picked, err := m.pick([]uint64{0, n - 1}, &scratch{})
	if err != nil || picked[0] != 0 || picked[1] != (1<<22-1)<<3 {
		t.Errorf("%d, %v", picked, err)
	}
}

// TestRecordsFitTheirSize has chunks of all sizes, which leave room at the end of each record.
func TestRecordsFitTheirSize(t *testing.T) {
	f, err := os.Create(filepath.Join(t.TempDir(), "records"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	sizes := []int{1, 9, mostRecord - 1, mostRecord, mostRecord + 1, 3 * mostRecord}
	if testing.Short() {
		sizes = []int{9, 1000}
	}
	for _, n := range sizes {
		to, st, v := &file{File: f}, &store{limit: 1 << 62}, &values{}
		for i := range uint64(n) {
			v.add(1<<40|i<<20, st) // eight bytes each
		}
		most := v.recordSize()
		if err := v.moveTo(to, to, &st.grouper); err != nil {
			t.Fatal(err)
		}
		if to.size > most {
			t.Errorf("%d values have %d bytes, of at most %d", n, to.size, most)
		}
	}
}

// TestDamagedRecords changes bytes of the records of a partial analysis. Its checksum is right, as if
// its writer were wrong. Merging it gives an error or tables, and does not panic.
func TestDamagedRecords(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "part")
	rows := model(2000, 1)
	if err := writePart(path, rows, Options{}, Part{Trace: TraceID{"f", 2000, 1}, EndRow: 2000}); err != nil {
		t.Fatal(err)
	}
	part, err := checkPart(path)
	if err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused := 0
	step := int64(149)
	if testing.Short() {
		step = 1499
	}
	for at := int64(0); at < part.tables; at += step {
		for _, flip := range []byte{1, 0x80} {
			bad := slices.Clone(whole)
			bad[at] ^= flip
			sum := sha256.Sum256(bad[:len(bad)-sha256.Size])
			copy(bad[len(bad)-sha256.Size:], sum[:])
			if err := os.WriteFile(path, bad, 0o600); err != nil {
				t.Fatal(err)
			}
			if _, err := merged([]string{path}, Options{}); errors.Is(err, status.Corrupt) {
				refused++
			} else if err != nil {
				t.Fatalf("byte %d: %v", at, err)
			}
		}
	}
	if refused == 0 {
		t.Error("no damage was found")
	}
}

// BenchmarkSpill moves the gaps of a trace to records, and picks three quantiles.
func BenchmarkSpill(b *testing.B) {
	for _, bits := range []int{12, 26, 32} {
		b.Run(fmt.Sprintf("bits=%d", bits), func(b *testing.B) {
			const n = 8 << 20
			r := rand.New(rand.NewPCG(1, 1))
			drawn := make([]uint64, n)
			for i := range drawn {
				drawn[i] = r.Uint64() >> (64 - bits)
			}
			b.SetBytes(n * 4)
			for b.Loop() {
				sp := &spill{dir: b.TempDir()}
				st, v := &store{limit: 4 << 20, spill: sp}, &values{}
				for _, x := range drawn {
					v.add(x, st)
					if err := st.relieve(1, func(int) *values { return v }); err != nil {
						b.Fatal(err)
					}
				}
				m := union(v)
				if _, err := m.pick([]uint64{n / 2, n / 10 * 9, n / 100 * 99}, &scratch{}); err != nil {
					b.Fatal(err)
				}
				sp.close()
			}
		})
	}
}
