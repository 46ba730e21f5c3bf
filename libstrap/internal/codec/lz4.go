package codec

import (
	"encoding/binary"
	"io"
	"math/bits"
	"sync"

	"github.com/pierrec/lz4/v4"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// LZ4 frames, https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md:
// independent blocks, content size, no checksums (the index has one):
//
//	magic u32 | FLG 0x68 | BD | content size u64 | HC | { size u32 | block } ... | 0 u32
//
// The frame is written here, over pierrec/lz4's block compressor, so that a block
// can be compressed in place and a small packet costs no block-sized buffers.
const (
	lz4Magic      = 0x184D2204
	lz4HeaderSize = 15
	lz4EndSize    = 4
	lz4MaxBlock   = 4 << 20
	lz4Raw        = 1 << 31 // in a block's size: stored uncompressed
)

var lz4BlockIDs = map[int]byte{64 << 10: 4, 256 << 10: 5, 1 << 20: 6, lz4MaxBlock: 7}

// lz4BlockSize is the smallest block of the format that holds n bytes.
func lz4BlockSize(n int) int {
	size := 64 << 10
	for size < n && size < lz4MaxBlock {
		size *= 4
	}
	return size
}

// lz4Blocks compresses block by block into one scratch buffer.
type lz4Blocks struct {
	fast    lz4.Compressor
	high    *lz4.CompressorHC
	scratch []byte
}

var lz4Levels = [...]lz4.CompressionLevel{
	lz4.Fast, lz4.Level1, lz4.Level2, lz4.Level3, lz4.Level4,
	lz4.Level5, lz4.Level6, lz4.Level7, lz4.Level8, lz4.Level9,
}

func (b *lz4Blocks) setLevel(level int) error {
	if level < 0 || level >= len(lz4Levels) {
		return status.New(status.InvalidArgument, "level = %d: lz4 takes 0 to %d", level, len(lz4Levels)-1)
	}
	if level > 0 {
		b.high = &lz4.CompressorHC{Level: lz4Levels[level]}
	}
	return nil
}

// compress returns the block in the scratch buffer, or nil where it does not get
// smaller.
func (b *lz4Blocks) compress(src []byte) ([]byte, error) {
	if len(b.scratch) < len(src) {
		b.scratch = make([]byte, len(src))
	}
	// One byte less than the source: what does not fit is better stored raw.
	dst := b.scratch[:max(len(src)-1, 0)]
	var n int
	var err error
	if b.high != nil {
		n, err = b.high.CompressBlock(src, dst)
	} else {
		n, err = b.fast.CompressBlock(src, dst)
	}
	if err == lz4.ErrInvalidSourceShortBuffer || n == 0 {
		return nil, nil
	}
	return dst[:n], err
}

// lz4Frame is a frame being written; a Write of whole blocks needs no buffer.
type lz4Frame struct {
	blocks *lz4Blocks
	w      io.Writer
	left   int64
	block  int
	rest   []byte
}

func (b *lz4Blocks) newFrame(w io.Writer, size int64, block int) (*lz4Frame, error) {
	var h [lz4HeaderSize]byte
	binary.LittleEndian.PutUint32(h[:], lz4Magic)
	h[4] = 0x68 // version 1, independent blocks, content size
	h[5] = lz4BlockIDs[block] << 4
	binary.LittleEndian.PutUint64(h[6:], uint64(size))
	h[14] = byte(xxh32(h[4:14]) >> 8)
	if _, err := w.Write(h[:]); err != nil {
		return nil, err
	}
	return &lz4Frame{blocks: b, w: w, left: size, block: block}, nil
}

func (f *lz4Frame) Write(b []byte) (int, error) {
	if int64(len(b)) > f.left {
		return 0, status.New(status.Internal, "%d bytes more than announced", int64(len(b))-f.left)
	}
	f.left -= int64(len(b))
	for rest := b; len(rest) > 0; {
		if len(f.rest) == 0 && (len(rest) >= f.block || f.left == 0) {
			n := min(len(rest), f.block)
			if err := f.put(rest[:n]); err != nil {
				return 0, err
			}
			rest = rest[n:]
			continue
		}
		n := min(len(rest), f.block-len(f.rest))
		f.rest = append(f.rest, rest[:n]...)
		rest = rest[n:]
		if len(f.rest) == f.block {
			if err := f.putRest(); err != nil {
				return 0, err
			}
		}
	}
	return len(b), nil
}

func (f *lz4Frame) putRest() error {
	err := f.put(f.rest)
	f.rest = f.rest[:0]
	return err
}

func (f *lz4Frame) put(src []byte) error {
	data, err := f.blocks.compress(src)
	if err != nil {
		return status.Wrap(status.Internal, err, "lz4 block of %d bytes", len(src))
	}
	size := uint32(len(data))
	if data == nil {
		data, size = src, uint32(len(src))|lz4Raw
	}
	var h [4]byte
	binary.LittleEndian.PutUint32(h[:], size)
	if _, err := f.w.Write(h[:]); err != nil {
		return err
	}
	_, err = f.w.Write(data)
	return err
}

func (f *lz4Frame) Close() error {
	if f.left != 0 {
		return status.New(status.Internal, "%d bytes less than announced", f.left)
	}
	if len(f.rest) > 0 {
		if err := f.putRest(); err != nil {
			return err
		}
	}
	_, err := f.w.Write(make([]byte, lz4EndSize))
	return err
}

// xxh32 is XXH32 with seed 0 of fewer than 16 bytes,
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
func xxh32(b []byte) uint32 {
	const p1, p2, p3, p4, p5 = 2654435761, 2246822519, 3266489917, 668265263, 374761393
	h := uint32(p5) + uint32(len(b))
	for ; len(b) >= 4; b = b[4:] {
		h = bits.RotateLeft32(h+le32(b)*p3, 17) * p4
	}
	for _, c := range b {
		h = bits.RotateLeft32(h+uint32(c)*p5, 11) * p1
	}
	h = (h ^ h>>15) * p2
	h = (h ^ h>>13) * p3
	return h ^ h>>16
}

func lz4DecodedSize(prefix []byte) (int64, error) {
	if len(prefix) < 7 || le32(prefix) != lz4Magic {
		return 0, corrupt(nil, "no LZ4 frame")
	}
	if prefix[4]&0x08 == 0 {
		return -1, nil
	}
	if len(prefix) < lz4HeaderSize {
		return 0, corrupt(nil, "the LZ4 frame ends in its header")
	}
	n := int64(binary.LittleEndian.Uint64(prefix[6:]))
	if n < 0 {
		return 0, corrupt(nil, "the LZ4 frame claims %d bytes", uint64(n))
	}
	return n, nil
}

var lz4Readers = sync.Pool{New: func() any { return lz4.NewReader(nil) }}

func withLZ4(payload io.Reader, f func(io.Reader) error) error {
	r := lz4Readers.Get().(*lz4.Reader)
	r.Reset(payload)
	err := f(r)
	r.Reset(nil)
	lz4Readers.Put(r)
	return err
}
