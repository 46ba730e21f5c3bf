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
	files Files
	path  string // of the file whose place it takes
}

// Files opens and closes files that are locked in between. A lock lasts as long as any process
// has the file open, children after fork() among them. A program that forks passes Files that
// close the file in the child.
type Files interface {
	// Open is os.OpenFile. The Files say with which mode.
	Open(path string, flags int) (*os.File, error)
	Close(f *os.File) error
}

// Plain are the Files of a program that does not fork: those of package os, with this mode.
type Plain os.FileMode

// Open is os.OpenFile.
func (mode Plain) Open(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, flags, os.FileMode(mode))
}

// Close is f.Close.
func (Plain) Close(f *os.File) error { return f.Close() }

// Create makes a new, empty file for path, and removes what killed processes left of
// earlier ones. mode is as for os.OpenFile.
//
// Errors: NotFound, Permission, NoSpace, IO.
func Create(path string, mode os.FileMode) (*File, error) { return CreateBy(Plain(mode), path) }

// CreateBy is Create with Files that open and close the new file.
func CreateBy(files Files, path string) (*File, error) {
	removeLeftovers(path)
	for range attempts {
		f, err := files.Open(name(path), os.O_RDWR|os.O_CREATE|os.O_EXCL|syscall.O_NOFOLLOW)
		if err != nil {
			return nil, status.FromOS(err, "cannot create a file beside %q", path)
		}
		if lock(f) && stands(f) {
			return &File{File: f, files: files, path: path}, nil
		}
		// removeLeftovers of another process came before the lock.
		files.Close(f)
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

// Inherit gives the file the owner and the permissions of the one whose place it takes. A process
// that may not give files away stays the owner.
func (f *File) Inherit(old os.FileInfo) error {
	own, err := f.Stat()
	if err != nil {
		return status.FromOS(err, "cannot stat %q", f.Name())
	}
	was, known := old.Sys().(*syscall.Stat_t)
	is, _ := own.Sys().(*syscall.Stat_t)
	if known && (was.Uid != is.Uid || was.Gid != is.Gid) {
		if err := f.Chown(int(was.Uid), int(was.Gid)); err != nil && !errors.Is(err, syscall.EPERM) {
			return status.FromOS(err, "cannot set the owner of %q", f.Name())
		}
	}
	if own.Mode().Perm() == old.Mode().Perm() {
		return nil
	}
	if err := f.Chmod(old.Mode().Perm()); err != nil {
		return status.FromOS(err, "cannot set the permissions of %q", f.Name())
	}
	return nil
}

// Refused reports whether an error of CreateBy, Rename or Aside means that no file may take the
// place of another there: the folder is read-only or sticky, or the file is a mount point.
func Refused(err error) bool {
	return errors.Is(err, status.Permission) || errors.Is(err, syscall.EBUSY)
}

// Aside gives the file at path a name of its own for the time in which another takes its place.
// What a killed process left aside, the next Create for path removes.
func Aside(path string) (aside string, err error) {
	aside = name(path)
	if err := os.Rename(path, aside); err != nil {
		return "", status.FromOS(err, "cannot put %q aside", path)
	}
	return aside, nil
}

// Discard closes the file and removes it, unless it has its name. It may be called
// after Place, and after Close.
func (f *File) Discard() {
	// Both fail only where nothing is left to give up.
	_ = f.files.Close(f.File)
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
	folder, err := os.Open(filepath.Dir(path))
	if err != nil {
		return
	}
	defer folder.Close()
	names, _ := folder.Readdirnames(-1) // unsorted, which takes a fraction of os.ReadDir's time
	for _, name := range names {
		random, ok := strings.CutPrefix(name, stem(path)+".")
		random, partial := strings.CutSuffix(random, suffix)
		if ok && partial && len(random) == digits && strings.Trim(random, "0123456789abcdef") == "" {
			removeUnlocked(filepath.Join(filepath.Dir(path), name))
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
