// Selects the value of a rank without sorting all values.

package analyse

import (
	"math/bits"
	"slices"
)

// nth returns the value of rank k of v, counted from 0. It reorders v so that this value is at v[k],
// no larger value is before it, and no smaller one after it.
func nth[T uint32 | uint64](v []T, k int) T {
	low, high := 0, len(v)-1
	// Bad pivots make the partitions many: after 2*log2(n) of them sort the rest instead.
	for patience := 2 * bits.Len(uint(len(v))); high-low > 16; patience-- {
		if patience == 0 {
			slices.Sort(v[low : high+1])
			return v[k]
		}
		pivot := median(v[low], v[low+(high-low)/2], v[high])
		i, j := low, high
		for i <= j {
			for v[i] < pivot {
				i++
			}
			for v[j] > pivot {
				j--
			}
			if i <= j {
				v[i], v[j] = v[j], v[i]
				i++
				j--
			}
		}
		switch {
		case k <= j:
			high = j
		case k >= i:
			low = i
		default:
			return v[k]
		}
	}
	slices.Sort(v[low : high+1])
	return v[k]
}

func median[T uint32 | uint64](a, b, c T) T {
	return max(min(a, b), min(max(a, b), c))
}
