package main

/*
#include "strap.h"
*/
import "C"

import (
	"bytes"
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

func view(p unsafe.Pointer, n C.size_t) []byte { return unsafe.Slice((*byte)(p), n) }

//export strapgoEncodeBound
func strapgoEncodeBound(c C.strap_codec, size C.size_t) C.size_t {
	kind, err := kindOf(c)
	if err != nil {
		return 0
	}
	return size + C.size_t(codec.Headroom(kind, int(size)))
}

//export strapgoEncode
func strapgoEncode(c C.strap_codec, level C.int32_t, source unsafe.Pointer, size C.size_t, data unsafe.Pointer, room C.size_t, length *C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		kind, err := kindOf(c)
		if err != nil {
			return err
		}
		need := strapgoEncodeBound(c, size)
		if room < need {
			return status.New(status.InvalidArgument, "room = %d: %d bytes may need %d", room, size, need)
		}
		encoder, err := codec.NewEncoder(kind, int(level))
		if err != nil {
			return err
		}
		buf := view(data, need)
		from := codec.Front(kind, int(size))
		copy(buf[from:], view(source, size))
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
		n, err := codec.DecodedSize(kind, view(payload, size))
		if err == nil && n < 0 {
			var data []byte
			data, err = codec.DecodeUnknown(kind, bytes.NewReader(view(payload, size)), 1<<32)
			n = int64(len(data))
		}
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
		return codec.Decode(view(data, length), kind, bytes.NewReader(view(payload, size)))
	})
}
