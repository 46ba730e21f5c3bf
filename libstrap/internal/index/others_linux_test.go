// Tests of an index in a folder that takes no file beside it.

package index

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
)

func TestAnIndexInAReadOnlyFolderIsEmptied(t *testing.T) {
	if os.Geteuid() == 0 { // no folder refuses root: this thread becomes another user, and ends with the test
		runtime.LockOSThread()
		check(t, syscall.Setfsuid(65534))
	}
	folder, err := os.MkdirTemp("/tmp", "index")
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(folder)) })
	path := filepath.Join(folder, "a.stream.index")
	w, err := Create(path, captureID)
	check(t, err)
	add(t, w, sample()...)
	check(t, w.Close())
	before, err := os.ReadFile(path)
	check(t, err)
	check(t, os.Chmod(folder, 0o500))
	t.Cleanup(func() { check(t, os.Chmod(folder, 0o700)) })

	w, err = Prepare(path, captureID, false)
	check(t, err)
	if there, err := os.ReadFile(path); err != nil || !bytes.Equal(there, before) {
		t.Errorf("%d bytes of %d are there, %v", len(there), len(before), err)
	}
	check(t, w.Begin())
	check(t, w.Close())
	if f, err := Open(path); err != nil || f.NumRows() != 0 || f.Torn {
		t.Errorf("%+v, %v", f, err)
	}
}

// An index stays if the system makes no file beside it, which is to replace it.
func TestAnIndexThatCannotBeReplacedStays(t *testing.T) {
	const length = 4085 // a path may have 4,095 bytes, and the name of the new file has 25 more
	folder := t.TempDir()
	for len(folder) < length-260 {
		folder = filepath.Join(folder, strings.Repeat("d", min(200, length-60-len(folder))))
	}
	check(t, os.MkdirAll(folder, 0o777))
	path := filepath.Join(folder, strings.Repeat("n", length-len(folder)-1))
	w, err := Create(path, captureID)
	check(t, err)
	add(t, w, sample()...)
	check(t, w.Close())
	before, err := os.ReadFile(path)
	check(t, err)
	if _, err := Prepare(path, captureID, true); !errors.Is(err, syscall.ENAMETOOLONG) {
		t.Errorf("a new index: %v", err)
	}
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
		t.Errorf("%d bytes became %d, %v", len(before), len(after), err)
	}
}
