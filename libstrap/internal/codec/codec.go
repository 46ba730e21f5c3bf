// Package codec turns the elements of a tensor into the payload of a packet, and back.
//
//   - kernel.go converts float32 to float16, and round.go rounds to fewer mantissa bits.
//   - gather.go copies a strided tensor to contiguous memory.
//   - lz4.go and zstd.go compress bytes to an LZ4 or zstd frame. zstd.go chooses between match
//     finding and literals.go; repeats.go gives it the estimate for this. frame.go reads frames.
//   - parts.go decodes parts of a payload. excerpt.go finds the blocks that they need.
//   - archive.go, quantise.go and unarchive.go store 16-bit floats as an archive payload, with a
//     bounded error.
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

// Detect returns the kind of the payload that begins with prefix, by the magic number of its
// frame. Without a magic number it returns None. Raw bytes can begin with one by chance.
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

// Headroom returns how many bytes EncodeInPlace needs in addition to n source bytes: the most by
// which a frame of incompressible data is longer than its source.
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

// Front returns how many bytes of the Headroom EncodeInPlace needs in front of the source bytes.
// With exactly this many bytes in front, a single raw block stays in place.
func Front(k Kind, n int) int {
	if k == LZ4 {
		block := lz4BlockSize(int64(n))
		return lz4HeaderSize + 4*((n+block-1)/block)
	}
	return Headroom(k, n)
}

// Surround writes the frame around n raw source bytes, which stay at buf[Front:]. It returns the
// payload's length. ok is false if the format would split the bytes into several blocks.
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

// Encoder compresses payloads without loss, one at a time. Its memory is bounded and reused. It is
// not safe for concurrent use.
type Encoder struct {
	kind  Kind
	lz4   *lz4Encoder
	zstd  *zstdEncoder
	frame sized
	place inPlace
}

// NewEncoder returns an encoder. Level 0 is the fast default. LZ4 also has levels 1 to 9, its high
// compression mode. zstd also has levels 1 to 4, those of klauspost/compress. Level 0 of zstd is
// level 1, but skips match finding if matches would not pay and there are kernels. None has level 0
// alone.
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

// EncodeInPlace compresses the n bytes at buf[from:] to the beginning of buf, and returns the
// payload's length. from is at least Front, and buf at least Headroom longer than n.
//
// The frame is never longer than the bytes that were read by more than the headroom. So writing
// does not overtake reading. If it would, EncodeInPlace fails with status.Internal.
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
	// Hand over whole blocks. An encoder reads a block in full before it writes it. Only the header
	// of a raw block comes before its bytes are read.
	step := lz4BlockSize(int64(n))
	if e.kind == Zstd {
		if step, err = e.zstd.plan(out.source()); err != nil {
			return 0, err
		}
	}
	return out.encode(w, step)
}

const inPlaceBlockHeader = max(4, zstdBlockHeader)

// inPlace writes to the front of a buffer while a source further back is being read.
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

// encode hands the source to w, step bytes at a time. w writes to p. encode returns how many bytes
// w wrote.
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
	if len(b) > 0 && &b[0] != &to[0] { // a raw block can be in its final position
		copy(to, b)
	}
	p.written += len(b)
	return len(b), nil
}

func overtaken(n int) error {
	return status.New(status.Internal, "an encoder writes over %d bytes that it has not read", n)
}

// NewFrame begins a payload of size source bytes, which is written to w piece by piece. Close ends
// the frame, and fails unless size bytes were written. The encoder can make one frame at a time. A
// call of NewFrame without a Close before it leaves the earlier frame unfinished.
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

// plain is the frame of raw bytes. It adds nothing to them.
type plain struct{ io.Writer }

func (plain) Close() error { return nil }

// sized checks that the announced number of bytes is written to a frame.
type sized struct {
	frame io.WriteCloser
	left  int64 // bytes still to come
}

// of begins to count size bytes for another frame.
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

// DecodedSize returns the decoded length that the header of a frame states. prefix begins with the
// header. DecodedSize returns -1 if the header states no length, and for None: there the packet's
// length is the payload's.
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

// Decode decodes a payload into dst, which must have the decoded length. In addition to dst it
// takes at most the memory of a decoder for len(dst) bytes, whatever window the payload claims.
//
// Errors: Corrupt if the payload is not exactly one frame of its kind, or cannot be read.
// Unsupported if the payload needs a dictionary or a window of more than 128 MiB, or is an archive
// of a later version. After an error dst may be partly written.
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

// checkEnd returns nil if r has no more bytes and ends without an error. after is how many bytes were
// decoded before.
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

// withDecoder calls use with the decoded bytes and the length that the frame states, or -1. Then it
// checks that nothing follows the frame. use must read at most limit bytes, and none if the frame
// states more.
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
