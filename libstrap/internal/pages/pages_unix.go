//go:build unix && !linux

package pages

import (
	"os"
	"syscall"
)

func mapPages(n int) (whole, all []byte, err error) {
	whole, err = syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	return whole, whole, err
}

func unmapPages(whole []byte) {
	if err := syscall.Munmap(whole); err != nil {
		panic("pages: munmap of its own memory: " + err.Error())
	}
}

// relinquish is for Linux alone.
func relinquish([]byte, int) bool { return false }

func touch(b []byte) {
	for i := 0; i < len(b); i += os.Getpagesize() {
		b[i] = 0
	}
}
