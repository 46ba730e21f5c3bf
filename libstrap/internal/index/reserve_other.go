// Stands in for reserve_linux.go on other systems: allocates nothing.

//go:build !linux

package index

import "os"

// reserve does nothing: there is no portable way to allocate disk blocks.
func reserve(f *os.File, at, n int64) {}
