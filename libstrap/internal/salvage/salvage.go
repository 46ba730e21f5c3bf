// Package salvage copies the intact packets of a damaged stream to a new stream with an index of its own. It
// only reads the source.
package salvage

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Options of Salvage.
type Options struct {
	Force bool // replace files at the new stream's path
	// Progress, if not nil, is called now and then. done is how many bytes were processed, total is
	// about how many there are. If Progress returns an error, Salvage ends with this error.
	Progress func(done, total int64) error
}

// Report tells what the new stream has of its source, and what was lost.
type Report struct {
	Packets   uint64 // in the new stream
	Bytes     int64  // length of the new stream
	Verified  uint64 // packets with the checksum of the index
	Repaired  uint64 // verified packets whose damaged header was replaced from the index
	Unlisted  uint64 // packets that are not in the index, so without shape and type
	Lost      []Packet
	Ranges    []Range // ranges of the source that belong to no kept packet, in order
	LostBytes int64   // in the ranges
	Problem   string  // problem of the index; "" if there is none, or no index
}

// Packet is a lost packet whose name is known.
type Packet struct {
	Name   string
	Range         // where it should be in the source
	Reason string // what is there instead
}

// Range is a range of bytes of the source.
type Range struct{ Offset, Length int64 }

// Salvage writes the intact packets of the stream at src, however damaged, to a new stream at dst, with an
// index. It does not change src. The new stream and its index appear when they are complete and durable.
//
// A packet that the index of src lists is kept if its checksum is right, also if it has moved, or if only its
// header is damaged. Otherwise the new index notes that it is lost. A packet that the index does not list is
// kept if it is complete: it follows another packet, or was found behind a damaged range; see unlisted.go.
//
// The work is linear in the bytes of the stream and of the index. A search ends if it meets far more false
// beginnings of packets than damage makes.
//
// Errors: NotFound, InvalidArgument (src is no regular file, dst is src, or dst or its index exists and Force
// is not set), Busy (dst is being captured), Corrupt (there is no intact packet), IO, errors of writing dst,
// and the error of Progress.
func Salvage(src, dst string, o Options) (Report, error) {
	s, err := open(src, o)
	if err != nil {
		return Report{}, err
	}
	defer s.f.Close()
	out, err := s.target(dst, o.Force)
	if err != nil {
		return Report{}, err
	}
	found, err := s.locate()
	if err != nil {
		return Report{}, err
	}
	if len(found) == 0 && s.size > 0 {
		return Report{}, status.New(status.Corrupt, "%q has no intact packet in its %d bytes", src, s.size)
	}
	if err := s.write(out, s.captureID(), func(c *copier) error { return c.copy(found) }); err != nil {
		return Report{}, err
	}
	return s.report, nil
}

// salvage has the source, and what is known about it.
type salvage struct {
	path   string
	f      *os.File
	size   int64
	mode   os.FileMode // its permissions
	idx    *index.File // nil: there is no index that can be used
	rows   []listed    // the packets of the index, in the order of their offsets
	report Report

	read int64 // bytes, so far
	// allowance is how many bytes each search may process for candidates that are no packets. A hostile
	// stream can have a candidate at each byte, which claims all the bytes behind it. Damage makes few
	// candidates.
	allowance int64

	progress func(done, total int64) error
	done     int64 // processed bytes
	ahead    int64 // most bytes that will be processed again
	told     int64 // done at the last call of Progress
	chunk    []byte
}

const (
	chunkSize = 1 << 20
	// step is how many bytes are processed between two calls of Progress.
	step = 8 << 20
	// The allowance of each search is searchFactor times the length of the stream, plus
	// searchBytes.
	searchFactor = 16
	searchBytes  = 64 << 20
)

func open(path string, o Options) (*salvage, error) {
	// O_NONBLOCK: do not wait for a FIFO; it is refused below.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, status.FromOS(err, "cannot open the stream %q", path)
	}
	s := &salvage{path: path, f: f, progress: o.Progress}
	// Get the size after the index was read. So the stream of a running capture has all packets that
	// the index lists.
	if err := errors.Join(s.openIndex(), s.measure()); err != nil {
		f.Close()
		return nil, err
	}
	s.ahead = 2 * s.size
	s.allowance = searchFactor*s.size + searchBytes
	return s, nil
}

func (s *salvage) openIndex() error {
	idx, err := index.Recover(index.PathOf(s.path))
	switch {
	case errors.Is(err, status.NotFound):
	case err != nil:
		s.problem("%v", err)
	default:
		s.idx = idx
		if idx.Torn {
			s.problem("%s", idx.Problem)
		}
	}
	return nil
}

func (s *salvage) measure() error {
	info, err := s.f.Stat()
	if err != nil {
		return status.FromOS(err, "cannot stat the stream %q", s.path)
	}
	if !info.Mode().IsRegular() {
		return status.New(status.InvalidArgument, "%q is no regular file (%s), so it is no stream", s.path, info.Mode().Type())
	}
	s.size, s.mode = info.Size(), info.Mode().Perm()
	return nil
}

func (s *salvage) problem(format string, args ...any) {
	if s.report.Problem != "" {
		s.report.Problem += "; "
	}
	s.report.Problem += fmt.Sprintf(format, args...)
}

// tick counts n processed bytes, and calls Progress now and then.
func (s *salvage) tick(n int64) error {
	s.done += n
	if s.progress == nil || s.done-s.told < step {
		return nil
	}
	s.told = s.done
	return s.progress(s.done, max(s.done, s.ahead))
}

// ReadAt reads the source. If the file has become shorter, the error is IO.
func (s *salvage) ReadAt(b []byte, at int64) (int, error) {
	n, err := s.f.ReadAt(b, at)
	s.read += int64(n)
	if n == len(b) {
		return n, nil
	}
	if errors.Is(err, io.EOF) {
		err = io.ErrUnexpectedEOF
	}
	return n, status.FromOS(err, "cannot read %d bytes at %d of %q", len(b), at, s.path)
}

// sum returns the CRC-32C of n bytes at an offset. If w is not nil, it also copies them to w.
func (s *salvage) sum(at, n int64, w io.Writer) (crc uint32, err error) {
	if s.chunk == nil {
		s.chunk = make([]byte, chunkSize)
	}
	for n > 0 {
		b := s.chunk[:min(n, chunkSize)]
		if _, err := s.ReadAt(b, at); err != nil {
			return 0, err
		}
		crc = crc32c.Update(crc, b)
		if w != nil {
			if _, err := w.Write(b); err != nil {
				return 0, err
			}
		}
		at, n = at+int64(len(b)), n-int64(len(b))
		if err := s.tick(int64(len(b))); err != nil {
			return 0, err
		}
	}
	return crc, nil
}
