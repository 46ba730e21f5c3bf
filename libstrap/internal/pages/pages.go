// Package pages is memory outside the Go heap, from the system and in whole pages.
//
// A little of what is released stays with the process, for whoever maps some next: a page
// that is touched for the first time costs more than all that a capture does with it, most of
// all in a virtual machine whose host takes back what its guest has freed. The system may take
// it at any time, and does where memory runs short.
package pages

import (
	"os"
	"slices"
	"sync"
	"syscall"
)

const (
	hugePage = 2 << 20
	// Of the last keepCount that were released, the first keepBytes each stay.
	keepCount = 2
	keepBytes = 64 << 20
)

// Memory is a stretch of pages. Those that were not written yet are zeros; but
// what stayed of another's may hold what that wrote.
type Memory struct {
	Bytes []byte
	all   []byte // of which Bytes are the first, and stay where less is asked for
	whole []byte // what was mapped around it
}

var kept struct {
	sync.Mutex
	released []*Memory // in their order
}

// Map maps n bytes, n > 0. A forked child does not inherit them: one that shares them would
// make the writer pay for copies, and a write to disk that is under way would come from pages
// that are no longer the writer's. From 2 MiB on they are aligned to that, and in huge
// pages where the system has some: these fault seldom, and a write of them has few pieces.
func Map(n int) (*Memory, error) {
	if m := takeKept(n); m != nil {
		return m, nil
	}
	whole, all, err := mapPages(n)
	if err != nil && dropKept() {
		whole, all, err = mapPages(n)
	}
	if err != nil {
		return nil, err
	}
	return &Memory{Bytes: all, all: all, whole: whole}, nil
}

// Touch has the system put pages behind the first n bytes, which nothing is in yet.
func (m *Memory) Touch(n int) {
	b := m.Bytes[:n]
	if len(b) == 0 || populate(b) {
		return
	}
	for i := 0; i < len(b); i += os.Getpagesize() {
		b[i] = 0
	}
}

// Release gives the memory back, of which the first used bytes were touched at most.
func (m *Memory) Release(used int) {
	if used == 0 || !relinquish(m.all, min((used+hugePage-1)/hugePage*hugePage, keepBytes)) {
		unmapPages(m.whole)
		return
	}
	kept.Lock()
	defer kept.Unlock()
	if kept.released = append(kept.released, m); len(kept.released) > keepCount {
		unmapPages(kept.released[0].whole)
		kept.released = slices.Delete(kept.released, 0, 1)
	}
}

// takeKept is the last released memory that has n bytes, and not much more.
func takeKept(n int) *Memory {
	kept.Lock()
	defer kept.Unlock()
	for i, m := range slices.Backward(kept.released) {
		if n <= len(m.all) && len(m.all)/2 <= n {
			kept.released = slices.Delete(kept.released, i, i+1)
			m.Bytes = m.all[:n:n]
			return m
		}
	}
	return nil
}

// dropKept unmaps all that was kept; false: nothing was.
func dropKept() bool {
	kept.Lock()
	defer kept.Unlock()
	for _, m := range kept.released {
		unmapPages(m.whole)
	}
	some := len(kept.released) > 0
	kept.released = nil
	return some
}

func unmapPages(whole []byte) {
	if err := syscall.Munmap(whole); err != nil {
		panic("pages: munmap of its own memory: " + err.Error())
	}
}
