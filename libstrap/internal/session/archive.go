package session

import (
	"io"
	"math"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// float16Share is the most by which rounding to float16 changes values that are no
// subnormal numbers there: squared error over squares.
const float16Share = 1.0 / (1 << 22)

// float16Least is the most by which it changes the square of a subnormal number.
const float16Least = 1.0 / (1 << 50)

// encoders are those of one thread.
type encoders struct {
	plain   *codec.Encoder
	archive *codec.ArchiveEncoder // nil unless the codec is codec.Archive
}

func newEncoders(o *Options) (*encoders, error) {
	e, kind := &encoders{}, o.Codec
	var err error
	if kind == codec.Archive {
		kind = codec.Zstd // of what is not archived
		if e.archive, err = codec.NewArchiveEncoder(o.ErrorBound); err != nil {
			return nil, err
		}
	}
	e.plain, err = codec.NewEncoder(kind, o.Level)
	return e, err
}

// encodeInPlace is codec.Encoder.EncodeInPlace in the item's codec.
func (e *encoders) encodeInPlace(it *item, buf []byte) (int, error) {
	if it.kind == codec.Archive {
		return e.archive.EncodeInPlace(buf, it.front, it.source, it.row.Stored)
	}
	return e.plain.EncodeInPlace(buf, it.front, it.source)
}

// newFrame is codec.Encoder.NewFrame in the item's codec.
func (e *encoders) newFrame(it *item, w io.Writer, size int64) (io.WriteCloser, error) {
	if it.kind == codec.Archive {
		return e.archive.NewFrame(w, size, it.row.Stored)
	}
	return e.plain.NewFrame(w, size)
}

// kindOf is the codec of a packet of count elements. In an archive it has room for
// codec.Zstd too.
func (o *Options) kindOf(stored wire.DType, count int64) codec.Kind {
	if o.Codec == codec.Archive && !codec.Archives(stored, count) {
		return codec.Zstd
	}
	return o.Codec
}

// keepWhole takes a packet out of the archive whose values lost more by the rounding to
// float16 than the archive's error bound allows for.
func (it *item) keepWhole() {
	if it.kind == codec.Archive && it.converted.SquareError > it.converted.SquareSum*float16Share {
		it.kind = codec.Zstd
		it.row.Codec = it.kind.String()
	}
}

// addLoss counts the error of an archived packet. That of the rounding to float16 came
// first. Where values have both, the two are at most as large together as if they went in
// one direction; and of rounding, those values have no more than float16Share allows for.
func (s *Session) addLoss(it *item, l codec.Loss) {
	if l.Count == 0 {
		return
	}
	c := &it.converted
	rounding := min(c.SquareError, l.SquareCoded*float16Share+float64(l.Count)*float16Least)
	more := codec.Stats{
		SquareError: l.SquareError + 2*math.Sqrt(rounding*l.SquareError),
		MaxError:    c.MaxError + l.MaxError,
	}
	it.row.MSE = (c.SquareError + more.SquareError) / float64(l.Count)
	if c.Count == 0 { // it was 16 bits before
		more.Count, more.SquareSum = l.Count, l.SquareSum
		it.row.MeanSquare = l.SquareSum / float64(l.Count)
	}
	s.convert.Lock()
	s.convert.Add(&more)
	s.convert.Unlock()
}
