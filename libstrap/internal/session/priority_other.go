// Stands in for priority_linux.go on other systems: priorities stay as they are.

//go:build !linux

package session

// lowerPriority does nothing: priorities are per process here, and the model's
// own must stay.
func lowerPriority() {}

// threadID is 0: threads are not known by number here.
func threadID() int { return 0 }
