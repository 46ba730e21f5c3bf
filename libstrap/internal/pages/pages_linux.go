// Maps, relinquishes and populates pages by calls of Linux.

package pages

import (
	"os"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

func mapPages(n int) (whole, all []byte, err error) {
	room := n
	if n >= hugePage {
		room += hugePage
	}
	whole, err = syscall.Mmap(-1, 0, room, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	if err != nil {
		return nil, nil, err
	}
	if err := syscall.Madvise(whole, syscall.MADV_DONTFORK); err != nil {
		unmapPages(whole)
		return nil, nil, err
	}
	if n < hugePage {
		return whole, whole, nil
	}
	at := -int(uintptr(unsafe.Pointer(unsafe.SliceData(whole)))) & (hugePage - 1)
	all = whole[at : at+n : at+n]
	_ = syscall.Madvise(all, syscall.MADV_HUGEPAGE) // a kernel without them refuses
	return whole, all, nil
}

func mapFile(f *os.File, n int) ([]byte, error) {
	all, err := syscall.Mmap(int(f.Fd()), 0, n, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err != nil {
		return nil, err
	}
	if err := syscall.Madvise(all, syscall.MADV_DONTFORK); err != nil {
		unmapPages(all)
		return nil, err
	}
	_ = syscall.Madvise(all, syscall.MADV_HUGEPAGE) // a file system without them refuses
	return all, nil
}

// relinquish lets the system take the first n bytes at any time, and the other bytes now. The addresses
// stay mapped. It returns false if the system cannot do this (locked memory, a kernel before 4.5), or if
// the process must save addresses.
func relinquish(b []byte, n int) bool {
	if addressesCount() || n < len(b) && syscall.Madvise(b[n:], syscall.MADV_DONTNEED) != nil {
		return false
	}
	return syscall.Madvise(b[:min(n, len(b))], unix.MADV_FREE) == nil
}

// drop lets the system take whole pages now.
func drop(b []byte) bool { return syscall.Madvise(b, syscall.MADV_DONTNEED) == nil }

// punch lets the system take whole pages of a file, from one offset to another. The file keeps its length.
func punch(f *os.File, from, to int) bool {
	return fallocate(f, unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, from, to)
}

// reserve gives a file room on its file system, from one offset to another.
func reserve(f *os.File, from, to int) bool { return fallocate(f, unix.FALLOC_FL_KEEP_SIZE, from, to) }

func fallocate(f *os.File, mode uint32, from, to int) bool {
	for {
		err := unix.Fallocate(int(f.Fd()), mode, int64(from), int64(to-from))
		if err != unix.EINTR { //nolint:errorlint // a call of the system returns it as it is
			return err == nil
		}
	}
}

// addressesCount reports whether there is a limit on mapped memory, touched or not.
func addressesCount() bool {
	var most unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_AS, &most) != nil || most.Cur != unix.RLIM_INFINITY {
		return true
	}
	return strictOvercommit()
}

var strictOvercommit = sync.OnceValue(func() bool {
	mode, err := os.ReadFile("/proc/sys/vm/overcommit_memory")
	return err == nil && len(mode) > 0 && mode[0] == '2'
})

// populate does the work of Touch in one call. It returns false if the kernel cannot (before 5.14).
func populate(b []byte) bool { return unix.Madvise(b, unix.MADV_POPULATE_WRITE) == nil }
