// Tests of the id of a capture in its index.

package index

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// A capture that is killed before its first row has its id in the index already.
func TestAnIndexHasAnIDFromItsBeginningOn(t *testing.T) {
	w := create(t)
	check(t, w.f.Close())
	f, err := Open(w.path)
	check(t, err)
	if !f.Begun() || f.NumRows() != 0 || f.Metadata().CaptureID != captureID {
		t.Errorf("%d rows of %+v", f.NumRows(), f.Metadata())
	}
}

func TestAnIndexStaysUntilTheNextOneBegins(t *testing.T) {
	w := create(t)
	add(t, w, sample()...)
	check(t, w.Close())
	before, err := os.ReadFile(w.path)
	check(t, err)
	same := func(what string) {
		t.Helper()
		if after, err := os.ReadFile(w.path); err != nil || !bytes.Equal(after, before) {
			t.Errorf("%s left %d bytes of %d, %v", what, len(after), len(before), err)
		}
	}
	next, err := Prepare(w.path, captureID, false)
	check(t, err)
	if _, err := os.Stat(w.path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the old index stands beside what may be another stream: %v", err)
	}
	check(t, next.Discard())
	same("Discard")
	found, err := Find(w.path, streamOf(sample()...), 180)
	check(t, err)
	if found.Lost != nil || found.Rows == 0 || found.Rows == uint64(len(sample())) {
		t.Errorf("%d rows are kept, %v", found.Rows, found.Lost)
	}
	same("Find")
	check(t, found.Close())
	same("Close")
}

// A lost index, and an index without an id, get the id that is given.
func TestALostIDIsGivenAnew(t *testing.T) {
	const other = "00112233445566778899aabbccddeeff"
	for name, c := range map[string]struct {
		content []byte
		lost    error
	}{
		"nothing":       {nil, status.NotFound},
		"no index":      {[]byte("no index"), status.Corrupt},
		"without an id": {encoded(t, Schema(Metadata{})), nil},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "a.stream.index")
			check(t, os.WriteFile(path, c.content, 0o666))
			found, err := Find(path, streamOf(), 0)
			check(t, err)
			if !errors.Is(found.Lost, c.lost) || found.CaptureID != "" {
				t.Errorf("lost %v, id %q", found.Lost, found.CaptureID)
			}
			w, err := found.Resume(other)
			check(t, err)
			check(t, w.f.Close())
			f, err := Open(path)
			check(t, err)
			if f.Metadata().CaptureID != other {
				t.Errorf("%+v", f.Metadata())
			}
			_, err = os.Stat(path + ".bad-1")
			if aside := err == nil; aside != (c.lost == status.Corrupt) {
				t.Errorf("set aside: %v", aside)
			}
		})
	}
}
