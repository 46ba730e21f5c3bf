// Stands in for direct_linux.go on other systems: no direct writes, no allocated blocks.

//go:build !linux

package stream

import (
	"os"
	"syscall"
)

// openDirect returns nil: direct writes are for Linux alone.
func openDirect(path string, f *os.File) (direct *os.File, align int) { return nil, 0 }

func preallocate(f *os.File, at, n int64) error { return syscall.ENOTSUP }

func freeBytes(f *os.File) int64 { return 0 }
