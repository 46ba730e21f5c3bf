package analyse

import "unsafe"

// hugePage is the size of the huge pages of x86-64 and most arm64 machines.
const hugePage = 2 << 20

// zeros is a slice of n zeros, in huge pages if it fills some: one fault and one
// translation for what are 512 small pages. New memory, looked up at random, costs
// more in those than in all else.
func zeros[T any](n int) []T {
	var one T
	width := int(unsafe.Sizeof(one))
	if n*width < hugePage {
		return make([]T, n)
	}
	v := make([]T, n+hugePage/width)
	skip := int(-uintptr(unsafe.Pointer(unsafe.SliceData(v)))%hugePage) / width
	v = v[skip : skip+n : skip+n]
	adviseHuge(unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), n*width))
	return v
}
