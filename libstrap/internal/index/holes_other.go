// Stands in for holes_linux.go on other systems: takes a file for one without holes.

//go:build !linux

package index

import "os"

// written returns size, as for a file without holes.
func written(_ *os.File, size, _ int64) int64 { return size }
