// Takes those blocks out of a payload that some stretches of its decoded bytes need.

package codec

import (
	"encoding/binary"
	"io"
	"slices"
)

// rawGap is the most bytes between two parts of a raw block that are read with them.
const rawGap = 4 << 10

// excerpt is a payload of some of the blocks of another payload. It has a header of its own, and decodes to
// runs. It has no end mark: a reader must not read behind the last run.
type excerpt struct {
	payload io.ReaderAt
	runs    []run

	head     []byte // bytes to read next
	next     int    // run to read after them and after the bytes [at, at+left) of payload
	at, left int64
}

// run is a run of blocks, and the stretch of decoded bytes that they decode to.
type run struct {
	at, length   int64  // in the payload
	first, bytes int64  // decoded
	head         []byte // of a block that is not one of the payload; it stands before the bytes at
}

func (r *run) end() int64 { return r.first + r.bytes }

// length returns how many bytes Read returns from the beginning on.
func (x *excerpt) length() int {
	n := int64(len(x.head))
	for _, r := range x.runs {
		n += int64(len(r.head)) + r.length
	}
	return int(n)
}

func (x *excerpt) Read(b []byte) (int, error) {
	for len(b) > 0 {
		switch {
		case len(x.head) > 0:
			n := copy(b, x.head)
			x.head = x.head[n:]
			return n, nil
		case x.left > 0:
			n, err := x.payload.ReadAt(b[:min(int64(len(b)), x.left)], x.at)
			x.at, x.left = x.at+int64(n), x.left-int64(n)
			if n > 0 {
				err = nil
			}
			return n, unexpected(err)
		case x.next == len(x.runs):
			return 0, io.EOF
		}
		r := &x.runs[x.next]
		x.next++
		x.head, x.at, x.left = r.head, r.at, r.length
	}
	return 0, nil
}

// excerptOf returns the blocks that parts need. ok is false if the blocks cannot be told apart without
// decoding them, if they may need others, or if all of them are needed.
func excerptOf(parts []Part, k Kind, payload io.ReaderAt, length, size int64) (x excerpt, ok bool) {
	b := &blocks{kind: k, payload: payload, length: length, size: size, most: size, parts: parts}
	if !b.walk() || b.kept == 0 || b.kept == size {
		return excerpt{}, false
	}
	return b.excerpt(b.runs), true
}

// blocks walks over the blocks of a payload and keeps those that parts need.
type blocks struct {
	kind         Kind
	payload      io.ReaderAt
	length, size int64 // of the payload, and of its decoded bytes
	most         int64 // see keep
	parts        []Part
	reach        int64 // end of the parts that begin before the last block's end
	runs         []run
	kept         int64  // decoded bytes of runs
	head         []byte // of an excerpt
	begin, end   int64  // of the blocks in the payload; end is 0 if the payload does not end well behind them
	ahead        []byte // bytes of the payload from aheadAt on, so that short blocks take few reads
	aheadAt      int64
	buf          [512]byte
}

// walk keeps the blocks that parts need. ok is false if they cannot be told apart without decoding them, or
// if they may need others.
func (b *blocks) walk() (ok bool) {
	switch b.kind {
	case LZ4:
		return b.lz4()
	case Zstd:
		return b.zstd()
	case Archive:
		return b.archive()
	default:
		return false
	}
}

// excerpt returns an excerpt that decodes to runs.
func (b *blocks) excerpt(runs []run) excerpt {
	head := b.head
	if b.kind == Archive {
		head = slices.Clone(head)
		binary.LittleEndian.PutUint32(head[8:], uint32(decodedBytes(runs)/2))
	}
	return excerpt{payload: b.payload, runs: runs, head: head}
}

// decodedBytes returns how many bytes runs decode to.
func decodedBytes(runs []run) int64 {
	bytes := int64(0)
	for _, r := range runs {
		bytes += r.bytes
	}
	return bytes
}

// read returns up to n bytes of the payload from a place on. ok is false if there are fewer than least.
func (b *blocks) read(at int64, n, least int) (_ []byte, ok bool) {
	if at < b.aheadAt || at+int64(n) > b.aheadAt+int64(len(b.ahead)) {
		got, _ := b.payload.ReadAt(b.buf[:max(min(int64(len(b.buf)), b.length-at), 0)], at)
		b.ahead, b.aheadAt = b.buf[:got], at
	}
	h := b.ahead[at-b.aheadAt:]
	h = h[:min(len(h), n)]
	return h, len(h) >= least
}

