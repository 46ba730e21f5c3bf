// Asks Linux for huge pages.

package analyse

import "golang.org/x/sys/unix"

func adviseHuge(v []byte) {
	// A kernel without huge pages returns an error. Then the memory stays in small pages.
	_ = unix.Madvise(v[:len(v)/hugePage*hugePage], unix.MADV_HUGEPAGE)
}
