// Writes the new stream and its index.

package salvage

import (
	"bufio"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"syscall"

	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/partial"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// target has the paths of the new files.
type target struct {
	stream string
	force  bool
}

// target checks that the new files replace no file that they must not replace.
func (s *salvage) target(dst string, force bool) (target, error) {
	t := target{stream: dst, force: force}
	if _, err := os.Stat(filepath.Dir(dst)); err != nil {
		return t, status.FromOS(err, "cannot write to %q", dst)
	}
	for _, path := range t.paths() {
		info, err := os.Stat(path)
		if errors.Is(err, os.ErrNotExist) {
			continue
		}
		if err != nil {
			return t, status.FromOS(err, "cannot stat %q", path)
		}
		for _, own := range []string{s.path, index.PathOf(s.path)} {
			if theirs, err := os.Stat(own); err == nil && os.SameFile(info, theirs) {
				return t, status.New(status.InvalidArgument, "%q belongs to the source: salvage writes a new stream", path)
			}
		}
		if !info.Mode().IsRegular() {
			return t, status.New(status.InvalidArgument, "%q is no regular file (%s)", path, info.Mode().Type())
		}
	}
	return t, t.free()
}

func (t target) paths() []string { return []string{t.stream, index.PathOf(t.stream)} }

// free returns an error if there is a file that must not be replaced.
func (t target) free() error {
	for _, path := range t.paths() {
		if _, err := os.Lstat(path); errors.Is(err, os.ErrNotExist) {
			continue
		} else if err != nil {
			return status.FromOS(err, "cannot stat %q", path)
		}
		if !t.force {
			return status.New(status.InvalidArgument, "%q exists: salvage writes a new file", path)
		}
		if err := notCaptured(path); err != nil {
			return err
		}
	}
	return nil
}

// notCaptured returns Busy if a capture has the lock of the stream at path.
func notCaptured(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return status.FromOS(err, "cannot open %q", path)
	}
	defer f.Close()
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); errors.Is(err, syscall.EWOULDBLOCK) {
		return status.Wrap(status.Busy, err, "%q is being captured", path)
	}
	return nil
}

// copier writes the new stream and its index.
type copier struct {
	*salvage
	out   *bufio.Writer
	index *index.Writer
	at    int64  // length of the new stream
	next  uint64 // sequence of the next packet that is not listed
}

// write writes both files under other names, and renames them when they are complete and durable. copy writes
// their packets and rows.
func (s *salvage) write(t target, captureID string, copy func(c *copier) error) (err error) {
	var files []*partial.File // the stream, the index
	for _, path := range t.paths() {
		f, err := partial.Create(path, 0o666)
		if err != nil {
			return err
		}
		defer f.Discard()
		files = append(files, f)
	}
	if err := s.fill(files[0].File, files[1].File, captureID, copy); err != nil {
		return err
	}
	if err := t.free(); err != nil {
		return err
	}
	// Rename the index first, so that no stream is beside the index of another stream.
	if err := files[1].Rename(); err != nil {
		return err
	}
	if err := files[0].Rename(); err != nil {
		return err
	}
	return partial.SyncFolder(t.stream)
}

func (s *salvage) fill(f, idx *os.File, captureID string, copy func(c *copier) error) (err error) {
	path := f.Name()
	if err := f.Chmod(s.mode & 0o666); err != nil {
		return status.FromOS(err, "cannot set the permissions of %q", path)
	}
	c := copier{salvage: s, out: bufio.NewWriterSize(f, chunkSize)}
	if c.index, err = index.New(idx, captureID); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, c.index.Close()) }()
	if err := copy(&c); err != nil {
		return err
	}
	if err := c.out.Flush(); err != nil {
		return status.FromOS(err, "cannot write to %q", path)
	}
	if err := f.Sync(); err != nil {
		return status.FromOS(err, "cannot make %q durable", path)
	}
	s.report.Bytes = c.at
	return c.index.Sync()
}

// captureID returns the capture id of the source if it can be read, because it is the same capture. Otherwise
// it returns a new one.
func (s *salvage) captureID() string {
	if s.idx != nil && index.IsCaptureID(s.idx.Metadata().CaptureID) {
		return s.idx.Metadata().CaptureID
	}
	var id [16]byte
	rand.Read(id[:]) // never fails, crypto/rand
	return hex.EncodeToString(id[:])
}

