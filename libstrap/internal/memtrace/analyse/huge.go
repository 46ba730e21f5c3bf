// Allocates large tables in huge pages.

package analyse

import "unsafe"

// hugePage is the size of the huge pages of x86-64 and most arm64 machines.
const hugePage = 2 << 20

// zeros returns a slice of n zeros, in huge pages if it fills at least one. A huge page costs one page
// fault and one address translation where small pages cost 512. In a new table that is accessed at
// random, these cost more than all the rest.
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
