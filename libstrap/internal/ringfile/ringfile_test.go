package ringfile

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const testID = "000102030405060708090a0b0c0d0e0f"

func create(t testing.TB, size int64) (*File, string) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "ring")
	f, err := Create(path, size, testID, 5, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = f.Remove()
		f.Memory.Release(0)
	})
	return f, path
}

// put writes a whole packet at an offset of the arena.
func put(f *File, offset int, row wire.Row, elements []byte, number, first uint64) {
	b := f.Memory.Bytes[HeadSize+offset:]
	at := RecordSize(len(row.Shape), TextOf(&row)) + 3
	copy(b[at:], elements)
	row.CRC = crc32c.Checksum(elements)
	f.Put(b, offset, &row, at, len(elements), number, first)
	Commit(b)
}

func rowOf(layer string, shape ...int64) wire.Row {
	return wire.Row{
		Parts: 1, Model: "m", Layer: layer, Shape: shape, Source: wire.Float32, Stored: wire.UInt8,
		Codec: "none", MSE: 0.5, MeanSquare: 2,
	}
}

func scanned(t testing.TB, b []byte) (all []Record) {
	t.Helper()
	head, err := parseHead(b[:HeadSize], "ring")
	if err != nil {
		t.Fatal(err)
	}
	r, err := NewReader(bytes.NewReader(b), int64(len(b)), &head)
	if err != nil {
		t.Fatal(err)
	}
	if err := r.Scan(func(p *Record) error { all = append(all, *p); return nil }); err != nil {
		t.Fatal(err)
	}
	return all
}

func TestARecordComesBack(t *testing.T) {
	f, path := create(t, 1<<20)
	row := rowOf("größe", 2, 3)
	row.Path, row.Request, row.Transform, row.Parameters = "[1]", "r", wire.TransformOverflow, "{}"
	row.Step, row.Token, row.Thread, row.TimeNS, row.Call, row.Mantissa = -1, math.MinInt64, 1<<63, 9, 8, 7
	row.Part, row.Parts, row.Rank = 3, 4, 0
	put(f, 128, row, []byte("abcde"), 11, 10)
	PutMark(f.Memory.Bytes[HeadSize+128:], 10, 70_000, 1<<20)
	long := rowOf(strings.Repeat("x", wire.MaxName))
	for range maxDims {
		long.Shape = append(long.Shape, 1)
	}
	long.Model, long.Parameters = strings.Repeat("m", 1<<16), strings.Repeat("p", 1<<16)
	put(f, 1024, long, []byte{1}, 12, 12)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	all := scanned(t, b)
	if len(all) != 2 {
		t.Fatalf("%d records", len(all))
	}
	row.Offset, row.Length, row.CRC = HeadSize+128, 5, crc32c.Checksum([]byte("abcde"))
	want := Record{
		Row: row, Number: 11, First: 10, Mark: Mark{true, 70_000, math.MaxUint16}, At: all[0].At, Bytes: 5,
	}
	if fmt.Sprintf("%+v", all[0]) != fmt.Sprintf("%+v", want) || string(b[all[0].At:][:5]) != "abcde" {
		t.Errorf("got %+v\nnot %+v", all[0], want)
	}
	if got := all[1].Row; got.Layer != long.Layer || got.Model != long.Model || len(got.Shape) != maxDims || all[1].Mark.Ended {
		t.Error("the record with the longest texts differs")
	}
	Erase(f.Memory.Bytes[HeadSize+128:])
	if b, err = os.ReadFile(path); err != nil || len(scanned(t, b)) != 1 {
		t.Errorf("an erased record is found: %v", err)
	}
}

// A copy of a record elsewhere, or in the file of another capture, is none.
func TestACopiedRecordIsNone(t *testing.T) {
	f, path := create(t, 1<<20)
	put(f, 0, rowOf("a", 3), []byte("abc"), 1, 1)
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	copy(b[HeadSize+4096:], b[HeadSize:HeadSize+1024])
	if all := scanned(t, b); len(all) != 1 {
		t.Errorf("%d records", len(all))
	}
	other := Head{Size: int64(len(b)), CaptureID: strings.Repeat("ab", 16)}
	other.put(b)
	if all := scanned(t, b); len(all) != 0 {
		t.Errorf("%d records of another capture", len(all))
	}
}

func TestDamagedHeadsAndStrangers(t *testing.T) {
	f, path := create(t, 1<<20)
	good, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := Open(path); !errors.Is(err, status.Busy) {
		t.Errorf("the file of a process that lives: %v", err)
	}
	if err := f.Remove(); err != nil {
		t.Fatal(err)
	}
	expect := func(what string, b []byte, code status.Code) {
		t.Helper()
		if err := os.WriteFile(path, b, 0o600); err != nil {
			t.Fatal(err)
		}
		g, head, err := Open(path)
		if status.CodeOf(err) != code {
			t.Errorf("%s: %v", what, err)
		}
		if err == nil {
			g.Close()
			if head.PID != int32(os.Getpid()) || head.Rank != 5 || head.CaptureID != testID || head.Size != 1<<20 {
				t.Errorf("%s: %+v", what, head)
			}
		}
	}
	with := func(at int, v byte) []byte {
		b := bytes.Clone(good)
		b[at] ^= v
		return b
	}
	expect("a good one", good, status.OK)
	expect("an empty file", nil, status.Corrupt)
	expect("a short one", good[:40], status.Corrupt)
	expect("another magic", with(0, 1), status.Corrupt)
	expect("another version", with(8, 2), status.Unsupported)
	expect("another id", with(25, 1), status.Corrupt)
	expect("another size", with(20, 1), status.Corrupt)
	if _, _, err := Open(filepath.Dir(path)); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a folder: %v", err)
	}
	if _, _, err := Open(path + "no"); !errors.Is(err, status.NotFound) {
		t.Errorf("no file: %v", err)
	}
}

