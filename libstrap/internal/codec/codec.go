// Package codec turns tensor elements into the payload of a packet and back:
// float32 to float16 (kernel.go), strided to contiguous (gather.go), bytes to
// one raw, LZ4 or zstd payload (lz4.go; zstd.go, which chooses between match finding and
// literals.go by repeats.go; frame.go), and 16-bit floats to an archive payload, which
// loses a bounded part of them (archive.go, quantise.go, unarchive.go).
package codec

import (
	"bytes"
	"encoding/binary"
	"io"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Kind is the form of a payload. The values are those of strap_codec in strap.h.
type Kind uint8

const (
	None    Kind = iota // raw bytes
	LZ4                 // one LZ4 frame
	Zstd                // one zstd frame
	Archive             // see archive.go
)

var kindNames = [...]string{None: "none", LZ4: "lz4", Zstd: "zstd", Archive: "archive"}

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
	return 0, status.New(status.InvalidArgument, "codec %q: choose none, lz4, zstd or archive", name)
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
		case archiveMagic:
			return Archive
		}
	}
	return None
}

func le32(b []byte) uint32 { return binary.LittleEndian.Uint32(b) }

// Headroom is how many bytes of space EncodeInPlace needs beside n source bytes: what a
// frame of incompressible data adds.
func Headroom(k Kind, n int) int {
	switch k {
	case LZ4:
		return lz4HeaderSize + 4*(n/lz4BlockSize(int64(n))+1) + lz4EndSize
	case Zstd:
		return zstdHeaderMax + zstdBlockHeader*(n/zstdBlockSize+2)
	case Archive:
		return archiveHeader + archiveSlack*(n/(2*archiveChunk)+1)
	default:
		return 0
	}
}

// Front is how much of the Headroom EncodeInPlace needs in front of the source bytes. Where
// it is no more, what stays raw as one block need not be moved.
func Front(k Kind, n int) int {
	if k == LZ4 {
		block := lz4BlockSize(int64(n))
		return lz4HeaderSize + 4*((n+block-1)/block)
	}
	return Headroom(k, n)
}

// Surround makes the payload of n source bytes that stay raw and where they are, at buf[Front:],
// and returns its length. ok is false where a format does not keep them in one piece.
func Surround(k Kind, buf []byte, n int) (length int, ok bool) {
	switch {
	case !Surrounds(k, n):
		return 0, false
	case k == LZ4:
		return surroundLZ4(buf, n), true
	default:
		return n, true
	}
}

// Surrounds reports whether Surround can make a payload of n source bytes.
func Surrounds(k Kind, n int) bool {
	return k == None || k == LZ4 && 0 < n && n <= lz4MaxBlock
}

// Encoder compresses payloads without loss, one at a time; its memory is bounded and
// reused. It is not for concurrent use.
type Encoder struct {
	kind  Kind
	lz4   *lz4Encoder
	zstd  *zstdEncoder
	frame sized
	place inPlace
}

// NewEncoder returns an encoder. Level 0 is the fast default; LZ4 takes 1 to 9
// (the high compression mode), zstd 1 to 4 (klauspost/compress levels; level 0
// looks for matches as level 1 does, but only where they pay, or where there are no
// kernels), and none takes no level.
func NewEncoder(k Kind, level int) (*Encoder, error) {
	e := &Encoder{kind: k}
	var err error
	switch k {
	case None:
		if level != 0 {
			err = status.New(status.InvalidArgument, "level = %d: raw payloads have no level", level)
		}
	case LZ4:
		e.lz4, err = newLZ4Encoder(level)
	case Zstd:
		e.zstd, err = newZstdEncoder(level)
	case Archive:
		err = status.New(status.InvalidArgument, "codec = archive: it takes a tensor of a capture, not bytes")
	default:
		err = unknownKind(k)
	}
	if err != nil {
		return nil, err
	}
	return e, nil
}

