package main

/*
#include "intake.h"
*/
import "C"

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/intake"
	"github.com/libstrap/strap/libstrap/internal/session"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// room is an intake.Room whose tensors intake.c takes.
type room struct {
	session C.strap_session
	c       *C.struct_intake // not this session's any more once closed is set
	held    bool             // C takes no tensor. First and Pop alone use held and at
	at      C.uint32_t       // the offset of the oldest tensor that waits

	mu             sync.Mutex  // guards what follows
	closed         atomic.Bool // may be read without the lock
	tensors, bytes uint64      // the last counts; final once closed is set
}

// openRoom returns the room of a session. It returns nil if another session has it.
func openRoom(id uint64) intake.Room {
	c := C.intake_open(C.strap_session(id))
	if c == nil {
		return nil
	}
	return &room{session: C.strap_session(id), c: c}
}

func (r *room) Layers(n int)   { C.intake_layers(r.session, C.uint32_t(n)) }
func (r *room) Requests(n int) { C.intake_requests(r.session, C.uint32_t(n)) }
func (r *room) Hold()          { C.intake_hold(r.session) }
func (r *room) Shut()          { C.intake_shut(r.session) }

func (r *room) Waiting() int {
	if r.closed.Load() {
		return 0
	}
	return int(atomic.LoadUint32((*uint32)(&r.c.waiting)))
}

func (r *room) Taken() (tensors, bytes uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count()
	return r.tensors, r.bytes
}

func (r *room) count() {
	if !r.closed.Load() {
		r.tensors = atomic.LoadUint64((*uint64)(&r.c.tensors))
		r.bytes = atomic.LoadUint64((*uint64)(&r.c.bytes))
	}
}

func (r *room) first() *C.struct_intake_tensor {
	return (*C.struct_intake_tensor)(unsafe.Add(unsafe.Pointer(r.c.room), r.at))
}

func (r *room) First(t *session.Tensor) bool {
	if r.closed.Load() {
		return false
	}
	if !r.held {
		C.intake_hold(r.session)
		r.held = true
	}
	if r.at == r.c.used {
		r.held, r.at = false, 0
		C.intake_resume(r.session)
		return false
	}
	c := r.first()
	shape := (*int64)(unsafe.Add(unsafe.Pointer(c), unsafe.Sizeof(*c)))
	*t = session.Tensor{
		Layer: uint32(c.layer), DType: wire.DType(c.dtype), Shape: unsafe.Slice(shape, int(c.ndim)),
		Data: unsafe.Add(unsafe.Pointer(r.c.room), c.data),
		Step: int64(c.step), Token: int64(c.token), Call: uint32(c.call),
		Request: uint32(c.request),
		Thread:  uint64(c.thread), TimeNS: int64(c.time_ns),
	}
	return true
}

func (r *room) Pop() {
	r.at = r.first().next
	atomic.AddUint32((*uint32)(&r.c.waiting), ^uint32(0))
}

func (r *room) Close() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.count()
	r.closed.Store(true)
	C.intake_close(r.session)
}
