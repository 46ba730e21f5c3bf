// Writes and reads zstd frames.

package codec

import (
	"encoding/binary"
	"io"
	"math/bits"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	zstdMagic       = 0xFD2FB528
	zstdHeaderMax   = 18 // RFC 8878, 3.1.1.1, with the magic number
	zstdBlockHeader = 3
	zstdBlockSize   = 64 << 10  // the smallest that klauspost/compress cuts data into
	zstdWindow      = 256 << 10 // stays in a core's cache; activations repeat nothing from further back
	// zstdLeastRepeats is the least share of repeats that makes match finding worth a try. Match
	// finding saves at most about half of the share: with 0.08 it saved 4 % of embeddings, with 0.04
	// nothing.
	zstdLeastRepeats = 0.05

	zstdMaxWindow  = 128 << 20 // largest window that is decoded, zstd's own default
	zstdKeepWindow = 8 << 20   // a decoder with a larger window is not reused
)

// zstdEmptyFrame is a single segment that states the content size 0, with one empty last block.
// klauspost/compress cannot write it, because it takes the size 0 for an unknown size.
var zstdEmptyFrame = []byte{0x28, 0xB5, 0x2F, 0xFD, 0x20, 0x00, 0x01, 0x00, 0x00}

// zstdEncoder writes one frame after another. It uses match finding, or at level 0 literals alone if
// matches would not pay. Without kernels literals alone are slower than match finding, so it never
// chooses them.
type zstdEncoder struct {
	matches  *zstd.Encoder
	literals *literalsEncoder
	repeats  *repeats // nil: always use match finding

	w     io.Writer
	size  int64
	frame io.WriteCloser // the encoder of this frame; nil before its first byte
}

func newZstdEncoder(level int) (*zstdEncoder, error) {
	if level < 0 || level > int(zstd.SpeedBestCompression) {
		return nil, status.New(status.InvalidArgument,
			"level = %d: zstd takes 0 to %d", level, int(zstd.SpeedBestCompression))
	}
	matches, err := zstd.NewWriter(nil,
		zstd.WithEncoderLevel(zstd.EncoderLevel(max(level, int(zstd.SpeedFastest)))),
		zstd.WithEncoderConcurrency(1), zstd.WithLowerEncoderMem(true),
		zstd.WithWindowSize(zstdWindow), zstd.WithEncoderCRC(false),
		// Activations hardly ever repeat, but some bytes are much more frequent than others: code
		// literals also if no match is found.
		zstd.WithAllLitEntropyCompression(true),
		// Content of less than a block is a single segment. Only single segments can state a size
		// below 256.
		zstd.WithSingleSegment(true))
	if err != nil {
		return nil, status.Wrap(status.Internal, err, "zstd encoder")
	}
	e := &zstdEncoder{matches: matches, literals: newLiteralsEncoder()}
	if _, kernel := kernelInUse(); kernel && level == 0 {
		e.repeats = &repeats{}
	}
	return e, nil
}

// begin starts a frame. Unless choose is called, the first write decides how the frame is encoded.
func (e *zstdEncoder) begin(w io.Writer, size int64) error {
	e.w, e.size, e.frame = w, size, nil
	if size == 0 {
		_, err := w.Write(zstdEmptyFrame)
		return err
	}
	return nil
}

// choose decides how the frame is encoded, from src, the beginning of the source.
func (e *zstdEncoder) choose(src []byte) error {
	matches := true
	if e.repeats != nil {
		var err error
		if matches, err = e.matchesPay(src); err != nil {
			return err
		}
	}
	if !matches {
		e.frame = e.literals
		return e.literals.begin(e.w, e.size)
	}
	e.frame = e.matches
	e.matches.ResetContentSize(e.w, e.size)
	return nil
}

// plan decides how the frame is encoded, from the whole source. It returns how many bytes to write at a
// time, so that each block is read in full before it is written.
func (e *zstdEncoder) plan(src []byte) (step int, err error) {
	if len(src) > 0 {
		err = e.choose(src)
	}
	if e.frame == e.literals {
		return literalsBlock, err
	}
	return zstdBlockSize, err
}