// EncodeInPlace compresses the n bytes at buf[from:], from at least Front, and leaves the
// payload at the beginning of buf, which must be at least Headroom longer than n.
//
// This works because a frame never grows past what it has consumed by more than
// the headroom, so writing does not overtake reading. Were it to, the answer is
// status.Internal.
func (e *Encoder) EncodeInPlace(buf []byte, from, n int) (m int, err error) {
	out := &e.place
	if err := out.begin(e.kind, buf, from, n); err != nil {
		return 0, err
	}
	defer func() { out.buf = nil }()
	if e.kind == None {
		out.consumed = out.to
		return out.Write(out.source())
	}
	w, err := e.NewFrame(out, int64(n))
	if err != nil {
		return 0, err
	}
	// Hand over blocks, which an encoder has read in full when it writes them,
	// but for the header in front of one that stays raw.
	step := lz4BlockSize(int64(n))
	if e.kind == Zstd {
		if step, err = e.zstd.plan(out.source()); err != nil {
			return 0, err
		}
	}
	return out.encode(w, step)
}

const inPlaceBlockHeader = max(4, zstdBlockHeader)

// inPlace writes to the front of a buffer while a source behind it is still being read.
type inPlace struct {
	buf      []byte
	from, to int // the source
	written  int
	consumed int // bytes of buf that may be overwritten
}

func (p *inPlace) begin(k Kind, buf []byte, from, n int) error {
	if n < 0 || from < Front(k, n) || from+n > len(buf) || n+Headroom(k, n) > len(buf) {
		return status.New(status.Internal, "%d bytes of space for a source of %d at %d", len(buf), n, from)
	}
	*p = inPlace{buf: buf, from: from, to: from + n, consumed: from}
	return nil
}

func (p *inPlace) source() []byte { return p.buf[p.from:p.to] }

// encode hands the source to w, which writes to p, step bytes at a time; it returns how
// many were written.
func (p *inPlace) encode(w io.WriteCloser, step int) (int, error) {
	for start := p.from; start < p.to; {
		if p.written+inPlaceBlockHeader > start {
			return 0, overtaken(p.written + inPlaceBlockHeader - start)
		}
		end := min(start+step, p.to)
		p.consumed = end
		if _, err := w.Write(p.buf[start:end]); err != nil {
			return 0, err
		}
		start = end
	}
	p.consumed = len(p.buf)
	if err := w.Close(); err != nil {
		return 0, err
	}
	return p.written, nil
}

func (p *inPlace) Write(b []byte) (int, error) {
	if over := p.written + len(b) - p.consumed; over > 0 {
		return 0, overtaken(over)
	}
	to := p.buf[p.written:]
	if len(b) > 0 && &b[0] != &to[0] { // it may stand there already
		copy(to, b)
	}
	p.written += len(b)
	return len(b), nil
}

func overtaken(n int) error {
	return status.New(status.Internal, "an encoder writes over %d bytes that it has not read", n)
}

// NewFrame starts a payload of size source bytes that is written to w piece by
// piece. Close ends the frame and fails unless size bytes were written. The
// encoder takes no other work meanwhile; the next one may begin without a Close,
// which leaves the frame unfinished.
func (e *Encoder) NewFrame(w io.Writer, size int64) (io.WriteCloser, error) {
	frame, err := e.begin(w, size)
	if err != nil {
		return nil, err
	}
	return e.frame.of(frame, size), nil
}

func (e *Encoder) begin(w io.Writer, size int64) (io.WriteCloser, error) {
	switch e.kind {
	case LZ4:
		return e.lz4, e.lz4.begin(w, size)
	case Zstd:
		return e.zstd, e.zstd.begin(w, size)
	default:
		return plain{w}, nil
	}
}

// plain is the frame of raw bytes, which is these bytes.
type plain struct{ io.Writer }

func (plain) Close() error { return nil }

// sized checks that the announced number of bytes is written to a frame.
type sized struct {
	frame io.WriteCloser
	left  int64 // bytes still to come
}

// of begins anew with a frame for size bytes.
func (s *sized) of(frame io.WriteCloser, size int64) *sized {
	s.frame, s.left = frame, size
	return s
}

