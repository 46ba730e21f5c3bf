// Package pages maps memory of whole pages outside the Go heap.
//
// The process keeps a little of the memory that is released, for the next Map. Touching a page for the
// first time costs more than all that a capture does with it. This is worst in a virtual machine whose
// host takes back freed memory. The system may take kept memory at any time, and does if memory runs
// short.
package pages

import (
	"os"
	"slices"
	"sync"
	"syscall"
)

const (
	hugePage  = 2 << 20
	keepCount = 2        // number of released memories that are kept
	keepBytes = 64 << 20 // bytes of each that are kept
)

// Memory is a range of pages. New pages are zeros. Kept pages may have the contents of their earlier
// use.
type Memory struct {
	Bytes []byte
	all   []byte   // aligned; Bytes are the first bytes of it
	whole []byte   // the whole mapping
	file  *os.File // has the pages; nil: no file has
}

var kept struct {
	sync.Mutex
	released []*Memory // in the order of their release
}

// Map maps n bytes, n > 0. A forked child does not inherit them. If a child shared them, the writer would
// pay for copies, and a write to disk that is under way could read pages that are no longer the
// writer's. Mappings of 2 MiB and more are aligned to 2 MiB, and in huge pages if the system has some.
// Huge pages fault seldom, and a write of them has few pieces.
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

// MapFile maps the first n bytes of a file, n > 0, and shares them with the file. The file must have these
// bytes, and its file system must have room for them: otherwise an access ends the process. A forked child
// does not inherit them.
func MapFile(f *os.File, n int) (*Memory, error) {
	all, err := mapFile(f, n)
	if err != nil {
		return nil, err
	}
	return &Memory{Bytes: all, all: all, whole: all, file: f}, nil
}

// Touch makes the system provide the pages of the first n bytes. Nothing must have been written to them.
func (m *Memory) Touch(n int) {
	b := m.Bytes[:n]
	if len(b) == 0 || populate(b) {
		return
	}
	for i := 0; i < len(b); i += os.Getpagesize() {
		b[i] = 0
	}
}

// GiveBack lets the system take the pages behind the first n bytes up to touched, the end of those that were
// touched, as far as no huge page has some of the first. It returns the new end. Nothing must be in those
// pages. The addresses stay mapped, and the system provides new pages at the next access, or of a file when
// Provide asks for them. A system or file system that cannot do this leaves the pages.
func (m *Memory) GiveBack(n, touched int) (end int) {
	end = wholePages(n)
	if end >= touched {
		return touched
	}
	if m.file != nil && !punch(m.file, end, len(m.Bytes)) || m.file == nil && !drop(m.Bytes[end:]) {
		return touched
	}
	return end
}

// Provide makes sure that the first n bytes can be accessed, of which the first touched can already. It
// returns the new end of those, or false if the file system of a file has no room.
func (m *Memory) Provide(touched, n int) (end int, ok bool) {
	if n <= touched {
		return touched, true
	}
	if m.file == nil {
		return n, true
	}
	end = min(wholePages(n), len(m.Bytes))
	return end, reserve(m.file, touched, end)
}

// wholePages rounds n up to whole huge pages.
func wholePages(n int) int { return (n + hugePage - 1) / hugePage * hugePage }

// Release keeps or unmaps the memory. used is the end of the bytes that were touched.
func (m *Memory) Release(used int) {
	if used == 0 || m.file != nil || !relinquish(m.all, min(wholePages(used), keepBytes)) {
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

// takeKept returns the last released memory that has n bytes, but at most 2n, or nil.
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

// dropKept unmaps all kept memory. It returns false if there was none.
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
