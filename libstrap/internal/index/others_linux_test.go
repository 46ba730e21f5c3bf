// A test of an index in a folder that cannot be written to.

package index

import (
	"bytes"
	"os"
	"path/filepath"
	"runtime"
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
