package analyse

import (
	"encoding/binary"
	"math"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// traceOf makes a trace from any bytes, eight for a row: one for its kind, one for its region, two for
// its address, two for its time and two for its length. Small numbers make equal values likely. Bits
// of the first byte scale them up to the ends of their ranges.
func traceOf(data []byte) []access {
	var rows []access
	now := int64(0)
	for ; len(data) >= 8 && len(rows) < 500; data = data[8:] {
		what, at := data[0], uint64(binary.LittleEndian.Uint16(data[2:]))
		step, length := int64(binary.LittleEndian.Uint16(data[4:])), uint64(binary.LittleEndian.Uint16(data[6:]))
		a := access{op: trace.Op(what & 1), region: int64(int8(data[1])), kind: kinds[int(data[1]>>6)%len(kinds)]}
		switch what >> 1 & 3 {
		case 1:
			a.kind = kinds[int(what)%len(kinds)]
		case 2:
			at <<= 48
		case 3:
			at = math.MaxUint64 - at
		}
		a.address, a.page = at, at>>trace.PageShift
		switch what >> 3 & 3 {
		case 0:
			now += step
		case 1:
			now += min(step<<40, math.MaxInt64-now)
		case 2:
			now = max(0, now-step)
		}
		now = max(now, 0)
		a.time = now
		if what&0x20 != 0 {
			a.length = int64(min(length*8, math.MaxUint64-at)) // up to 128 pages: see longRow
		}
		if what&0x40 != 0 {
			a.page = uint64(step)
		}
		rows = append(rows, a)
	}
	return rows
}

// FuzzAnalyse compares all tables of any trace with the reference.
//
// Slow: each input makes all tables twice, and most of them spill to files on the way.
func FuzzAnalyse(f *testing.F) {
	row := func(what, region byte, address, step, length uint16) []byte {
		b := []byte{what, region}
		b = binary.LittleEndian.AppendUint16(b, address)
		b = binary.LittleEndian.AppendUint16(b, step)
		return binary.LittleEndian.AppendUint16(b, length)
	}
	trace := func(rows ...[]byte) []byte {
		var b []byte
		for _, r := range rows {
			b = append(b, r...)
		}
		return b
	}
	f.Add(byte(0), []byte(nil))
	f.Add(byte(1), trace(row(1, 1, 64, 1, 0), row(0, 1, 64, 5, 0), row(0, 1, 128, 5, 0), row(1, 2, 64, 5, 0)))
	f.Add(byte(2), trace(row(0x21, 1, 4000, 1, 9000), row(0x20, 1, 0, 2, 9000), row(0, 1, 4096, 1, 0), row(0, 2, 8192, 1, 0)))
	f.Add(byte(3), trace(row(1, 1, 0, 900, 0), row(0x10, 1, 0, 500, 0), row(0x10, 1, 64, 300, 0), row(0, 1, 0, 50, 0)))
	f.Add(byte(4), trace(row(0x0d, 1, 1, 0x7fff, 0), row(0x0c, 1, 0xffff, 0x7fff, 0), row(0x06, 1, 2, 1, 0), row(0x46, 1, 2, 1, 0)))
	f.Add(byte(5), trace(row(2, 200, 1, 1, 0), row(4, 200, 1, 1, 0), row(5, 200, 1, 0, 0), row(3, 200, 1, 0, 0)))
	f.Fuzz(func(t *testing.T, how byte, data []byte) {
		rows := traceOf(data)
		o := Options{
			Tables:      append(Ten[:len(Ten):len(Ten)], Further...),
			Workers:     1 + int(how&1)*8,
			MemoryBytes: []int{1, 300, 5000, 1 << 20}[how>>1&3],
			SpillDir:    t.TempDir(),
			Bins:        3, Windows: 1 + int(how>>3&7), Top: 3,
		}
		got, err := analysed(rows, o, 1+int(how>>2))
		if err != nil {
			t.Fatal(err)
		}
		want := reference(rows)
		for name, columns := range furtherReference(rows, o) {
			want[name] = columns
		}
		if err := difference(got, want); err != nil {
			t.Error(err)
		}
	})
}
