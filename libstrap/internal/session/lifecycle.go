// How a session fails, is closed or discarded, and is finished.

package session

import (
	"runtime/debug"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// lifecycle is how a session ends: it fails, is closed or is discarded, and is finished when its
// files are closed.
type lifecycle struct {
	path string // as the host gave it, for errors
	shut func() // of the intake; called before the first refusal

	closing   chan struct{} // closed when the session accepts no more calls
	closeOnce sync.Once

	discarded   chan struct{} // closed when the queued entries are to be given up
	discardOnce sync.Once

	failed   chan struct{} // closed once failure is set
	failure  error
	failOnce sync.Once

	finished  chan struct{} // closed when the files are closed; then finishErr is set
	finishErr error
}

func newLifecycle(path string, shut func()) *lifecycle {
	return &lifecycle{
		path:      path,
		shut:      shut,
		closing:   make(chan struct{}),
		discarded: make(chan struct{}),
		failed:    make(chan struct{}),
		finished:  make(chan struct{}),
	}
}

// fail stops the writing for good. The first cause stays.
func (l *lifecycle) fail(cause error) {
	l.failOnce.Do(func() {
		l.failure = cause
		l.shut()
		close(l.failed)
	})
}

// close makes the session refuse calls.
func (l *lifecycle) close() {
	l.closeOnce.Do(func() {
		l.shut() // first: a call that is refused once is refused from then on
		close(l.closing)
	})
}

// discard makes the writer give up the queued entries. Call it after close.
func (l *lifecycle) discard() { l.discardOnce.Do(func() { close(l.discarded) }) }

// refused returns why the session takes no more calls, or nil while it does.
func (l *lifecycle) refused() error {
	select { // one channel at a time, which takes no lock
	case <-l.failed:
		return l.failure
	default:
	}
	if l.isClosing() {
		return status.New(status.InvalidState, "the capture of %q is closed", l.path)
	}
	return nil
}

// refusedTo is refused for one tensor or note. One from the intake was taken before the close, so
// only a failure or a discard refuses it.
func (l *lifecycle) refusedTo(fromIntake bool) error {
	if fromIntake && !l.halted() {
		return nil
	}
	return l.refused()
}

func (l *lifecycle) isClosing() bool {
	select {
	case <-l.closing:
		return true
	default:
		return false
	}
}

// halted reports whether nothing more is to be written: the session failed or was discarded.
func (l *lifecycle) halted() bool {
	select { // one channel at a time, which takes no lock
	case <-l.failed:
		return true
	default:
	}
	select {
	case <-l.discarded:
		return true
	default:
		return false
	}
}

// Guard runs f and turns a panic into the session's failure.
func (l *lifecycle) Guard(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = status.New(status.Internal, "panic: %v\n%s", p, debug.Stack())
			l.fail(err)
		}
	}()
	return f()
}
