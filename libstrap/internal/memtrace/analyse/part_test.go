package analyse

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// writeParts writes the partial analyses of the parts of rows, which are cut at the given rows, and returns
// their paths.
func writeParts(dir string, rows []access, cuts []int, o Options, kept bool) ([]string, error) {
	id := TraceID{Fingerprint: "f", Rows: uint64(len(rows)), Bytes: 1}
	var paths []string
	from := 0
	for _, to := range append(slices.Clone(cuts), len(rows)) {
		path := filepath.Join(dir, fmt.Sprintf("part.%d", len(paths)))
		p := Part{Trace: id, FirstRow: uint64(from), EndRow: uint64(to), RowsKept: kept}
		if err := writePart(path, rows[from:to], o, p); err != nil {
			return nil, err
		}
		paths = append(paths, path)
		from = to
	}
	return paths, nil
}

func writePart(path string, rows []access, o Options, p Part) error {
	a, err := NewPart(o, p)
	if err != nil {
		return err
	}
	defer a.Close()
	for piece := range slices.Chunk(rows, 7000) {
		r := record(piece)
		err := a.Add(r)
		r.Release()
		if err != nil {
			return err
		}
	}
	return a.WritePart(path)
}

func merged(paths []string, o Options) (map[string]cells, error) {
	m, err := NewMerger(o, paths)
	if err != nil {
		return nil, err
	}
	defer m.Close()
	for done := false; !done; {
		if done, err = m.Step(); err != nil {
			return nil, err
		}
	}
	if rows := m.parts[0].head.Trace.Rows; m.Rows() != rows {
		return nil, fmt.Errorf("%d rows are merged of %d", m.Rows(), rows)
	}
	tables, err := m.Finish()
	if err != nil {
		return nil, err
	}
	out := map[string]cells{}
	for _, t := range tables {
		out[t.Name] = content(t)
		t.Record.Release()
	}
	return out, nil
}

// overlap reports whether a part begins before the end of a part before it.
func overlap(rows []access, cuts []int) bool {
	latest, from := int64(0), 0
	for _, to := range append(slices.Clone(cuts), len(rows)) {
		next := latest
		for _, r := range rows[from:to] {
			if r.time < latest {
				return true
			}
			next = max(next, r.time)
		}
		latest, from = next, to
	}
	return false
}

func cutsOf(r *rand.Rand, rows int) []int {
	cuts := make([]int, r.IntN(5))
	for i := range cuts {
		cuts[i] = r.IntN(rows + 1)
	}
	slices.Sort(cuts)
	return cuts
}

// checkParts compares the tables of rows in parts with the reference and with those of one analysis.
func checkParts(rows []access, cuts []int, o Options, kept bool, dir string) error {
	kept = kept || overlap(rows, cuts)
	paths, err := writeParts(dir, rows, cuts, o, kept)
	if err != nil {
		return err
	}
	rand.Shuffle(len(paths), func(i, j int) { paths[i], paths[j] = paths[j], paths[i] })
	got, err := merged(paths, o)
	if err != nil {
		return err
	}
	whole, err := analysed(rows, o)
	if err != nil {
		return err
	}
	if err := difference(got, whole); err != nil {
		return fmt.Errorf("cut at %v, rows kept %t: %w", cuts, kept, err)
	}
	return difference(got, reference(rows))
}

// TestParts cuts hundreds of small traces into parts: the merged tables equal those of the whole.
func TestParts(t *testing.T) {
	dir, spill := t.TempDir(), t.TempDir()
	seeds := uint64(150)
	if testing.Short() {
		seeds = 9
	}
	for seed := range seeds {
		r := rand.New(rand.NewPCG(seed, 11))
		rows := draw(r)
		if seed%3 == 0 {
			rows = drawLong(r)
		}
		o := Options{Workers: []int{1, 2, 9}[r.IntN(3)], MemoryBytes: []int{1, 200, 0}[r.IntN(3)], SpillDir: spill}
		if err := checkParts(rows, cutsOf(r, len(rows)), o, r.IntN(4) == 0, dir); err != nil {
			t.Fatalf("seed %d, %d rows %+v: %v", seed, len(rows), rows, err)
		}
	}
	if left, err := os.ReadDir(spill); err != nil || len(left) > 0 {
		t.Errorf("left in the spill's folder: %v, %v", left, err)
	}
}

