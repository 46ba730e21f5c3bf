//go:build !linux

package session

// availableMemory is not known here: the limit that was asked for stands.
func availableMemory() (bytes int64, ok bool) { return 0, false }
