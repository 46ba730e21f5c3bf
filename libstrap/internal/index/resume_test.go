package index

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/filelimit"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// No row that Resume keeps is lost by a kill after Resume or by a full disk during it, even if the
// cut is in the middle of a batch.
func TestResumeLosesNoRows(t *testing.T) {
	if !filelimit.Alone(t) {
		return
	}
	rows := sample()
	begin := func() string {
		w := create(t)
		add(t, w, rows[:3]...)
		add(t, w, rows[3:]...)
		check(t, w.Close())
		return w.path
	}
	path := begin()
	check(t, os.Chmod(path, 0o640))
	w, kept, err := Resume(path, streamOf(rows...), 180)
	check(t, err)
	defer w.f.Close()
	f, err := Open(path)
	check(t, err)
	sameRows(t, rowsOf(f), rows[:4])
	if info, _ := os.Stat(path); info.Mode().Perm() != 0o640 || kept.Rows != 4 {
		t.Errorf("mode %v, kept %+v", info.Mode(), kept)
	}

	path = begin()
	before, err := os.ReadFile(path)
	check(t, err)
	lift := filelimit.Set(t, uint64(len(before))-1000)
	_, _, err = Resume(path, streamOf(rows...), 180)
	lift()
	if status.Errno(err) != int32(syscall.EFBIG) {
		t.Errorf("error %v, want the system's", err)
	}
	if after, _ := os.ReadFile(path); !bytes.Equal(before, after) {
		t.Error("the index changed")
	}
	if left, _ := os.ReadDir(filepath.Dir(path)); len(left) != 1 {
		t.Errorf("the folder has %v", left)
	}
}

// The index may be a link to a disk with more room. Resume keeps the link.
func TestResumeKeepsALink(t *testing.T) {
	rows := sample()
	w := create(t)
	add(t, w, rows...)
	check(t, w.Close())
	link := filepath.Join(t.TempDir(), "a.stream.index")
	check(t, os.Symlink(w.path, link))
	resumed, _, err := Resume(link, streamOf(rows...), 180)
	check(t, err)
	check(t, resumed.Close())
	if to, err := os.Readlink(link); to != w.path {
		t.Errorf("%q, %v", to, err)
	}
	f, err := Open(w.path)
	check(t, err)
	sameRows(t, rowsOf(f), rows[:4])
}

// Rows that are cut must stay cut after a power failure, because other packets will take the places
// of theirs. A resume that cuts no row does not wait for the disk.
func TestACutOfRowsIsDurable(t *testing.T) {
	rows := sample()
	synced := 0
	syncFile = func(f *os.File) error { synced++; return f.Sync() }
	defer func() { syncFile = (*os.File).Sync }()
	for _, c := range []struct{ cut, want int }{{280, 0}, {130, 1}, {0, 1}} {
		w := create(t)
		add(t, w, rows[:3]...)
		add(t, w, rows[3:]...)
		check(t, w.Close())
		synced = 0
		resumed, _, err := Resume(w.path, streamOf(rows...), int64(c.cut))
		check(t, err)
		check(t, resumed.f.Close())
		if synced != c.want {
			t.Errorf("cut to %d bytes: %d waits for the disk, want %d", c.cut, synced, c.want)
		}
	}
}

// With an index that was copied from another stream, the place of each packet would be lost.
func TestAnIndexOfAnotherStreamIsRefused(t *testing.T) {
	rows := sample()
	other := func(change func([]wire.Row)) []wire.Row {
		rows := sample()
		change(rows)
		return rows
	}
	longer := sample()[0]
	longer.Length += 5
	for name, c := range map[string]struct {
		stream []wire.Row
		says   string
	}{
		"its own":       {rows, ""},
		"another first": {other(func(r []wire.Row) { r[0].Layer, r[0].Path = "embe", "" }), "its first packet has checksum"},
		"another name":  {other(func(r []wire.Row) { r[3].Layer = "out" }), `row 3 has the packet "mlp" at byte 130, the stream "out"`},
		"other sizes": {other(func(r []wire.Row) { r[1].Length++; r[3].Length-- }),
			"row 1 has a packet of 30 bytes at byte 100, the stream one of 31"},
		"other places": {other(func(r []wire.Row) { r[1].Length = 20; r[3].Length += 10 }), "row 1 has a packet of 30 bytes"},
		"fewer packets": {other(func(r []wire.Row) { r[4].Length += 20 })[:5],
			"row 4 has a packet of 80 bytes at byte 180, the stream one of 100"},
	} {
		t.Run(name, func(t *testing.T) {
			w := create(t)
			add(t, w, rows...)
			check(t, w.Close())
			before, err := os.ReadFile(w.path)
			check(t, err)
			stream := streamOf(c.stream...)
			resumed, _, err := Resume(w.path, stream, stream.Size())
			if c.says == "" {
				check(t, err)
				check(t, resumed.Close())
				return
			}
			if !errors.Is(err, status.Corrupt) || !strings.Contains(err.Error(), "index of another stream: "+c.says) {
				t.Errorf("error %v, want it to say %q", err, c.says)
			}
			if after, _ := os.ReadFile(w.path); !bytes.Equal(before, after) {
				t.Error("the refused index changed")
			}
		})
	}
}

// Packets without a row may stand between packets with one: a capture whose index was lost lists
// only what it found again. A row that claims more than the stream has is not kept.
func TestUnlistedPacketsMayStandBetween(t *testing.T) {
	rows := sample()
	w := create(t)
	add(t, w, rows[0], rows[3], rows[4])
	check(t, w.Close())
	resumed, kept, err := Resume(w.path, streamOf(rows...), 280)
	check(t, err)
	check(t, resumed.Close())
	if kept.Rows != 3 || kept.End != 260 {
		t.Errorf("kept %+v", kept)
	}
}

func BenchmarkResume(b *testing.B) {
	rows := make([]wire.Row, 200_000)
	at := int64(0)
	for i := range rows {
		rows[i] = sample()[0]
		rows[i].Sequence, rows[i].Offset = uint64(i), at
		at += int64(rows[i].Length)
	}
	stream := streamOf(rows...)
	w := create(b)
	add(b, w, rows...)
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		w, kept, err := Resume(w.path, stream, at)
		if err != nil || kept.Rows != uint64(len(rows)) {
			b.Fatal(kept, err)
		}
		w.f.Close()
	}
}
