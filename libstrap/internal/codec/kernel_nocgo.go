//go:build !cgo

package codec

import "unsafe"

func convertSIMD(dst, src unsafe.Pointer, n int, st *Stats) bool { return false }

func gatherKernel(dst, src unsafe.Pointer, itemSize int, shape, strides []int64, start, count int64) {
	gatherPortable(dst, src, itemSize, shape, strides, start, count)
}
