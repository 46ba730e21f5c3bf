// The mutex of builds for the race detector, which checks its rank.

//go:build race

package session

import (
	"bytes"
	"fmt"
	"runtime"
	"slices"
	"sync"
)

// mutex is a sync.Mutex with a rank. Lock panics if the goroutine holds a mutex of the same rank or
// of one further down. TryLock may take any, because it does not wait.
type mutex[R rank] struct {
	sync.Mutex
	holder string // the goroutine that holds it
}

func (m *mutex[R]) Lock() {
	var r R
	id := goroutine()
	locks.check(id, r.rank())
	m.Mutex.Lock()
	m.holder = id
	locks.add(id, r.rank())
}

func (m *mutex[R]) TryLock() bool {
	if !m.Mutex.TryLock() {
		return false
	}
	var r R
	m.holder = goroutine()
	locks.add(m.holder, r.rank())
	return true
}

func (m *mutex[R]) Unlock() {
	var r R
	locks.remove(m.holder, r.rank())
	m.Mutex.Unlock()
}

// locks are the ranks that each goroutine holds.
var locks = heldLocks{ranks: map[string][]int{}}

type heldLocks struct {
	mu    sync.Mutex
	ranks map[string][]int // by goroutine
}

// goroutine returns the number of the running goroutine, which its stack begins with. It takes microseconds.
func goroutine() string {
	var buf [64]byte
	fields := bytes.Fields(buf[:runtime.Stack(buf[:], false)])
	return string(fields[1])
}

func (h *heldLocks) check(id string, rank int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, held := range h.ranks[id] {
		if held >= rank {
			panic(fmt.Sprintf("order of locks: rank %d is taken while rank %d is held", rank, held))
		}
	}
}

func (h *heldLocks) add(id string, rank int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.ranks[id] = append(h.ranks[id], rank)
}

func (h *heldLocks) remove(id string, rank int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	held := h.ranks[id]
	at := slices.Index(held, rank)
	if at < 0 {
		panic(fmt.Sprintf("order of locks: rank %d is given back, and nobody holds it", rank))
	}
	if held = slices.Delete(held, at, at+1); len(held) == 0 {
		delete(h.ranks, id)
	} else {
		h.ranks[id] = held
	}
}
