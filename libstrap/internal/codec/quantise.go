// Turns 16-bit floats into the codes and steps of an archive payload, and back.

package codec

import (
	"encoding/binary"
	"math"

	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// archiveBlock is how many elements share a step. Payloads are about as large with 64, 128 and 256
	// elements. 128 divides the rows of most models.
	archiveBlock = 128
	// quantiseLanes is how many partial sums there are. SIMD and its twin have the same.
	quantiseLanes = 16

	// A step is a bfloat16 with three mantissa bits. So a code times a step is exact in float32, and in
	// float16 above its subnormal numbers.
	stepUnit = 1 << 20    // of its float32 bits
	stepMin  = 0x0D800000 // 2^-100: the reciprocal is finite
	codeMax  = 127
	// quantiseUpward makes a float32 sum of a block larger by the most that rounding can lose. Each
	// square goes through 12 roundings: its own, 7 additions in a lane and 4 additions of lanes. A
	// rounding loses 2^-24 at most. The fraction covers the terms of second order.
	quantiseUpward = 1 + 12.0078125/(1<<24)
	// codeExact is the code of a value of more than codeMax steps. The value is stored exactly.
	codeExact = 0x80
)

// quantised has the sums and the error of quantised values.
type quantised struct {
	finite      bool    // all values are finite, and their squares in float32
	squareError float64 // sum of (value - decoded value)^2; see atMost
	squareSum   float64 // sum of value^2; see atMost
	squareExact float64 // sum of value^2 over the exact values
	largest     float32 // largest |value|
	maxError    float32 // largest |value - decoded value|
	exact       int     // number of values that are stored exactly
}

// codeBuffers has room for the output of quantise for n values.
type codeBuffers struct {
	codes  []byte // n bytes
	scales []byte // the step of each archiveBlock values, as bfloat16
	exact  []byte // room for n values; the first ones are those whose code is codeExact
}

func newCodeBuffers(n int) *codeBuffers {
	return &codeBuffers{make([]byte, n), make([]byte, 2*blocksOf(n)), make([]byte, 2*n)}
}

// of returns the first part of the buffers, for n values.
func (b *codeBuffers) of(n int) *codeBuffers {
	return &codeBuffers{b.codes[:n], b.scales[:2*blocksOf(n)], b.exact[:2*n]}
}

// blocksOf returns how many blocks n values have.
func blocksOf(n int) int { return (n + archiveBlock - 1) / archiveBlock }

// quantise turns the 16-bit floats in src into codes and scales. All values of a block have the same
// step: sqrt(spread * mean of value^2), rounded to the grid of steps. decodeBlock decodes them.
//
// If the result is not finite, it is incomplete.
func quantise(dst *codeBuffers, src []byte, t wire.DType, spread float64) (q quantised) {
	_, kernel := kernelInUse()
	switch {
	case len(src) == 0:
		q.finite = true
	case kernel && quantiseInC:
		quantiseKernel(dst, src, t, spread, &q)
	default:
		quantisePortable(dst, src, t, spread, &q)
	}
	return q
}

// quantisePortable is the twin in Go of quantise.c: the same operations in the same order.
// float32(...) keeps the compiler from fusing two operations into one.
func quantisePortable(dst *codeBuffers, src []byte, t wire.DType, spread float64, q *quantised) {
	var x [archiveBlock]float32
	for i := range blocksOf(len(src) / 2) {
		at := i * archiveBlock
		count := min(archiveBlock, len(src)/2-at)
		widen(x[:count], src[2*at:], t)
		clear(x[count:])
		codes := dst.codes[at:][:count]
		if !quantiseBlock(codes, dst.scales[2*i:], &x, t, float32(spread/float64(count)), q) {
			return
		}
		for k, c := range codes {
			if c == codeExact {
				q.exact += copy(dst.exact[2*q.exact:], src[2*(at+k):][:2]) / 2
				q.squareExact += float64(x[k]) * float64(x[k])
			}
		}
	}
	q.finite = true
}

// quantiseBlock quantises a block. It returns false if the block is not finite.
func quantiseBlock(codes, scale []byte, x *[archiveBlock]float32, t wire.DType, spread float32, q *quantised) bool {
	var lanes [quantiseLanes]float32
	largest := float32(0)
	for i, v := range x {
		lanes[i%quantiseLanes] += float32(v * v)
		largest = max(largest, abs32(v))
	}
	square := addLanes(&lanes)
	if !(square <= math.MaxFloat32) {
		return false
	}
	step := stepOf(float32(square*spread), largest)
	inverse := float32(0)
	if step > 0 {
		inverse = 1 / step
	}
	exact := exactSteps(t, 1.0/(1<<21), step)
	clear(lanes[:])
	maxError := float32(0)
	for i, v := range x {
		// Adding 1.5 * 2^23 leaves the nearest integer, ties to even, in the lowest bits.
		const toInteger = 12582912
		shifted := float32(v*inverse) + toInteger
		code, far := byte(math.Float32bits(shifted)), abs32(shifted-toInteger) > codeMax
		if far {
			code = codeExact
		}
		if i < len(codes) {
			codes[i] = code
		}
		if far {
			continue
		}
		y := float32((shifted - toInteger) * step)
		if !exact {
			y = narrowed(y, t)
		}
		e := abs32(y - v)
		lanes[i%quantiseLanes] += float32(e * e)
		maxError = max(maxError, e)
	}
	binary.LittleEndian.PutUint16(scale, uint16(math.Float32bits(step)>>16))
	q.squareError += atMost(addLanes(&lanes), maxError)
	q.squareSum += atMost(square, largest)
	q.largest = max(q.largest, largest)
	q.maxError = max(q.maxError, maxError)
	return true
}

