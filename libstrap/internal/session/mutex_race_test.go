//go:build race

package session

import "testing"

// Under the race detector, a mutex panics if a goroutine locks it while it holds one of the same
// rank or further down. TryLock is always allowed, because it does not wait.
func TestAWrongOrderOfLocksPanics(t *testing.T) {
	var sink mutex[sinkRank]
	var a, b mutex[leafRank]
	panics := func(f func()) (did bool) {
		defer func() { did = recover() != nil }()
		f()
		return false
	}
	sink.Lock()
	if panics(func() { a.Lock() }) {
		t.Error("the right order panics")
	}
	if !panics(func() { b.Lock() }) {
		t.Error("two locks of one rank are taken")
	}
	sink.Unlock()
	if !panics(func() { sink.Lock() }) {
		t.Error("a lock is taken under one further down")
	}
	if !sink.TryLock() {
		t.Error("TryLock does not wait, so it may take any lock")
	}
	sink.Unlock()
	a.Unlock()
}
