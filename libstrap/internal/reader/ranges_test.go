package reader_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// place gives ranges places one behind the other, in the order of their numbers in order, or in their own.
// It returns the end of the last place.
func place(some []reader.Range, order []int) (end uint64) {
	for k := range some {
		if order != nil {
			k = order[k]
		}
		some[k].To = end
		end += some[k].Bytes
	}
	return end
}

// ranges reads ranges, and compares them with the values of c. Bytes behind them stay as they are.
func ranges(t testing.TB, r *reader.Reader, c *capture, some []reader.Range, order []int) {
	t.Helper()
	end := place(some, order)
	dst := bytes.Repeat([]byte{0xa5}, int(end)+100)
	done, err := r.ReadRanges(some, dst)
	check(t, err)
	if done != len(some) {
		t.Fatalf("%d ranges of %d", done, len(some))
	}
	for _, one := range some {
		if !bytes.Equal(dst[one.To:one.To+one.Bytes], c.values[one.Row][one.First:one.First+one.Bytes]) {
			t.Fatalf("%+v has other bytes", one)
		}
	}
	if !bytes.Equal(dst[end:], bytes.Repeat([]byte{0xa5}, 100)) {
		t.Fatal("bytes behind the ranges changed")
	}
}

// lines returns ranges of `each` bytes that cover the packet of a row.
func lines(c *capture, row, each int) (some []reader.Range) {
	for first := 0; first < len(c.values[row]); first += each {
		n := min(each, len(c.values[row])-first)
		some = append(some, reader.Range{Row: uint64(row), First: uint64(first), Bytes: uint64(n)})
	}
	return some
}

func TestRangesAreThoseOfWholePackets(t *testing.T) {
	c := crowd(t, 2000)
	for i, codec := range []string{"none", "lz4", "zstd", "lz4 without size"} {
		c.add(t, "long", codec, ramp(5<<20+i))
		c.rows[len(c.rows)-1].Codec = strings.TrimSuffix(codec, " without size")
	}
	path := save(t, c.stream, c.rows)
	rng := rand.New(rand.NewPCG(1, 2))
	random := func(n, row int) (some []reader.Range) {
		for range n {
			row := row
			if row < 0 {
				row = rng.IntN(len(c.rows))
			}
			first := rng.IntN(len(c.values[row]) + 1)
			bytes := rng.IntN(min(len(c.values[row])-first, 2000) + 1)
			some = append(some, reader.Range{Row: uint64(row), First: uint64(first), Bytes: uint64(bytes)})
		}
		return some
	}
	var forwards, backwards []reader.Range
	for _, row := range []int{300, 301, 302, 500, 550, 2001, 2002, 2003} {
		forwards = append(forwards, lines(c, row, 768)...)
	}
	for i := range forwards {
		backwards = append(backwards, forwards[len(forwards)-1-i])
	}
	for _, o := range []reader.Options{{}, {IgnoreIndex: true}} {
		r := open(t, path, o)
		for name, some := range map[string][]reader.Range{
			"in order": forwards, "backwards": backwards, "scattered": random(2000, -1),
			"none": random(200, 2000), "lz4": random(200, 2001), "zstd": random(200, 2002),
			"one again": {{Row: 5, First: 1, Bytes: 3}, {Row: 5, First: 1, Bytes: 3}, {Row: 5, First: 0, Bytes: 5}},
			"empty":     {{Row: 5}, {Row: 2001, First: 5 << 20}, {Row: 5, First: 5}},
		} {
			t.Run(fmt.Sprintf("%s/%v", name, o.IgnoreIndex), func(t *testing.T) {
				ranges(t, r, c, some, nil)
				ranges(t, r, c, some, rng.Perm(len(some)))
			})
		}
	}
}

