package reader

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// SalvageReport counts what Salvage found.
type SalvageReport struct {
	Packets      uint64 // kept
	Verified     uint64 // of them, by the checksum in the index
	Lost         uint64 // packets that the index lists and the stream has not, or damaged
	SkippedBytes int64  // of the stream, that belong to no kept packet
	Problem      string // why the index was of no use, "" where it was or there is none
}

// Salvage writes what is intact of the stream at src, however damaged, into a
// new stream and index at dst, and leaves src alone.
//
// A packet that the index of src lists is kept where its header and checksum
// agree; else the new index notes it as lost. What stands between and behind
// is kept where it is complete packets. Behind a tear only the index tells
// where packets begin again: without one, all that follows is skipped.
//
// Errors: NotFound, InvalidArgument (src is no regular file, dst or its index
// exists), Corrupt (no intact packet: nothing is written), and those of writing
// dst, which is removed then.
func Salvage(src, dst string) (SalvageReport, error) {
	f, err := openStream(src)
	if err != nil {
		return SalvageReport{}, err
	}
	defer f.Close()
	s := salvage{Reader: &Reader{path: src, f: f}}
	if err := s.open(); err != nil {
		return SalvageReport{}, err
	}
	if err := s.write(dst); err != nil {
		return SalvageReport{}, err
	}
	return s.report, nil
}

// salvage copies the packets of a Reader, whose segments it does not use.
type salvage struct {
	*Reader
	report SalvageReport
	out    *bufio.Writer
	index  *index.Writer
	next   uint64 // sequence for a packet that the index does not list
	at     int64  // length of the new stream
}

func (s *salvage) open() error {
	idx, err := index.Open(index.PathOf(s.path))
	switch {
	case err == nil && idx.Torn && !idx.Begun():
		s.report.Problem = idx.Problem
	case err == nil:
		s.idx = idx
	case !errors.Is(err, status.NotFound):
		s.report.Problem = err.Error()
	}
	info, err := s.f.Stat()
	if err != nil {
		return status.FromOS(err, "cannot stat the stream %q", s.path)
	}
	s.size = info.Size()
	if s.idx == nil {
		return nil
	}
	ours, err := s.anyIntact()
	if err == nil && !ours {
		s.idx, s.report.Problem = nil, "no packet of the stream agrees with the index"
	}
	return err
}

// anyIntact reports whether at least one packet is as the index says. A foreign
// index has none.
func (s *salvage) anyIntact() (found bool, err error) {
	s.idx.Extents(func(row int, _, _ int64) bool {
		w := s.idx.Row(row)
		_, _, err = s.verify(row, &w)
		found = err == nil
		if errors.Is(err, status.Corrupt) {
			err = nil
		}
		return !found && err == nil
	})
	return found, err
}

// verify finds the packet of a row and compares its checksum, if known.
func (s *salvage) verify(row int, w *wire.Row) (p scan.Packet, known bool, err error) {
	if p, err = s.header(w); err != nil {
		return p, false, err
	}
	want, known := s.idx.CRC(row)
	if !known {
		return p, false, nil
	}
	got, err := s.sum(p)
	if err == nil && got != want {
		err = status.New(status.Corrupt, "its payload has checksum %08x, the index says %08x", got, want)
	}
	return p, true, err
}

