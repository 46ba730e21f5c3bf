// Package scan walks the packets of a stream without an index.
package scan

import (
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// Packet describes one complete packet of a stream.
type Packet struct {
	Offset        int64 // of the header
	Name          string
	PayloadOffset int64
	PayloadLen    uint32
	// Magic has the first bytes of the payload, which show its codec. If the payload is shorter, the
	// rest is zero.
	Magic [4]byte
}

// End returns the offset of the first byte behind the packet.
func (p Packet) End() int64 { return p.PayloadOffset + int64(p.PayloadLen) }

// Head returns the first bytes of the payload, at most four.
func (p Packet) Head() []byte { return p.Magic[:min(len(p.Magic), int(p.PayloadLen))] }

// Tear is the error for bytes that are no complete packet. Offset is where they begin. errors.Is finds
// status.Corrupt in it.
type Tear struct {
	Offset int64
	Reason string
}

func (t *Tear) Error() string {
	return fmt.Sprintf("no complete packet at byte %d: %s", t.Offset, t.Reason)
}

// Unwrap makes errors.Is(err, status.Corrupt) true.
func (t *Tear) Unwrap() error { return status.Corrupt }

const (
	minWindow = 4 << 10
	maxWindow = 1 << 20
	// crowd is how many reads one window must serve before the next window is larger.
	crowd = 8
	// maxInterned is the most bytes of names that are kept for reuse.
	maxInterned = 16 << 20
)

// Packets calls fn for each complete packet of r from the offset from, in order. It returns the end of the
// last complete packet. r has size bytes. Packets does not read payloads, except the parts that are in one
// window with a header.
//
// The error is a *Tear if bytes remain behind end, or an error of fn, or of reading r.
func Packets(r io.ReaderAt, from, size int64, fn func(Packet) error) (end int64, err error) {
	w := window{r: r, size: size, least: minWindow}
	names := interner{}
	for end = from; end < size; {
		p, err := next(&w, &names, end)
		if err != nil {
			return end, err
		}
		if err := fn(p); err != nil {
			return end, err
		}
		end = p.End()
	}
	return end, nil
}

// next reads the packet at offset at.
func next(w *window, names *interner, at int64) (Packet, error) {
	torn := func(format string, args ...any) error {
		return &Tear{Offset: at, Reason: fmt.Sprintf(format, args...)}
	}
	left := w.size - at
	if left < wire.HeaderSize {
		return Packet{}, torn("the header is cut off, %d of %d bytes are there", left, wire.HeaderSize)
	}
	head, err := w.bytes(at, wire.HeaderSize)
	if err != nil {
		return Packet{}, err
	}
	n, d := wire.Header(head)
	length := wire.HeaderSize + int64(n) + int64(d)
	switch {
	case n == 0 && d == 0:
		return Packet{}, torn("six zero bytes, as in a hole of a file")
	case d == wire.Unfinished:
		return Packet{}, torn("its writing was not finished")
	case wire.HeaderSize+int64(n) > left:
		return Packet{}, torn("the name is cut off, %d of %d bytes are there", left-wire.HeaderSize, n)
	case length > left:
		return Packet{}, torn("it claims %d bytes, %d are there", length, left)
	}
	p := Packet{Offset: at, PayloadOffset: at + wire.HeaderSize + int64(n), PayloadLen: d}
	lead := min(len(p.Magic), int(d))
	b, err := w.bytes(at, wire.HeaderSize+n+lead)
	if err != nil {
		return Packet{}, err
	}
	name := b[wire.HeaderSize : wire.HeaderSize+n]
	if !utf8.Valid(name) {
		return Packet{}, torn("the name %.80q is not UTF-8", name)
	}
	p.Name = names.intern(name)
	copy(p.Magic[:], b[wire.HeaderSize+n:])
	return p, nil
}

// ReadAt reads the packet at offset at of r, which has size bytes. Its errors are those of Packets.
func ReadAt(r io.ReaderAt, at, size int64) (Packet, error) {
	w := window{r: r, size: size, least: 256}
	return next(&w, &interner{}, at)
}

// window is a range of the file in memory. It grows while packets are small, so that a million of them
// need few reads. Behind a large payload, which is skipped, it is small again.
type window struct {
	r     io.ReaderAt
	size  int64 // of the file
	least int   // least bytes of a read
	at    int64 // offset of buf in the file
	buf   []byte
	want  int // bytes of the next read
	hits  int // how often buf had the wanted bytes
}

// bytes returns n bytes at offset at, valid until the next call. size says that the file has them.
func (w *window) bytes(at int64, n int) ([]byte, error) {
	if at >= w.at && at+int64(n) <= w.at+int64(len(w.buf)) {
		w.hits++
		return w.buf[at-w.at:][:n], nil
	}
	if w.hits >= crowd && at < w.at+2*int64(len(w.buf)) {
		w.want = min(2*w.want, maxWindow)
	} else {
		w.want = w.least
	}
	w.hits = 0
	length := int(min(int64(max(w.want, n)), w.size-at))
	if cap(w.buf) < length {
		w.buf = make([]byte, length)
	}
	w.at, w.buf = at, w.buf[:length]
	if got, err := w.r.ReadAt(w.buf, at); got < length {
		w.buf = w.buf[:0]
		if errors.Is(err, io.EOF) {
			err = io.ErrUnexpectedEOF
		}
		return nil, status.FromOS(err, "cannot read %d bytes at %d of the stream", length, at)
	}
	return w.buf[:n], nil
}

// interner returns the same string for equal names. A stream has few names and many packets.
type interner struct {
	names map[string]string
	bytes int
}

func (in *interner) intern(b []byte) string {
	if s, ok := in.names[string(b)]; ok {
		return s
	}
	if in.names == nil || in.bytes > maxInterned {
		in.names, in.bytes = make(map[string]string), 0
	}
	s := string(b)
	in.names[s] = s
	in.bytes += len(s)
	return s
}
