// Calls the loop in C, in builds with cgo.

//go:build cgo

package crc32c

/*
#cgo CFLAGS: -std=gnu11 -O3 -Wall -Wextra
#cgo noescape strapcrc_update
#cgo nocallback strapcrc_update
#include "kernel.h"

static void *update_function(void) { return (void *)strapcrc_update; }
*/
import "C"

import "unsafe"

var hasKernel = C.strapcrc_runs() != 0

// kernel is Update in C, for at least 256 bytes.
func kernel(crc uint32, data []byte) uint32 {
	return uint32(C.strapcrc_update(C.uint32_t(crc), (*C.uint8_t)(&data[0]), C.size_t(len(data))))
}

// Function returns the address of a C function that is Update for at least 256 bytes:
//
//	uint32_t update(uint32_t crc, const uint8_t *data, size_t n);
//
// It returns nil if there is no kernel, or UseKernel has switched it off.
func Function() unsafe.Pointer {
	if !usesKernel() {
		return nil
	}
	return C.update_function()
}
