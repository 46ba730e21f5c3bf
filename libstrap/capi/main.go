// Command capi is libstrap.so: the C interface of c_include/strap.h. The exported functions are in
// entry.c. They make the checks that must come before the Go runtime is entered. Each then calls its
// counterpart in Go: strap_open calls strapgoOpen. That function runs under a guard and calls the
// internal packages, which do the work.
package main

/*
#cgo CFLAGS: -I${SRCDIR}/../../c_include -I${SRCDIR}/../internal/team -std=gnu11 -Wall -Wextra
#cgo linux LDFLAGS: -ldl
#include <string.h>
#include "strap.h"
*/
import "C"

import (
	"runtime/debug"
	"sync"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/session"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func main() {}

// guarded runs f and returns the code of its error. A panic becomes STRAP_ERR_INTERNAL. If out is
// not nil, *out receives the error.
func guarded(out *C.strap_error, f func() error) (code C.strap_status) {
	defer func() {
		if p := recover(); p != nil {
			code = report(out, status.New(status.Internal, "panic: %v\n%s", p, debug.Stack()))
		}
	}()
	if err := f(); err != nil {
		return report(out, err)
	}
	return C.STRAP_OK
}

// report fills *out, if out is not nil, and returns the code of err.
func report(out *C.strap_error, err error) C.strap_status {
	code := C.strap_status(status.CodeOf(err))
	if out != nil {
		out.code = code
		out.sys_errno = C.int32_t(status.Errno(err))
		putString(unsafe.Slice((*byte)(unsafe.Pointer(&out.message)), len(out.message)), err.Error())
	}
	return code
}

// putString copies s into dst and ends it with a zero. If s is too long, it is cut between two
// characters.
func putString(dst []byte, s string) {
	n := min(len(s), len(dst)-1)
	for n > 0 && n < len(s) && s[n]&0xC0 == 0x80 {
		n--
	}
	copy(dst, s[:n])
	dst[n] = 0
}

// text returns s as a Go string. It is an error if s has more than limit bytes; what is the name of s
// in the error.
func text(s *C.char, what string, limit int) (string, error) {
	if t := beginning(s, limit+1); len(t) <= limit {
		return t, nil
	}
	return "", status.New(status.InvalidArgument, "%s: give at most %d bytes", what, limit)
}

// beginning returns the first limit bytes of s, or all of s if it is shorter. It reads no bytes
// after them.
func beginning(s *C.char, limit int) string {
	if s == nil {
		return ""
	}
	return C.GoStringN(s, C.int(C.strnlen(s, C.size_t(limit))))
}

func boolInt(b bool) C.int32_t {
	if b {
		return 1
	}
	return 0
}

// handles maps the ids that C holds to Go objects. Each kind of object has one handles. An id is
// never used twice, and no two kinds use the same ids, so a stale or foreign id is recognised.
type handles[T any] struct {
	mu   sync.RWMutex
	what string // names an object in errors
	last uint64 // the last id given; at first below all ids of this kind
	step uint64 // from one id to the next
	open map[uint64]T
}

var (
	sessions = handles[*session.Session]{what: "session", last: 1, step: 2, open: map[uint64]*session.Session{}}
	readers  = handles[*openReader]{what: "reader", last: 2, step: 2, open: map[uint64]*openReader{}}
)

// openReader is the object behind a strap_reader handle.
type openReader struct {
	*reader.Reader
	mu   sync.Mutex
	next int // the row that strap_reader_next describes next
}

func (h *handles[T]) add(v T) uint64 {
	id := h.next()
	h.put(id, v)
	return id
}

// next returns a new id, for an object that is not open yet.
func (h *handles[T]) next() uint64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.last += h.step
	return h.last
}

func (h *handles[T]) put(id uint64, v T) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.open[id] = v
}

func (h *handles[T]) get(id uint64) (v T, err error) {
	h.mu.RLock()
	defer h.mu.RUnlock()
	v, ok := h.open[id]
	if !ok {
		return v, status.New(status.InvalidState, "%d is no open %s", id, h.what)
	}
	return v, nil
}

func (h *handles[T]) remove(id uint64) (v T, err error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	v, ok := h.open[id]
	if !ok {
		return v, status.New(status.InvalidState, "%d is no open %s", id, h.what)
	}
	delete(h.open, id)
	return v, nil
}