// atMost returns an upper bound of the sum of a block's squares. sum is the sum of float32 lanes. The
// bound exceeds the true sum by less than the share sumExcess. If the largest value is below 2^-55, it
// exceeds the true sum by 2^-142 more, because float32 rounds squares below 2^-126 by 2^-150 each.
//
// float64(...) keeps the compiler from fusing the product with an addition of the caller, as Go's does
// for arm64. So the bound is the same on every processor.
func atMost(sum, largest float32) float64 {
	const small, vanished = 1.0 / (1 << 55), archiveBlock * 0x1p-150
	if 0 < largest && largest < small {
		return float64(float64(sum)*quantiseUpward) + vanished
	}
	return float64(float64(sum) * quantiseUpward)
}

// stepOf returns the square root of square, rounded to the nearest step of the grid.
func stepOf(square, largest float32) float32 {
	if largest == 0 {
		return 0
	}
	wanted := math.Float32bits(float32(math.Sqrt(float64(square)))) + stepUnit/2
	return math.Float32frombits(max(wanted, stepMin) &^ (stepUnit - 1))
}

// addLanes adds in the order of SIMD: it adds the upper half of the lanes to the lower half, again and
// again.
func addLanes(lanes *[quantiseLanes]float32) float32 {
	for half := quantiseLanes / 2; half > 0; half /= 2 {
		for i := range half {
			lanes[i] += lanes[i+half]
		}
	}
	return lanes[0]
}

func abs32(x float32) float32 { return math.Float32frombits(math.Float32bits(x) &^ (1 << 31)) }

// widen converts the 16-bit floats in src to float32.
func widen(dst []float32, src []byte, t wire.DType) {
	if t == wire.BFloat16 {
		for i := range dst {
			dst[i] = math.Float32frombits(uint32(binary.LittleEndian.Uint16(src[2*i:])) << 16)
		}
		return
	}
	for i := range dst {
		dst[i] = float16Value(binary.LittleEndian.Uint16(src[2*i:]))
	}
}

// narrow rounds x to a 16-bit float of type t, to nearest, ties to even.
func narrow(x float32, t wire.DType) uint16 {
	if t == wire.BFloat16 {
		b := math.Float32bits(x)
		return uint16((b + 0x7FFF + b>>16&1) >> 16)
	}
	return float16Bits(x)
}

// narrowed returns the value of narrow(x, t).
func narrowed(x float32, t wire.DType) float32 {
	if t == wire.BFloat16 {
		return math.Float32frombits(uint32(narrow(x, t)) << 16)
	}
	return float16Value(float16Bits(x))
}

// exactSteps reports whether step is at least least, and each code times step is exact as t. float16 is
// exact from 2^-21 on: there the product's last bit is still a bit of a subnormal number. From 2^-14 on
// no product is subnormal.
func exactSteps(t wire.DType, least, step float32) bool {
	return t == wire.Float16 && step >= least && step <= 512
}

// restore writes the values of codes, code * step, to dst as 16-bit floats. For a codeExact it writes an
// undefined value. scales has the step of each block.
func restore(dst, codes, scales []byte, t wire.DType) {
	if _, kernel := kernelInUse(); kernel && quantiseInC && len(codes) > 0 {
		restoreKernel(dst, codes, scales, t)
	} else {
		restorePortable(dst, codes, scales, t)
	}
}

// restorePortable is the twin in Go of strapk_restore.
func restorePortable(dst, codes, scales []byte, t wire.DType) {
	for i := range blocksOf(len(codes)) {
		from, to := i*archiveBlock, min((i+1)*archiveBlock, len(codes))
		decodeBlock(dst[2*from:], codes[from:to], binary.LittleEndian.Uint16(scales[2*i:]), t)
	}
}

// decodeBlock writes the values of codes, code * step, as 16-bit floats. For a codeExact it writes an
// undefined value.
func decodeBlock(dst, codes []byte, scale uint16, t wire.DType) {
	step := math.Float32frombits(uint32(scale) << 16)
	if scale&(stepUnit>>16-1) == 0 && exactSteps(t, 1.0/(1<<14), step) {
		for i, c := range codes {
			b := math.Float32bits(float32(int8(c)) * step)
			h := uint32(0)
			if c != 0 {
				h = b>>16&0x8000 | (b&0x7FFFFFFF-112<<23)>>13 // the exponents' biases differ
			}
			binary.LittleEndian.PutUint16(dst[2*i:], uint16(h))
		}
		return
	}
	for i, c := range codes {
		binary.LittleEndian.PutUint16(dst[2*i:], narrow(float32(int8(c))*step, t))
	}
}
