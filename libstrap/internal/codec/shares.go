// Divides the decoding of a payload into shares that several goroutines decode at once.

package codec

import (
	"bytes"
	"io"
	"slices"

	"github.com/klauspost/compress/zstd"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
)

// Shares decodes parts of one payload in shares that do not need each other. Several goroutines can decode
// shares at the same time.
type Shares struct {
	kind          Kind
	shares        []share
	whole         bool // the shares have all blocks of the payload
	before, after sum  // of the payload's bytes around the blocks
}

// share is some runs of blocks.
type share struct {
	excerpt excerpt
	bytes   int // of the excerpt
	parts   []Part
	blocks  sum  // of the blocks in the payload
	last    bool // these are the last blocks of the frame
}

// sum is the CRC-32C of n bytes.
type sum struct {
	n   int
	crc uint32
}

// and returns the sum of the bytes of s and t in a row.
func (s sum) and(t sum) sum {
	return sum{s.n + t.n, crc32c.After(t.n).Combine(s.crc, t.crc)}
}

// Divide divides the decoding of parts of a payload. All shares but the last decode to at least least bytes.
// The other arguments are those of DecodeParts. ok is false if there is only one share: the payload is raw
// or short, or its blocks may need each other.
func Divide(parts []Part, k Kind, payload io.ReaderAt, length, size, least int64) (s *Shares, ok bool) {
	if checkClaim(k, size, length) != nil {
		return nil, false
	}
	b := &blocks{kind: k, payload: payload, length: length, size: size, most: least, parts: parts}
	if !b.walk() {
		return nil, false
	}
	s = &Shares{kind: k, whole: b.kept == size}
	if s.whole && !s.sumAround(b) {
		return nil, false
	}
	for runs := b.runs; len(runs) > 0; {
		n, decoded := 1, runs[0].bytes
		for n < len(runs) && decoded < least {
			decoded += runs[n].bytes
			n++
		}
		one := share{excerpt: b.excerpt(runs[:n])}
		one.bytes = one.excerpt.length()
		if int64(one.bytes) > 2*decoded+spareBytes {
			return nil, false
		}
		first, end := runs[0].first, runs[n-1].end()
		one.parts, one.last = clip(parts, first, end), s.whole && end == size
		s.shares = append(s.shares, one)
		runs = runs[n:]
	}
	return s, len(s.shares) > 1
}

// spareBytes and twice its decoded bytes is the most memory that the excerpt of a share may take. Blocks take
// more only if they are made to.
const spareBytes = 64 << 10

// sumAround sums what the payload has before and after its blocks. ok is false if it has other bytes than
// blocks between them, or does not end well.
func (s *Shares) sumAround(b *blocks) (ok bool) {
	at := b.begin
	for _, r := range b.runs {
		if r.at != at || len(r.head) > 0 {
			return false
		}
		at += r.length
	}
	if at != b.end {
		return false
	}
	read := func(from, to int64) (sum, bool) {
		bytes := make([]byte, to-from)
		n, _ := b.payload.ReadAt(bytes, from)
		return sum{n, crc32c.Checksum(bytes)}, n == len(bytes)
	}
	var before, after bool
	s.before, before = read(0, b.begin)
	s.after, after = read(b.end, b.length)
	return before && after
}

// clip returns what parts have of the decoded bytes from first to end.
func clip(parts []Part, first, end int64) (clipped []Part) {
	for _, p := range parts {
		if p.First >= end {
			break
		}
		if from, to := max(p.First, first), min(p.end(), end); from < to {
			clipped = append(clipped, Part{First: from, To: p.To[from-p.First : to-p.First]})
		}
	}
	return clipped
}

// Len returns the number of shares.
func (s *Shares) Len() int { return len(s.shares) }

// Decode decodes share k to its parts. If it fails, DecodeParts decodes the payload or tells why it cannot be
// decoded.
func (s *Shares) Decode(k int) error {
	one := &s.shares[k]
	pooled := excerpts.Get()
	defer excerpts.Put(pooled)
	*pooled = slices.Grow((*pooled)[:0], one.bytes+zstdBlockHeader)
	b := (*pooled)[:one.bytes]
	head := len(one.excerpt.head)
	if _, err := io.ReadFull(&one.excerpt, b); err != nil {
		return err
	}
	if s.whole {
		one.blocks = sum{len(b) - head, crc32c.Checksum(b[head:])}
	}
	return s.decode(one, b)
}

// excerpts has buffers for excerpts.
var excerpts = newSpares(func() *[]byte { return new([]byte) })

// decode decodes a share, of which b is the excerpt. b has room for a block's header.
func (s *Shares) decode(one *share, b []byte) error {
	runs := one.excerpt.runs
	if len(one.parts) != 1 || s.kind != Zstd || int64(len(one.parts[0].To)) != decodedBytes(runs) {
		return decodeRuns(one.parts, s.kind, bytes.NewReader(b), runs)
	}
	if !one.last {
		b = appendBlockHeader(b, blockRaw, 0, true)
	}
	to := one.parts[0].To
	d := zstdReaders.Get().(*zstd.Decoder)
	defer zstdReaders.Put(d)
	out, err := d.DecodeAll(b, to[:0:len(to)])
	if err == nil && (len(out) != len(to) || &out[0] != &to[0]) {
		err = corrupt(nil, "the blocks hold %d bytes, not %d", len(out), len(to))
	}
	return err
}

// Sum returns the CRC-32C of the payload after all shares were decoded. whole is false if they do not have
// all of its bytes.
func (s *Shares) Sum() (crc uint32, whole bool) {
	all := s.before
	for k := range s.shares {
		all = all.and(s.shares[k].blocks)
	}
	return all.and(s.after).crc, s.whole
}
