//go:build cgo

package codec

/*
#cgo CFLAGS: -std=gnu11 -O3 -Wall -Wextra
#cgo noescape strapk_float32_to_float16
#cgo nocallback strapk_float32_to_float16
#cgo noescape strapk_gather
#cgo nocallback strapk_gather
#include "kernel.h"
*/
import "C"

import "unsafe"

// kernels are the conversion kernels that this processor can run, by the name of
// their instruction set, the fastest first.
var kernels = func() []string {
	names := make([]string, C.strapk_kernels())
	for i := range names {
		names[i] = C.GoString(C.strapk_kernel_name(C.int(i)))
	}
	return names
}()

func convertKernel(kernel int, dst, src unsafe.Pointer, n int, st *Stats) {
	var c C.struct_strapk_stats
	C.strapk_float32_to_float16(C.int(kernel), (*C.uint16_t)(dst), (*C.float)(src), C.size_t(n), &c)
	st.Add(&Stats{
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
