// Package partial makes files that take the place of others once they are whole.
//
// A file is written as NAME.0123456789abcdef.partial beside the file NAME that it
// will be. Nobody can guess that name, and it is created exclusively: in a folder that
// others write to, no link that they made is followed. The Python package makes files in
// the same way (_files.py).
package partial

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	suffix   = ".partial"
	digits   = 16
	maxStem  = 200 // bytes, of the 255 that a name can have
	attempts = 100
)

// File is a file that does not have its name yet. It is locked as long as its process
// has it open, so that Create leaves it alone in other processes.
type File struct {
	*os.File
	path string // of the file whose place it takes
}

// Create makes a new, empty file for path, and removes what killed processes left of
// earlier ones. mode is as for os.OpenFile.
//
// Errors: NotFound, Permission, NoSpace, IO.
func Create(path string, mode os.FileMode) (*File, error) {
	removeLeftovers(path)
	for range attempts {
		f, err := os.OpenFile(name(path), os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW, mode)
		if err != nil {
			return nil, status.FromOS(err, "cannot create a file beside %q", path)
		}
		if lock(f) && stands(f) {
			return &File{File: f, path: path}, nil
		}
		// removeLeftovers of another process came before the lock.
		f.Close()
		os.Remove(f.Name())
	}
	return nil, status.New(status.IO, "cannot create a file beside %q: others remove or lock each of %d", path, attempts)
}

// name is a new name beside path.
func name(path string) string {
	var random [digits / 2]byte
	rand.Read(random[:]) // never fails, crypto/rand
	return filepath.Join(filepath.Dir(path), stem(path)+"."+hex.EncodeToString(random[:])+suffix)
}

func stem(path string) string {
	base := filepath.Base(path)
	return base[:min(len(base), maxStem)]
}

// Place waits until the file is durable, and gives it its name, which is durable then too.
// The file stays open. Where Place fails, the caller is to call Discard.
func (f *File) Place() error {
	if err := f.Sync(); err != nil {
		return status.FromOS(err, "cannot make %q durable", f.Name())
	}
	if err := f.Rename(); err != nil {
		return err
	}
	return SyncFolder(f.path)
}

// Rename gives the file its name. It is Place for a caller that sees to durability.
func (f *File) Rename() error {
	if err := os.Rename(f.Name(), f.path); err != nil {
		return status.FromOS(err, "cannot give %q its name %q", f.Name(), f.path)
	}
	return nil
}

// Discard closes the file and removes it, unless it has its name. It may be called
// after Place, and after Close.
func (f *File) Discard() {
	// Both fail only where nothing is left to give up.
	_ = f.Close()
	_ = os.Remove(f.Name())
}

// SyncFolder makes the names beside path durable. Some file systems refuse that; on
// those names need no sync, or cannot have one. Nor can a folder be synced that this process
// may not read: fsync wants it open for reading.
func SyncFolder(path string) error {
	folder, err := os.Open(filepath.Dir(path))
	if errors.Is(err, syscall.EACCES) {
		return nil
	}
	if err == nil {
		defer folder.Close()
		err = folder.Sync()
	}
	if err == nil || errors.Is(err, errors.ErrUnsupported) || errors.Is(err, syscall.EINVAL) {
		return nil
	}
	return status.FromOS(err, "cannot make the name %q durable", path)
}

// removeLeftovers removes the files for path that no process has locked.
func removeLeftovers(path string) {
	// A folder that cannot be read is reported when the file is created.
	entries, _ := os.ReadDir(filepath.Dir(path))
	for _, e := range entries {
		random, ok := strings.CutPrefix(e.Name(), stem(path)+".")
		random, partial := strings.CutSuffix(random, suffix)
		if ok && partial && len(random) == digits && strings.Trim(random, "0123456789abcdef") == "" {
			removeUnlocked(filepath.Join(filepath.Dir(path), e.Name()))
		}
	}
}

func removeUnlocked(path string) {
	// For writing, or NFS refuses the lock.
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	defer f.Close()
	if err := flock(f); err == nil {
		_ = os.Remove(path) // it stays where the folder is not ours to change
	}
}

func flock(f *os.File) error { return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) }

// lock reports whether no other process has locked the file. On a file system without
// locks it is true, and leftovers stay.
func lock(f *os.File) bool { return !errors.Is(flock(f), syscall.EWOULDBLOCK) }

// stands reports whether the file still has the name that it was created with.
func stands(f *os.File) bool {
	there, err := os.Lstat(f.Name())
	if err != nil {
		return false
	}
	own, err := f.Stat()
	return err == nil && os.SameFile(there, own)
}
