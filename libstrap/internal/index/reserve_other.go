//go:build !linux

package index

import "os"

// reserve does nothing here: there is no portable way to it.
func reserve(f *os.File, at, n int64) {}
