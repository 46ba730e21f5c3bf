// Package jsonl appends lines to a file. While the disk takes none, lines wait in memory and are
// written later.
package jsonl

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Kept is how many lines may wait while the file takes none, or FlushEvery if that is larger.
// Beyond it the oldest lines are dropped.
const Kept = 256

// Options of a Writer.
type Options struct {
	FlushEvery int  // lines that are written together
	Fsync      bool // wait for the disk at each flush
	// Report receives a message of one line when the file stops taking lines, and another when it
	// takes them again. It must not be nil.
	Report func(message string)
}

// Writer appends lines to a file. A killed program loses at most the lines since the last flush. If
// it left a torn line, the next Open writes an end of line after it, so that readers can skip it. A
// Writer may be used by one goroutine only.
type Writer struct {
	path    string
	options Options
	file    *os.File
	torn    bool     // the file does not end with a whole line
	lines   [][]byte // still to be written
	begun   int      // bytes of lines[0] that are written already
	dropped int      // lines dropped since the file last took any
	failing bool     // the last write failed, and Report was told
}

// Open opens a file to append to, and creates it if it is missing.
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

// cause strips the path from an error, because the message names it already.
func cause(err error) error {
	if path := (*fs.PathError)(nil); errors.As(err, &path) {
		return path.Err
	}
	return err
}

// Write adds a line. line has no end of line; Write copies it. If the file does not take the line,
// Report is told once, and the next flush tries again.
func (w *Writer) Write(line []byte) {
	w.lines = append(w.lines, append(bytes.Clone(line), '\n'))
	if len(w.lines) >= w.options.FlushEvery {
		w.flush()
	}
}

// flush writes the waiting lines, reports a change between failing and working, and drops the
// oldest lines beyond the limit.
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

// write passes all lines to the file in one call, so that lines of other programs that append do
// not come between.
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

// wrote removes the n bytes that the file took from the waiting lines.
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

// Reopen continues in the file that now has the path, as after a rotation of logs. The waiting
// lines go to the old file first. If the new file cannot be opened, the Writer keeps the old one.
//
// Errors: IO, naming the file.
func (w *Writer) Reopen() error {
	w.flush()
	old := w.file
	if err := w.open(); err != nil {
		return err
	}
	w.begun = 0 // write a line that the old file has only in part to the new one as a whole
	return closed(old)
}

// Close flushes and closes the file. The second call does nothing.
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