// done reports whether no part needs a byte from first on.
func (b *blocks) done(first int64) bool { return len(b.parts) == 0 && b.reach <= first }

// add keeps the next block if a part needs it. The block has length bytes at a place of the payload, and
// decodes to the bytes from first on.
func (b *blocks) add(at, length, first, bytes int64) {
	for len(b.parts) > 0 && b.parts[0].First < first+bytes {
		b.reach = max(b.reach, b.parts[0].end())
		b.parts = b.parts[1:]
	}
	if b.reach > first {
		b.keep(at, length, first, bytes)
	}
}

// keep keeps a block. Blocks in a row are one run until it has b.most bytes.
func (b *blocks) keep(at, length, first, bytes int64) {
	b.kept += bytes
	if k := len(b.runs) - 1; k >= 0 {
		if last := &b.runs[k]; last.at+last.length == at && last.end() == first && last.bytes < b.most {
			last.length, last.bytes = last.length+length, last.bytes+bytes
			return
		}
	}
	b.runs = append(b.runs, run{at: at, length: length, first: first, bytes: bytes})
}

// addRaw keeps what parts need of the next block, which has a header and raw bytes. It is kept as raw
// blocks of these bytes. cut makes the header of a raw block of n bytes.
func (b *blocks) addRaw(at, header, first, bytes int64, cut func(n int64) []byte) {
	end := first + bytes
	from, to := first, min(b.reach, end) // to keep
	keep := func() {
		switch n := to - from; {
		case n <= 0:
		case n == bytes:
			b.keep(at, header+bytes, first, bytes)
		default:
			b.kept += n
			b.runs = append(b.runs, run{at: at + header + from - first, length: n, first: from, bytes: n, head: cut(n)})
		}
	}
	for ; len(b.parts) > 0 && b.parts[0].First < end; b.parts = b.parts[1:] {
		p := &b.parts[0]
		if to <= from || p.First > to+rawGap {
			keep()
			from, to = p.First, p.First
		}
		b.reach = max(b.reach, p.end())
		to = max(to, min(p.end(), end))
	}
	keep()
}

// lz4 walks over the blocks of an LZ4 frame. Their places in the decoded bytes are known only if all blocks
// but the last are full. Then the last block has the rest of the frame's bytes, which is checked.
func (b *blocks) lz4() (ok bool) {
	f, err := openFrame(LZ4, io.NewSectionReader(b.payload, 0, b.length))
	if err != nil || f.linked || f.size != b.size {
		return false
	}
	b.begin = int64(len(f.held))
	at := b.begin
	flags, size := f.buf[4], f.buf[5]>>4&7
	if size < 4 {
		return false
	}
	most, sum := int64(64<<10)<<(2*(size-4)), int64(0)
	if flags&lz4BlockChecksum != 0 {
		sum = 4
	}
	head := binary.LittleEndian.AppendUint32(nil, lz4Magic)
	head = append(head, lz4Version|lz4Independent|flags&lz4BlockChecksum, f.buf[5])
	b.head = append(head, lz4HeaderChecksum(head[4:]))

	first, sure := int64(0), b.size%most == 0 || b.size <= most
	var last run
	for {
		h, ok := b.read(at, 4, 4)
		if !ok {
			return false
		}
		word := le32(h)
		if word == 0 {
			break
		}
		raw, n := word&lz4Raw != 0, int64(word&^lz4Raw)
		last = run{at: at, length: 4 + n + sum, first: first, bytes: min(most, b.size-first)}
		if last.bytes == 0 || at+last.length > b.length || raw && n != last.bytes {
			return false
		}
		if raw && sum == 0 {
			b.addRaw(at, 4, first, n, func(n int64) []byte {
				return binary.LittleEndian.AppendUint32(nil, uint32(n)|lz4Raw)
			})
		} else {
			b.add(at, last.length, first, last.bytes)
		}
		at, first = at+last.length, last.end()
		sure = sure || raw && first == b.size
	}
	if first != b.size {
		return false
	}
	if flags&lz4HasChecksum == 0 && at+lz4EndSize == b.length {
		b.end = at
	}
	if !sure && b.kept < b.size {
		end := run{head: make([]byte, lz4EndSize)}
		x := b.excerpt([]run{last, end})
		n, err := Count(LZ4, &x, last.length)
		sure = err == nil && n == last.bytes
	}
	return sure
}

