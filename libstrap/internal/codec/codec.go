// Package codec turns tensor elements into the payload of a packet and back:
// float32 to float16 (kernel.go), strided to contiguous (gather.go), and bytes to
// one raw, LZ4 or zstd payload (lz4.go, zstd.go).
package codec

import (
	"bytes"
	"io"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Kind is the form of a payload. The values are those of strap_codec in strap.h.
type Kind uint8

const (
	None Kind = iota // raw bytes
	LZ4              // one LZ4 frame
	Zstd             // one zstd frame
)

var kindNames = [...]string{None: "none", LZ4: "lz4", Zstd: "zstd"}

// String is the name that the index carries.
func (k Kind) String() string {
	if int(k) >= len(kindNames) {
		return "invalid"
	}
	return kindNames[k]
}

// ParseKind is the inverse of String.
func ParseKind(name string) (Kind, error) {
	for k, n := range kindNames {
		if n == name {
			return Kind(k), nil
		}
	}
	return 0, status.New(status.InvalidArgument, "codec %q: choose none, lz4 or zstd", name)
}

// Detect tells the kind of a payload by the magic number of its frame; None where
// there is none, which raw bytes can also begin with by chance.
func Detect(prefix []byte) Kind {
	if len(prefix) >= 4 {
		switch le32(prefix) {
		case lz4Magic:
			return LZ4
		case zstdMagic:
			return Zstd
		}
	}
	return None
}

func le32(b []byte) uint32 {
	return uint32(b[0]) | uint32(b[1])<<8 | uint32(b[2])<<16 | uint32(b[3])<<24
}

// Headroom is how many bytes of space EncodeInPlace needs in front of n source
// bytes: what a frame of incompressible data adds.
func Headroom(k Kind, n int) int {
	switch k {
	case LZ4:
		return lz4HeaderSize + 4*(n/lz4BlockSize(n)+1) + lz4EndSize
	case Zstd:
		return zstdHeaderMax + zstdBlockHeader*(n/zstdBlockSize+2)
	default:
		return 0
	}
}

// Encoder compresses payloads, one at a time; its memory is bounded and reused.
type Encoder struct {
	kind Kind
	lz4  lz4Blocks
	zstd zstdEncoders
}

// NewEncoder returns an encoder. Level 0 is the fast default; LZ4 takes 1 to 9
// (the high compression mode), zstd 1 to 4 (klauspost/compress levels), and
// none takes no level.
func NewEncoder(k Kind, level int) (*Encoder, error) {
	e := &Encoder{kind: k}
	var err error
	switch k {
	case None:
		if level != 0 {
			err = status.New(status.InvalidArgument, "level = %d: raw payloads have no level", level)
		}
	case LZ4:
		err = e.lz4.setLevel(level)
	case Zstd:
		e.zstd, err = newZstdEncoders(level)
	default:
		err = status.New(status.InvalidArgument, "codec = %d: give none, lz4 or zstd", k)
	}
	if err != nil {
		return nil, err
	}
	return e, nil
}

// Kind is what the encoder writes.
func (e *Encoder) Kind() Kind { return e.kind }

// EncodeInPlace compresses the n bytes at the end of buf and leaves the payload at
// its beginning; buf must be Headroom longer than n. A raw payload of m = n bytes
// stays at the end where it is.
//
// This works because a frame never grows past what it has consumed by more than
// the headroom, so writing does not overtake reading.
func (e *Encoder) EncodeInPlace(buf []byte, n int) (m int, err error) {
	if n < 0 || n+Headroom(e.kind, n) > len(buf) {
		return 0, status.New(status.Internal, "%d bytes of space for a source of %d", len(buf), n)
	}
	if e.kind == None {
		return n, nil
	}
	src := buf[len(buf)-n:]
	out := &inPlace{buf: buf, consumed: len(buf) - n}
	w, err := e.newFrame(out, int64(n), lz4BlockSize(n))
	if err != nil {
		return 0, err
	}
	// Hand over a piece at a time, so that out knows what has been consumed.
	for len(src) > 0 {
		piece := min(len(src), inPlaceStep(e.kind, n))
		out.consumed = len(buf) - len(src) + piece
		if _, err := w.Write(src[:piece]); err != nil {
			return 0, err
		}
		src = src[piece:]
	}
	out.consumed = len(buf)
	if err := w.Close(); err != nil {
		return 0, err
	}
	return out.written, nil
}

func inPlaceStep(k Kind, n int) int {
	if k == LZ4 {
		return lz4BlockSize(n)
	}
	return zstdBlockSize
}

// inPlace writes to the front of a buffer whose end is still being read.
type inPlace struct {
	buf      []byte
	written  int
	consumed int // bytes of buf that may be overwritten
}

func (p *inPlace) Write(b []byte) (int, error) {
	if p.written+len(b) > p.consumed {
		return 0, status.New(status.Internal,
			"an encoder wrote %d bytes before it had read them", p.written+len(b)-p.consumed)
	}
	p.written += copy(p.buf[p.written:], b)
	return len(b), nil
}

// NewFrame starts a payload of size source bytes that is written to w piece by
// piece. Close ends the frame and fails unless size bytes were written. The
// encoder takes no other work meanwhile.
func (e *Encoder) NewFrame(w io.Writer, size int64) (io.WriteCloser, error) {
	block := lz4MaxBlock
	if size < int64(block) {
		block = lz4BlockSize(int(size))
	}
	return e.newFrame(w, size, block)
}

func (e *Encoder) newFrame(w io.Writer, size int64, block int) (io.WriteCloser, error) {
	switch e.kind {
	case LZ4:
		return e.lz4.newFrame(w, size, block)
	case Zstd:
		if size == 0 {
			_, err := w.Write(zstdEmptyFrame)
			return &sized{w: w}, err
		}
		z := e.zstd.pick(size)
		z.ResetContentSize(w, size)
		return &sized{w: z, closer: z, left: size}, nil
	default:
		return &sized{w: w, left: size}, nil
	}
}

// sized checks that exactly the announced bytes are written.
type sized struct {
	w      io.Writer
	closer io.Closer
	left   int64
}

func (s *sized) Write(b []byte) (int, error) {
	if int64(len(b)) > s.left {
		return 0, status.New(status.Internal, "%d bytes more than announced", int64(len(b))-s.left)
	}
	n, err := s.w.Write(b)
	s.left -= int64(n)
	return n, err
}

func (s *sized) Close() error {
	if s.left != 0 {
		return status.New(status.Internal, "%d bytes less than announced", s.left)
	}
	if s.closer != nil {
		return s.closer.Close()
	}
	return nil
}

// DecodedSize is the length of the decoded payload that a frame's header states;
// -1 where it states none. For None it is unknown here: the packet has it.
func DecodedSize(k Kind, prefix []byte) (int64, error) {
	switch k {
	case LZ4:
		return lz4DecodedSize(prefix)
	case Zstd:
		return zstdDecodedSize(prefix)
	default:
		return -1, nil
	}
}

// Decode decodes a payload into dst, which must have its exact length.
// status.Corrupt says that the payload is not one such frame.
func Decode(dst []byte, k Kind, payload io.Reader) error {
	return withDecoder(k, payload, func(r io.Reader) error {
		if n, err := io.ReadFull(r, dst); err != nil {
			return corrupt(err, "the payload ends after %d of %d bytes", n, len(dst))
		}
		var more [1]byte
		switch n, err := io.ReadFull(r, more[:]); {
		case n > 0:
			return corrupt(nil, "the payload has more than %d bytes", len(dst))
		case err != io.EOF:
			return corrupt(err, "the payload does not end well")
		}
		return nil
	})
}

// DecodeUnknown decodes a payload whose length is not known, of at most limit
// bytes.
func DecodeUnknown(k Kind, payload io.Reader, limit int64) (data []byte, err error) {
	err = withDecoder(k, payload, func(r io.Reader) error {
		if data, err = io.ReadAll(io.LimitReader(r, limit+1)); err != nil {
			return corrupt(err, "the payload breaks off after %d bytes", len(data))
		}
		if int64(len(data)) > limit {
			return corrupt(nil, "the payload has more than %d bytes", limit)
		}
		return nil
	})
	return data, err
}

// withDecoder gives f the decoded bytes of a payload, which must begin with the
// frame and end with it.
func withDecoder(k Kind, payload io.Reader, f func(io.Reader) error) error {
	decode := withLZ4
	switch k {
	case None:
		return f(payload)
	case LZ4:
	case Zstd:
		decode = withZstd
	default:
		return status.New(status.InvalidArgument, "codec = %d: give none, lz4 or zstd", k)
	}
	// The libraries take an empty input for an empty result, and skip frames that
	// are not of the kind.
	magic := make([]byte, 4)
	if _, err := io.ReadFull(payload, magic); err != nil || Detect(magic) != k {
		return corrupt(err, "the payload does not begin with a %s frame", k)
	}
	if err := decode(io.MultiReader(bytes.NewReader(magic), payload), f); err != nil {
		return err
	}
	if n, _ := io.ReadFull(payload, magic[:1]); n > 0 {
		return corrupt(nil, "bytes stand behind the payload's frame")
	}
	return nil
}

func corrupt(cause error, format string, args ...any) error {
	return status.Wrap(status.Corrupt, cause, format, args...)
}
