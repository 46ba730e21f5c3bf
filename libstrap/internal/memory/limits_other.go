//go:build !linux

package memory

// Available is not known here.
func Available() (bytes int64, ok bool) { return 0, false }
