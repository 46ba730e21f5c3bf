// Package salvage copies what is intact of a damaged stream into a new one, with
// an index of its own. The source is only read.
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
	Force bool // replace what stands at the new stream's path
	// Progress, if not nil, is told now and then how many bytes of about how
	// many have been gone through. Its error ends the work, and is the answer.
	Progress func(done, total int64) error
}

// Report says what a new stream has of its source, and what it has not.
type Report struct {
	Packets   uint64 // in the new stream
	Bytes     int64  // its length
	Verified  uint64 // of the packets: by the checksum in the index
	Repaired  uint64 // of the verified: only the header was damaged, the index had it
	Unlisted  uint64 // of the packets: not in the index, so without shape and type
	Lost      []Packet
	Ranges    []Range // of the source, that are no kept packet, in order
	LostBytes int64   // in the ranges
	Problem   string  // what is wrong with the index, "" where nothing is or there is none
}

// Packet is one that was lost and is known by its name.
type Packet struct {
	Name   string
	Range         // of the source, where it should stand
	Reason string // what stands there
}

// Range is a stretch of bytes of the source.
type Range struct{ Offset, Length int64 }

// Salvage writes what is intact of the stream at src, however damaged, into a
// new stream at dst, with an index, and leaves src alone. Both appear when they
// are whole and durable.
//
// A packet that the index of src lists is kept where its checksum agrees, also
// where it has moved, and where its header alone is damaged; else the new index
// notes it as lost. What no index lists is kept where it is a complete packet:
// behind another, or found again behind a damaged stretch, see unlisted.go.
//
// The work is linear in the bytes of the stream and of the index: a search that met far more false
// beginnings of packets than damage makes is given up.
//
// Errors: NotFound, InvalidArgument (src is no regular file, dst is src, or dst
// or its index exists and Force is not set), Busy (dst is being captured),
// Corrupt (no intact packet), IO, those of writing dst and that of Progress.
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
	if err := s.write(out, found); err != nil {
		return Report{}, err
	}
	return s.report, nil
}

// salvage is the source, and what has been found out about it.
type salvage struct {
	path   string
	f      *os.File
	size   int64
	mode   os.FileMode // its permissions
	idx    *index.File // nil: there is none that is of use
	rows   []listed    // its packets, in the order of their offsets
	report Report

	read int64 // bytes, so far
	// allowance is how many bytes each search may go through for candidates that turn out to be no
	// packets. A hostile stream has more of them than bytes, each with a claim on all that follows.
	// Damage makes few.
	allowance int64

	progress func(done, total int64) error
	done     int64 // bytes gone through
	ahead    int64 // bytes to go through again, at most
	told     int64 // done, when progress was called last
	chunk    []byte
}

const (
	chunkSize = 1 << 20
	// step is how many bytes are gone through between two calls of Progress.
	step = 8 << 20
	// Each search may go through so much in vain: so many times the stream, and so many bytes.
	searchFactor = 16
	searchBytes  = 64 << 20
)

func open(path string, o Options) (*salvage, error) {
	// O_NONBLOCK: a FIFO is refused below, not waited for.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, status.FromOS(err, "cannot open the stream %q", path)
	}
	s := &salvage{path: path, f: f, progress: o.Progress}
	// The size comes after the index: of a capture that goes on, the stream then
	// has what the index lists.
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

// tick counts bytes gone through, and tells of them.
func (s *salvage) tick(n int64) error {
	s.done += n
	if s.progress == nil || s.done-s.told < step {
		return nil
	}
	s.told = s.done
	return s.progress(s.done, max(s.done, s.ahead))
}

// ReadAt reads the source. It is an IO error where the file has become shorter.
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

// sum is the CRC-32C of n bytes, each of which goes to w too, if that is not nil.
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
