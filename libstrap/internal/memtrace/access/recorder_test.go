package access

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func TestRecorder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.access")
	r, err := Create(path)
	if err != nil {
		t.Fatal(err)
	}
	write := func(want error, fill func(*fileWriter)) {
		t.Helper()
		w := &fileWriter{}
		fill(w)
		if err := r.Write(w.Bytes()); !errors.Is(err, want) {
			t.Errorf("error %v, want %v", err, want)
		}
	}
	one := record{0x1000, 1, opLoad, 0, 4}
	write(status.InvalidArgument, func(w *fileWriter) { w.accesses(1, 0, 1, one) }) // no start yet
	write(nil, (*fileWriter).start)
	write(nil, func(w *fileWriter) { w.accesses(1, 0, 1, one); w.accesses(2, 0, 1, one) })
	write(nil, func(*fileWriter) {})
	write(status.InvalidArgument, func(w *fileWriter) { w.accesses(1, 0, 1, one); w.Truncate(w.Len() - 1) })
	write(status.InvalidArgument, func(w *fileWriter) { w.WriteString("no block") })
	write(nil, (*fileWriter).end)
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
	write(status.InvalidState, (*fileWriter).end)
	if err := r.Close(); !errors.Is(err, status.InvalidState) {
		t.Errorf("a second Close: %v", err)
	}
	in, err := Open(path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer in.Release()
	if rows := drain(t, in); len(rows) != 2 || len(in.Problems()) != 0 {
		t.Errorf("%d rows, problems %q", len(rows), in.Problems())
	}
}

func TestRecorderErrors(t *testing.T) {
	if _, err := Create(filepath.Join(t.TempDir(), "none", "a")); !errors.Is(err, status.NotFound) {
		t.Error(err)
	}
	if _, err := os.Stat("/dev/full"); err != nil {
		t.Skip("no /dev/full")
	}
	r, err := Create("/dev/full")
	if err != nil {
		t.Fatal(err)
	}
	w := &fileWriter{}
	w.start()
	for range 2 {
		// /dev/full is a device: it cannot be cut back to its last whole block.
		if err := r.Write(w.Bytes()); err == nil || !strings.Contains(err.Error(), "torn") {
			t.Errorf("error %v", err)
		}
	}
	if r.Close() == nil {
		t.Error("a failure is not reported at the end")
	}
}
