// Reserves no room on systems other than Linux.

//go:build !linux

package ringfile

import (
	"os"
	"syscall"
)

func reserve(*os.File, int64) error { return syscall.ENOTSUP }
