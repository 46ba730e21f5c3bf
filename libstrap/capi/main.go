// Command capi is libstrap.so: the C interface of c_include/strap.h and nothing
// else. The exported functions live in entry.c, which checks what must be checked
// before the Go runtime is entered; each calls its strapgo twin here, which runs
// under a guard, and the work is done by the packages below.
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

	"github.com/libstrap/strap/libstrap/internal/intake"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func main() {}

// guarded runs f, turns a panic into STRAP_ERR_INTERNAL, and reports the error
// in *out where the caller gave one.
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

// report fills *out and returns the code of err.
func report(out *C.strap_error, err error) C.strap_status {
	code := C.strap_status(status.CodeOf(err))
	if out != nil {
		out.code = code
		out.sys_errno = C.int32_t(status.Errno(err))
		putString(unsafe.Slice((*byte)(unsafe.Pointer(&out.message)), len(out.message)), err.Error())
	}
	return code
}

// putString copies s into dst, cut at a character where it is too long, and ends
// it with a zero.
func putString(dst []byte, s string) {
	n := min(len(s), len(dst)-1)
	for n > 0 && n < len(s) && s[n]&0xC0 == 0x80 {
		n--
	}
	copy(dst, s[:n])
	dst[n] = 0
}

func goString(s *C.char) string {
	if s == nil {
		return ""
	}
	return C.GoString(s)
}

// text is goString of at most limit bytes; what names it in the error.
func text(s *C.char, what string, limit int) (string, error) {
	if t := beginning(s, limit+1); len(t) <= limit {
		return t, nil
	}
	return "", status.New(status.InvalidArgument, "%s: give at most %d bytes", what, limit)
}

// beginning is goString of the first limit bytes.
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

// handles maps the ids that C holds to what they stand for. Ids are never used
// twice, and those of sessions and readers differ, so that a stale or foreign
// one is recognised.
type handles[T any] struct {
	mu   sync.RWMutex
	what string
	last uint64
	step uint64
	open map[uint64]T
}

var (
	sessions = handles[*intake.Capture]{what: "session", last: 1, step: 2, open: map[uint64]*intake.Capture{}}
	readers  = handles[*openReader]{what: "reader", last: 2, step: 2, open: map[uint64]*openReader{}}
)

// openReader is a reader and the place of strap_reader_next in it.
type openReader struct {
	*reader.Reader
	mu   sync.Mutex
	next int
}

func (h *handles[T]) add(v T) uint64 {
	id := h.next()
	h.put(id, v)
	return id
}

// next is the id of one that is not open yet.
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
