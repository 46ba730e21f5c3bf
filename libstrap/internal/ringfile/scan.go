// Finds the packets of a ring file.

package ringfile

import (
	"errors"
	"io"
)

// windowSize is the bytes that a scan reads at a time.
const windowSize = 256 << 10

// Reader reads the packets of a ring file. It is not safe for concurrent use.
type Reader struct {
	key key
	w   window
}

// NewReader returns a reader of a file with this head, of size bytes.
func NewReader(r io.ReaderAt, size int64, head *Head) (*Reader, error) {
	k, err := newKey(head.CaptureID)
	return &Reader{key: k, w: window{r: r, size: size}}, err
}

// Scan calls found with the record of each packet, in the order of their places. It does not read their
// elements. It leaves damaged records out.
//
// Scan looks at each multiple of Align that is not in a packet. Its work is linear in the bytes of the file.
func (r *Reader) Scan(found func(*Record) error) error {
	for at := int64(HeadSize); r.w.size-at >= fixedSize; {
		rec, ok, err := r.Record(at)
		if err != nil {
			return err
		}
		if !ok {
			at += Align
			continue
		}
		if err := found(&rec); err != nil {
			return err
		}
		at = (rec.At + rec.Bytes + Align - 1) / Align * Align
	}
	return nil
}

// Record reads the record at an offset. ok is false if there is none, or a damaged one.
func (r *Reader) Record(at int64) (rec Record, ok bool, err error) {
	w := &r.w
	if w.size-at < fixedSize {
		return rec, false, nil
	}
	b, err := w.at(at, fixedSize)
	if err != nil {
		return rec, false, err
	}
	n, ok := parseFixed(b, at, w.size)
	if !ok || int64(n) > w.size-at {
		return rec, false, nil
	}
	if b, err = w.at(at, n); err != nil {
		return rec, false, err
	}
	rec, ok = r.key.parse(b, at)
	return rec, ok, nil
}

// window reads a file through a buffer.
type window struct {
	r    io.ReaderAt
	size int64
	from int64
	b    []byte
}

// at returns n bytes at an offset. The file has them.
func (w *window) at(at int64, n int) ([]byte, error) {
	if at < w.from || at+int64(n) > w.from+int64(len(w.b)) {
		want := int(min(max(windowSize, int64(n)), w.size-at))
		if cap(w.b) < want {
			w.b = make([]byte, want)
		}
		w.from, w.b = at, w.b[:want]
		if got, err := w.r.ReadAt(w.b, at); got < want {
			w.b = w.b[:0]
			if errors.Is(err, io.EOF) {
				err = io.ErrUnexpectedEOF
			}
			return nil, err
		}
	}
	return w.b[at-w.from:][:n], nil
}
