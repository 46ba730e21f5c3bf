package partial

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func names(t *testing.T, folder string) (found []string) {
	t.Helper()
	entries, err := os.ReadDir(folder)
	check(t, err)
	for _, e := range entries {
		found = append(found, e.Name())
	}
	return found
}

func TestAFileTakesThePlaceOfAnotherWhole(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.txt")
	check(t, os.WriteFile(path, []byte("old"), 0o600))
	f, err := Create(path, 0o640)
	check(t, err)
	if !regexp.MustCompile(`^a\.txt\.[0-9a-f]{16}\.partial$`).MatchString(filepath.Base(f.Name())) {
		t.Errorf("it is written as %q", f.Name())
	}
	_, err = f.WriteString("new")
	check(t, err)
	if b, _ := os.ReadFile(path); string(b) != "old" {
		t.Errorf("%q before Place", b)
	}
	check(t, f.Place())
	f.Discard() // must not remove the file, which has its final name
	if b, _ := os.ReadFile(path); string(b) != "new" {
		t.Errorf("%q after Place", b)
	}
	if found := names(t, filepath.Dir(path)); len(found) != 1 {
		t.Errorf("the folder has %q", found)
	}
}

func TestADiscardedFileIsGone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.txt")
	f, err := Create(path, 0o600)
	check(t, err)
	f.Discard()
	if found := names(t, filepath.Dir(path)); len(found) != 0 {
		t.Errorf("the folder has %q", found)
	}
	if err := f.Place(); err == nil {
		t.Error("a discarded file was placed")
	}
}

func TestNamesDiffer(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.txt")
	seen := map[string]bool{}
	for range 50 {
		seen[name(path)] = true
	}
	if len(seen) != 50 {
		t.Errorf("%d names of 50", len(seen))
	}
}

func TestLongNamesAreCut(t *testing.T) {
	path := filepath.Join(t.TempDir(), strings.Repeat("n", 255))
	f, err := Create(path, 0o600)
	check(t, err)
	check(t, f.Place())
	if found := names(t, filepath.Dir(path)); len(found) != 1 || found[0] != filepath.Base(path) {
		t.Errorf("the folder has %q", found)
	}
}

// A file that a killed process left is not locked. A file that a process still writes is.
func TestLeftoversAreRemoved(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "a.txt")
	killed, err := Create(path, 0o600)
	check(t, err)
	check(t, killed.Close())
	writing, err := os.Create(filepath.Join(folder, "a.txt.00112233aabbccdd.partial"))
	check(t, err)
	defer writing.Close()
	check(t, syscall.Flock(int(writing.Fd()), syscall.LOCK_EX))
	for _, other := range []string{"b.txt.00112233aabbccdd.partial", "a.txt.00112233AABBCCDD.partial", "a.txt.partial"} {
		check(t, os.WriteFile(filepath.Join(folder, other), nil, 0o600))
	}
	check(t, os.WriteFile(filepath.Join(folder, "target"), nil, 0o600))
	check(t, os.Symlink("target", filepath.Join(folder, "a.txt.ffffffffffffffff.partial")))

	f, err := Create(path, 0o600)
	check(t, err)
	defer f.Discard()
	if _, err := os.Lstat(killed.Name()); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what the killed process left is there: %v", err)
	}
	if found := names(t, folder); len(found) != 7 {
		t.Errorf("the folder has %q", found)
	}
}

func TestAFolderThatIsNotThere(t *testing.T) {
	if _, err := Create(filepath.Join(t.TempDir(), "none", "a.txt"), 0o600); !errors.Is(err, status.NotFound) {
		t.Errorf("error %v", err)
	}
}