// TestLargeParts has parts of several blocks and batches, with everything in memory and with nearly nothing.
func TestLargeParts(t *testing.T) {
	n := 60_000
	if testing.Short() {
		n = 16_000
	}
	rows := model(n, 1)
	for memory, kept := range map[int]bool{0: false, 100_000: false, 50_000: true} {
		o := Options{Workers: 2, MemoryBytes: memory, SpillDir: t.TempDir()}
		if err := checkParts(rows, []int{n / 3, n/3 + 1, n / 4 * 3}, o, kept, t.TempDir()); err != nil {
			t.Errorf("%d bytes: %v", memory, err)
		}
	}
}

// TestSweepsInParts has parts that sweep over a region, each with a first stride of its own, which it has
// once, up to fewFirsts times, or more often.
func TestSweepsInParts(t *testing.T) {
	times := []int{1, 2, fewFirsts, fewFirsts + 1, fewFirsts + 2, 300}
	if testing.Short() {
		times = []int{1, fewFirsts + 1}
	}
	for _, each := range times {
		var rows []access
		var cuts []int
		address := uint64(1 << 40)
		for _, stride := range []uint64{64, 128, 128, 4096, 64, 1 << 33, 128} {
			for range each {
				rows = append(rows, access{
					time: int64(len(rows)), address: address, page: address >> trace.PageShift, kind: "weight", region: 1,
				})
				address += stride
			}
			cuts = append(cuts, len(rows))
		}
		for _, memory := range []int{0, 100} {
			o := Options{MemoryBytes: memory, SpillDir: t.TempDir()}
			if err := checkParts(rows, cuts[:len(cuts)-1], o, false, t.TempDir()); err != nil {
				t.Errorf("%d strides each, %d bytes: %v", each, memory, err)
			}
		}
	}
}

// FuzzParts cuts any trace anywhere.
//
// Slow: each input writes a file for each part.
func FuzzParts(f *testing.F) {
	f.Add(byte(0), []byte(nil), []byte(nil))
	f.Add(byte(1), []byte{1, 2}, bytes.Repeat([]byte{1, 1, 64, 0, 1, 0, 0, 0}, 4))
	f.Add(byte(2), []byte{0, 3}, bytes.Repeat([]byte{0x21, 1, 64, 0, 1, 0, 0, 0x90}, 5))
	f.Add(byte(3), []byte{1}, bytes.Repeat([]byte{0x10, 1, 0, 16, 200, 0, 0, 0}, 3))
	f.Fuzz(func(t *testing.T, how byte, where, data []byte) {
		rows := traceOf(data)
		var cuts []int
		for _, at := range where[:min(len(where), 6)] {
			cuts = append(cuts, int(at)%(len(rows)+1))
		}
		slices.Sort(cuts)
		o := Options{Workers: 1, MemoryBytes: []int{1, 300, 5000, 1 << 20}[how>>1&3], SpillDir: t.TempDir()}
		if err := checkParts(rows, cuts, o, how&1 == 1, t.TempDir()); err != nil {
			t.Error(err)
		}
	})
}

// TestKindsInParts has the kinds of traces that do not need every stage.
func TestKindsInParts(t *testing.T) {
	rows := model(2000, 3)
	for _, kind := range []trace.Kind{trace.FirstTouches, trace.WriteSets, trace.Allocations} {
		for _, kept := range []bool{false, true} {
			o := Options{Kind: kind}
			paths, err := writeParts(t.TempDir(), rows, []int{700, 1500}, o, kept)
			if err != nil {
				t.Fatal(err)
			}
			got, err := merged(paths, Options{})
			if err != nil {
				t.Fatal(err)
			}
			want, err := analysed(rows, o)
			if err != nil {
				t.Fatal(err)
			}
			if err := difference(got, want); err != nil {
				t.Errorf("%s: %v", kind, err)
			}
		}
	}
}

