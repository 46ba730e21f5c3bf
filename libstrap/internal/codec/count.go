// Tells how many bytes a payload decodes to, from its header or by decoding it.

package codec

import (
	"bytes"
	"io"
	"math"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// maxCounted is the most bytes that Count decodes. No packet of a capture has more.
const maxCounted = 1 << 32

// MaxDecoded returns the most bytes that a payload of n bytes can decode to. A frame that claims more
// is corrupt.
func MaxDecoded(k Kind, n int64) int64 {
	expansion := int64(1)
	switch k {
	case LZ4:
		expansion = 255 // one byte of a match's length
	case Zstd, Archive:
		// A zstd block of four bytes repeats one byte for 128 KiB. A chunk of an archive decodes to
		// 256 KiB and has at least eight bytes.
		expansion = 128 << 10 / 4
	}
	if n > math.MaxInt64/expansion {
		return math.MaxInt64
	}
	return n * expansion
}

// DecodedLen returns the decoded length of a whole payload. It takes the length from the header. If the
// header states none, it calls Count.
//
// Errors: Corrupt, also if the header claims more than MaxDecoded; those of Count.
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

// checkClaim returns Corrupt if a payload of n bytes cannot decode to the size that it claims.
func checkClaim(k Kind, size, n int64) error {
	if size > MaxDecoded(k, n) {
		return corrupt(nil, "the payload of %d bytes claims to hold %d", n, size)
	}
	return nil
}

// Count decodes a payload of n bytes and returns the number of decoded bytes. It does not keep the
// bytes, and takes the memory of a decoder, whatever the payload claims. A nil error means that this
// is one whole payload of its kind, and nothing follows it. Raw bytes are always a whole payload.
//
// Errors: Corrupt; Unsupported if this build cannot decode the payload, or it decodes to more than
// 4 GiB; errors of reading. With an error, the count is of the bytes before it.
func Count(k Kind, payload io.Reader, n int64) (count int64, err error) {
	return countUpTo(maxCounted, k, payload, n)
}

// countUpTo is Count with another number of bytes than 4 GiB.
func countUpTo(most int64, k Kind, payload io.Reader, n int64) (count int64, err error) {
	if k == None {
		return n, nil
	}
	limit := min(MaxDecoded(k, n), most)
	err = withDecoder(k, payload, limit, func(r io.Reader, size int64) error {
		if err := checkClaim(k, size, n); err != nil {
			return err
		}
		var broken error
		count, broken = io.Copy(io.Discard, io.LimitReader(r, limit+1))
		switch {
		case broken != nil:
			return corrupt(broken, "the payload breaks off after %d bytes", count)
		case count > most:
			return status.New(status.Unsupported, "the payload has more than %d bytes: no packet has", most)
		case count > limit:
			return corrupt(nil, "the payload of %d bytes has more than %d", n, limit)
		case size >= 0 && size != count:
			return corrupt(nil, "the payload holds %d bytes, its header says %d", count, size)
		}
		return nil
	})
	return count, err
}
