// Decodes stretches of a payload that the caller chose.

package codec

import (
	"bufio"
	"io"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
)

// partsBuffer is how many bytes of a payload DecodeParts reads ahead.
const partsBuffer = 128 << 10

// Part is a stretch of the decoded bytes of a payload. First is the place of its first byte. To receives
// the bytes.
type Part struct {
	First int64
	To    []byte
}

func (p *Part) end() int64 { return p.First + int64(len(p.To)) }

// DecodeParts decodes parts of a payload. The payload has length bytes and decodes to size bytes. parts
// are in the order of First and within these bytes, and can overlap.
//
// Of raw bytes it reads the parts alone, or everything if the parts are at least half of it. Other payloads it reads from the beginning until the last part is
// decoded. whole reports whether it read the payload to its end. Then sum is the payload's CRC-32C. After an
// error of the payload it reads the rest, because a wrong checksum explains the error.
//
// Errors: those of Decode, where the payload was read; errors of reading. After an error the parts may be
// partly written.
func DecodeParts(parts []Part, k Kind, payload io.ReaderAt, length, size int64) (sum uint32, whole bool, err error) {
	if err := checkClaim(k, size, length); err != nil {
		return 0, false, err
	}
	if k == None {
		if size != length {
			return 0, false, corrupt(nil, "the payload holds %d bytes, not %d", length, size)
		}
		wanted := int64(0)
		for _, p := range parts {
			wanted += int64(len(p.To))
		}
		if 2*wanted >= length && len(parts) > 1 {
			s := summers.Get().(*summer)
			defer s.release()
			s.begin(io.NewSectionReader(payload, 0, length))
			err := scatter(s.buf, parts, []run{{bytes: size}})
			_, _ = io.Copy(io.Discard, s.buf)
			return s.sum, s.n == length, err
		}
		for _, p := range parts {
			if n, err := payload.ReadAt(p.To, p.First); n < len(p.To) {
				return 0, false, corrupt(unexpected(err), "the payload ends after %d bytes", p.First+int64(n))
			}
		}
		return 0, false, nil
	}
	s := summers.Get().(*summer)
	defer s.release()
	if x, ok := excerptOf(parts, k, payload, length, size); ok {
		s.begin(&x)
		if decodeRuns(parts, k, s.buf, x.runs) == nil {
			return 0, false, nil
		}
	}
	s.begin(io.NewSectionReader(payload, 0, length))
	err = decodeRuns(parts, k, s.buf, []run{{bytes: size}})
	if err != nil || length-s.n <= partsBuffer {
		_, _ = io.Copy(io.Discard, s.buf)
	}
	return s.sum, s.n == length, err
}

// summer reads a payload, counts its bytes and computes their CRC-32C.
type summer struct {
	src io.Reader
	buf *bufio.Reader
	n   int64
	sum uint32
}

var summers = sync.Pool{New: func() any {
	s := &summer{}
	s.buf = bufio.NewReaderSize(s, partsBuffer)
	return s
}}

func (s *summer) begin(src io.Reader) {
	s.src, s.n, s.sum = src, 0, 0
	s.buf.Reset(s)
}

func (s *summer) release() {
	s.src = nil
	summers.Put(s)
}

func (s *summer) Read(b []byte) (int, error) {
	n, err := s.src.Read(b)
	s.n += int64(n)
	s.sum = crc32c.Update(s.sum, b[:n])
	return n, err
}

// decodeRuns decodes src, which decodes to runs, one run after the other.
func decodeRuns(parts []Part, k Kind, src io.Reader, runs []run) error {
	size := decodedBytes(runs)
	use := func(r io.Reader, stated int64) error {
		if stated >= 0 && stated != size {
			return corrupt(nil, "the payload holds %d bytes, not %d", stated, size)
		}
		return scatter(r, parts, runs)
	}
	switch k {
	case LZ4:
		return withFrame(k, withLZ4, src, size, use)
	case Zstd:
		return withFrame(k, withZstd, src, size, use)
	case Archive:
		return withArchive(src, use)
	default:
		return unknownKind(k)
	}
}

// scatter fills parts from r, which returns the bytes of runs, one run after the other. Parts lie within
// runs. scatter reads no byte after the last part.
func scatter(r io.Reader, parts []Part, runs []run) error {
	at := runs[0].first // of the next byte of r
	last := Part{First: at}
	skip := func(to int64) error {
		if to <= at {
			return nil
		}
		n, err := io.CopyN(io.Discard, r, to-at)
		at += n
		return err
	}
	for _, p := range parts {
		n := 0
		if p.First < at && len(p.To) > 0 { // an earlier part has these bytes
			n = copy(p.To, last.To[p.First-last.First:])
		}
		if n == len(p.To) {
			continue
		}
		first := p.First + int64(n)
		for first >= runs[0].end() {
			if err := skip(runs[0].end()); err != nil {
				return short(err, at)
			}
			runs = runs[1:]
			at = max(at, runs[0].first)
		}
		if err := skip(first); err != nil {
			return short(err, at)
		}
		m, err := io.ReadFull(r, p.To[n:])
		at += int64(m)
		if err != nil {
			return short(err, at)
		}
		last = p
	}
	return nil
}

func short(err error, at int64) error {
	return corrupt(unexpected(err), "the payload ends before byte %d", at)
}
