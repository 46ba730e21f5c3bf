package parquet

import (
	"runtime"
	"sync"

	"github.com/apache/arrow/go/v17/parquet/compress"
	"github.com/klauspost/compress/zstd"
)

// zstdCodec is Arrow's with one encoder for all pages: Arrow's own makes a new one,
// with its tables, for each page.
type zstdCodec struct{ compress.Codec }

func init() {
	arrows, err := compress.GetCodec(compress.Codecs.Zstd)
	if err != nil {
		panic(err) // Arrow is built without zstd
	}
	compress.RegisterCodec(compress.Codecs.Zstd, zstdCodec{arrows})
}

// window is the distance at which text repeats in a page of at most 1 MiB; the
// encoders' memory grows with it.
const window = 256 << 10

var pageEncoder = sync.OnceValue(func() *zstd.Encoder {
	encoder, err := zstd.NewWriter(nil, zstd.WithZeroFrames(true), zstd.WithEncoderLevel(zstd.SpeedDefault),
		zstd.WithEncoderConcurrency(min(runtime.NumCPU(), maxWorkers)), zstd.WithWindowSize(window), zstd.WithLowerEncoderMem(true))
	if err != nil {
		panic(err) // the options are constants
	}
	return encoder
})

func (zstdCodec) Encode(dst, src []byte) []byte { return pageEncoder().EncodeAll(src, dst[:0]) }

func (c zstdCodec) EncodeLevel(dst, src []byte, _ int) []byte { return c.Encode(dst, src) }
