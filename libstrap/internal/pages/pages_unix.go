// Maps pages on systems other than Linux, where they are neither relinquished nor populated.

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

func mapFile(*os.File, int) ([]byte, error) { return nil, syscall.ENOTSUP }

// What follows works on Linux alone.

func relinquish([]byte, int) bool     { return false }
func drop([]byte) bool                { return false }
func populate([]byte) bool            { return false }
func punch(*os.File, int, int) bool   { return false }
func reserve(*os.File, int, int) bool { return false }
