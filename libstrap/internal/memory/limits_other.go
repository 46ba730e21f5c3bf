// Stands in for limits_linux.go on other systems: the memory that is left is unknown.

//go:build !linux

package memory

// Available returns false: it works on Linux only.
func Available() (bytes int64, ok bool) { return 0, false }
