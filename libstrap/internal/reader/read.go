// Finds and decodes the packet of a row.

package reader

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// frameHead is the longest header of an LZ4 (19) or zstd (18) frame.
const frameHead = 19

// packet is a packet that can be read.
type packet struct {
	scan.Packet
	row    wire.Row
	kind   codec.Kind
	crc    uint32
	hasCRC bool
}

// packet finds the packet of row i and checks that it is there.
func (r *Reader) packet(i int) (packet, error) {
	at, scanned, err := r.find(i)
	if err != nil {
		return packet{}, err
	}
	if scanned {
		p := r.found[at]
		return packet{Packet: p, kind: codec.Detect(p.Head())}, nil
	}
	p := packet{row: r.idx.Row(at)}
	if p.row.Offset < 0 && p.row.Error == "" {
		// An empty tensor, which has no packet; see docs/STREAM_FORMAT.md.
		p.Name = p.row.Name()
		return p, nil
	}
	if p.row.Offset < 0 {
		return packet{}, status.New(status.NotFound, "row %d of %q has no packet: %s", i, r.path, p.row.Error)
	}
	if p.Packet, err = r.header(&p.row); err != nil {
		return packet{}, err
	}
	if p.kind, err = codec.ParseKind(p.row.Codec); err != nil {
		return packet{}, status.Wrap(status.Unsupported, err, "packet %s", label(p.Name, p.Offset))
	}
	p.crc, p.hasCRC = r.idx.CRC(at)
	return p, nil
}

func (p *packet) corrupt(format string, args ...any) error {
	return status.New(status.Corrupt, "packet %s: %s", label(p.Name, p.Offset), fmt.Sprintf(format, args...))
}

// DecodedLen returns the number of bytes that ReadInto writes for row i. If a frame does not state it,
// DecodedLen decodes the frame in the memory of a decoder.
//
// Errors: NotFound if there is no row i, or row i is a note; Corrupt; Unsupported if a frame does not state
// its size and has more than 4 GiB; IO.
func (r *Reader) DecodedLen(i int) (int64, error) {
	p, err := r.packet(i)
	if err != nil {
		return 0, err
	}
	return r.decodedLen(&p)
}

func (r *Reader) decodedLen(p *packet) (int64, error) {
	n, err := r.claimedLen(p)
	if err != nil {
		return 0, err
	}
	want, known := tensorLen(&p.row)
	switch {
	case n < 0 && known:
		n = want
	case n < 0:
		return r.measure(p)
	case known && n != want:
		return 0, p.corrupt("its payload holds %d bytes, shape %v of %s has %d", n, p.row.Shape, p.row.Stored, want)
	}
	if n > codec.MaxDecoded(p.kind, int64(p.PayloadLen)) {
		return 0, p.corrupt("its payload of %d bytes claims to hold %d", p.PayloadLen, n)
	}
	return n, nil
}

// claimedLen returns the decoded length that the payload states, or -1.
func (r *Reader) claimedLen(p *packet) (int64, error) {
	if p.kind == codec.None {
		return int64(p.PayloadLen), nil
	}
	head := make([]byte, min(frameHead, int(p.PayloadLen)))
	if _, err := r.f.ReadAt(head, p.PayloadOffset); err != nil {
		return 0, r.readError(err, p.Name, p.Offset)
	}
	n, err := codec.DecodedSize(p.kind, head)
	if err != nil {
		return 0, status.Wrap(status.Corrupt, err, "packet %s", label(p.Name, p.Offset))
	}
	return n, nil
}

// tensorLen returns the decoded length that the row gives. known is false for a part of a tensor, and for
// a packet that was found by scanning.
func tensorLen(w *wire.Row) (n int64, known bool) {
	if w.Shape == nil || !w.Stored.Valid() || w.Parts > 1 {
		return 0, false
	}
	return wire.TensorLen(w.Shape, w.Stored), true
}

// measure decodes a payload to find its decoded length. It does not keep the bytes.
func (r *Reader) measure(p *packet) (int64, error) {
	src := r.payload(p)
	defer src.release()
	n, err := codec.Count(p.kind, src.buf, int64(p.PayloadLen))
	if err := r.outcome(p, src, err); err != nil {
		return 0, err
	}
	return n, nil
}

// ReadInto decodes the packet of row i into dst, which must have DecodedLen(i) bytes. If the index has a
// checksum of the packet, ReadInto compares it.
//
// Errors: InvalidArgument if dst has another length; NotFound if there is no row i, or row i is a note;
// Corrupt, Unsupported, IO. After an error dst may be partly written.
func (r *Reader) ReadInto(i int, dst []byte) error {
	p, err := r.packet(i)
	if err != nil {
		return err
	}
	n, err := r.decodedLen(&p)
	if err != nil {
		return err
	}
	if int64(len(dst)) != n {
		return status.New(status.InvalidArgument, "%d bytes for packet %s, which has %d", len(dst), label(p.Name, p.Offset), n)
	}
	src := r.payload(&p)
	defer src.release()
	return r.outcome(&p, src, codec.Decode(dst, p.kind, src.buf))
}

// outcome reads the rest of a payload for its checksum, and returns the error of the decoding.
func (r *Reader) outcome(p *packet, src *source, decoded error) error {
	if p.hasCRC {
		// An error of reading is kept in src.
		_, _ = io.Copy(io.Discard, src.buf)
	}
	return r.verdict(p, src.err, true, src.sum, decoded)
}

// verdict returns the error of a decoding. file, the error of reading, goes first. Then comes a wrong
// checksum, because it explains any error of the codec. sum is the checksum if whole is true: then all of
// the payload was read.
func (r *Reader) verdict(p *packet, file error, whole bool, sum uint32, decoded error) error {
	switch {
	case file != nil:
		return r.readError(file, p.Name, p.Offset)
	case whole && p.hasCRC && sum != p.crc:
		return p.corrupt("its payload has checksum %08x, the index says %08x", sum, p.crc)
	case decoded != nil:
		code := status.Corrupt
		if c := status.CodeOf(decoded); c != status.Internal {
			code = c
		}
		return status.Wrap(code, decoded, "packet %s", label(p.Name, p.Offset))
	}
	return nil
}

// source reads a payload. It computes the checksum, and keeps the file's error, because a codec may hide
// it.
type source struct {
	section io.SectionReader
	buf     *bufio.Reader
	sum     uint32
	err     error
}

func (s *source) Read(b []byte) (int, error) {
	n, err := s.section.Read(b)
	s.sum = crc32c.Update(s.sum, b[:n])
	if err != nil && !errors.Is(err, io.EOF) {
		s.err = err
	}
	return n, err
}

var sources = sync.Pool{New: func() any {
	s := &source{}
	s.buf = bufio.NewReaderSize(s, 128<<10)
	return s
}}

func (r *Reader) payload(p *packet) *source {
	s := sources.Get().(*source)
	s.section = *io.NewSectionReader(r.f, p.PayloadOffset, int64(p.PayloadLen))
	s.sum, s.err = 0, nil
	s.buf.Reset(s)
	return s
}

func (s *source) release() {
	s.section = io.SectionReader{}
	sources.Put(s)
}
