//go:build !linux

package index

import "os"

// written takes every file for one without holes.
func written(_ *os.File, size, _ int64) int64 { return size }