// A file system without room is an error at the start, and leaves no file.
func TestAFullFileSystemIsToldAtTheStart(t *testing.T) {
	folder, err := os.MkdirTemp("/dev/shm", "strap-ring-*")
	if err != nil {
		t.Skip("no /dev/shm")
	}
	defer os.RemoveAll(folder)
	path := filepath.Join(folder, "ring")
	if _, err = Create(path, 1<<50, testID, 0, nil); !errors.Is(err, status.NoSpace) {
		t.Fatalf("a PB: %v", err)
	}
	if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the file is left: %v", err)
	}
}

// filled returns the bytes of a file with some packets of random sizes, one of them erased.
func filled(t testing.TB, random *rand.Rand) []byte {
	t.Helper()
	const size = 64 << 10
	path := filepath.Join(t.TempDir(), "ring")
	f, err := Create(path, size, testID, 0, nil)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Memory.Release(0)
	at := 0
	for number := uint64(1); ; number++ {
		n := random.IntN(3000)
		if at+n+512 > size-HeadSize {
			break
		}
		put(f, at, rowOf(fmt.Sprint("layer", number), int64(n)), bytes.Repeat([]byte{byte(number)}, n), number, number/3*3)
		if number == 2 {
			Erase(f.Memory.Bytes[HeadSize+at:])
		}
		at = (at + n + 512) / Align * Align
	}
	b := bytes.Clone(f.Memory.Bytes)
	if err := f.Remove(); err != nil {
		t.Fatal(err)
	}
	return b
}

// A damaged file gives fewer records, and each that it gives was written so.
func FuzzReader(f *testing.F) {
	random := rand.New(rand.NewPCG(1, 2))
	good := filled(f, random)
	f.Add(uint32(0), []byte{})
	f.Add(uint32(HeadSize), []byte{1, 2, 3})
	f.Add(uint32(HeadSize+20), []byte{255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 255})
	f.Add(uint32(HeadSize+119), []byte{255, 255, 255, 255, 255})
	wanted := map[int64]Record{}
	for _, p := range scanned(f, good) {
		wanted[p.At] = p
	}
	if len(wanted) < 10 {
		f.Fatalf("%d records", len(wanted))
	}
	head, err := parseHead(good[:HeadSize], "")
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, at uint32, change []byte) {
		b := bytes.Clone(good)
		at %= uint32(len(b))
		copy(b[at:], change)
		b = b[:len(b)-len(change)%64] // and cut
		_, _ = parseHead(b[:HeadSize], "")
		r, err := NewReader(bytes.NewReader(b), int64(len(b)), &head)
		if err != nil {
			t.Fatal(err)
		}
		end := int64(HeadSize)
		err = r.Scan(func(p *Record) error {
			if p.Row.Offset < end || p.At < p.Row.Offset || p.At+p.Bytes > int64(len(b)) {
				t.Fatalf("%+v overlaps or is beyond the end", p)
			}
			end = p.At + p.Bytes
			before, was := wanted[p.At]
			p.Mark, before.Mark = Mark{}, Mark{}
			if !was || fmt.Sprintf("%+v", *p) != fmt.Sprintf("%+v", before) {
				t.Fatalf("%+v was never written", p)
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
	})
}

// With right checksums a parser meets the values themselves.
func FuzzForgedRecord(f *testing.F) {
	good := filled(f, rand.New(rand.NewPCG(3, 4)))
	head, err := parseHead(good[:HeadSize], "")
	if err != nil {
		f.Fatal(err)
	}
	k, err := newKey(testID)
	if err != nil {
		f.Fatal(err)
	}
	f.Add(uint16(20), []byte{255, 255, 255, 255})
	f.Add(uint16(24), []byte{0, 0, 0, 0})
	f.Add(uint16(32), []byte{255, 255, 255, 255, 255, 255, 255, 127})
	f.Add(uint16(116), []byte{200, 200, 1, 64})
	f.Add(uint16(120), []byte{255, 255, 255, 255, 255, 255, 255, 255})
	f.Add(uint16(144), []byte{255, 255, 255, 255, 255, 255, 255, 255})
	f.Fuzz(func(t *testing.T, at uint16, change []byte) {
		b := bytes.Clone(good)
		copy(b[HeadSize+int(at)%400:], change)
		copy(b[HeadSize:], good[HeadSize:HeadSize+8])
		record := b[HeadSize:]
		if n := int(record[20]) | int(record[21])<<8 | int(record[22])<<16; n > 20 && n < len(record) {
			sum := k.sum(HeadSize, record[:n])
			for i := range 4 {
				record[16+i] = byte(sum >> (8 * i))
			}
		}
		r, err := NewReader(bytes.NewReader(b), int64(len(b)), &head)
		if err != nil {
			t.Fatal(err)
		}
		end := int64(HeadSize)
		if err := r.Scan(func(p *Record) error {
			if p.Row.Offset < end || p.At < p.Row.Offset || p.At+p.Bytes > int64(len(b)) || !p.fits() {
				t.Fatalf("%+v", p)
			}
			end = p.At + p.Bytes
			return nil
		}); err != nil {
			t.Fatal(err)
		}
	})
}