// TestEqualPartsAreEqualFiles: what a part is written by a second time has the same bytes.
func TestEqualPartsAreEqualFiles(t *testing.T) {
	dir, rows := t.TempDir(), model(5000, 1)
	p := Part{Trace: TraceID{"f", 5000, 1}, EndRow: 5000}
	var files [2][]byte
	for i, workers := range []int{1, 8} {
		path := filepath.Join(dir, "part")
		if err := writePart(path, rows, Options{Workers: workers}, p); err != nil {
			t.Fatal(err)
		}
		var err error
		if files[i], err = os.ReadFile(path); err != nil {
			t.Fatal(err)
		}
	}
	if !bytes.Equal(files[0], files[1]) {
		t.Error("the files differ")
	}
}

func TestPartsThatAreNotOneTrace(t *testing.T) {
	dir, rows := t.TempDir(), model(300, 1)
	make := func(name string, change func(*Part), kind trace.Kind) string {
		p := Part{Trace: TraceID{"f", 300, 1}, EndRow: 300}
		change(&p)
		path := filepath.Join(dir, name)
		if err := writePart(path, rows[p.FirstRow:p.EndRow], Options{Kind: kind}, p); err != nil {
			t.Fatal(err)
		}
		return path
	}
	of := func(name string, from, to uint64) string {
		return make(name, func(p *Part) { p.FirstRow, p.EndRow = from, to }, "")
	}
	a, b, c := of("a", 0, 100), of("b", 100, 200), of("c", 200, 300)
	other := make("other", func(p *Part) { p.Trace.Fingerprint = "g" }, "")
	touches := make("touches", func(*Part) {}, trace.FirstTouches)
	kept := make("kept", func(p *Part) { p.FirstRow, p.RowsKept = 200, true }, "")
	for _, test := range []struct {
		parts []string
		says  []string
	}{
		{nil, []string{"no partial analysis"}},
		{[]string{b, c}, []string{"rows 0 to 99 are missing, before", b}},
		{[]string{a, c}, []string{"rows 100 to 199 are missing, before", c}},
		{[]string{a, of("empty", 200, 200), c}, []string{"rows 100 to 199 are missing, before", c}},
		{[]string{a, b, of("end", 300, 300)}, []string{"rows 200 to 299 are missing, the last ones"}},
		{[]string{b}, []string{"rows 0 to 99 are missing", "rows 200 to 299 are missing, the last ones"}},
		{[]string{a, b, of("b2", 100, 200), c}, []string{b, "b2", "are the same part, rows 100 to 199"}},
		{[]string{a, of("wide", 50, 200), c}, []string{a, "wide", "overlap: both have the rows 50 to 99"}},
		{[]string{a, b, c, of("within", 120, 130)}, []string{b, "within", "both have the rows 120 to 129"}},
		{[]string{a, other}, []string{a, other, "different traces", "fingerprint g"}},
		{[]string{a, touches}, []string{a, touches, "different traces"}},
		{[]string{a, b, kept}, []string{a, kept, "different options"}},
	} {
		_, err := merged(test.parts, Options{})
		if !errors.Is(err, status.InvalidArgument) {
			t.Errorf("%v: %v", test.parts, err)
		}
		for _, text := range test.says {
			if !strings.Contains(fmt.Sprint(err), text) {
				t.Errorf("%v: %v does not say %q", test.parts, err, text)
			}
		}
	}
	if _, err := merged([]string{c, a, of("none", 100, 100), b}, Options{}); err != nil {
		t.Error(err)
	}
}

// TestPartsThatOverlapInTime: without their rows they are refused, because strides and gaps would be wrong.
func TestPartsThatOverlapInTime(t *testing.T) {
	rows := model(300, 1)
	rows[150].time = 0
	paths, err := writeParts(t.TempDir(), rows, []int{100}, Options{}, false)
	if err != nil {
		t.Fatal(err)
	}
	_, err = merged(paths, Options{})
	if !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "begins at 0 ns") {
		t.Error(err)
	}
	if err := checkParts(rows, []int{100}, Options{}, true, t.TempDir()); err != nil {
		t.Error(err)
	}
}

