package reader_test

import (
	"errors"
	"os"
	"reflect"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// growing is a capture under way. Its stream is locked and complete; its index still grows.
type growing struct {
	*capture
	path   string
	lock   *os.File
	index  *index.Writer
	listed int
}

func grow(t *testing.T, c *capture) *growing {
	t.Helper()
	g := &growing{capture: c, path: saveStream(t, c.stream)}
	var err error
	g.lock, err = os.Open(g.path)
	check(t, err)
	check(t, syscall.Flock(int(g.lock.Fd()), syscall.LOCK_EX))
	g.index, err = index.Create(index.PathOf(g.path), captureID)
	check(t, err)
	return g
}

// list appends the next n rows to the index.
func (g *growing) list(t *testing.T, n int) {
	t.Helper()
	for i := range n {
		check(t, g.index.Append(&g.rows[g.listed+i]))
	}
	check(t, g.index.Flush())
	g.listed += n
}

func (g *growing) end(t *testing.T) {
	t.Helper()
	g.list(t, len(g.rows)-g.listed)
	check(t, errors.Join(g.index.Close(), g.lock.Close()))
}

func follow(t *testing.T, r *reader.Reader, first int) *reader.Reader {
	t.Helper()
	next, err := r.Follow(first)
	check(t, err)
	if next != nil {
		t.Cleanup(func() { _ = next.Close() })
	}
	return next
}

func rowsOf(t *testing.T, r *reader.Reader) []wire.Row {
	t.Helper()
	var rows []wire.Row
	for i := range r.NumRows() {
		row, err := r.Row(i)
		check(t, err)
		rows = append(rows, row)
	}
	return rows
}

// sameRows compares the fields that identify a row. Whole rows do not compare, because NaN differs
// from itself.
func sameRows(t *testing.T, got, want []wire.Row) {
	t.Helper()
	keys := func(rows []wire.Row) (keys [][3]any) {
		for _, r := range rows {
			keys = append(keys, [3]any{r.Sequence, r.Offset, r.Layer})
		}
		return keys
	}
	if !reflect.DeepEqual(keys(got), keys(want)) {
		t.Errorf("rows %v, want %v", keys(got), keys(want))
	}
}

// A reader that follows gets each row, however the index grows and however many rows it reads
// again.
func TestFollowersGetTheRowsThatAReaderGets(t *testing.T) {
	for batch := 1; batch < 4; batch++ {
		for again := range 3 {
			c := sample(t)
			g := grow(t, c)
			r := open(t, g.path, reader.Options{})
			if r = follow(t, r, 0); r.NumRows() != 0 || !r.Info().Live { // leaves out packets that are not listed yet
				t.Fatalf("%d rows before the index has any: %+v", r.NumRows(), r.Info())
			}
			var got []wire.Row
			for g.listed < len(c.rows) {
				g.list(t, min(batch, len(c.rows)-g.listed))
				first := max(0, r.NumRows()-again)
				got = got[:len(got)-(r.NumRows()-first)]
				r = follow(t, r, first)
				got = append(got, rowsOf(t, r)...)
				sameRows(t, got, c.rows[:g.listed])
				if same := follow(t, r, 0); same != nil {
					t.Error("nothing changed, and there is another reader")
				}
			}
			g.end(t)
			r = follow(t, r, 0)
			if info := r.Info(); info.Live || info.Problem != "" || info.ValidBytes != int64(len(c.stream)) {
				t.Errorf("at the end: %+v", info)
			}
			want := open(t, g.path, reader.Options{})
			sameRows(t, rowsOf(t, want), c.rows)
			for i := range r.NumRows() {
				n, err := r.DecodedLen(i)
				if status.CodeOf(err) == status.NotFound {
					continue // a note
				}
				check(t, err)
				b := make([]byte, n)
				check(t, r.ReadInto(i, b))
			}
		}
	}
}

func TestFollowingByScanningGivesEachPacketOnce(t *testing.T) {
	c := sample(t)
	g := grow(t, c)
	check(t, os.Truncate(g.path, c.rows[3].Offset+3)) // cut in the middle of a packet
	r := open(t, g.path, reader.Options{IgnoreIndex: true})
	got := rowsOf(t, r)
	f, err := os.OpenFile(g.path, os.O_WRONLY, 0)
	check(t, err)
	_, err = f.WriteAt(c.stream, 0)
	check(t, errors.Join(err, f.Close()))
	r = follow(t, r, r.NumRows())
	got = append(got, rowsOf(t, r)...)
	want := rowsOf(t, open(t, g.path, reader.Options{IgnoreIndex: true}))
	if len(got) != len(want) {
		t.Fatalf("%d packets, want %d", len(got), len(want))
	}
	for i := range want {
		if got[i].Offset != want[i].Offset || got[i].Layer != want[i].Layer {
			t.Errorf("packet %d is %+v, want %+v", i, got[i], want[i])
		}
	}
}

func TestReadersThatShareAStreamAreClosedOneByOne(t *testing.T) {
	c := sample(t)
	g := grow(t, c)
	g.list(t, 1)
	first, err := reader.Open(g.path, reader.Options{})
	check(t, err)
	second, err := first.Follow(0)
	check(t, err)
	check(t, first.Close())
	b := make([]byte, len(c.values[0]))
	check(t, second.ReadInto(0, b))
	check(t, second.Close())
	if err := second.ReadInto(0, b); status.CodeOf(err) != status.InvalidState {
		t.Errorf("a closed stream answers %v", err)
	}
}

// A capture that has written nothing yet is followed until it has an index, which is not there at
// first, then empty.
func TestACaptureThatHasWrittenNothingIsFollowed(t *testing.T) {
	path := saveStream(t, nil)
	lock, err := os.Open(path)
	check(t, err)
	defer lock.Close()
	check(t, syscall.Flock(int(lock.Fd()), syscall.LOCK_EX))
	r := open(t, path, reader.Options{})
	if next := follow(t, r, 0); next != nil {
		t.Errorf("without an index: %+v", next.Info())
	}
	check(t, os.WriteFile(index.PathOf(path), nil, 0o666))
	if next := follow(t, r, 0); next != nil {
		t.Errorf("with an empty index: %+v", next.Info())
	}
	w, err := index.Create(index.PathOf(path), captureID)
	check(t, err)
	check(t, w.Close())
	if next := follow(t, r, 0); next == nil || !next.Info().Indexed {
		t.Errorf("with an index: %+v", next)
	}
}

func TestFollowTellsWhatIsNoLongerThere(t *testing.T) {
	follows := func(change func(g *growing)) error {
		g := grow(t, sample(t))
		g.list(t, 2)
		r := follow(t, open(t, g.path, reader.Options{}), 0)
		change(g)
		_, err := r.Follow(r.NumRows())
		return err
	}
	for what, change := range map[string]func(g *growing){
		"removed":       func(g *growing) { check(t, os.Remove(g.path)) },
		"replaced":      func(g *growing) { check(t, os.Rename(saveStream(t, g.stream), g.path)) },
		"cut":           func(g *growing) { check(t, errors.Join(os.Truncate(g.path, 5), g.lock.Close())) },
		"index cut":     func(g *growing) { check(t, os.Truncate(index.PathOf(g.path), 800)) },
		"other index":   func(g *growing) { check(t, os.WriteFile(index.PathOf(g.path), make([]byte, 1<<16), 0o666)) },
		"without index": func(g *growing) { check(t, os.Remove(index.PathOf(g.path))) },
	} {
		if err := follows(change); status.CodeOf(err) != status.NotFound {
			t.Errorf("%s: %v", what, err)
		}
	}
	g := grow(t, sample(t))
	g.list(t, 2)
	if _, err := open(t, g.path, reader.Options{}).Follow(3); status.CodeOf(err) != status.InvalidArgument {
		t.Errorf("behind the rows that the index lists: %v", err)
	}
}
