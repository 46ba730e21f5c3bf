// Compresses all pages with one zstd encoder.

package parquet

import (
	"runtime"
	"sync"

	"github.com/apache/arrow/go/v17/parquet/compress"
	"github.com/klauspost/compress/zstd"
)

// zstdCodec is Arrow's zstd codec with one encoder for all pages. Arrow makes a new encoder, with
// new tables, for each page.
type zstdCodec struct{ compress.Codec }

func init() {
	arrows, err := compress.GetCodec(compress.Codecs.Zstd)
	if err != nil {
		panic(err) // Arrow is built without zstd
	}
	compress.RegisterCodec(compress.Codecs.Zstd, zstdCodec{arrows})
}

// window is the zstd window in bytes. Repeated text in a page, which has at most 1 MiB, lies within
// this distance. The memory of the encoders grows with the window.
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
