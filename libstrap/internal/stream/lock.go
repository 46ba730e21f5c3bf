package stream

import (
	"errors"
	"os"
	"sync"
	"syscall"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Files opens and closes the file of a stream. The stream locks the file in between. A lock
// lasts as long as any process has the file open, children after fork() among them. A program
// that forks passes Files that close the file in the child.
type Files interface {
	// Open is os.OpenFile with the mode 0666.
	Open(path string, flags int) (*os.File, error)
	Close(f *os.File) error
}

// plainFiles are the Files of a program that does not fork.
type plainFiles struct{}

func (plainFiles) Open(path string, flags int) (*os.File, error) {
	return os.OpenFile(path, flags, 0o666)
}

func (plainFiles) Close(f *os.File) error { return f.Close() }

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

// maxTurns is how often lock begins again, because others remove or replace the file.
const maxTurns = 100

// lock opens the file at path and locks it. It returns Busy if another session has it. On a
// file system without locks, only sessions of this process are kept apart.
func lock(path string, flags int, files Files) (*lockedFile, error) {
	if files == nil {
		files = plainFiles{}
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

func openLocked(path string, flags int, files Files) (*lockedFile, error) {
	l := &lockedFile{files: files}
	flags |= syscall.O_NONBLOCK // a FIFO is refused below, not waited for
	f, err := files.Open(path, flags&^os.O_CREATE)
	if errors.Is(err, os.ErrNotExist) && flags&os.O_CREATE != 0 {
		if f, err = files.Open(path, flags|os.O_EXCL); err == nil {
			l.created = true
		} else if errors.Is(err, os.ErrExist) { // made by somebody else meanwhile
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
	switch err := flock(int(l.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); {
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
		_ = flock(int(l.Fd()), syscall.LOCK_UN) // a lock that stays ends with the file
	}
	return l.files.Close(l.File)
}
