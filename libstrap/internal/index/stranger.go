package index

import (
	"errors"
	"fmt"
	"io"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// stranger says why f is not the index of a stream that was cut to cut bytes, or "" where
// it is: the first packet has the checksum that the index knows, and each kept row stands
// for a packet of its place, length and name. packets are the kept rows that have a packet,
// and end is where the last of those ends.
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

// FirstCRC is the checksum of the packet at offset 0, where the index knows it: in its row,
// or in the metadata that earlier releases wrote.
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

// firstSum is the checksum of the first packet of a stream; there is none in an empty one.
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
