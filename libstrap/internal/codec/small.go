// Decodes small payloads that are in memory, in less time than the other decoders take.

package codec

import (
	"bytes"
	"encoding/binary"
	"io"

	"github.com/klauspost/compress/zstd"
	"github.com/pierrec/lz4/v4"
)

// DecodeSmall decodes a payload that is in memory into dst, which must have the decoded length. For a
// payload of a few hundred bytes it takes a fraction of Decode's time. It decodes raw bytes, the LZ4
// frames that this package writes, and zstd frames that state their content size.
//
// If DecodeSmall returns false, the payload can still be valid: call Decode, which decodes it or
// returns the error. dst may be partly written then.
func DecodeSmall(dst []byte, k Kind, payload []byte) bool {
	switch k {
	case None:
		return len(payload) == len(dst) && copy(dst, payload) == len(dst)
	case LZ4:
		return decodeSmallLZ4(dst, payload)
	case Zstd:
		return decodeSmallZstd(dst, payload)
	default:
		return false
	}
}

func decodeSmallLZ4(dst, payload []byte) bool {
	if len(payload) < lz4HeaderSize+lz4EndSize || le32(payload) != lz4Magic ||
		payload[4] != lz4Version|lz4Independent|lz4HasSize || payload[5]&^0x30 != 0x40 ||
		binary.LittleEndian.Uint64(payload[6:]) != uint64(len(dst)) ||
		payload[14] != lz4HeaderChecksum(payload[4:14]) {
		return false
	}
	most := 64 << 10 << (2 * (payload[5]>>4 - 4)) // bytes of a block
	for at := lz4HeaderSize; at+4 <= len(payload); {
		size := le32(payload[at:])
		at += 4
		if size == 0 {
			return at == len(payload) && len(dst) == 0
		}
		n := int(size &^ lz4Raw)
		if n > len(payload)-at {
			return false
		}
		block, room := payload[at:at+n], dst[:min(most, len(dst))]
		at += n
		if size&lz4Raw != 0 {
			if n > len(room) {
				return false
			}
			copy(room, block)
		} else {
			var err error
			if n, err = lz4.UncompressBlock(block, room); err != nil {
				return false
			}
		}
		dst = dst[n:]
	}
	return false
}

func decodeSmallZstd(dst, payload []byte) bool {
	r := bytes.NewReader(payload)
	f, err := openFrame(Zstd, r)
	if err != nil || f.size != int64(len(dst)) {
		return false
	}
	// Check that there is only one frame, because DecodeAll would go on with the next.
	for !f.done {
		f.held = f.buf[:0]
		if f.walk(f) != nil {
			return false
		}
		if _, err := r.Seek(f.left, io.SeekCurrent); err != nil {
			return false
		}
	}
	if at, err := r.Seek(0, io.SeekCurrent); err != nil || at != int64(len(payload)) {
		return false
	}
	d := zstdReaders.Get().(*zstd.Decoder)
	defer zstdReaders.Put(d)
	out, err := d.DecodeAll(payload, dst[:0:len(dst)])
	if err != nil || len(out) != len(dst) {
		return false
	}
	copy(dst, out) // out is dst, unless the decoder wanted more room
	return true
}
