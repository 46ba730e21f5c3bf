// The encoders of one thread, and spare ones for threads that help.

package session

import (
	"io"

	"github.com/libstrap/strap/libstrap/internal/codec"
)

// encoders are the encoders of one thread.
type encoders struct {
	plain   *codec.Encoder
	archive *codec.ArchiveEncoder // nil unless the codec is codec.Archive
}

func newEncoders(o *Options) (*encoders, error) {
	e, kind := &encoders{}, o.Codec
	if kind == codec.Archive {
		kind = codec.Zstd // of values that are not archived
		e.archive = codec.NewArchiveEncoder(o.ErrorBound)
	}
	var err error
	e.plain, err = codec.NewEncoder(kind, o.Level)
	return e, err
}

// encodeInPlace is codec.Encoder.EncodeInPlace in the packet's codec.
func (e *encoders) encodeInPlace(it *entry) (int, error) {
	buf := it.payload()
	if it.kind == codec.Archive {
		return e.archive.EncodeInPlace(buf, it.front, it.source, it.row.Stored)
	}
	return e.plain.EncodeInPlace(buf, it.front, it.source)
}

// newFrame is codec.Encoder.NewFrame in the packet's codec.
func (e *encoders) newFrame(it *entry, w io.Writer, size int64) (io.WriteCloser, error) {
	if it.kind == codec.Archive {
		return e.archive.NewFrame(w, size, it.row.Stored)
	}
	return e.plain.NewFrame(w, size)
}

// spares keeps the encoders of helpers for the next ones.
type spares struct {
	mu   mutex[leafRank]
	idle []*encoders
}

// use runs f with idle encoders, or with new ones.
func (s *spares) use(o *Options, f func(*encoders) error) error {
	e, err := s.take(o)
	if err != nil {
		return err
	}
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.idle = append(s.idle, e)
	}()
	return f(e)
}

func (s *spares) take(o *Options) (*encoders, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n := len(s.idle); n > 0 {
		e := s.idle[n-1]
		s.idle = s.idle[:n-1]
		return e, nil
	}
	return newEncoders(o)
}