func TestRangesEndBeforeTheOneThatCannotBeRead(t *testing.T) {
	c := crowd(t, 1000)
	const damaged = 701
	c.stream[c.rows[damaged+1].Offset-1] ^= 1 // the last byte of its payload
	c.note("layer.0", "no room")
	r := open(t, save(t, c.stream, c.rows), reader.Options{})
	var some []reader.Range
	for row := range 1000 {
		some = append(some, reader.Range{Row: uint64(row), Bytes: uint64(min(len(c.values[row]), 9))})
	}
	place(some, nil)
	dst := make([]byte, 1<<20)
	if done, err := r.ReadRanges(some, dst); done != damaged || err != nil {
		t.Errorf("%d ranges, %v", done, err)
	}
	for name, of := range map[string]struct {
		ranges []reader.Range
		done   int
		code   status.Code
	}{
		"damaged":           {[]reader.Range{{Row: damaged, Bytes: 1}, {Row: 1, Bytes: 1}}, 0, status.Corrupt},
		"damaged later":     {[]reader.Range{{Row: 1}, {Row: damaged, Bytes: 1}, {Row: 1, Bytes: 1}}, 1, status.OK},
		"note":              {[]reader.Range{{Row: 1000}}, 0, status.NotFound},
		"no row":            {[]reader.Range{{Row: 1001}}, 0, status.NotFound},
		"no such number":    {[]reader.Range{{Row: 1 << 63, Bytes: 1}}, 0, status.NotFound},
		"outside":           {[]reader.Range{{Row: 299, First: 299, Bytes: 1}}, 0, status.InvalidArgument},
		"far outside":       {[]reader.Range{{Row: 299, First: 300, Bytes: 0}}, 0, status.InvalidArgument},
		"beyond 2^64":       {[]reader.Range{{Row: 299, First: 5, Bytes: 1<<64 - 1}}, 0, status.InvalidArgument},
		"outside later":     {[]reader.Range{{Row: 299, First: 298, Bytes: 1}, {Row: 299, First: 298, Bytes: 2}}, 1, status.OK},
		"none":              {nil, 0, status.OK},
		"no room":           {[]reader.Range{{Row: 500, Bytes: 1<<16 + 1}, {Row: 1, Bytes: 1}}, 0, status.InvalidArgument},
		"no room for later": {[]reader.Range{{Row: 1, Bytes: 1}, {Row: 500, Bytes: 1 << 16, To: 1}, {Row: 1, Bytes: 1}}, 1, status.OK},
		"no such place":     {[]reader.Range{{Row: 1, Bytes: 1, To: 1<<64 - 1}}, 0, status.InvalidArgument},
		"behind the end":    {[]reader.Range{{Row: 1, To: 1 << 16}, {Row: 1, To: 1<<16 + 1}}, 1, status.OK},
	} {
		done, err := r.ReadRanges(of.ranges, dst[:1<<16])
		if done != of.done || status.CodeOf(err) != of.code {
			t.Errorf("%s: %d ranges, %v", name, done, err)
		}
	}
	_, err := r.ReadRanges([]reader.Range{{Row: 299, First: 280, Bytes: 20}}, dst)
	if want := "row = 299, first = 280, bytes = 20: the packet has 299 bytes"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, not %q", err, want)
	}
	_, err = r.ReadRanges([]reader.Range{{Row: 299, Bytes: 20, To: 1<<20 - 19}}, dst)
	if want := "to = 1048557, bytes = 20: there is room for 1048576 bytes"; err == nil || !strings.Contains(err.Error(), want) {
		t.Errorf("%v, not %q", err, want)
	}
}

// A checksum is of a whole payload. Damage of raw bytes is found where all of them are read, and in a
// frame that is decoded to its end.
func TestRangesVerifyWhatIsReadWhole(t *testing.T) {
	c := &capture{}
	c.add(t, "first", "none", ramp(10)) // the index belongs to the stream that has it
	c.add(t, "short", "none", ramp(1000))
	c.add(t, "long", "none", ramp(200_000))
	for row := range c.rows[1:] {
		c.stream[c.rows[1+row].Offset+500] ^= 1
	}
	r := open(t, save(t, c.stream, c.rows), reader.Options{})
	for _, of := range []struct {
		row, first, bytes uint64
		code              status.Code
	}{
		{1, 0, 1000, status.Corrupt},
		{1, 900, 1, status.Corrupt},
		{2, 0, 200_000, status.Corrupt},
		{2, 0, 99_000, status.OK},
	} {
		dst := make([]byte, of.bytes)
		if _, err := r.ReadRanges([]reader.Range{{Row: of.row, First: of.first, Bytes: of.bytes}}, dst); status.CodeOf(err) != of.code {
			t.Errorf("%+v: %v", of, err)
		}
	}
	for _, each := range []int{768, 5000} { // together they are the whole packet
		some := lines(c, 2, each)
		place(some, nil)
		done, err := r.ReadRanges(some, make([]byte, 200_000))
		if done != 0 || status.CodeOf(err) != status.Corrupt {
			t.Errorf("ranges of %d: %d, %v", each, done, err)
		}
	}
}

func BenchmarkReadRanges(b *testing.B) {
	c := &capture{}
	rng := rand.New(rand.NewPCG(1, 2))
	values := make([]byte, 1<<20)
	for i := range values {
		values[i] = byte(rng.NormFloat64() * 16)
	}
	const packets = 64
	first := map[string]int{}
	for _, codec := range []string{"none", "lz4", "zstd"} {
		first[codec] = len(c.rows)
		for range packets {
			c.add(b, "layer", codec, values)
		}
	}
	r := open(b, save(b, c.stream, c.rows), reader.Options{})
	for codec, row := range first {
		var inOrder, scattered []reader.Range
		rows := []uint64{}
		for k := range 4 {
			inOrder = append(inOrder, lines(c, row+k, 768)...)
			rows = append(rows, uint64(row+k))
		}
		for range 4096 {
			one := reader.Range{Row: uint64(row + rng.IntN(packets)), First: uint64(rng.IntN(len(values) - 768)), Bytes: 768}
			scattered = append(scattered, one)
		}
		one := []reader.Range{{Row: uint64(row), First: 600_000, Bytes: 768}}
		for name, some := range map[string][]reader.Range{"in order": inOrder, "scattered": scattered, "one": one} {
			place(some, nil)
			b.Run(codec+"/"+name, func(b *testing.B) {
				dst := make([]byte, 5<<20)
				b.ReportAllocs()
				for b.Loop() {
					if done, err := r.ReadRanges(some, dst); done != len(some) {
						b.Fatal(done, err)
					}
				}
			})
		}
		b.Run(codec+"/ReadMany", func(b *testing.B) {
			dst, ends := make([]byte, 5<<20), make([]uint64, len(rows))
			b.ReportAllocs()
			for b.Loop() {
				if done, err := r.ReadMany(rows, 1, dst, ends); done != len(rows) {
					b.Fatal(done, err)
				}
			}
		})
	}
}
