// Package jsonl appends lines to a file, whole ones, and loses none to a disk that is full
// for a while.
package jsonl

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Kept is how many lines at most wait for a disk that takes none; fewer than FlushEvery are
// never too many. Beyond, the oldest are dropped.
const Kept = 256

// Options of a Writer.
type Options struct {
	FlushEvery int  // lines that are written together
	Fsync      bool // wait for the disk at each flush
	// Report is told, in one line, that the file takes nothing, and that it does again; not nil.
	Report func(message string)
}

// Writer appends lines. A program that is killed loses those since the last flush, at most;
// a line that it left torn is ended when the file is opened again, so that readers can pass
// it over. It is for one goroutine.
type Writer struct {
	path    string
	options Options
	file    *os.File
	torn    bool     // the file does not end with a whole line
	lines   [][]byte // not written
	begun   int      // bytes of the first that are
	dropped int      // since the file took the last one
	failing bool     // and that has been reported
}

// Open opens a file to append to, and makes it where it is missing.
//
// Errors: IO, naming the file.
func Open(path string, o Options) (*Writer, error) {
	w := &Writer{path: path, options: o}
	if err := w.open(); err != nil {
		return nil, err
	}
	return w, nil
}

func (w *Writer) open() error {
	file, err := os.OpenFile(w.path, os.O_RDWR|os.O_CREATE|os.O_APPEND, 0o644)
	if err != nil {
		return status.Wrap(status.IO, cause(err), "%s cannot be written", w.path)
	}
	torn, err := endsTorn(file)
	if err != nil {
		file.Close()
		return status.Wrap(status.IO, cause(err), "%s cannot be read", w.path)
	}
	w.file, w.torn = file, torn
	return nil
}

func endsTorn(file *os.File) (bool, error) {
	info, err := file.Stat()
	if err != nil || info.Size() == 0 {
		return false, err
	}
	last := make([]byte, 1)
	_, err = file.ReadAt(last, info.Size()-1)
	return last[0] != '\n', err
}

// cause is an error without the path that the message names.
func cause(err error) error {
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		return path.Err
	}
	return err
}

// Write adds a line, without its end. A file that does not take it is reported, once, and
// tried again with the next flush.
func (w *Writer) Write(line []byte) {
	w.lines = append(w.lines, append(bytes.Clone(line), '\n'))
	if len(w.lines) >= w.options.FlushEvery {
		w.flush()
	}
}

// flush writes what is held back, and reports what comes of it.
func (w *Writer) flush() {
	err := w.write()
	switch {
	case err != nil && !w.failing:
		w.failing = true
		w.options.Report(fmt.Sprintf("%s: %v; up to %d lines are kept for the next flush, then the oldest are dropped", w.path, err, w.kept()))
	case err == nil && w.failing:
		w.options.Report(fmt.Sprintf("%s: written again; %d lines were dropped", w.path, w.dropped))
		w.failing, w.dropped = false, 0
	}
	if over := len(w.lines) - w.kept(); over > 0 {
		w.torn = w.torn || w.begun > 0
		w.begun = 0
		w.lines = append([][]byte(nil), w.lines[over:]...)
		w.dropped += over
	}
}

func (w *Writer) kept() int { return max(Kept, w.options.FlushEvery) }

// write gives the file all lines at once: other programs that append do not come between.
func (w *Writer) write() error {
	var room []byte
	if w.torn {
		room = append(room, '\n')
	}
	room = append(room, bytes.Join(w.lines, nil)[w.begun:]...)
	n, err := w.file.Write(room)
	w.wrote(n)
	if err == nil && w.options.Fsync {
		err = w.file.Sync()
	}
	return cause(err)
}

// wrote takes away what the file has.
func (w *Writer) wrote(n int) {
	if w.torn && n > 0 {
		w.torn = false
		n--
	}
	n += w.begun
	for len(w.lines) > 0 && n >= len(w.lines[0]) {
		n -= len(w.lines[0])
		w.lines = w.lines[1:]
	}
	w.begun = n
}

// Reopen goes on in the file that has the name now, as after a rotation of logs; what is
// held back still goes to the old one. Where there is none it stays with the old one.
//
// Errors: IO, naming the file.
func (w *Writer) Reopen() error {
	w.flush()
	old := w.file
	if err := w.open(); err != nil {
		return err
	}
	w.begun = 0 // a line that is torn there is whole here
	return closed(old)
}

// Close flushes and closes; the second time it does nothing.
//
// Errors: IO, with how many lines are lost.
func (w *Writer) Close() error {
	if w.file == nil {
		return nil
	}
	w.flush()
	err := closed(w.file)
	w.file = nil
	if lost := len(w.lines) + w.dropped; lost > 0 {
		return status.New(status.IO, "%s: %d lines were not written", w.path, lost)
	}
	return err
}

func closed(file *os.File) error {
	if err := file.Close(); err != nil {
		return status.Wrap(status.IO, cause(err), "%s was not closed", file.Name())
	}
	return nil
}
