// Encodes archive payloads, which hold 16-bit floats with a bounded error.

package codec

import (
	"encoding/binary"
	"io"
	"math"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// An archive payload holds 16-bit floats with a bounded error. Each element has a code of one byte,
// and each block of elements a step. Both are Huffman-coded (quantise.go, literals.go). Little
// endian:
//
//	"SARC" | version u8 | type u8 | block u16 | count u32 | chunk ...
//	chunk: lengths of the three parts, 3 of u32 | scales | codes | exact elements
//
// type is a wire.DType, float16 or bfloat16. block is archiveBlock. count is the number of elements.
// A chunk has archiveChunk elements, the last chunk the rest. Scales are bfloat16, one for each block
// of the chunk. Codes are int8. The exact elements are those whose code is codeExact. Each of the three
// parts is a zstd frame, or empty. In a chunk without scales and codes all elements are exact.
//
// No chunk refers to another one. So a chunk is written as soon as it was read.
const (
	archiveMagic       = 0x43524153
	archiveVersion     = 1
	archiveHeader      = 12
	archiveChunkHeader = 12

	// archiveChunk elements have one Huffman block of codes. It stays in a core's cache together with
	// its source.
	archiveChunk = literalsBlock

	// archiveSlack is by how many bytes a chunk can be longer than its source: its header, and a zstd
	// frame of two raw blocks.
	archiveSlack = archiveChunkHeader + zstdHeaderMax + 2*zstdBlockHeader

	// archiveLeast is the least number of elements in an archive. With fewer the headers take as much
	// as the codes save.
	archiveLeast = 64

	archiveTries = 6       // attempts with smaller and smaller steps to keep the error bound
	archiveTiny  = 1 << 40 // 1/archiveTiny: squares of smaller values vanish in float32

	// ArchiveMaxBound is the largest error bound.
	ArchiveMaxBound = 1e-2
	// ArchiveDefaultBound is the error bound of a session that names none.
	ArchiveDefaultBound = 5e-4
)

// Archives reports whether n elements of type t can be an archive payload. The session stores other
// elements without loss.
func Archives(t wire.DType, n int64) bool {
	return (t == wire.Float16 || t == wire.BFloat16) && n >= archiveLeast
}

// Loss is the error of an archive payload. Its sums are over the finite values, and are never too
// small; see atMost.
type Loss struct {
	Count       int64   // finite values
	SquareError float64 // sum of (value - decoded value)^2
	SquareSum   float64 // sum of value^2
	SquareCoded float64 // sum of value^2 over the values that are not exact
	MaxError    float64 // largest |value - decoded value|
}

// ArchiveEncoder writes archive payloads, one at a time. Its memory is bounded and reused. It is not
// safe for concurrent use.
type ArchiveEncoder struct {
	budget float64 // of the normalised squared error
	frame  *literalsEncoder
	cut    cutter
	sized  sized
	place  inPlace
	w      io.Writer
	dtype  wire.DType
	loss   Loss
	codes  *codeBuffers
	out    []byte // a chunk
}

// NewArchiveEncoder returns an encoder. The sum of squared errors of each chunk, and so of each
// payload, is at most bound times the sum of squares of its values. bound is at most ArchiveMaxBound.
func NewArchiveEncoder(bound float64) *ArchiveEncoder {
	// The elements may have been rounded to float16 before. The error of that, at most 2^-11 of a value
	// that is not subnormal, can add to the error of the codes and to the values here.
	const rounding = 1.0 / (1 << 11)
	left := max(math.Sqrt(bound)-rounding, 0) / (1 + rounding)
	e := &ArchiveEncoder{budget: left * left, frame: newLiteralsEncoder()}
	e.cut.put = e.put
	return e
}

// EncodeInPlace works like Encoder.EncodeInPlace, for elements that Archives accepts.
func (e *ArchiveEncoder) EncodeInPlace(buf []byte, from, n int, t wire.DType) (m int, err error) {
	out := &e.place
	if err := out.begin(Archive, buf, from, n); err != nil {
		return 0, err
	}
	defer func() { out.buf = nil }()
	w, err := e.NewFrame(out, int64(n), t)
	if err != nil {
		return 0, err
	}
	return out.encode(w, 2*archiveChunk)
}

// NewFrame works like Encoder.NewFrame, for elements that Archives accepts. size is in bytes.
func (e *ArchiveEncoder) NewFrame(w io.Writer, size int64, t wire.DType) (io.WriteCloser, error) {
	if !Archives(t, size/2) || size%2 != 0 || size/2 > math.MaxUint32 {
		return nil, status.New(status.Internal, "an archive of %d bytes of %s", size, t)
	}
	e.w, e.dtype, e.loss = w, t, Loss{}
	e.cut.begin(2*archiveChunk, size)
	h := binary.LittleEndian.AppendUint32(e.out[:0], archiveMagic)
	h = append(h, archiveVersion, byte(t))
	h = binary.LittleEndian.AppendUint16(h, archiveBlock)
	h = binary.LittleEndian.AppendUint32(h, uint32(size/2))
	e.out = h
	if _, err := w.Write(h); err != nil {
		return nil, err
	}
	return e.sized.of(&e.cut, size), nil
}

// Loss returns the error of the last payload.
func (e *ArchiveEncoder) Loss() Loss { return e.loss }

// put encodes src as a chunk and writes it.
func (e *ArchiveEncoder) put(src []byte, _ bool) error {
	if e.codes == nil {
		e.codes = newCodeBuffers(archiveChunk)
	}
	b := e.codes.of(len(src) / 2)
	q, ok := e.search(b, src)
	if ok {
		if err := e.chunk(b.scales, b.codes, b.exact[:2*q.exact]); err != nil {
			return err
		}
		ok = len(e.out) < len(src)
	}
	if ok {
		e.count(&q, len(src)/2)
	} else {
		e.countExact(src)
		if err := e.chunk(nil, nil, src); err != nil {
			return err
		}
	}
	_, err := e.w.Write(e.out)
	return err
}

// chunk assembles a chunk in out.
func (e *ArchiveEncoder) chunk(scales, codes, exact []byte) error {
	e.out = append(e.out[:0], make([]byte, archiveChunkHeader)...)
	for i, data := range [...][]byte{scales, codes, exact} {
		length := len(e.out)
		if err := e.append(data); err != nil {
			return err
		}
		binary.LittleEndian.PutUint32(e.out[4*i:], uint32(len(e.out)-length))
	}
	return nil
}

// append appends a zstd frame of data to out, or nothing if data is empty.
func (e *ArchiveEncoder) append(data []byte) error {
	if len(data) == 0 {
		return nil
	}
	if err := e.frame.begin((*appender)(&e.out), int64(len(data))); err != nil {
		return err
	}
	return writeAll(e.frame, data)
}

// appender is a slice to which writes append.
type appender []byte

func (a *appender) Write(b []byte) (int, error) {
	*a = append(*a, b...)
	return len(b), nil
}

// search quantises src with smaller and smaller steps until the error is within the budget. ok is
// false if codes do not pay.
func (e *ArchiveEncoder) search(b *codeBuffers, src []byte) (q quantised, ok bool) {
	spread := 12 * 0.98 * e.budget // rounding makes a squared error of step^2 / 12
	for range archiveTries {
		q = quantise(b, src, e.dtype, spread)
		switch {
		case !q.finite || q.largest != 0 && q.largest < 1.0/archiveTiny || q.exact > len(src)/4:
			return q, false
		case within(q.squareError, q.squareSum, e.budget):
			return q, true
		}
		share := e.budget * q.squareSum / q.squareError
		spread *= share * share
	}
	return q, false
}

// count adds the loss of n quantised values.
func (e *ArchiveEncoder) count(q *quantised, n int) {
	e.loss.Count += int64(n)
	e.loss.SquareError += q.squareError
	e.loss.SquareSum += q.squareSum
	e.loss.SquareCoded += max(q.squareSum-q.squareExact, 0)
	e.loss.MaxError = max(e.loss.MaxError, float64(q.maxError))
}

// countExact counts the finite values of a chunk that is stored exactly.
func (e *ArchiveEncoder) countExact(src []byte) {
	var x [archiveBlock]float32
	for len(src) > 0 {
		n := min(len(src)/2, archiveBlock)
		widen(x[:n], src, e.dtype)
		for _, v := range x[:n] {
			if abs32(v) <= math.MaxFloat32 {
				e.loss.Count++
				e.loss.SquareSum += float64(v) * float64(v)
			}
		}
		src = src[2*n:]
	}
}
