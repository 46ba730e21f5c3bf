//go:build !linux

package session

// lowerPriority does nothing: priorities are per process here, and the model's
// own must stay.
func lowerPriority() {}
