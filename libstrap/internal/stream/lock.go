// Locks the file of a stream against other sessions.

package stream

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/libstrap/strap/libstrap/internal/partial"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Files opens and closes the file of a stream, with the mode 0666.
type Files = partial.Files

// flock is syscall.Flock; tests replace it.
var flock = syscall.Flock

// unlockable lists the files in use on file systems that have no locks.
var unlockable = struct {
	sync.Mutex
	inUse map[fileID]bool
}{inUse: map[fileID]bool{}}

type fileID struct{ device, inode uint64 }

// lockedFile is an open file that no other session writes to.
type lockedFile struct {
	*os.File
	files      Files
	id         fileID
	unlockable bool
	created    bool // lock created the file
}

// maxTurns is how often lock tries to open the file, if others remove or replace it.
const maxTurns = 100

// lock opens the file at path and locks it. It returns Busy if another session has it. On a
// file system without locks, only sessions of this process are kept apart.
func lock(path string, flags int, files Files) (*lockedFile, error) {
	if files == nil {
		files = partial.Plain(0o666)
	}
	for range maxTurns {
		l, err := openLocked(path, flags, files)
		if err != nil {
			return nil, err
		}
		stands, err := l.stands(path)
		if stands {
			return l, nil
		}
		// Another session created this file, was refused, and removed it before the lock.
		if err = errors.Join(err, l.Close()); err != nil {
			return nil, err
		}
	}
	return nil, status.New(status.Busy, "%q is removed or replaced by others each time it is opened", path)
}

// stands reports whether path still names the file.
func (l *lockedFile) stands(path string) (bool, error) {
	own, err := l.Stat()
	if err != nil {
		return false, status.FromOS(err, "cannot stat %q", path)
	}
	now, err := os.Stat(path)
	if errors.Is(err, os.ErrNotExist) {
		return false, nil
	}
	if err != nil {
		return false, status.FromOS(err, "cannot stat %q", path)
	}
	return os.SameFile(own, now), nil
}

// now returns the path of the file now, also if the file was moved. It returns "" if the file has no path
// or the system does not tell it.
func (l *lockedFile) now() string {
	path, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", l.Fd()))
	if err != nil {
		return ""
	}
	if stands, err := l.stands(path); err != nil || !stands {
		return "" // the path of a removed file ends with " (deleted)"
	}
	return path
}

// successor is a locked file that will replace another file.
type successor struct {
	*lockedFile
	partial *partial.File
}

// succeed creates an empty file beside l with the owner and permissions of l. path is l's path.
func (l *lockedFile) succeed(path string) (*successor, error) {
	target, err := filepath.EvalSymlinks(path) // replace the file, not a link to it
	if err != nil {
		return nil, status.FromOS(err, "cannot follow %q", path)
	}
	old, err := l.Stat()
	if err != nil {
		return nil, status.FromOS(err, "cannot stat %q", path)
	}
	p, err := partial.CreateBy(l.files, target)
	if err != nil {
		return nil, err
	}
	s := &successor{&lockedFile{File: p.File, files: l.files}, p}
	if err = p.Inherit(old); err == nil {
		err = s.take(path)
	}
	if err != nil {
		p.Discard()
		return nil, err
	}
	return s, nil
}

// discard removes the file. It must not have replaced the other file.
func (s *successor) discard() error {
	return errors.Join(os.Remove(s.Name()), s.Close())
}

func openLocked(path string, flags int, files Files) (*lockedFile, error) {
	l := &lockedFile{files: files}
	flags |= syscall.O_NONBLOCK // do not wait for a FIFO; it is refused below
	f, err := files.Open(path, flags&^os.O_CREATE)
	if errors.Is(err, os.ErrNotExist) && flags&os.O_CREATE != 0 {
		if f, err = files.Open(path, flags|os.O_EXCL); err == nil {
			l.created = true
		} else if errors.Is(err, os.ErrExist) { // another process created it meanwhile
			f, err = files.Open(path, flags)
		}
	}
	if err != nil {
		if errors.Is(err, syscall.EISDIR) {
			return nil, status.Wrap(status.InvalidArgument, err, "%q is a directory, not a stream file", path)
		}
		return nil, status.FromOS(err, "cannot open %q for writing", path)
	}
	l.File = f
	if err := l.take(path); err != nil {
		return nil, errors.Join(err, files.Close(f))
	}
	return l, nil
}

func (l *lockedFile) take(path string) error {
	info, err := l.Stat()
	if err != nil {
		return status.FromOS(err, "cannot stat %q", path)
	}
	if !info.Mode().IsRegular() {
		return status.New(status.InvalidArgument,
			"%q is no regular file (%s): a stream is seekable", path, info.Mode().Type())
	}
	busy := func(err error) error {
		return status.Wrap(status.Busy, err, "%q is being captured by another session", path)
	}
	err = flock(int(l.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	// A reader also takes the lock for a moment, to find out whether the stream is being captured.
	for tries := 0; tries < 20 && errors.Is(err, syscall.EWOULDBLOCK); tries++ {
		time.Sleep(time.Millisecond)
		err = flock(int(l.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	}
	switch {
	case err == nil:
		return nil
	case errors.Is(err, syscall.EWOULDBLOCK):
		return busy(err)
	case errors.Is(err, errors.ErrUnsupported), errors.Is(err, syscall.ENOLCK), errors.Is(err, syscall.EINVAL):
	default:
		return status.FromOS(err, "cannot lock %q", path)
	}
	if s, ok := info.Sys().(*syscall.Stat_t); ok {
		l.id = fileID{uint64(s.Dev), uint64(s.Ino)}
	}
	unlockable.Lock()
	defer unlockable.Unlock()
	if unlockable.inUse[l.id] {
		return busy(syscall.EWOULDBLOCK)
	}
	l.unlockable, unlockable.inUse[l.id] = true, true
	return nil
}

// Close unlocks the file, also for processes that inherited it, and closes it.
func (l *lockedFile) Close() error {
	if l.unlockable {
		unlockable.Lock()
		delete(unlockable.inUse, l.id)
		unlockable.Unlock()
	} else {
		_ = flock(int(l.Fd()), syscall.LOCK_UN) // after an error the lock ends with the file
	}
	return l.files.Close(l.File)
}
