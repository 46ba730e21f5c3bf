// Tests of the memory and time that a hostile index may take.

package index

import (
	"bytes"
	"encoding/binary"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// allocated returns how many bytes f allocates on the heap.
func allocated(f func()) int64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	f()
	runtime.ReadMemStats(&after)
	return int64(after.TotalAlloc - before.TotalAlloc)
}

// A file of holes can have any length without taking space on the disk.
func TestAnIndexOfHolesIsRefused(t *testing.T) {
	w := create(t)
	add(t, w, sample()...)
	check(t, w.Close())
	for _, size := range []int64{64 << 20, 1 << 40} {
		check(t, os.Truncate(w.path, size))
		for name, open := range map[string]func(string) (*File, error){"Open": Open, "Recover": Recover} {
			used := allocated(func() {
				if _, err := open(w.path); !errors.Is(err, status.Corrupt) || !strings.Contains(err.Error(), "the rest are holes") {
					t.Errorf("%s of %d bytes: %v", name, size, err)
				}
			})
			if used > 1<<20 {
				t.Errorf("%s of %d bytes allocates %d", name, size, used)
			}
		}
	}
}

// A backup may leave out pages of zeros.
func TestAFewHolesAreRead(t *testing.T) {
	w, row := create(t), sample()[0]
	row.Sequence, row.Rank, row.Token = 0, 0, 0
	for range 2 {
		for range 10_000 {
			check(t, w.Append(&row))
		}
		check(t, w.Flush())
	}
	check(t, w.Close())
	b, err := os.ReadFile(w.path)
	check(t, err)
	copied := filepath.Join(t.TempDir(), "copy.index")
	f, err := os.Create(copied)
	check(t, err)
	for at := 0; at < len(b); at += 4096 {
		if page := b[at:min(at+4096, len(b))]; !isZero(page) {
			_, err := f.WriteAt(page, int64(at))
			check(t, err)
		}
	}
	check(t, f.Close())
	if n := writtenOf(t, copied); n > int64(len(b))*9/10 {
		t.Skipf("this file system keeps %d bytes of %d", n, len(b))
	}
	idx, err := Open(copied)
	check(t, err)
	if idx.Torn || idx.NumRows() != 20_000 {
		t.Errorf("%d rows, %s", idx.NumRows(), idx.Problem)
	}
}

func writtenOf(t *testing.T, path string) int64 {
	f, err := os.Open(path)
	check(t, err)
	defer f.Close()
	info, err := f.Stat()
	check(t, err)
	return written(f, info.Size(), info.Size())
}

// sharedText returns a schema of 1,024 columns and 64 keys whose names are all the same n bytes.
func sharedText(n int) []byte {
	b := make([]byte, 512)
	u16 := func(at int, values ...uint16) {
		for i, v := range values {
			binary.LittleEndian.PutUint16(b[at+2*i:], v)
		}
	}
	u32 := func(at, v int) { binary.LittleEndian.PutUint32(b[at:], uint32(v)) }
	const fields, fieldCount, keyCount = 512, 1 << 10, 64
	keys := fields + 4 + 4*fieldCount
	field := (keys + 4 + 4*keyCount + 7) &^ 7
	key := field + 8
	text := key + 16
	b = append(b, make([]byte, text-len(b))...)
	u32(0, 32)
	u16(8, 4+2*4, 20, 4, 6, 8, 12) // the message: version, kind, header, body
	u32(32, 32-8)
	u16(36, metadataV5)
	b[38] = schemaType
	u32(40, 80-40)
	u16(60, 4+2*3, 12, 0, 4, 8) // the schema: fields, metadata
	u32(80, 80-60)
	u32(84, fields-84)
	u32(88, keys-88)
	u16(100, 4+2, 8, 4) // a field: its name
	u32(field, field-100)
	u32(field+4, text-field-4)
	u16(140, 4+2*2, 12, 4, 8) // a key and its value
	u32(key, key-140)
	u32(key+4, text-key-4)
	u32(key+8, text-key-8)
	u32(fields, fieldCount)
	for i := range fieldCount {
		u32(fields+4+4*i, field-(fields+4+4*i))
	}
	u32(keys, keyCount)
	for i := range keyCount {
		u32(keys+4+4*i, key-(keys+4+4*i))
	}
	b = binary.LittleEndian.AppendUint32(b, uint32(n))
	b = append(b, bytes.Repeat([]byte("A"), n)...)
	b = append(b, make([]byte, -len(b)&7)...)
	head := binary.LittleEndian.AppendUint32([]byte{0xff, 0xff, 0xff, 0xff}, uint32(len(b)))
	return append(head, b...)
}

func TestTextThatManyNamesShareIsHeldOnce(t *testing.T) {
	b := sharedText(8 << 20)
	used := allocated(func() {
		_, bad := parse(held(b), &memory.Budget{})
		if bad == nil || !bad.foreign || !strings.Contains(bad.reason, `its format is ""`) {
			t.Errorf("%v", bad)
		}
	})
	if used > 1<<20 {
		t.Errorf("%d bytes allocated for %d", used, len(b))
	}
}

// Each batch costs memory for objects besides its bytes. The memory that is left bounds both.
func TestManySmallBatchesAreCounted(t *testing.T) {
	const batches = 300
	w, row := create(t), sample()[0]
	for range batches {
		add(t, w, row)
	}
	check(t, w.Close())
	b, err := os.ReadFile(w.path)
	check(t, err)
	f, err := Open(w.path)
	check(t, err)
	needed := batches * (batchBytes + f.batches[0].size())
	used := allocated(func() {
		f, bad := parse(held(b), memory.Limit(needed))
		if bad != nil || f.NumRows() != batches {
			t.Errorf("%v", bad)
		}
	})
	if used > needed {
		t.Errorf("%d batches take %d bytes, more than %d", batches, used, needed)
	}
	for name, by := range map[string]func(source, *memory.Budget) (*File, *fault){"parse": parse, "parseAll": parseAll} {
		_, bad := by(held(b), memory.Limit(needed-batchBytes))
		if bad == nil || !errors.Is(bad.system, status.NoMemory) {
			t.Errorf("%s with memory for one batch less: %v", name, bad)
		}
	}
}

// A file with many beginnings of batches. Each claims that the rest of the file is its body.
func TestRecoverTriesOnlySoMuch(t *testing.T) {
	w := create(t)
	add(t, w, sample()...)
	begin, err := os.ReadFile(w.path)
	check(t, err)
	schema, bad := next(held(begin), 0)
	if bad != nil {
		t.Fatal(bad)
	}
	batch := bytes.Clone(begin[schema.end:])
	m, bad := next(held(batch), 0)
	if bad != nil {
		t.Fatal(bad)
	}
	head := batch[:m.end-int64(len(m.body))]
	bodyAt := bytes.Index(head, binary.LittleEndian.AppendUint64(nil, uint64(len(m.body))))
	const beginnings = 2000
	b := bytes.Clone(begin[:schema.end])
	for i := range beginnings {
		one := bytes.Clone(head)
		binary.LittleEndian.PutUint64(one[bodyAt:], uint64((beginnings-1-i)*len(head)))
		b = append(b, one...)
	}
	f, bad := parseAll(held(b), &memory.Budget{})
	if bad != nil || !strings.Contains(f.Problem, "was not looked for rows any more") {
		t.Errorf("%v, %+v", bad, f)
	}
}
