// The functions of the C API that encode and decode a payload without a stream.

package main

/*
#include "strap.h"
*/
import "C"

import (
	"bytes"
	"math"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func kindOf(c C.strap_codec) (codec.Kind, error) {
	if c < 0 || c > C.STRAP_CODEC_ARCHIVE {
		return 0, status.New(status.InvalidArgument, "codec = %d: give a STRAP_CODEC_ value", c)
	}
	return codec.Kind(c), nil
}

// maxObject is the largest size in bytes of an object in memory.
const maxObject = math.MaxInt

// view returns the n bytes at p as a slice. name is the name of n in the error.
func view(p unsafe.Pointer, name string, n C.size_t) ([]byte, error) {
	if n > maxObject {
		return nil, status.New(status.InvalidArgument, "%s = %d: no object has more than %d bytes", name, n, maxObject)
	}
	return unsafe.Slice((*byte)(p), n), nil
}

// encodeBound returns the most bytes that size bytes take when they are encoded. ok is false if that
// is more than an object can have.
func encodeBound(kind codec.Kind, size C.size_t) (room int, ok bool) {
	if size > maxObject {
		return 0, false
	}
	headroom := codec.Headroom(kind, int(size))
	return int(size) + headroom, int(size) <= maxObject-headroom
}

//export strapgoEncodeBound
func strapgoEncodeBound(c C.strap_codec, size C.size_t) C.size_t {
	kind, err := kindOf(c)
	if err != nil {
		return 0
	}
	room, ok := encodeBound(kind, size)
	if !ok {
		return 0
	}
	return C.size_t(room)
}

//export strapgoEncode
func strapgoEncode(c C.strap_codec, level C.int32_t, source unsafe.Pointer, size C.size_t, data unsafe.Pointer, room C.size_t, length *C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		kind, err := kindOf(c)
		if err != nil {
			return err
		}
		need, ok := encodeBound(kind, size)
		if !ok {
			return status.New(status.InvalidArgument, "size = %d: no object has room for so many bytes and a frame", size)
		}
		if room < C.size_t(need) {
			return status.New(status.InvalidArgument, "room = %d: %d bytes may need %d", room, size, need)
		}
		encoder, err := codec.NewEncoder(kind, int(level))
		if err != nil {
			return err
		}
		buf := unsafe.Slice((*byte)(data), need)
		from := codec.Front(kind, int(size))
		copy(buf[from:], unsafe.Slice((*byte)(source), size))
		n, err := encoder.EncodeInPlace(buf, from, int(size))
		*length = C.size_t(n)
		return err
	})
}

//export strapgoDecodedSize
func strapgoDecodedSize(c C.strap_codec, payload unsafe.Pointer, size C.size_t, length *C.uint64_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		kind, err := kindOf(c)
		if err != nil {
			return err
		}
		if kind == codec.None {
			*length = C.uint64_t(size)
			return nil
		}
		from, err := view(payload, "size", size)
		if err != nil {
			return err
		}
		n, err := codec.DecodedLen(kind, from)
		if err != nil {
			return err
		}
		*length = C.uint64_t(n)
		return nil
	})
}

//export strapgoDecode
func strapgoDecode(c C.strap_codec, payload unsafe.Pointer, size C.size_t, data unsafe.Pointer, length C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		kind, err := kindOf(c)
		if err != nil {
			return err
		}
		from, err := view(payload, "size", size)
		if err != nil {
			return err
		}
		to, err := view(data, "length", length)
		if err != nil {
			return err
		}
		return codec.Decode(to, kind, bytes.NewReader(from))
	})
}
