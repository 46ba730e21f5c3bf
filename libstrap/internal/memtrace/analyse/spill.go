// The temporary file for rows and values that exceed the memory.

package analyse

import (
	"os"
	"path/filepath"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/partial"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// spill is the temporary file for rows and values that exceed the memory. A record is written once
// and read by its offset. The file is created for the first record and unlinked at once, so a
// killed process leaves nothing. spill is safe for concurrent use.
type spill struct {
	dir    string
	memory int // MemoryBytes, for the error message

	mu     sync.Mutex
	file   *os.File
	end    int64 // bytes reserved so far
	closed bool
}

// reserve reserves n bytes of the file for the caller and returns their offset.
func (s *spill) reserve(n int64) (int64, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return 0, errClosed
	}
	if s.file == nil {
		f, err := partial.Create(filepath.Join(s.dir, "strap-analysis"), 0o600)
		if err != nil {
			return 0, s.failed(err)
		}
		if err := os.Remove(f.Name()); err != nil {
			return 0, s.failed(err)
		}
		s.file = f.File
	}
	at := s.end
	s.end += n
	return at, nil
}

func (s *spill) write(p []byte, at int64) error {
	if _, err := s.file.WriteAt(p, at); err != nil {
		return s.failed(err)
	}
	return nil
}

// spillWriter writes records one after the other into reserved bytes of the file.
type spillWriter struct {
	spill  *spill
	offset int64 // of the buffer's first byte
	buffer []byte
}

const spillBuffer = 1 << 18

func (s *spill) writer(size int64) (*spillWriter, error) {
	at, err := s.reserve(size)
	if err != nil {
		return nil, err
	}
	return &spillWriter{spill: s, offset: at, buffer: make([]byte, 0, min(size, spillBuffer))}, nil
}

// at returns the file offset of the next byte.
func (w *spillWriter) at() int64 { return w.offset + int64(len(w.buffer)) }

func (w *spillWriter) write(p []byte) error {
	for len(p) > 0 {
		if len(w.buffer) == cap(w.buffer) {
			if err := w.flush(); err != nil {
				return err
			}
		}
		n := min(len(p), cap(w.buffer)-len(w.buffer))
		w.buffer = append(w.buffer, p[:n]...)
		p = p[n:]
	}
	return nil
}

func (w *spillWriter) flush() error {
	if err := w.spill.write(w.buffer, w.offset); err != nil {
		return err
	}
	w.offset += int64(len(w.buffer))
	w.buffer = w.buffer[:0]
	return nil
}

func (s *spill) read(p []byte, at int64) error {
	if _, err := s.file.ReadAt(p, at); err != nil {
		return status.FromOS(err, "cannot read %d bytes back from the analysis' file in %q", len(p), s.dir)
	}
	return nil
}

func (s *spill) name() string { return s.dir }

func (s *spill) failed(err error) error {
	return status.FromOS(err, "the analysis needs more than its %d bytes of memory and cannot spill to %q: "+
		"make room there, give another folder or more memory", s.memory, s.dir)
}

func (s *spill) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.file != nil {
		// Closing an unlinked file deletes its data, so an error does not matter.
		_ = s.file.Close()
		s.file = nil
	}
}