// copy writes the packets and rows in the order of the index. Packets that the index does not list keep their
// positions between them.
func (c *copier) copy(all []found) error {
	places := make([]int, len(c.rows)) // number in all, plus 1; 0: lost
	var unlisted []found
	for i, f := range all {
		if f.k == unlistedPacket {
			unlisted = append(unlisted, f)
		} else {
			places[f.k] = i + 1
		}
	}
	k, rows := 0, 0
	if c.idx != nil {
		rows = c.idx.NumRows()
	}
	for row := range rows {
		w := c.idx.Row(row)
		if k < len(c.rows) && c.rows[k].row == row {
			r, place := &c.rows[k], places[k]
			k++
			if place > 0 {
				f := all[place-1]
				for len(unlisted) > 0 && unlisted[0].at < f.at {
					if err := c.unlisted(unlisted[0], w.Sequence); err != nil {
						return err
					}
					unlisted = unlisted[1:]
				}
				if err := c.listed(f, &w); err != nil {
					return err
				}
				continue
			}
			lost := c.lost(r)
			c.report.Lost = append(c.report.Lost, lost)
			w.Error = fmt.Sprintf("lost in the damaged stream, at byte %d: %s", r.offset, lost.Reason)
			w.Offset, w.Length = -1, 0
		}
		if err := c.append(&w); err != nil {
			return err
		}
	}
	for _, f := range unlisted {
		if err := c.unlisted(f, ^uint64(0)); err != nil {
			return err
		}
	}
	return c.ranges(all)
}

// ranges reports the ranges between the packets.
func (c *copier) ranges(all []found) error {
	return c.stretches(all, func(from, to, _, _ int64) error {
		c.report.Ranges = append(c.report.Ranges, Range{Offset: from, Length: to - from})
		c.report.LostBytes += to - from
		return nil
	})
}

// unlisted copies a packet that the index does not list. before is the sequence of the next listed packet.
func (c *copier) unlisted(f found, before uint64) error {
	p, err := scan.ReadAt(c.salvage, f.at, f.end)
	if err != nil {
		return err
	}
	w := reader.ScannedRow(p, min(c.next, before))
	c.report.Unlisted++
	if _, err := c.packet(f, f.name); err != nil {
		return err
	}
	return c.row(f, &w)
}

// listed copies a packet of the index. Its checksum must still be right.
func (c *copier) listed(f found, w *wire.Row) error {
	want, known := c.idx.CRC(c.rows[f.k].row)
	got, err := c.packet(f, w.Name())
	if err != nil {
		return err
	}
	if known {
		if got != want {
			return status.New(status.IO, "%q changes while it is read: packet %.80q at byte %d", c.path, w.Name(), f.at)
		}
		c.report.Verified++
	}
	if f.repaired {
		c.report.Repaired++
	}
	return c.row(f, w)
}

// packet writes the packet's right header, and copies its payload.
func (c *copier) packet(f found, name string) (crc uint32, err error) {
	head := make([]byte, wire.HeaderSize, wire.HeaderSize+len(name))
	wire.PutHeader(head, len(name), uint32(f.end-f.payload))
	if _, err := c.out.Write(append(head, name...)); err != nil {
		return 0, status.FromOS(err, "cannot write the new stream")
	}
	crc, err = c.sum(f.payload, f.end-f.payload, newStream{c.out})
	return crc, err
}

// newStream adds to a failed write's error that it was the new stream's.
type newStream struct{ io.Writer }

func (n newStream) Write(b []byte) (int, error) {
	k, err := n.Writer.Write(b)
	if err != nil {
		err = status.FromOS(err, "cannot write the new stream")
	}
	return k, err
}

func (c *copier) row(f found, w *wire.Row) error {
	w.Offset, w.Length = c.at, uint64(f.end-f.at)
	c.at += f.end - f.at
	c.report.Packets++
	return c.append(w)
}

func (c *copier) append(w *wire.Row) error {
	c.next = w.Sequence + 1
	return c.index.Append(w)
}
