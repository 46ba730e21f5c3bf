// Copies the elements of a strided tensor to contiguous memory.

package codec

import "unsafe"

// Gather copies the elements [start, start+count) of a strided tensor, in row-major order, to
// contiguous memory at dst. Strides are in elements, and may be zero or negative. itemSize is 1, 2, 4,
// 8 or 16 bytes. Each length of shape is positive.
func Gather(dst, src unsafe.Pointer, itemSize int, shape, strides []int64, start, count int64) {
	if count == 0 {
		return
	}
	var lengths, steps [64]int64
	n := collapse(&lengths, &steps, shape, strides)
	gatherKernel(dst, src, itemSize, lengths[:n], steps[:n], start, count)
}

// collapse merges neighbouring dimensions that one stride can walk, and drops dimensions of length 1.
// It returns how many are left, at least one.
func collapse(lengths, steps *[64]int64, shape, strides []int64) (n int) {
	for i, length := range shape {
		switch {
		case length == 1:
			continue
		case n > 0 && steps[n-1] == length*strides[i]:
			lengths[n-1] *= length
			steps[n-1] = strides[i]
			continue
		}
		lengths[n], steps[n] = length, strides[i]
		n++
	}
	if n == 0 {
		lengths[0], steps[0], n = 1, 1, 1
	}
	return n
}

// gatherPortable is the twin of strapk_gather in gather.c.
func gatherPortable(dst, src unsafe.Pointer, itemSize int, shape, strides []int64, start, count int64) {
	for i := range count {
		rest, offset := start+i, int64(0)
		for d := len(shape) - 1; d >= 0; d-- {
			offset += rest % shape[d] * strides[d]
			rest /= shape[d]
		}
		copy(unsafe.Slice((*byte)(unsafe.Add(dst, i*int64(itemSize))), itemSize),
			unsafe.Slice((*byte)(unsafe.Add(src, offset*int64(itemSize))), itemSize))
	}
}
