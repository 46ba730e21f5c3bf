package main

/*
#include "intake.h"
*/
import "C"

import (
	"sync"
	"sync/atomic"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/session"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// intake is the session's side of what intake.c takes.
type intake struct {
	session C.strap_session
	c       *C.struct_intake // until closed
	held    bool             // this and at are the caller's of First and Pop
	at      C.uint32_t       // where in the room the first one is that waits

	mu             sync.Mutex // the rest; closed may be read without
	closed         atomic.Bool
	tensors, bytes uint64 // when it was
}

// openIntake returns that of a session, nil if another one has it.
func openIntake(id uint64) session.Intake {
	c := C.intake_open(C.strap_session(id))
	if c == nil {
		return nil
	}
	return &intake{session: C.strap_session(id), c: c}
}

func (i *intake) Layers(n int)   { C.intake_layers(i.session, C.uint32_t(n)) }
func (i *intake) Requests(n int) { C.intake_requests(i.session, C.uint32_t(n)) }
func (i *intake) Hold()          { C.intake_hold(i.session) }
func (i *intake) Shut()          { C.intake_shut(i.session) }

func (i *intake) Waiting() int {
	if i.closed.Load() {
		return 0
	}
	return int(atomic.LoadUint32((*uint32)(&i.c.waiting)))
}

func (i *intake) Settled() uint64 { return atomic.LoadUint64((*uint64)(&i.c.settled)) }

func (i *intake) Taken() (tensors, bytes uint64) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.count()
	return i.tensors, i.bytes
}

func (i *intake) count() {
	if !i.closed.Load() {
		i.tensors = atomic.LoadUint64((*uint64)(&i.c.tensors))
		i.bytes = atomic.LoadUint64((*uint64)(&i.c.bytes))
	}
}

func (i *intake) first() *C.struct_intake_tensor {
	return (*C.struct_intake_tensor)(unsafe.Add(unsafe.Pointer(i.c.room), i.at))
}

func (i *intake) First(t *session.Tensor) bool {
	if i.closed.Load() {
		return false
	}
	if !i.held {
		C.intake_hold(i.session)
		i.held = true
	}
	if i.at == i.c.used {
		i.held, i.at = false, 0
		C.intake_resume(i.session)
		return false
	}
	c := i.first()
	shape := (*int64)(unsafe.Add(unsafe.Pointer(c), unsafe.Sizeof(*c)))
	*t = session.Tensor{
		Layer: uint32(c.layer), DType: wire.DType(c.dtype), Shape: unsafe.Slice(shape, int(c.ndim)),
		Data: unsafe.Add(unsafe.Pointer(i.c.room), c.data),
		Step: int64(c.step), Token: int64(c.token), Call: uint32(c.call),
		Request: uint32(c.request),
		Thread:  uint64(c.thread), TimeNS: int64(c.time_ns),
	}
	return true
}

func (i *intake) Pop() {
	i.at = i.first().next
	atomic.AddUint32((*uint32)(&i.c.waiting), ^uint32(0))
}

func (i *intake) Close() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.count()
	i.closed.Store(true)
	C.intake_close(i.session)
}
