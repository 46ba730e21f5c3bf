// Stands in for the loops in C, in builds without cgo.

//go:build !cgo

package codec

import (
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/team"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// kernels is empty without a C compiler.
var kernels []string

func convertKernel(int, unsafe.Pointer, unsafe.Pointer, int, rounding, *Stats) {
	panic("codec: there is no kernel")
}

func roundKernel(int, unsafe.Pointer, unsafe.Pointer, int, rounding, *Stats) {
	panic("codec: there is no kernel")
}

const convertWay, roundWay, copyWay = 0, 1, 2

func shareKernel(team.Team, uint32, unsafe.Pointer, unsafe.Pointer, int, rounding, *Stats, *Sum) {
	panic("codec: there is no kernel")
}

func gatherKernel(dst, src unsafe.Pointer, itemSize int, shape, strides []int64, start, count int64) {
	gatherPortable(dst, src, itemSize, shape, strides, start, count)
}

func huffmanKernel(*huffCode, int, int, *huffStream, *huffStream) {
	panic("codec: there is no kernel")
}

func huffmanWideKernel(*[256]uint16, int, *huffStream, *huffStream) {
	panic("codec: there is no kernel")
}

func countWordsKernel(*[4][1 << huffWordBits]uint16, uint, []byte, int, int, int) uint64 {
	panic("codec: there is no kernel")
}

func extentKernel([]byte, bool) extent {
	panic("codec: there is no kernel")
}

const quantiseInC = false

func quantiseKernel(*codeBuffers, []byte, wire.DType, float64, *quantised) {
	panic("codec: there is no kernel")
}

func restoreKernel([]byte, []byte, []byte, wire.DType) {
	panic("codec: there is no kernel")
}
