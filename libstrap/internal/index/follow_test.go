package index

import (
	"errors"
	"math/rand/v2"
	"os"
	"slices"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// Continue reads the same rows as Open, from any row on: from short and from compressed batches,
// and with some, all or no nulls in a column.
func TestContinueHasTheRowsOfOpen(t *testing.T) {
	random := rand.New(rand.NewPCG(5, 6))
	w := create(t)
	f, err := Open(w.path)
	check(t, err)
	var rows []wire.Row
	sizes := []int{3, 1, 2000, 0, 5, 900}
	if testing.Short() {
		sizes = []int{3, 1, 200, 0, 5, 90}
	}
	for _, n := range sizes {
		for range n {
			if random.IntN(3) == 0 {
				rows = append(rows, sample()[random.IntN(5)])
			} else {
				rows = append(rows, decoded(random, len(rows)))
			}
		}
		had := f.NumRows()
		for i := had; i < len(rows); i++ {
			check(t, w.Append(&rows[i]))
		}
		check(t, w.Flush())
		for _, first := range []int{0, had, random.IntN(had + 1), random.IntN(had + 1), max(0, had-1)} {
			more, err := f.Continue(w.path, first)
			check(t, err)
			sameRows(t, rowsOf(more), rows[first:])
			for from := 0; from < more.NumRows(); from += 1 + more.NumRows()/7 {
				whole, err := Open(w.path)
				check(t, err)
				want := NewRecorder(whole.Schema())
				got := NewRecorder(more.Schema())
				a := want.Record(whole.Slice(first+from, first+from+1)[0])
				b := got.Record(more.Slice(from, from+1)[0])
				if !slices.Equal(json(t, a), json(t, b)) {
					t.Fatalf("row %d from %d on: %s, want %s", from, first, json(t, b), json(t, a))
				}
			}
		}
		if f, err = f.Continue(w.path, 0); err != nil {
			t.Fatal(err)
		}
	}
	check(t, w.Close())
	last, err := f.Continue(w.path, f.NumRows())
	check(t, err)
	if last.Torn || last.NumRows() != 0 {
		t.Errorf("%d rows behind all, torn: %v", last.NumRows(), last.Torn)
	}
}

func json(t *testing.T, record interface{ MarshalJSON() ([]byte, error) }) []byte {
	t.Helper()
	b, err := record.MarshalJSON()
	check(t, err)
	return b
}

func TestAnIndexThatWasWrittenAnewIsNotContinued(t *testing.T) {
	w, rows := create(t), slices.Repeat(sample(), 60)
	add(t, w, rows...)
	f, err := Open(w.path)
	check(t, err)
	at := f.messages[len(f.messages)-1]
	whole, err := os.ReadFile(w.path)
	check(t, err)
	for name, b := range map[string][]byte{
		"cut":   whole[:at.end-1],
		"empty": nil,
		"other": append(slices.Clone(whole[:at.end-9]), slices.Repeat([]byte{1}, 9)...),
	} {
		check(t, os.WriteFile(w.path, b, 0o600))
		if _, err := f.Continue(w.path, 0); !errors.Is(err, status.NotFound) {
			t.Errorf("%s: %v", name, err)
		}
	}
	check(t, os.Remove(w.path))
	if _, err := f.Continue(w.path, 0); !errors.Is(err, status.NotFound) {
		t.Errorf("removed: %v", err)
	}
}