// matchesPay reports whether match finding makes src smaller than literals alone. If next to nothing
// repeats, it returns false. Otherwise it encodes the window that repeats most in both ways.
func (e *zstdEncoder) matchesPay(src []byte) (bool, error) {
	share, most := e.repeats.share(src)
	if share < zstdLeastRepeats {
		return false, nil
	}
	var matches, literals counter
	e.matches.ResetContentSize(&matches, int64(len(most)))
	err := writeAll(e.matches, most)
	if err == nil {
		err = e.literals.begin(&literals, int64(len(most)))
	}
	if err == nil {
		err = writeAll(e.literals, most)
	}
	return matches < literals, err
}

// counter counts the bytes written to it.
type counter int64

func (c *counter) Write(b []byte) (int, error) {
	*c += counter(len(b))
	return len(b), nil
}

func writeAll(w io.WriteCloser, b []byte) error {
	if _, err := w.Write(b); err != nil {
		return err
	}
	return w.Close()
}

func (e *zstdEncoder) Write(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, nil
	}
	if e.frame == nil {
		if err := e.choose(b); err != nil {
			return 0, err
		}
	}
	return e.frame.Write(b)
}

func (e *zstdEncoder) Close() error {
	if e.frame == nil { // an empty one
		return nil
	}
	return e.frame.Close()
}

// openZstd reads a frame's header, RFC 8878, 3.1.1.1:
//
//	magic u32 | descriptor | window 0..1 | dictionary 0..4 | content size 0..8
func openZstd(f *frame) error {
	h, err := f.take(5)
	if err != nil {
		return err
	}
	if le32(h) != zstdMagic {
		return status.New(status.Corrupt, "magic number %#x", le32(h))
	}
	descriptor := h[4]
	single, checksum := descriptor&0x20 != 0, descriptor&0x04 != 0
	if !single {
		w, err := f.take(1)
		if err != nil {
			return err
		}
		f.windowAt = len(f.held) - 1
		f.window = 1 << (10 + w[0]>>3)
		f.window += f.window / 8 * int64(w[0]&7)
	}
	id, err := f.take([]int{0, 1, 2, 4}[descriptor&3])
	if err != nil {
		return err
	}
	for _, b := range id {
		if b != 0 {
			return status.New(status.Unsupported, "the zstd frame needs a dictionary")
		}
	}
	length := []int{0, 2, 4, 8}[descriptor>>6]
	if length == 0 && single {
		length = 1
	}
	size, err := f.take(length)
	if err != nil {
		return err
	}
	if length > 0 {
		var wide [8]byte
		copy(wide[:], size)
		f.size = int64(binary.LittleEndian.Uint64(wide[:]))
		if length == 2 {
			f.size += 256
		}
	}
	if single {
		f.window = f.size
	}
	if f.window > zstdMaxWindow {
		return status.New(status.Unsupported,
			"the zstd frame needs a window of %d bytes: at most %d are kept", f.window, zstdMaxWindow)
	}
	f.walk = func(f *frame) error {
		h, err := f.take(zstdBlockHeader)
		if err != nil {
			return err
		}
		block := uint32(h[0]) | uint32(h[1])<<8 | uint32(h[2])<<16
		f.left = int64(block >> 3)
		if block>>1&3 == 1 { // one byte, repeated
			f.left = 1
		}
		if f.done = block&1 != 0; f.done && checksum {
			f.left += 4
		}
		return nil
	}
	return nil
}

// narrow makes the header state a window that is no larger than content of limit bytes needs. The
// decoder takes the memory of a window before it decodes the first byte. narrow never states a window
// below the largest block, because the window also limits blocks.
func (f *frame) narrow(limit int64) {
	log := max(17, bits.Len64(uint64(max(limit, 1)-1)))
	if f.windowAt == 0 || log > 62 || f.window <= 1<<log {
		return
	}
	f.window = 1 << log
	f.held[f.windowAt] = byte(log-10) << 3
}

var zstdReaders = sync.Pool{New: func() any {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(zstdMaxWindow))
	if err != nil {
		panic("codec: zstd decoder: " + err.Error()) // its options are constants
	}
	return d
}}

func withZstd(f *frame, use func(io.Reader) error) error {
	d := zstdReaders.Get().(*zstd.Decoder)
	if err := d.Reset(f); err != nil {
		return status.Wrap(status.Internal, err, "zstd decoder")
	}
	err := use(d)
	if reset := d.Reset(nil); reset != nil {
		return status.Wrap(status.Internal, reset, "zstd decoder")
	}
	if f.window <= zstdKeepWindow {
		zstdReaders.Put(d)
	}
	return err
}