func (s *sized) Write(b []byte) (int, error) {
	if int64(len(b)) > s.left {
		return 0, status.New(status.Internal, "%d bytes more than announced", int64(len(b))-s.left)
	}
	n, err := s.frame.Write(b)
	s.left -= int64(n)
	return n, err
}

// Close ends the frame.
func (s *sized) Close() error {
	if s.left != 0 {
		return status.New(status.Internal, "%d bytes less than announced", s.left)
	}
	return s.frame.Close()
}

// DecodedSize is the length of the decoded payload that a frame's header, within
// prefix, states; -1 where it states none. For None it is unknown here: the
// packet has it.
func DecodedSize(k Kind, prefix []byte) (int64, error) {
	switch k {
	case None:
		return -1, nil
	case LZ4, Zstd:
		f, err := openFrame(k, bytes.NewReader(prefix))
		if err != nil {
			return 0, err
		}
		return f.size, nil
	case Archive:
		h, err := parseArchive(prefix)
		return 2 * h.count, err
	default:
		return 0, unknownKind(k)
	}
}

// Decode decodes a payload into dst, which must have its exact length. Beside dst it takes no more
// memory than a decoder of so many bytes needs, whatever window the payload claims.
//
// Errors: Corrupt where the payload is not one such frame and nothing else (or
// cannot be read), Unsupported where it needs a dictionary, or a window of more
// than 128 MiB, or is an archive of a later version. dst may be partly written then.
func Decode(dst []byte, k Kind, payload io.Reader) error {
	return withDecoder(k, payload, int64(len(dst)), func(r io.Reader, size int64) error {
		if size >= 0 && size != int64(len(dst)) {
			return corrupt(nil, "the payload holds %d bytes, not %d", size, len(dst))
		}
		if n, err := io.ReadFull(r, dst); err != nil {
			return corrupt(unexpected(err), "the payload ends after %d of %d bytes", n, len(dst))
		}
		return checkEnd(r, int64(len(dst)))
	})
}

// checkEnd is nil if r has no more bytes and ends well.
func checkEnd(r io.Reader, after int64) error {
	var more [1]byte
	switch n, err := io.ReadFull(r, more[:]); {
	case n > 0:
		return corrupt(nil, "the payload has more than %d bytes", after)
	case err != io.EOF:
		return corrupt(err, "the payload does not end well")
	}
	return nil
}

// withDecoder gives use the decoded bytes and the length that the frame states,
// or -1. It then checks that nothing stands behind the frame. use takes at most limit bytes, and
// reads none where the frame states more.
func withDecoder(k Kind, payload io.Reader, limit int64, use func(r io.Reader, size int64) error) error {
	var err error
	switch k {
	case None:
		return use(payload, -1)
	case LZ4:
		err = withFrame(k, withLZ4, payload, limit, use)
	case Zstd:
		err = withFrame(k, withZstd, payload, limit, use)
	case Archive:
		err = withArchive(payload, use)
	default:
		return unknownKind(k)
	}
	if err != nil {
		return err
	}
	var more [1]byte
	switch n, err := io.ReadFull(payload, more[:]); {
	case n > 0:
		return corrupt(nil, "bytes stand behind the payload's end (codec %s)", k)
	case err != io.EOF:
		return corrupt(err, "the end of the payload cannot be read")
	}
	return nil
}

func withFrame(k Kind, with func(*frame, func(io.Reader) error) error, payload io.Reader,
	limit int64, use func(r io.Reader, size int64) error) error {
	f, err := openFrame(k, payload)
	if err != nil {
		return err
	}
	f.narrow(limit)
	return with(f, func(r io.Reader) error { return use(r, f.size) })
}

func corrupt(cause error, format string, args ...any) error {
	return status.Wrap(status.Corrupt, cause, format, args...)
}

func unknownKind(k Kind) error {
	return status.New(status.InvalidArgument, "codec = %d: give none, lz4, zstd or archive", k)
}