func (s *salvage) write(dst string) (err error) {
	to := index.PathOf(dst)
	if _, err := os.Lstat(to); !errors.Is(err, os.ErrNotExist) {
		return status.New(status.InvalidArgument, "%q exists: salvage writes a new file", to)
	}
	f, err := os.OpenFile(dst, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
	if errors.Is(err, os.ErrExist) {
		return status.New(status.InvalidArgument, "%q exists: salvage writes a new file", dst)
	} else if err != nil {
		return status.FromOS(err, "cannot create %q", dst)
	}
	defer func() {
		if cerr := f.Close(); cerr != nil && err == nil {
			err = status.FromOS(cerr, "cannot close %q", dst)
		}
		if err != nil {
			err = errors.Join(err, os.Remove(dst))
		}
	}()
	if s.index, err = index.Create(to, s.captureID()); err != nil {
		return err
	}
	defer func() {
		if cerr := s.index.Close(); err == nil {
			err = cerr
		}
		if err != nil {
			err = errors.Join(err, os.Remove(to))
		}
	}()
	s.out = bufio.NewWriterSize(f, 1<<20)
	if err := s.copyAll(); err != nil {
		return err
	}
	if s.report.Packets == 0 && s.size > 0 {
		return status.New(status.Corrupt, "%q has no intact packet in its %d bytes", s.path, s.size)
	}
	if err := s.out.Flush(); err != nil {
		return status.FromOS(err, "cannot write to %q", dst)
	}
	if err := f.Sync(); err != nil {
		return status.FromOS(err, "cannot make %q durable", dst)
	}
	return s.index.Sync()
}

// captureID is that of the source: it is the same capture.
func (s *salvage) captureID() string {
	if s.idx != nil && s.idx.Metadata().CaptureID != "" {
		return s.idx.Metadata().CaptureID
	}
	var id [16]byte
	rand.Read(id[:]) // never fails, crypto/rand
	return hex.EncodeToString(id[:])
}

func (s *salvage) copyAll() error {
	pos := int64(0)
	if s.idx != nil {
		for row := range s.idx.NumRows() {
			w := s.idx.Row(row)
			var err error
			if pos, err = s.copyRow(row, &w, pos); err != nil {
				return err
			}
		}
	}
	return s.copyFound(pos, s.size)
}

// copyRow copies the packet of a row of the index, and what stands before it
// from pos on; it returns where the packet ends.
func (s *salvage) copyRow(row int, w *wire.Row, pos int64) (int64, error) {
	if w.Offset < 0 {
		return pos, s.append(w)
	}
	if w.Offset < pos || w.Offset >= s.size {
		return pos, s.lose(w, "it does not fit the stream")
	}
	if err := s.copyFound(pos, w.Offset); err != nil {
		return 0, err
	}
	end := min(w.Offset+int64(w.Length), s.size)
	p, known, err := s.verify(row, w)
	switch {
	case errors.Is(err, status.Corrupt):
		s.report.SkippedBytes += end - w.Offset
		return end, s.lose(w, err.Error())
	case err != nil:
		return 0, err
	case known:
		s.report.Verified++
	}
	return end, s.keep(p, w)
}

// copyFound copies the complete packets of the stretch [from, to).
func (s *salvage) copyFound(from, to int64) error {
	end, err := scan.Packets(s.f, from, to, func(p scan.Packet) error {
		w := scannedRow(p, s.next)
		return s.keep(p, &w)
	})
	s.report.SkippedBytes += max(0, to-end)
	var tear *scan.Tear
	if errors.As(err, &tear) {
		return nil // the skipped bytes are counted
	}
	return err
}

func (s *salvage) keep(p scan.Packet, w *wire.Row) error {
	n, err := io.CopyN(s.out, io.NewSectionReader(s.f, p.Offset, p.End()-p.Offset), p.End()-p.Offset)
	if err != nil {
		return status.FromOS(err, "cannot copy packet %s of %q", label(p.Name, p.Offset), s.path)
	}
	w.Offset = s.at
	s.at += n
	s.report.Packets++
	return s.append(w)
}

func (s *salvage) lose(w *wire.Row, why string) error {
	s.report.Lost++
	w.Error = fmt.Sprintf("lost in the damaged stream, at byte %d: %s", w.Offset, why)
	w.Offset, w.Length = -1, 0
	return s.append(w)
}

func (s *salvage) append(w *wire.Row) error {
	s.next = w.Sequence + 1
	return s.index.Append(w)
}
