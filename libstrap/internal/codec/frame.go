// Reads exactly one frame from a source, whatever bytes follow it.

package codec

import (
	"io"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// frame reads the bytes of exactly one frame from src. It finds the frame's end by the lengths of its
// blocks. The decoders would go on with the next frame, because they read sequences of frames.
type frame struct {
	src    io.Reader
	size   int64 // decoded bytes that the header states, or -1
	window int64 // bytes that a decoder must keep; zstd only
	// windowAt is the offset of the window's byte in the held header, or 0 if there is none; zstd
	// only.
	windowAt int
	linked   bool               // blocks refer to earlier blocks; LZ4 only
	walk     func(*frame) error // reads the next block's header

	buf  [24]byte
	held []byte // headers that take has read and Read has not returned
	left int64  // bytes of the block after held that Read has not returned
	done bool   // this block is the last
}

// openFrame reads a frame's header. It fails with Corrupt if src is no frame, and with Unsupported if
// this build cannot decode the frame.
func openFrame(k Kind, src io.Reader) (*frame, error) {
	f := &frame{src: src, size: -1}
	f.held = f.buf[:0]
	open := openLZ4
	if k == Zstd {
		open = openZstd
	}
	if err := open(f); err != nil {
		if status.CodeOf(err) == status.Unsupported {
			return nil, err
		}
		return nil, corrupt(err, "no %s frame", k)
	}
	if f.size < -1 {
		return nil, corrupt(nil, "the %s frame claims %d bytes", k, uint64(f.size))
	}
	return f, nil
}

// take reads n header bytes. Read returns them later.
func (f *frame) take(n int) ([]byte, error) {
	at := len(f.held)
	f.held = f.held[:at+n]
	if _, err := io.ReadFull(f.src, f.held[at:]); err != nil {
		f.held = f.held[:at]
		return nil, unexpected(err)
	}
	return f.held[at:], nil
}

func (f *frame) Read(p []byte) (int, error) {
	for {
		switch {
		case len(p) == 0:
			return 0, nil
		case len(f.held) > 0:
			n := copy(p, f.held)
			f.held = f.held[n:]
			return n, nil
		case f.left > 0:
			n, err := f.src.Read(p[:min(int64(len(p)), f.left)])
			f.left -= int64(n)
			if f.left == 0 && err == io.EOF {
				err = nil
			}
			return n, unexpected(err)
		case f.done:
			return 0, io.EOF
		}
		f.held = f.buf[:0]
		if err := f.walk(f); err != nil {
			return 0, err
		}
	}
}

// unexpected makes io.EOF within a frame io.ErrUnexpectedEOF.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
