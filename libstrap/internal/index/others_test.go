// Tests of files that stand where an index is to be written.

package index

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func TestAFileThatIsNoIndexStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "books.index")
	for _, content := range []string{"IxFI: vectors of somebody", "abc", "\xff\xff\xff\xff\x10\x00\x00\x00cut"} {
		check(t, os.WriteFile(path, []byte(content), 0o666))
		_, err := Prepare(path, captureID, false)
		if !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "overwrite") {
			t.Errorf("%q: %v", content, err)
		}
		if after, err := os.ReadFile(path); err != nil || string(after) != content {
			t.Errorf("%q became %q, %v", content, after, err)
		}
	}
	w, err := Prepare(path, captureID, true)
	check(t, err)
	check(t, w.Begin())
	check(t, w.Close())
	if f, err := Open(path); err != nil || f.Metadata().CaptureID != captureID {
		t.Errorf("overwritten it is none: %v", err)
	}
}

// Discard leaves no file if there was none, and leaves an empty file empty.
func TestAnIndexThatIsGivenUp(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream.index")
	for _, there := range []bool{false, true} {
		if there {
			check(t, os.WriteFile(path, nil, 0o600))
		}
		w, err := Prepare(path, captureID, false)
		check(t, err)
		check(t, w.Discard())
		if info, err := os.Stat(path); (err == nil) != there || there && info.Size() != 0 {
			t.Errorf("there before: %t, afterwards %v, %v", there, info, err)
		}
	}
}

func TestAnIndexTakesThePlaceOfTheOld(t *testing.T) {
	w := create(t)
	add(t, w, sample()...)
	check(t, w.Close())
	check(t, os.Chmod(w.path, 0o640))
	old, err := os.Open(w.path)
	check(t, err)
	defer old.Close()
	link := filepath.Join(t.TempDir(), "link.index")
	check(t, os.Symlink(w.path, link))

	next, err := Prepare(link, captureID, false)
	check(t, err)
	check(t, next.Begin())
	check(t, next.Close())
	if info, err := os.Stat(w.path); err != nil || info.Mode().Perm() != 0o640 {
		t.Errorf("mode %v, %v", info.Mode(), err)
	}
	if to, err := os.Readlink(link); err != nil || to != w.path {
		t.Errorf("the link leads to %q, %v", to, err)
	}
	if read, err := read(old, w.path, parse); err != nil || read.NumRows() != len(sample()) {
		t.Errorf("who has the old one open reads %v, %v", read, err)
	}
	if files, err := os.ReadDir(filepath.Dir(w.path)); err != nil || len(files) != 1 {
		t.Errorf("%v are left, %v", files, err)
	}
}
