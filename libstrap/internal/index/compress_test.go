package index

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

func TestManyPacketsTakeFewBytes(t *testing.T) {
	if testing.Short() {
		t.Skip("more rows than a batch may have, and no goroutines")
	}
	const count = maxPending + 1000
	w, random := create(t), rand.New(rand.NewPCG(1, 2))
	rows := make([]wire.Row, count)
	for i := range rows {
		rows[i] = decoded(random, i)
		check(t, w.Append(&rows[i]))
	}
	check(t, w.Close())
	f, err := Open(w.path)
	check(t, err)
	sameRows(t, rowsOf(f), rows)
	compareWithArrow(t, w.path)
	if n := w.end / count; n > 52 {
		t.Errorf("%d bytes of the file a row", n)
	}
	size := int64(0)
	for _, b := range f.batches {
		size += b.size()
	}
	if n := size / count; n > 36 {
		t.Errorf("%d bytes of memory a row", n)
	}
}

func TestACompressedBatchIsAnyRows(t *testing.T) {
	w, rows := create(t), slices.Repeat(sample(), 40)
	add(t, w, rows...)
	check(t, w.Close())
	f, err := Open(w.path)
	check(t, err)
	sameRows(t, rowsOf(f), rows)
	compareWithArrow(t, w.path)
	// A slice of the rows has only its own texts.
	schema, _, ok := Select([]string{"layer", "offset"})
	if !ok {
		t.Fatal("no such columns")
	}
	some := NewRecorder(schema).Record(f.Slice(2, 5)[0])
	got, err := some.MarshalJSON()
	check(t, err)
	want := `[{"layer":"couche.é","offset":null},{"layer":"mlp","offset":130},{"layer":"mlp","offset":180}]`
	if strings.Join(strings.Fields(string(got)), "") != want {
		t.Errorf("%s, want %s", got, want)
	}
}

func TestTextsThatAreAlikeInAllRows(t *testing.T) {
	w, rows := create(t), sample()
	for i := range rows {
		rows[i].Model, rows[i].Request = "bert", ""
	}
	add(t, w, rows...)
	check(t, w.Close())
	f, err := Open(w.path)
	check(t, err)
	schema, _, _ := Select([]string{"model", "request"})
	for _, all := range []Rows{f.Slice(0, len(rows))[0], f.Slice(1, 3)[0]} {
		record := NewRecorder(schema).Record(all)
		got, err := record.MarshalJSON()
		check(t, err)
		each := strings.Repeat(`{"model":"bert","request":null},`, int(record.NumRows()))
		want := "[" + strings.TrimSuffix(each, ",") + "]"
		if strings.Join(strings.Fields(string(got)), "") != want {
			t.Errorf("%s, want %s", got, want)
		}
	}
}

func TestNumbersAreKeptWhateverTheyAre(t *testing.T) {
	random := rand.New(rand.NewPCG(3, 4))
	noise := func(i int) uint64 { return uint64(i)*1000 + random.Uint64N(200) }
	for name, c := range map[string]struct {
		value func(i int) uint64
		width int
	}{
		"zeros":    {func(int) uint64 { return 0 }, 0},
		"line":     {func(i int) uint64 { return 7 - 3*uint64(i) }, 0},
		"noise":    {noise, 2}, // the integer slope is wrong by up to 1 in each row
		"negative": {func(i int) uint64 { return uint64(int64(i%3) - 1) }, 1},
		"floats":   {func(int) uint64 { return math.Float64bits(1 + random.Float64()) }, 7},
		"extremes": {func(i int) uint64 { return math.MaxUint64 / 2 * uint64(i%4) }, 8},
		"any":      {func(int) uint64 { return random.Uint64() }, 8},
	} {
		for _, n := range []int{0, 1, 2, 1000} {
			values := make([]uint64, n)
			for i := range values {
				values[i] = c.value(i)
			}
			v := packed(values)
			for i, want := range values {
				if got := v.at(i); got != want {
					t.Fatalf("%s: number %d of %d is %d, want %d", name, i, n, got, want)
				}
			}
			if n == 1000 && v.width > c.width {
				t.Errorf("%s: %d bytes a number, want %d", name, v.width, c.width)
			}
		}
	}
}

