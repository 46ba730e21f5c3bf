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

// touchMemory has the system put pages behind b, which nothing is in yet.
func touchMemory(b []byte) {
	for i := 0; i < len(b); i += pageSize {
		b[i] = 0
	}
}
