// Opens the files of captures, so that they are closed in a child after fork().

package main

/*
#include <stdlib.h>
#include "files.h"
*/
import "C"

import (
	"os"
	"syscall"
	"unsafe"
)

// files are stream.Files that are closed in a child after fork().
type files struct{}

func (files) Open(path string, flags int) (*os.File, error) {
	name := C.CString(path)
	defer C.free(unsafe.Pointer(name))
	fd := C.files_open(name, C.int(flags), 0o666)
	if fd < 0 {
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.Errno(-fd)}
	}
	return os.NewFile(uintptr(fd), path), nil
}

func (files) Close(f *os.File) error {
	C.files_forget(C.int(f.Fd()))
	return f.Close()
}
