// Calls the loops in C, in builds with cgo.

//go:build cgo

package codec

/*
#cgo CFLAGS: -I${SRCDIR}/../team -std=gnu11 -O3 -Wall -Wextra
#cgo noescape strapk_float32_to_float16
#cgo nocallback strapk_float32_to_float16
#cgo noescape strapk_round
#cgo nocallback strapk_round
#cgo noescape strapk_gather
#cgo nocallback strapk_gather
#cgo noescape strapk_huffman_pair
#cgo nocallback strapk_huffman_pair
#cgo noescape strapk_huffman_wide
#cgo nocallback strapk_huffman_wide
#cgo noescape strapk_count_words
#cgo nocallback strapk_count_words
#cgo noescape strapk_extent_of
#cgo nocallback strapk_extent_of
#cgo noescape strapk_extent_wide
#cgo nocallback strapk_extent_wide
#cgo noescape strapk_quantise
#cgo nocallback strapk_quantise
#cgo noescape strapk_restore
#cgo nocallback strapk_restore
#include "kernel.h"
*/
import "C"

import (
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// kernels lists the kernels that this processor can run, by the name of their instruction set, the
// fastest first.
var kernels = func() []string {
	names := make([]string, C.strapk_kernels())
	for i := range names {
		names[i] = C.GoString(C.strapk_kernel_name(C.int(i)))
	}
	return names
}()

func convertKernel(kernel int, dst, src unsafe.Pointer, n int, r rounding, st *Stats) {
	var c C.struct_strapk_stats
	how := r.toC()
	C.strapk_float32_to_float16(C.int(kernel), (*C.uint16_t)(dst), (*C.float)(src), C.size_t(n), &how, &c)
	st.addC(&c)
}

func roundKernel(kernel int, dst, src unsafe.Pointer, n int, r rounding, st *Stats) {
	var c C.struct_strapk_stats
	how := r.toC()
	C.strapk_round(C.int(kernel), (*C.uint16_t)(dst), (*C.uint16_t)(src), C.size_t(n), &how, &c)
	st.addC(&c)
}

// The ways of shareKernel.
const (
	convertWay = C.STRAPK_CONVERT
	roundWay   = C.STRAPK_ROUND
	copyWay    = C.STRAPK_COPY
)

// shareKernel runs convertKernel, roundKernel or a copy of n bytes in the threads of a team. It needs a
// kernel. If sum is not nil and there is a kernel for checksums, the threads also take the checksum of
// dst, and sum receives it.
func shareKernel(t team.Team, way uint32, dst, src unsafe.Pointer, n int, r rounding, st *Stats, sum *Sum) {
	var c C.struct_strapk_stats
	var sums C.struct_strapk_checksums
	var by unsafe.Pointer
	if sum != nil {
		by = crc32c.Function()
	}
	how := r.toC()
	kernel, _ := kernelInUse()
	C.strapk_share((C.strapk_team)(t.Parallel), way, C.int(kernel), dst, src, C.size_t(n), &how, &c, (C.strapk_sum)(by), &sums)
	st.addC(&c)
	if by == nil {
		return
	}
	size := 1
	if way != copyWay {
		size = 2 // of a 16-bit float
	}
	written, share := unsafe.Slice((*byte)(dst), n*size), int(sums.share)
	shift := crc32c.After(share)
	*sum = Sum{Known: true}
	for i := 0; len(written) > 0; i++ {
		of := uint32(sums.of[i])
		if len(written) < share {
			shift = crc32c.After(len(written))
		}
		if len(written) < C.STRAPK_SUMMED {
			of = crc32c.Checksum(written)
		}
		sum.CRC = shift.Combine(sum.CRC, of)
		written = written[min(share, len(written)):]
	}
}

func (r rounding) toC() C.struct_strapk_rounding {
	return C.struct_strapk_rounding{exponent: C.uint16_t(r.exponent), drop: C.uint16_t(r.drop)}
}

func (s *Stats) addC(c *C.struct_strapk_stats) {
	s.Add(&Stats{
		Count: int64(c.count), Overflow: int64(c.overflow),
		SquareError: float64(c.square_error), SquareSum: float64(c.square_sum),
		MaxError: float64(c.max_error),
	})
}

func gatherKernel(dst, src unsafe.Pointer, itemSize int, shape, strides []int64, start, count int64) {
	C.strapk_gather(dst, src, C.size_t(itemSize), C.int(len(shape)),
		(*C.int64_t)(unsafe.SliceData(shape)), (*C.int64_t)(unsafe.SliceData(strides)),
		C.int64_t(start), C.int64_t(count))
}

// huffmanKernel codes the last 4 * count > 0 bytes of each stream. codes has the codes of bytes if shift
// is negative, else the codes of words, which are shifted right by shift. C gets the address of each
// source's beginning, because the address of its end can belong to another object.
func huffmanKernel(codes *huffCode, shift int, count int, s, t *huffStream) {
	a, b := s.toC(), t.toC()
	C.strapk_huffman_pair((*C.uint64_t)(codes), C.int(shift), C.size_t(count),
		(*C.uint8_t)(&s.src[0]), (*C.uint8_t)(&t.src[0]),
		(*C.uint8_t)(&s.out[s.at]), (*C.uint8_t)(&t.out[t.at]), &a, &b)
	s.fromC(&a)
	t.fromC(&b)
}

// huffmanWideKernel codes the last 64 * count > 0 bytes of each stream. t may be nil. The level in use
// must be avx512.
func huffmanWideKernel(codes *[256]uint16, count int, s, t *huffStream) {
	short, a := (*C.uint16_t)(&codes[0]), s.toC()
	if t == nil {
		C.strapk_huffman_wide(short, C.size_t(count), (*C.uint8_t)(&s.src[0]), nil,
			(*C.uint8_t)(&s.out[s.at]), nil, &a, nil)
		s.fromC(&a)
		return
	}
	b := t.toC()
	C.strapk_huffman_wide(short, C.size_t(count), (*C.uint8_t)(&s.src[0]), (*C.uint8_t)(&t.src[0]),
		(*C.uint8_t)(&s.out[s.at]), (*C.uint8_t)(&t.out[t.at]), &a, &b)
	s.fromC(&a)
	t.fromC(&b)
}

// countWordsKernel is huffman.countPieces in C. It shifts words right by shift, and counts word i in part
// i % 4. len(src) is at least 2*stride.
func countWordsKernel(parts *[4][1 << huffWordBits]uint16, shift uint, src []byte, piece, stride, step int) uint64 {
	return uint64(C.strapk_count_words((*[1 << huffWordBits]C.uint16_t)(unsafe.Pointer(parts)), C.int(shift),
		(*C.uint8_t)(&src[0]), C.size_t(len(src)/2), C.size_t(piece), C.size_t(stride), C.size_t(step)))
}

// extentKernel returns the extent of the words of src. len(src) is a positive multiple of 64. wide asks
// for the loop with AVX-512.
func extentKernel(src []byte, wide bool) extent {
	var c C.struct_strapk_extent
	if wide {
		C.strapk_extent_wide((*C.uint8_t)(&src[0]), C.size_t(len(src)/2), &c)
	} else {
		C.strapk_extent_of((*C.uint8_t)(&src[0]), C.size_t(len(src)/2), &c)
	}
	return extent{all: uint16(c.all), least: uint16(c.least), most: uint16(c.most)}
}

func (s *huffStream) toC() C.struct_strapk_huffman {
	return C.struct_strapk_huffman{held: C.uint64_t(s.held), n: C.uint64_t(s.n), left: C.size_t(len(s.src))}
}

func (s *huffStream) fromC(c *C.struct_strapk_huffman) {
	s.held, s.n, s.src, s.at = uint64(c.held), uint(c.n), s.src[:c.left], s.at+int(c.written)
}

// quantiseInC reports whether this processor can run quantiseKernel and restoreKernel.
var quantiseInC = C.strapk_quantises() != 0

// quantiseKernel is quantisePortable in C. src has at least one value.
func quantiseKernel(dst *codeBuffers, src []byte, t wire.DType, spread float64, q *quantised) {
	var c C.struct_strapk_quantised
	q.finite = C.strapk_quantise((*C.uint8_t)(&dst.codes[0]), (*C.uint8_t)(&dst.scales[0]),
		(*C.uint8_t)(&dst.exact[0]), (*C.uint8_t)(&src[0]), C.size_t(len(src)/2), isBFloat(t), C.double(spread), &c) != 0
	q.squareError, q.squareSum = float64(c.square_error), float64(c.square_sum)
	q.squareExact = float64(c.square_exact)
	q.largest, q.maxError, q.exact = float32(c.largest), float32(c.max_error), int(c.exact)
}

// restoreKernel is restorePortable in C. There is at least one code.
func restoreKernel(dst, codes, scales []byte, t wire.DType) {
	C.strapk_restore((*C.uint8_t)(&dst[0]), (*C.uint8_t)(&codes[0]), (*C.uint8_t)(&scales[0]),
		C.size_t(len(codes)), isBFloat(t))
}

func isBFloat(t wire.DType) C.int {
	if t == wire.BFloat16 {
		return 1
	}
	return 0
}
