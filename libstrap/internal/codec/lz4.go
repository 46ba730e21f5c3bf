// Writes and reads LZ4 frames.

package codec

import (
	"encoding/binary"
	"errors"
	"io"
	"math/bits"
	"sync"

	"github.com/pierrec/lz4/v4"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// LZ4 frames, https://github.com/lz4/lz4/blob/dev/doc/lz4_Frame_format.md. They have independent
// blocks, a content size, and no checksums, because the index has one:
//
//	magic u32 | FLG 0x68 | BD | content size u64 | HC | { size u32 | block } ... | 0 u32
//
// pierrec/lz4 compresses the blocks, and this file writes the frame. So blocks can be compressed in
// place, and a small packet needs no buffers as large as a block.
const (
	lz4Magic      = 0x184D2204
	lz4HeaderSize = 15
	lz4EndSize    = 4
	lz4MaxBlock   = 4 << 20
	lz4Raw        = 1 << 31 // in a block's size: stored uncompressed

	// Bits of FLG.
	lz4HasDictionary = 1 << 0
	lz4HasChecksum   = 1 << 2
	lz4HasSize       = 1 << 3
	lz4BlockChecksum = 1 << 4
	lz4Independent   = 1 << 5
	lz4Version       = 1 << 6
)

var lz4BlockIDs = map[int]byte{64 << 10: 4, 256 << 10: 5, 1 << 20: 6, lz4MaxBlock: 7}

// lz4BlockSize returns the smallest block size of the format that holds n bytes, or the largest.
func lz4BlockSize(n int64) int {
	size := 64 << 10
	for int64(size) < n && size < lz4MaxBlock {
		size *= 4
	}
	return size
}

// lz4Encoder writes one frame after another.
type lz4Encoder struct {
	fast    lz4.Compressor
	high    *lz4.CompressorHC
	scratch []byte // a compressed block

	cut  cutter
	w    io.Writer
	head [lz4HeaderSize]byte
}

var lz4Levels = [...]lz4.CompressionLevel{
	lz4.Fast, lz4.Level1, lz4.Level2, lz4.Level3, lz4.Level4,
	lz4.Level5, lz4.Level6, lz4.Level7, lz4.Level8, lz4.Level9,
}

func newLZ4Encoder(level int) (*lz4Encoder, error) {
	if level < 0 || level >= len(lz4Levels) {
		return nil, status.New(status.InvalidArgument, "level = %d: lz4 takes 0 to %d", level, len(lz4Levels)-1)
	}
	e := &lz4Encoder{}
	e.cut.put = e.put
	if level > 0 {
		e.high = &lz4.CompressorHC{Level: lz4Levels[level]}
	}
	return e, nil
}

// begin writes a frame's header. If the writes after it are whole blocks, they are not copied.
func (e *lz4Encoder) begin(w io.Writer, size int64) error {
	block := lz4BlockSize(size)
	e.w = w
	e.cut.begin(block, size)
	putLZ4Header(e.head[:], block, size)
	_, err := w.Write(e.head[:])
	return err
}

// putLZ4Header writes the header of a frame of size bytes in blocks of block bytes to h.
func putLZ4Header(h []byte, block int, size int64) {
	binary.LittleEndian.PutUint32(h, lz4Magic)
	h[4] = lz4Version | lz4Independent | lz4HasSize
	h[5] = lz4BlockIDs[block] << 4
	binary.LittleEndian.PutUint64(h[6:], uint64(size))
	h[14] = lz4HeaderChecksum(h[4:14])
}

// surroundLZ4 writes a frame of one raw block around its n bytes; see Surround.
func surroundLZ4(buf []byte, n int) (length int) {
	putLZ4Header(buf, lz4BlockSize(int64(n)), int64(n))
	binary.LittleEndian.PutUint32(buf[lz4HeaderSize:], uint32(n)|lz4Raw)
	end := lz4HeaderSize + 4 + n
	binary.LittleEndian.PutUint32(buf[end:], 0)
	return end + lz4EndSize
}

func (e *lz4Encoder) Write(b []byte) (int, error) { return e.cut.Write(b) }

func (e *lz4Encoder) Close() error {
	end := e.head[:lz4EndSize]
	clear(end)
	_, err := e.w.Write(end)
	return err
}

// put compresses src as a block and writes it.
func (e *lz4Encoder) put(src []byte, _ bool) error {
	data, err := e.compress(src)
	if err != nil {
		return status.Wrap(status.Internal, err, "lz4 block of %d bytes", len(src))
	}
	size := uint32(len(data))
	if data == nil {
		data, size = src, uint32(len(src))|lz4Raw
	}
	h := e.head[:4]
	binary.LittleEndian.PutUint32(h, size)
	if _, err := e.w.Write(h); err != nil {
		return err
	}
	_, err = e.w.Write(data)
	return err
}

// compress returns the compressed block in the scratch buffer, or nil if it is not smaller than src.
func (e *lz4Encoder) compress(src []byte) ([]byte, error) {
	if len(e.scratch) < len(src) {
		e.scratch = make([]byte, len(src))
	}
	// One byte less than the source: a block that does not fit is not smaller.
	dst := e.scratch[:len(src)-1]
	var n int
	var err error
	if e.high != nil {
		n, err = e.high.CompressBlock(src, dst)
	} else {
		n, err = e.fast.CompressBlock(src, dst)
	}
	if errors.Is(err, lz4.ErrInvalidSourceShortBuffer) || n == 0 {
		return nil, nil
	}
	return dst[:n], err
}

// lz4HeaderChecksum returns the second byte of XXH32, seed 0, of fewer than 16 bytes,
// https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
func lz4HeaderChecksum(b []byte) byte {
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
	return byte((h ^ h>>16) >> 8)
}

// openLZ4 reads a frame's header. pierrec/lz4 makes the checks that are not here.
func openLZ4(f *frame) error {
	h, err := f.take(6)
	if err != nil {
		return err
	}
	if le32(h) != lz4Magic {
		return status.New(status.Corrupt, "magic number %#x", le32(h))
	}
	flags, more := h[4], 1
	if flags&lz4HasSize != 0 {
		more += 8
	}
	if flags&lz4HasDictionary != 0 {
		more += 4
	}
	rest, err := f.take(more)
	if err != nil {
		return err
	}
	if sum := lz4HeaderChecksum(f.held[4 : len(f.held)-1]); sum != rest[more-1] {
		return status.New(status.Corrupt, "header checksum %#x, computed %#x", rest[more-1], sum)
	}
	if flags&lz4HasDictionary != 0 {
		return status.New(status.Unsupported, "the LZ4 frame needs dictionary %#x", le32(rest[more-5:]))
	}
	f.linked = flags&lz4Independent == 0
	if flags&lz4HasSize != 0 {
		f.size = int64(binary.LittleEndian.Uint64(rest))
	}
	f.walk = func(f *frame) error {
		h, err := f.take(4)
		if err != nil {
			return err
		}
		if size := le32(h); size != 0 {
			f.left = int64(size &^ lz4Raw)
			if flags&lz4BlockChecksum != 0 {
				f.left += 4
			}
			return nil
		}
		f.done = true
		if flags&lz4HasChecksum != 0 {
			f.left = 4
		}
		return nil
	}
	return nil
}

var lz4Readers = sync.Pool{New: func() any { return lz4.NewReader(nil) }}

func withLZ4(f *frame, use func(io.Reader) error) error {
	if f.linked {
		// Use a new reader. Reset does not clear the window of linked blocks (pierrec/lz4 v4.1.33),
		// so the next frame could refer to bytes of this one.
		return use(lz4.NewReader(f))
	}
	r := lz4Readers.Get().(*lz4.Reader)
	defer lz4Readers.Put(r)
	defer r.Reset(nil)
	r.Reset(f)
	return use(r)
}