// Whatever byte is wrong, the other batch can be read.
func TestAnyCompressedByteMayBeWrong(t *testing.T) {
	w, rows := create(t), slices.Repeat(sample(), 40)
	add(t, w, rows...)
	add(t, w, rows...)
	check(t, w.Close())
	whole, err := os.ReadFile(w.path)
	check(t, err)
	step := 37
	if testing.Short() {
		step = 997
	}
	for at := int(messageIn(whole, 0).end); at < len(whole); at += step {
		b := bytes.Clone(whole)
		b[at] ^= 0x80
		file, bad := parse(held(b), &memory.Budget{})
		if bad != nil {
			t.Fatalf("byte %d: %v", at, bad)
		}
		rowsOf(file)
		if all, bad := parseAll(held(b), &memory.Budget{}); bad != nil || all.NumRows() < len(rows) {
			t.Fatalf("byte %d: %d rows are left, %v", at, all.NumRows(), bad)
		}
	}
}

// Many rows may wait for a full disk. They are written in batches small enough for every reader.
func TestALongQueueIsSeveralBatches(t *testing.T) {
	if testing.Short() {
		t.Skip("more rows than two batches may have, and no goroutines")
	}
	w, row := create(t), sample()[0]
	const count = 2*maxPending + 10
	w.rows = slices.Repeat([]wire.Row{row}, count)
	check(t, w.Flush())
	for range 3 {
		row.Error = strings.Repeat("x", maxPendingText/2)
		w.rows = append(w.rows, row)
	}
	check(t, w.Close())
	f, err := Open(w.path)
	check(t, err)
	if f.Torn || f.NumRows() != count+3 || len(f.batches) != 6 {
		t.Errorf("%d rows in %d batches: %s", f.NumRows(), len(f.batches), f.Problem)
	}
}

// A few bytes can claim to decompress to any number of bytes.
func TestWhatABufferDecompressesToIsBounded(t *testing.T) {
	w := create(t)
	add(t, w, slices.Repeat(sample(), 40)...)
	whole, err := os.ReadFile(w.path)
	check(t, err)
	at := int(messageIn(whole, 0).end)
	m := messageIn(whole, int64(at))
	head := int(m.end) - at - len(m.body)
	for name, c := range map[string]struct {
		claim uint64
		says  string
	}{
		"more than a batch may": {maxBatch + 1, "at most"},
		"negative":              {1 << 63, "at most"},
		"more than there is":    {m64(m.body) + 8, "decompresses to"},
		"less than there is":    {m64(m.body) - 8, "a compressed buffer"},
	} {
		b := bytes.Clone(whole)
		binary.LittleEndian.PutUint64(b[at+head:], c.claim) // the decompressed length of the first column's values
		var f *File
		used := allocated(func() {
			var bad *fault
			if f, bad = parse(held(b), &memory.Budget{}); bad != nil {
				t.Fatalf("%s: %v", name, bad)
			}
		})
		if f.NumRows() != 0 || !strings.Contains(f.Problem, c.says) || used > 1<<20 {
			t.Errorf("%s: %d rows, %d bytes taken, %s", name, f.NumRows(), used, f.Problem)
		}
	}
	// A claim of many rows.
	b := bytes.Clone(whole)
	place := bytes.Index(b[at:at+head], binary.LittleEndian.AppendUint64(nil, 240))
	binary.LittleEndian.PutUint64(b[at+place:], maxRows+1)
	if f, bad := parse(held(b), &memory.Budget{}); bad != nil || f.NumRows() != 0 || !strings.Contains(f.Problem, "claims 65537 rows") {
		t.Errorf("%v, %+v", bad, f)
	}
}

func m64(b []byte) uint64 { return binary.LittleEndian.Uint64(b) }
