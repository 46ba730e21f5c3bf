// Package status holds the one error type that every package of libstrap
// returns and the codes with which an error crosses the C boundary.
package status

import (
	"errors"
	"fmt"
	"io/fs"
	"syscall"
)

// Code says what kind of failure an error is. The values are those of
// strap_status in c_include/strap.h.
type Code int32

const (
	OK              Code = 0
	InvalidArgument Code = -1
	InvalidState    Code = -2
	Timeout         Code = -3
	IO              Code = -4
	NoSpace         Code = -5
	NotFound        Code = -6
	Permission      Code = -7
	Busy            Code = -8
	Corrupt         Code = -9
	Unsupported     Code = -10
	NoMemory        Code = -11
	Forked          Code = -12
	Internal        Code = -13
)

var names = map[Code]string{
	OK:              "ok",
	InvalidArgument: "invalid argument",
	InvalidState:    "invalid state",
	Timeout:         "timed out",
	IO:              "input/output error",
	NoSpace:         "no space left",
	NotFound:        "not found",
	Permission:      "permission denied",
	Busy:            "busy",
	Corrupt:         "corrupt data",
	Unsupported:     "unsupported",
	NoMemory:        "out of memory",
	Forked:          "used after fork",
	Internal:        "internal error",
}

// Error makes a bare code usable with errors.Is: errors.Is(err, status.Busy).
func (c Code) Error() string {
	if s, ok := names[c]; ok {
		return s
	}
	return fmt.Sprintf("status %d", int32(c))
}

// Error is a failure with its code, a message that names the offending value,
// and the cause, if there is one.
type Error struct {
	Code    Code
	Message string
	Cause   error
}

func (e *Error) Error() string {
	if e.Cause != nil {
		return e.Message + ": " + e.Cause.Error()
	}
	return e.Message
}

// Unwrap exposes the cause.
func (e *Error) Unwrap() error { return e.Cause }

// Is reports whether target is the code of e.
func (e *Error) Is(target error) bool {
	c, ok := target.(Code)
	return ok && c == e.Code
}

// New returns an error of the given code.
func New(code Code, format string, args ...any) error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...)}
}

// Wrap returns an error of the given code with a cause.
func Wrap(code Code, cause error, format string, args ...any) error {
	return &Error{Code: code, Message: fmt.Sprintf(format, args...), Cause: cause}
}

// FromOS wraps an error of the operating system under the code that fits it.
func FromOS(cause error, format string, args ...any) error {
	return Wrap(osCode(cause), cause, format, args...)
}

func osCode(err error) Code {
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return NotFound
	case errors.Is(err, fs.ErrPermission), errors.Is(err, syscall.EROFS):
		return Permission
	case errors.Is(err, syscall.ENOSPC), errors.Is(err, syscall.EDQUOT):
		return NoSpace
	case errors.Is(err, syscall.ENOMEM):
		return NoMemory
	case errors.Is(err, syscall.EISDIR), errors.Is(err, syscall.ENOTDIR),
		errors.Is(err, syscall.ENAMETOOLONG), errors.Is(err, syscall.EINVAL):
		return InvalidArgument
	default:
		return IO
	}
}

// CodeOf returns the code of err: OK for nil, Internal where none is attached.
func CodeOf(err error) Code {
	if err == nil {
		return OK
	}
	var e *Error
	if errors.As(err, &e) {
		return e.Code
	}
	var c Code
	if errors.As(err, &c) {
		return c
	}
	return Internal
}

// Errno returns the system error number behind err, or 0.
func Errno(err error) int32 {
	var no syscall.Errno
	if errors.As(err, &no) {
		return int32(no)
	}
	return 0
}
