package codec

import (
	"io"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// maxChecked bounds what Check decodes of one payload: no tensor has more in one
// packet.
const maxChecked = 1 << 32

// Check decodes a payload and keeps nothing. nil says that it is one whole
// payload of its kind, with nothing behind it; raw bytes always are. Memory is
// that of a decoder, whatever the payload claims.
//
// Errors: Corrupt, Unsupported (this build cannot decode it), those of reading.
func Check(k Kind, payload io.Reader) error {
	if k == None {
		return nil
	}
	return withDecoder(k, payload, func(r io.Reader, size int64) error {
		n, err := io.Copy(io.Discard, io.LimitReader(r, maxChecked))
		if err != nil {
			return corrupt(err, "the payload breaks off after %d bytes", n)
		}
		if n == maxChecked {
			return nil
		}
		if size >= 0 && size != n {
			return status.New(status.Corrupt, "the payload holds %d bytes, its header says %d", n, size)
		}
		return checkEnd(r, n)
	})
}
