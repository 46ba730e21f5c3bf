package access

import (
	"bytes"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memtrace/label"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// FuzzAccessFile checks that any bytes are either refused, or give a valid trace: rows in order, not
// more than the bytes can hold, and ranges that label.New accepts.
func FuzzAccessFile(f *testing.F) {
	w := &fileWriter{}
	w.start()
	w.text(kindMaps, 1, "1000-2000 r-xp 00000000 08:01 0 [vdso]\n")
	w.rangeEvent(3, 1, 0x1000, 0x100, 1, 1, "w")
	w.accesses(1, 5, 10, record{0x1000, 0x1801, opLoad, 0, 4}, record{0x1004, 0x1802, opBoth, 4, 4})
	w.accesses(2, 4, 12, record{0x2000, 0x1803, opStore, 1, 32})
	w.rangeEvent(9, 1, 0x1000, 0x100, 1, 0, "")
	w.accesses(1, 10, 20, record{0x1000, 0x1801, opLoad, 9, 4})
	w.end()
	f.Add(w.Bytes(), uint8(3))
	f.Add(w.Bytes()[:w.Len()-70], uint8(1))
	f.Add(w.Bytes()[:w.Len()/2], uint8(0))
	f.Fuzz(func(t *testing.T, data []byte, batch uint8) {
		in, err := newTrace(bytes.NewReader(data), int64(len(data)), Options{
			BatchRows: int(batch), Phases: []Phase{{"a", 3, 9}},
		})
		if err != nil {
			if code := status.CodeOf(err); code != status.Corrupt && code != status.Unsupported {
				t.Fatalf("code %v of %v", code, err)
			}
			return
		}
		defer in.Release()
		rows := drain(t, in)
		if limit := 2 * len(data) / recordBytes; len(rows) > limit {
			t.Fatalf("%d rows from %d bytes", len(rows), len(data))
		}
		c := in.Counts()
		if !c.Done || c.Rows != int64(len(rows)) || c.Invalid > c.Records {
			t.Fatalf("counts %+v for %d rows", c, len(rows))
		}
		if _, err := label.New(label.Options{Ranges: in.Ranges()}); err != nil {
			t.Fatal(err)
		}
	})
}
