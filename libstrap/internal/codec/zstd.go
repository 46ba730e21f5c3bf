package codec

import (
	"io"
	"sync"

	"github.com/klauspost/compress/zstd"

	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	zstdMagic       = 0xFD2FB528
	zstdHeaderMax   = 18 // RFC 8878, 3.1.1.1, with the magic number
	zstdBlockHeader = 3
	zstdBlockSize   = 64 << 10 // the smallest that klauspost/compress cuts data into
	zstdWindow      = 1 << 20
	zstdSmall       = 128 << 10 // a single segment up to here
	// zstdMaxWindow is the largest window that is decoded, zstd's own default.
	zstdMaxWindow = 128 << 20
)

// zstdEmptyFrame is a single segment that states a content size of 0 and holds one
// empty last block; klauspost/compress takes the size 0 for an unknown one.
var zstdEmptyFrame = []byte{0x28, 0xB5, 0x2F, 0xFD, 0x20, 0x00, 0x01, 0x00, 0x00}

// zstdEncoders are two, because klauspost/compress leaves the content size of
// less than 256 bytes out unless the frame is a single segment, and a single
// segment makes the decoder's window as large as the content.
type zstdEncoders struct{ small, large *zstd.Encoder }

func (z zstdEncoders) pick(size int64) *zstd.Encoder {
	if size <= zstdSmall {
		return z.small
	}
	return z.large
}

func newZstdEncoders(level int) (z zstdEncoders, err error) {
	if level < 0 || level > int(zstd.SpeedBestCompression) {
		return z, status.New(status.InvalidArgument,
			"level = %d: zstd takes 0 to %d", level, int(zstd.SpeedBestCompression))
	}
	speed := zstd.SpeedFastest
	if level > 0 {
		speed = zstd.EncoderLevel(level)
	}
	for _, e := range []**zstd.Encoder{&z.small, &z.large} {
		*e, err = zstd.NewWriter(nil,
			zstd.WithEncoderLevel(speed), zstd.WithEncoderConcurrency(1), zstd.WithWindowSize(zstdWindow),
			zstd.WithLowerEncoderMem(true), zstd.WithEncoderCRC(false), zstd.WithZeroFrames(true),
			zstd.WithSingleSegment(e == &z.small))
		if err != nil {
			return z, status.Wrap(status.Internal, err, "zstd encoder")
		}
	}
	return z, nil
}

func zstdDecodedSize(prefix []byte) (int64, error) {
	var h zstd.Header
	if err := h.Decode(prefix); err != nil {
		return 0, corrupt(err, "no zstd frame")
	}
	if h.Skippable {
		return 0, corrupt(nil, "a skippable zstd frame is no payload")
	}
	if !h.HasFCS {
		return -1, nil
	}
	if int64(h.FrameContentSize) < 0 {
		return 0, corrupt(nil, "the zstd frame claims %d bytes", h.FrameContentSize)
	}
	return int64(h.FrameContentSize), nil
}

var zstdReaders = sync.Pool{New: func() any {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(1), zstd.WithDecoderLowmem(true),
		zstd.WithDecoderMaxWindow(zstdMaxWindow))
	if err != nil {
		panic("codec: zstd decoder: " + err.Error()) // its options are constants
	}
	return d
}}

func withZstd(payload io.Reader, f func(io.Reader) error) error {
	d := zstdReaders.Get().(*zstd.Decoder)
	defer zstdReaders.Put(d)
	if err := d.Reset(payload); err != nil {
		return corrupt(err, "no zstd frame")
	}
	err := f(d)
	if rerr := d.Reset(nil); err == nil && rerr != nil {
		err = status.Wrap(status.Internal, rerr, "zstd decoder")
	}
	return err
}
