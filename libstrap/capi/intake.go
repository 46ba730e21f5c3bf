// The buffer in C memory in which small tensors of a session wait.

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

// intakeBuffer is a session.IntakeBuffer that intake.c fills.
type intakeBuffer struct {
	session  C.strap_session
	c        *C.struct_intake // another session's once closed is set
	held     bool             // C takes no tensor. Next alone uses this and the offsets
	at, used C.uint32_t       // offsets of the next tensor, and of the end of the last

	mu             sync.Mutex // guards what follows
	closed         bool
	tensors, bytes uint64 // the last counts; final once closed is set
}

// openIntake returns a buffer for the session id. If another session has that buffer, the session
// gets a new id. nil: all buffers are in use.
func openIntake(id uint64) (uint64, session.IntakeBuffer) {
	for range C.INTAKE_COUNT {
		if c := C.intake_open(C.strap_session(id)); c != nil {
			return id, &intakeBuffer{session: C.strap_session(id), c: c}
		}
		id = sessions.next()
	}
	return id, nil
}

func closeIntake(id uint64) { C.intake_close(C.strap_session(id)) }

func (b *intakeBuffer) Admit(layers, least, requests uint32) {
	C.intake_admit(b.session, C.uint32_t(layers), C.uint32_t(least), C.uint32_t(requests))
}

func (b *intakeBuffer) Taken() (tensors, bytes uint64) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if !b.closed {
		b.tensors = atomic.LoadUint64((*uint64)(&b.c.tensors))
		b.bytes = atomic.LoadUint64((*uint64)(&b.c.bytes))
	}
	return b.tensors, b.bytes
}

func (b *intakeBuffer) Hold() { C.intake_hold(b.session) }

func (b *intakeBuffer) Next(t *session.Tensor) bool {
	if !b.held {
		b.held, b.used = true, C.intake_hold(b.session)
	}
	if b.at == b.used {
		b.held, b.at = false, 0
		C.intake_resume(b.session)
		return false
	}
	buffer := unsafe.Pointer(b.c.buffer)
	c := (*C.struct_intake_tensor)(unsafe.Add(buffer, b.at))
	shape := (*int64)(unsafe.Add(unsafe.Pointer(c), unsafe.Sizeof(*c)))
	*t = session.Tensor{
		Layer: uint32(c.layer), DType: wire.DType(c.dtype), Shape: unsafe.Slice(shape, int(c.ndim)),
		Data: unsafe.Add(buffer, c.data), Step: int64(c.step), Token: int64(c.token),
		Call: uint32(c.call), Request: uint32(c.request),
		Thread: uint64(c.thread), TimeNS: int64(c.time_ns),
	}
	b.at = c.next
	return true
}

func (b *intakeBuffer) Close() {
	b.Taken()
	b.mu.Lock()
	defer b.mu.Unlock()
	b.closed = true
	C.intake_close(b.session)
}
