package analyse

import "golang.org/x/sys/unix"

func adviseHuge(v []byte) {
	// A kernel without huge pages refuses: then there are small ones.
	_ = unix.Madvise(v[:len(v)/hugePage*hugePage], unix.MADV_HUGEPAGE)
}
