// Copies elements in their stored type, and measures what they lose.

package session

import (
	"math"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// copy puts count elements from start on into dst, in the stored type, and measures what they lose.
// It sets the checksum of dst in sum if it learns it. With sum nil it computes none.
func (e *emission) copy(dst []byte, start, count int64, sum *codec.Sum) {
	var lost codec.Stats
	by := codec.Copier{Team: e.opts.Team, Sum: sum}
	bits := e.tensor.copyElements(dst, e.stored, start, count, e.bound, by, &lost)
	e.lost.Add(&lost)
	e.packetLost.Add(&lost)
	e.bits = max(e.bits, bits)
}

// measure returns the loss of the current packet, all of whose elements are copied. Rounding keeps
// the error bound. So an error above the bound means that the values are too small for float16, and
// measure sets e.tiny.
func (e *emission) measure() packetLoss {
	made := &e.packetLost
	if e.conversion != nil {
		made = &e.conversion.Loss
	}
	if e.source != e.stored && !made.Within(e.opts.mostLost) {
		e.tiny = true
	}
	return packetLoss{e.withConversion(e.packetLost, e.part.count), e.bits}
}

// setLoss puts the packet's loss into its row.
func (it *entry) setLoss(l packetLoss) {
	it.converted = l.stats
	n := float64(l.stats.Count) // NaN, which is 0 / 0, if nothing was measured
	it.row.MSE, it.row.MeanSquare = l.stats.SquareError/n, l.stats.SquareSum/n
	it.row.Mantissa = int8(l.bits)
}

// withConversion joins the loss that copying measured of count elements with the loss of the
// caller's conversion.
func (e *emission) withConversion(copied codec.Stats, count int64) codec.Stats {
	if e.conversion == nil || count == 0 {
		return copied
	}
	return e.conversion.joined(float64(count)/float64(e.elems), &copied)
}

// left returns the bound of the normalised squared error that is left for rounding after the
// conversion; 0: nothing is left.
//
// Let b be the root of the bound, l the root of what is left, and r the norm of the conversion's error
// over the norm of the captured values. The norm of the converted values is at most 1 + r times that of
// the captured ones. So rounding adds an error of at most l*(1 + r), and the sum r + l*(1 + r) is b for
// l = (b - r) / (1 + r).
func (c *Conversion) left(bound float64) float64 {
	if c == nil || c.Loss.SquareError == 0 {
		return bound
	}
	r := math.Sqrt(c.Loss.SquareError / c.Loss.SquareSum) // infinite if the sum is 0
	root := (math.Sqrt(bound) - r) / (1 + r)
	if !(root > 0) {
		return 0
	}
	return root * root
}

// joined returns what a share of the tensor lost by the conversion and by the rounding after it.
// No code measures both at once. So joined adds their errors as if these went in one direction,
// which is the most that they can be together.
//
// A packet that holds a part of the tensor gets an even share of the conversion's error. The sum over
// the packets of a tensor is a true bound. The error of one packet may be larger than its share, because
// its values may have lost more than the values of other packets.
func (c *Conversion) joined(share float64, rounding *codec.Stats) codec.Stats {
	l := codec.Stats{
		Count:       max(int64(math.Ceil(float64(c.Loss.Count)*share)), rounding.Count),
		SquareError: c.Loss.SquareError * share,
		SquareSum:   c.Loss.SquareSum * share,
		MaxError:    c.Loss.MaxError + rounding.MaxError,
	}
	l.SquareError += rounding.SquareError + 2*math.Sqrt(l.SquareError*rounding.SquareError)
	return l
}

// mantissaOf returns the mantissa of a stored type that can be rounded to fewer bits. It returns 0
// for other types.
func mantissaOf(stored wire.DType) codec.Mantissa {
	switch stored {
	case wire.Float16:
		return codec.Float16
	case wire.BFloat16:
		return codec.BFloat16
	default:
		return 0
	}
}

// copyElements puts the elements [start, start+count), row-major, into dst as the stored type. With
// a bound above 0 it rounds to the fewest bits of mantissa that keep the normalised squared error
// within the bound, and returns their number; it returns 0 if it rounds nothing. If it converts or
// rounds, it adds the loss to st.
func (t *Tensor) copyElements(dst []byte, stored wire.DType, start, count int64, bound float64, by codec.Copier, st *codec.Stats) int {
	full := mantissaOf(stored)
	if full == 0 || bound == 0 {
		t.copyRounded(dst, stored, start, count, int(full), by, st)
		return 0
	}
	for bits := full.LeastBits(bound); ; bits++ {
		var own codec.Stats
		t.copyRounded(dst, stored, start, count, bits, by, &own)
		if own.Within(bound) || bits >= int(full) {
			st.Add(&own)
			return bits % int(full)
		}
	}
}

// copyRounded is copyElements with a given number of bits. Types without a mantissa ignore bits.
func (t *Tensor) copyRounded(dst []byte, stored wire.DType, start, count int64, bits int, by codec.Copier, st *codec.Stats) {
	if count == 0 {
		return
	}
	size := int64(t.DType.Size())
	to := unsafe.Pointer(unsafe.SliceData(dst))
	full := mantissaOf(stored)
	asIs := stored == t.DType && bits >= int(full)
	if t.Strides != nil {
		if asIs {
			codec.Gather(to, t.Data, int(size), t.Shape, t.Strides, start, count)
		} else {
			t.copyPieces(to, stored, start, count, bits, st)
		}
		return
	}
	from := unsafe.Add(t.Data, start*size)
	switch {
	case asIs:
		by.Copy(to, from, int(count*size))
	case stored == t.DType:
		by.Round(full, to, from, int(count), bits, st)
	default:
		by.Float32ToFloat16(to, from, int(count), bits, st)
	}
}

// copyPieces gathers strided elements before it converts or rounds them.
func (t *Tensor) copyPieces(to unsafe.Pointer, stored wire.DType, start, count int64, bits int, st *codec.Stats) {
	var piece [4096]float32
	at, size := unsafe.Pointer(&piece), t.DType.Size()
	for done := int64(0); done < count; {
		n := min(count-done, int64(len(piece)))
		codec.Gather(at, t.Data, size, t.Shape, t.Strides, start+done, n)
		dst := unsafe.Add(to, done*int64(stored.Size()))
		if stored == t.DType {
			mantissaOf(stored).Round(dst, at, int(n), bits, st)
		} else {
			codec.Float32ToFloat16(dst, at, int(n), bits, st)
		}
		done += n
	}
}
