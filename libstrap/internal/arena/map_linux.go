package arena

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// mapMemory maps n bytes that a forked child does not inherit: it may not use
// libstrap, and copy-on-write would make the model's thread pay for the fork.
func mapMemory(n int) ([]byte, error) {
	mem, err := syscall.Mmap(-1, 0, n, syscall.PROT_READ|syscall.PROT_WRITE,
		syscall.MAP_ANON|syscall.MAP_PRIVATE|syscall.MAP_NORESERVE)
	if err != nil {
		return nil, err
	}
	if err := syscall.Madvise(mem, syscall.MADV_DONTFORK); err != nil {
		unmapMemory(mem)
		return nil, err
	}
	// Fewer page faults in the model's thread; a kernel without huge pages refuses.
	_ = syscall.Madvise(mem, syscall.MADV_HUGEPAGE)
	return mem, nil
}

func unmapMemory(b []byte) {
	if err := syscall.Munmap(b); err != nil {
		panic("arena: munmap of its own memory: " + err.Error())
	}
}

// touchMemory has the system put pages behind b, which nothing is in yet.
func touchMemory(b []byte) {
	if len(b) == 0 || unix.Madvise(b, unix.MADV_POPULATE_WRITE) == nil { // Linux 5.14
		return
	}
	for i := 0; i < len(b); i += pageSize {
		b[i] = 0
	}
}