// zstd walks over the blocks of a zstd frame that need nothing of earlier blocks: raw bytes, one repeated
// byte, and literals without sequences that have their own tree (see literals.go). Behind another block no
// place is known.
func (b *blocks) zstd() (ok bool) {
	f, err := openFrame(Zstd, io.NewSectionReader(b.payload, 0, b.length))
	if err != nil || f.size >= 0 && f.size != b.size {
		return false
	}
	b.begin = int64(len(f.held))
	at, first, last := b.begin, int64(0), false
	for !b.done(first) {
		h, ok := b.read(at, zstdBlockHeader+5, zstdBlockHeader)
		if !ok || last {
			return false
		}
		block := uint32(h[0]) | uint32(h[1])<<8 | uint32(h[2])<<16
		kind, length := block>>1&3, int64(block>>3)
		bytes := length
		switch kind {
		case blockRLE:
			length = 1
		case blockCompressed:
			bytes, ok = onlyLiterals(h[zstdBlockHeader:], length)
		}
		if !ok || kind > blockCompressed || bytes > literalsBlock || at+zstdBlockHeader+length > b.length {
			return false
		}
		if kind == blockRaw {
			b.addRaw(at, zstdBlockHeader, first, bytes, func(n int64) []byte {
				return appendBlockHeader(nil, blockRaw, int(n), false)
			})
		} else {
			b.add(at, zstdBlockHeader+length, first, bytes)
		}
		at, first, last = at+zstdBlockHeader+length, first+bytes, block&1 != 0
	}
	if last && at == b.length { // no checksum comes after the blocks
		b.end = at
	}
	const exponent = 17 - 10 // of a window of literalsBlock bytes
	b.head = append(binary.LittleEndian.AppendUint32(nil, zstdMagic), 0, exponent<<3)
	return true
}

// onlyLiterals returns how many literals a compressed block of length bytes has, whose Literals_Section_Header
// begins at h (RFC 8878, 3.1.1.3.1.1). ok is false if they need the tree of an earlier block, or sequences
// come after them.
func onlyLiterals(h []byte, length int64) (literals int64, ok bool) {
	var wide [8]byte
	copy(wide[:], h)
	v := binary.LittleEndian.Uint64(wide[:])
	kind, format := v&3, v>>2&3
	var header, stored int64
	switch kind {
	case literalsCompressed:
		width := []int{10, 10, 14, 18}[format]
		header = []int64{3, 3, 4, 5}[format]
		literals, stored = int64(v>>4&(1<<width-1)), int64(v>>(4+width)&(1<<width-1))
	case blockRaw, blockRLE: // have the same numbers among literals
		header = []int64{1, 2, 1, 3}[format]
		literals = int64(v & (1<<(8*header) - 1) >> []int{3, 4, 3, 4}[format])
		if stored = literals; kind == blockRLE {
			stored = 1
		}
	default:
		return 0, false
	}
	const sequences = 1 // Number_of_Sequences, which is 0
	return literals, header <= int64(len(h)) && header+stored+sequences == length
}

// archive walks over the chunks of an archive, which do not need each other.
func (b *blocks) archive() (ok bool) {
	h, _ := b.read(0, archiveHeader, 0)
	parsed, err := parseArchive(h)
	if err != nil || 2*parsed.count != b.size {
		return false
	}
	b.head, b.begin = slices.Clone(h), archiveHeader
	at := b.begin
	for first := int64(0); !b.done(first); {
		h, ok := b.read(at, archiveChunkHeader, archiveChunkHeader)
		if !ok {
			return false
		}
		length := archiveChunkHeader + int64(le32(h)) + int64(le32(h[4:])) + int64(le32(h[8:]))
		bytes := min(2*archiveChunk, b.size-first)
		if bytes == 0 || at+length > b.length {
			return false
		}
		b.add(at, length, first, bytes)
		at, first = at+length, first+bytes
	}
	if at == b.length {
		b.end = at
	}
	return true
}
