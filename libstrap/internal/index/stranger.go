// Tells whether an index is that of a stream, or a stranger to it.

package index

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// stranger returns the reason why f is not the index of a stream that is cut to cut bytes, or "". f is its
// index if the first packet has the checksum in the index, and each kept row has a packet of its offset,
// length and name. packets are the kept rows that have a packet, and end is the end of the last of these
// packets.
func (f *File) stranger(stream io.ReaderAt, cut int64, packets []int, end int64) (reason string, err error) {
	if want, known := f.FirstCRC(); known {
		got, there, err := firstSum(stream, cut)
		if err != nil {
			return "", err
		}
		if there && got != want {
			return fmt.Sprintf("its first packet has checksum %08x, that of the stream %08x", want, got), nil
		}
	}
	missing := func(row int, offset int64) {
		reason = fmt.Sprintf("row %d has a packet at byte %d, where none of the stream begins", row, offset)
	}
	next := 0 // of packets
	_, err = scan.Packets(stream, 0, end, func(p scan.Packet) error {
		if next == len(packets) || reason != "" {
			return nil
		}
		row := packets[next]
		switch offset, length := f.place(row); {
		case offset < p.Offset:
			missing(row, offset)
		case offset > p.Offset: // a packet that no row lists
		case length != p.End()-p.Offset:
			reason = fmt.Sprintf("row %d has a packet of %d bytes at byte %d, the stream one of %d",
				row, length, offset, p.End()-p.Offset)
		default:
			if name := f.packetName(row); name != p.Name {
				reason = fmt.Sprintf("row %d has the packet %.80q at byte %d, the stream %.80q", row, name, offset, p.Name)
			}
			next++
		}
		return nil
	})
	var tear *scan.Tear
	if err != nil && !errors.As(err, &tear) {
		return "", err
	}
	if reason == "" && next < len(packets) {
		offset, _ := f.place(packets[next])
		missing(packets[next], offset)
	}
	return reason, nil
}

// Begins reports whether there is an index at path that lists the first packet of the stream, or no packet
// yet. It reads the index up to its first rows.
func Begins(path string, stream io.ReaderAt) bool {
	f, err := openRegular(path, os.O_RDONLY)
	if err != nil {
		return false
	}
	defer f.Close()
	idx, err := beginning(f)
	if err != nil {
		return false
	}
	begins := true
	idx.Extents(func(row int, offset, end int64) bool {
		name := idx.packetName(row)
		length := end - offset - wire.HeaderSize - int64(len(name))
		if begins = length >= 0 && length <= wire.MaxPayload; !begins {
			return false
		}
		want := make([]byte, wire.HeaderSize, wire.HeaderSize+len(name))
		wire.PutHeader(want, len(name), uint32(length))
		want = append(want, name...)
		got := make([]byte, len(want))
		n, err := stream.ReadAt(got, offset)
		begins = n > 0 && (err == nil || errors.Is(err, io.EOF)) && bytes.Equal(got[:n], want[:n])
		return false
	})
	return begins
}

// beginning reads an index up to its first rows, or to its end. The error is Corrupt if f does not begin as
// an index.
func beginning(f *os.File) (*File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, status.FromOS(err, "cannot stat the index %q", f.Name())
	}
	for n := int64(beginningBytes); ; n *= 4 {
		b := make([]byte, min(n, info.Size()))
		if _, err := f.ReadAt(b, 0); err != nil {
			return nil, status.FromOS(err, "cannot read the index %q", f.Name())
		}
		var budget memory.Budget
		idx, bad := parse(held(b), &budget)
		if bad != nil || (!idx.Begun() && n >= info.Size()) {
			return nil, status.New(status.Corrupt, "%q is no index of a capture", f.Name())
		}
		if idx.NumRows() > 0 || idx.Damaged || n >= info.Size() {
			return idx, nil
		}
	}
}

// beginningBytes is how many bytes are read at first. They have the schema and the first rows of most indexes.
const beginningBytes = 64 << 10

// FirstCRC returns the checksum of the packet at offset 0, from the packet's row, or from the metadata that
// earlier releases wrote. known is false if the index has neither.
func (f *File) FirstCRC() (crc uint32, known bool) {
	if f.md.HasFirst {
		return f.md.FirstCRC, true
	}
	f.Extents(func(row int, offset, _ int64) bool {
		if offset == 0 {
			crc, known = f.CRC(row)
		}
		return false
	})
	return crc, known
}

// firstSum returns the checksum of the first packet of a stream. there is false for an empty stream.
func firstSum(stream io.ReaderAt, size int64) (crc uint32, there bool, err error) {
	p, err := scan.ReadAt(stream, 0, size)
	if errors.Is(err, status.Corrupt) || size == 0 {
		return 0, false, nil
	}
	if err != nil {
		return 0, false, err
	}
	var sum crc32c.Sum
	if _, err := io.Copy(&sum, io.NewSectionReader(stream, p.PayloadOffset, int64(p.PayloadLen))); err != nil {
		return 0, false, status.FromOS(err, "cannot read the first packet of the stream")
	}
	return uint32(sum), true, nil
}
