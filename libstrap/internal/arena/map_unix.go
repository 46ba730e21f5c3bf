//go:build unix && !linux

package arena

import "syscall"

func mapMemory(n int) ([]byte, error) {
	return syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
}

func unmapMemory(b []byte) {
	if err := syscall.Munmap(b); err != nil {
		panic("arena: munmap of its own memory: " + err.Error())
	}
}