func TestFilesThatAreNoPartialAnalysis(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "part")
	if err := writePart(path, model(300, 1), Options{}, Part{Trace: TraceID{"f", 300, 1}, EndRow: 300}); err != nil {
		t.Fatal(err)
	}
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	refused := func(content []byte, code status.Code, says string) {
		t.Helper()
		bad := filepath.Join(dir, "bad")
		if err := os.WriteFile(bad, content, 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := merged([]string{bad}, Options{})
		if !errors.Is(err, code) || !strings.Contains(fmt.Sprint(err), "bad") || !strings.Contains(fmt.Sprint(err), says) {
			t.Errorf("%v does not say %q", err, says)
		}
	}
	signed := func(content []byte) []byte {
		sum := sha256.Sum256(content)
		return append(slices.Clone(content), sum[:]...)
	}
	body := whole[:len(whole)-sha256.Size]
	refused(nil, status.Corrupt, "it has 0 bytes")
	refused([]byte("PAR1 and more that is no partial analysis at all"), status.Corrupt, "checksum")
	step := 97
	if testing.Short() {
		step = 997
	}
	for n := 1; n < len(whole); n += step {
		refused(whole[:n], status.Corrupt, "no whole partial analysis")
		flipped := slices.Clone(whole)
		flipped[n] ^= 1
		refused(flipped, status.Corrupt, "checksum")
	}
	refused(signed([]byte("text")), status.Corrupt, "no whole partial analysis")
	refused(signed(body[:len(body)/2]), status.Corrupt, "no whole partial analysis")
	refused(signed(bytes.Replace(body, []byte(`"version":1`), []byte(`"version":7`), 1)), status.Unsupported, "version 7, and this release reads version 1")
	_, err = merged([]string{filepath.Join(dir, "nothing")}, Options{})
	if !errors.Is(err, status.NotFound) {
		t.Error(err)
	}
}

// A part that is written takes no more rows, and is not written again.
func TestAPartIsWrittenOnce(t *testing.T) {
	rows := record(model(10, 1))
	defer rows.Release()
	a, err := NewPart(Options{}, Part{Trace: TraceID{"f", 10, 1}, EndRow: 10})
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	dir := t.TempDir()
	if err := errors.Join(a.Add(rows), a.WritePart(filepath.Join(dir, "part"))); err != nil {
		t.Fatal(err)
	}
	if err := a.Add(rows); !errors.Is(err, status.InvalidState) {
		t.Errorf("Add after WritePart: %v", err)
	}
	if err := a.WritePart(filepath.Join(dir, "again")); !errors.Is(err, status.InvalidState) {
		t.Errorf("WritePart after WritePart: %v", err)
	}
}

func TestPartsThatAreRefused(t *testing.T) {
	id := TraceID{"f", 300, 1}
	for _, test := range []struct {
		o    Options
		p    Part
		says string
	}{
		{Options{Tables: Ten}, Part{Trace: id}, "for all of"},
		{Options{}, Part{}, "fingerprint"},
		{Options{}, Part{Trace: id, FirstRow: 5, EndRow: 4}, "rows 5 to 4"},
		{Options{}, Part{Trace: id, EndRow: 301}, "within the 300 rows"},
	} {
		_, err := NewPart(test.o, test.p)
		if !errors.Is(err, status.InvalidArgument) || !strings.Contains(fmt.Sprint(err), test.says) {
			t.Errorf("%+v: %v", test.p, err)
		}
	}
	path := filepath.Join(t.TempDir(), "part")
	err := writePart(path, model(10, 1), Options{}, Part{Trace: id, EndRow: 300})
	if !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "has 300 rows, and 10 came") {
		t.Error(err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Error("a file is left")
	}
}
