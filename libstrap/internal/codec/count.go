package codec

import (
	"bytes"
	"io"
	"math"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// maxCounted bounds what Count decodes. No packet of a capture has more.
const maxCounted = 1 << 32

// MaxDecoded is the most bytes that n bytes of payload can stand for. A frame that claims more
// lies.
func MaxDecoded(k Kind, n int64) int64 {
	expansion := int64(1)
	switch k {
	case LZ4:
		expansion = 255 // a length byte of a match
	case Zstd, Archive:
		// Four bytes of a zstd block that repeats one byte 128 KiB long. The eight bytes in front
		// of an archive's chunk of 256 KiB come to the same.
		expansion = 128 << 10 / 4
	}
	if n > math.MaxInt64/expansion {
		return math.MaxInt64
	}
	return n * expansion
}

// DecodedLen is the decoded length of a whole payload: what its header states, or what Count
// finds where it states nothing.
//
// Errors: Corrupt, also where the header claims more than MaxDecoded, and those of Count.
func DecodedLen(k Kind, payload []byte) (int64, error) {
	n := int64(len(payload))
	if k == None {
		return n, nil
	}
	size, err := DecodedSize(k, payload)
	if err != nil {
		return 0, err
	}
	if size < 0 {
		return Count(k, bytes.NewReader(payload), n)
	}
	return size, checkClaim(k, size, n)
}

// checkClaim is Corrupt where a payload of n bytes cannot have the decoded size that it claims.
func checkClaim(k Kind, size, n int64) error {
	if size > MaxDecoded(k, n) {
		return corrupt(nil, "the payload of %d bytes claims to hold %d", n, size)
	}
	return nil
}

// Count decodes a payload of n bytes and returns how many it decodes to. It keeps none of them:
// its memory is that of a decoder, whatever the payload claims. No error says that this is one
// whole payload of its kind, with nothing behind it. Raw bytes always are.
//
// Errors: Corrupt, Unsupported (this build cannot decode it, or it has more than 4 GiB), those of
// reading. The count is then how many bytes were decoded until the error.
func Count(k Kind, payload io.Reader, n int64) (count int64, err error) {
	if k == None {
		return n, nil
	}
	limit := min(MaxDecoded(k, n), maxCounted)
	err = withDecoder(k, payload, limit, func(r io.Reader, size int64) error {
		if err := checkClaim(k, size, n); err != nil {
			return err
		}
		var broken error
		count, broken = io.Copy(io.Discard, io.LimitReader(r, limit+1))
		switch {
		case broken != nil:
			return corrupt(broken, "the payload breaks off after %d bytes", count)
		case count > maxCounted:
			return status.New(status.Unsupported, "the payload has more than %d bytes: no packet has", int64(maxCounted))
		case count > limit:
			return corrupt(nil, "the payload of %d bytes has more than %d", n, limit)
		case size >= 0 && size != count:
			return corrupt(nil, "the payload holds %d bytes, its header says %d", count, size)
		}
		return nil
	})
	return count, err
}
