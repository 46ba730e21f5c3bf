//go:build !linux

package session

// lowerPriority does nothing: priorities are per process here, and the model's
// own must stay.
func lowerPriority() {}

// threadID is 0: threads are not known by number here.
func threadID() int { return 0 }
