// Keeps packets with too large an error out of the archive, and adds up what archiving lost.

package session

import (
	"math"

	"github.com/libstrap/strap/libstrap/internal/codec"
)

// float16Share is the most by which rounding to float16 changes values that are normal numbers
// there: squared error over squares.
const float16Share = 1.0 / (1 << 22)

// float16Least is the most by which it changes the square of a subnormal number.
const float16Least = 1.0 / (1 << 50)

// keepWhole takes a packet out of the archive if its values lost more by the rounding to float16
// than the archive's error bound allows for. Call it for packets of codec.Archive.
func (it *entry) keepWhole() {
	if it.converted.SquareError > it.converted.SquareSum*float16Share {
		it.kind = codec.Zstd
		it.row.Codec = it.kind.String()
	}
}

// addArchiveLoss adds the loss of archiving to the row of a packet, and to the counters.
//
// The loss of the rounding to float16 came first. Where values have both, the two together are at
// most as large as if they went in one direction. The archived values lost no more by rounding
// than float16Share allows for.
func (c *counters) addArchiveLoss(it *entry, l codec.Loss) {
	if l.Count == 0 {
		return
	}
	before := &it.converted
	rounding := min(before.SquareError, l.SquareCoded*float16Share+float64(l.Count)*float16Least)
	more := codec.Stats{
		SquareError: l.SquareError + 2*math.Sqrt(rounding*l.SquareError),
		MaxError:    before.MaxError + l.MaxError,
	}
	it.row.MSE = (before.SquareError + more.SquareError) / float64(l.Count)
	if before.Count == 0 { // its values were 16 bits wide from the first
		more.Count, more.SquareSum = l.Count, l.SquareSum
		it.row.MeanSquare = l.SquareSum / float64(l.Count)
	}
	c.addLoss(&more)
}
