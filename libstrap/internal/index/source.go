// The bytes of an index that is read: in memory, or in a file.

package index

import (
	"bytes"
	"errors"
	"io"
	"os"

	"github.com/libstrap/strap/libstrap/internal/memory"
)

// source is the bytes of an index.
type source interface {
	size() int64
	// bytes returns n bytes from offset at on. The source must have them. They are valid until the same
	// part of another message is read.
	bytes(part int, at, n int64) ([]byte, *fault)
}

const (
	inPrefix = iota
	inMetadata
	inBody
)

// held is an index in memory.
type held []byte

func (h held) size() int64 { return int64(len(h)) }

func (h held) bytes(_ int, at, n int64) ([]byte, *fault) { return h[at : at+n : at+n], nil }

// opened is an index in a file. One message at a time is in memory.
type opened struct {
	f      *os.File
	length int64
	budget *memory.Budget
	parts  [inBody + 1][]byte
}

func (o *opened) size() int64 { return o.length }

func (o *opened) bytes(part int, at, n int64) ([]byte, *fault) {
	b, bad := grown(&o.parts[part], n, o.budget)
	if bad != nil {
		return nil, bad
	}
	switch _, err := o.f.ReadAt(b, at); {
	case errors.Is(err, io.EOF):
		return nil, &fault{cut: true, reason: "the file became shorter while it was read"}
	case err != nil:
		return nil, failed(err)
	}
	return b, nil
}

// grown returns n bytes of a buffer. If the buffer is too short, grown makes a new one.
func grown(b *[]byte, n int64, budget *memory.Budget) ([]byte, *fault) {
	if n > int64(cap(*b)) {
		room := n + n/4 // the next message may be a little longer
		if err := budget.Take(room); err != nil {
			return nil, failed(err)
		}
		*b = make([]byte, room)
	}
	return (*b)[:n:n], nil
}

// zeroFrom reports whether all bytes from offset at on are zero.
func zeroFrom(file source, at int64) (bool, *fault) {
	for at < file.size() {
		b, bad := file.bytes(inBody, at, min(64<<10, file.size()-at))
		if bad != nil || !isZero(b) {
			return false, bad
		}
		at += int64(len(b))
	}
	return true, nil
}

func isZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }
