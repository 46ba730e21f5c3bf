// Runs work in the threads of a team, in builds with cgo.

//go:build cgo

package team

/*
#cgo CFLAGS: -std=gnu11 -Wall -Wextra
#include <stdint.h>

#pragma GCC visibility push(hidden)
void strapt_run(void *parallel, unsigned n, uintptr_t work);
#pragma GCC visibility pop
*/
import "C"

import (
	"runtime/cgo"
	"unsafe"
)

const available = true

func run(parallel unsafe.Pointer, n int, work func()) {
	h := cgo.NewHandle(work)
	defer h.Delete()
	C.strapt_run(parallel, C.unsigned(n), C.uintptr_t(h))
}

//export straptWork
func straptWork(work C.uintptr_t) { cgo.Handle(work).Value().(func())() }
