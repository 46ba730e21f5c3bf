// Package partial makes files that replace others once they are complete.
//
// A file is written under the name NAME.0123456789abcdef.partial, beside the file NAME that it will
// replace. The digits are random, and the file is created with O_EXCL. So in a folder that others
// can write to, no link of theirs is followed. The Python package makes files in the same way
// (_files.py).
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

// File is a file that does not have its final name yet. Its process holds a lock on it while it is
// open, so that Create in another process does not remove it.
type File struct {
	*os.File
	files Files
	path  string // the final name
}

// Files opens and closes the files of CreateBy, which are locked while they are open. A lock lasts
// while any process has the file open, and a child of fork() has it open too. A program that forks
// passes Files that close the file in the child.
type Files interface {
	// Open works like os.OpenFile. The implementation chooses the mode.
	Open(path string, flags int) (*os.File, error)
	Close(f *os.File) error
}

// Plain opens and closes files with package os, for a program that does not fork. Its value is the
// mode of new files.
type Plain os.FileMode

// Open calls os.OpenFile with the mode.
func (mode Plain) Open(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, flags, os.FileMode(mode))
}

// Close calls f.Close.
func (Plain) Close(f *os.File) error { return f.Close() }

// Create makes a new, empty file that will replace path. It also removes files that killed
// processes left for path. mode is as for os.OpenFile.
//
// Errors: NotFound, Permission, NoSpace, IO.
func Create(path string, mode os.FileMode) (*File, error) { return CreateBy(Plain(mode), path) }

// CreateBy works like Create, and opens and closes the new file with files.
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
		// removeLeftovers in another process removed the file before it was locked.
		files.Close(f)
		os.Remove(f.Name())
	}
	return nil, status.New(status.IO, "cannot create a file beside %q: others remove or lock each of %d", path, attempts)
}

// name returns a new, random name beside path.
func name(path string) string {
	var random [digits / 2]byte
	rand.Read(random[:]) // never fails, crypto/rand
	return filepath.Join(filepath.Dir(path), stem(path)+"."+hex.EncodeToString(random[:])+suffix)
}

func stem(path string) string {
	base := filepath.Base(path)
	return base[:min(len(base), maxStem)]
}

// Place makes the file durable, gives it its final name, and makes the name durable. The file stays
// open. If Place fails, the caller must call Discard.
func (f *File) Place() error {
	if err := f.Sync(); err != nil {
		return status.FromOS(err, "cannot make %q durable", f.Name())
	}
	if err := f.Rename(); err != nil {
		return err
	}
	return SyncFolder(f.path)
}

// Rename gives the file its final name. The caller makes file and name durable.
func (f *File) Rename() error {
	if err := os.Rename(f.Name(), f.path); err != nil {
		return status.FromOS(err, "cannot give %q its name %q", f.Name(), f.path)
	}
	return nil
}

// Inherit gives the file the owner and the permissions of the file that it replaces. A process that
// may not give files away stays the owner.
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

// Refused reports whether an error of CreateBy, Rename or Aside means that files cannot be replaced
// there: the folder is read-only or sticky, or the file is a mount point.
func Refused(err error) bool {
	return errors.Is(err, status.Permission) || errors.Is(err, syscall.EBUSY)
}

// Aside renames the file at path to a random name, so that another file can take its place. If the
// process is killed, the next Create for path removes the renamed file.
func Aside(path string) (aside string, err error) {
	aside = name(path)
	if err := os.Rename(path, aside); err != nil {
		return "", status.FromOS(err, "cannot put %q aside", path)
	}
	return aside, nil
}

// Discard closes the file, and removes it unless it has its final name. It may be called after
// Place, and after Close.
func (f *File) Discard() {
	// Both fail only if the file is closed or gone already.
	_ = f.files.Close(f.File)
	_ = os.Remove(f.Name())
}

// SyncFolder makes the names in the folder of path durable. It returns nil if the file system
// refuses to sync a folder: such a file system needs no sync, or cannot do one. It also returns nil
// if this process may not read the folder, because fsync needs it open for reading.
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

// removeLeftovers removes the partial files for path that no process has locked.
func removeLeftovers(path string) {
	// If the folder cannot be read, creating the file reports the error.
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
	// NFS locks only files that are open for writing.
	f, err := os.OpenFile(path, os.O_RDWR|syscall.O_NOFOLLOW|syscall.O_NONBLOCK, 0)
	if err != nil {
		return
	}
	defer f.Close()
	if err := flock(f); err == nil {
		_ = os.Remove(path) // it fails if this process may not change the folder
	}
}

func flock(f *os.File) error { return syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) }

// lock locks the file, and returns false if another process has locked it. On a file system without
// locks it returns true, and removeLeftovers removes nothing.
func lock(f *os.File) bool { return !errors.Is(flock(f), syscall.EWOULDBLOCK) }

// stands reports whether the file's name still leads to the file.
func stands(f *os.File) bool {
	there, err := os.Lstat(f.Name())
	if err != nil {
		return false
	}
	own, err := f.Stat()
	return err == nil && os.SameFile(there, own)
}
