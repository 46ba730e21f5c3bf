package codec

import (
	"io"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// frame reads the bytes of exactly one frame from src. It walks the lengths of
// the frame's blocks, because the decoders take what they read for a sequence of
// frames and would go on with the next.
type frame struct {
	src    io.Reader
	size   int64 // decoded bytes that the header states, -1 where it does not
	window int64 // bytes that a decoder must keep, zstd only
	// windowAt is where the held header states the window, zstd only; 0 where it does not.
	windowAt int
	linked   bool // blocks refer to the ones before them, LZ4 only
	walk     func(*frame) error

	buf  [24]byte
	held []byte // headers read by take, not yet handed out
	left int64  // bytes to hand out of the block that follows them
	done bool   // nothing follows these
}

// openFrame reads a frame's header. It refuses what is no frame (Corrupt) and
// what is one that this build cannot decode (Unsupported).
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

// take reads n header bytes, which are handed out later.
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

// unexpected is an error of reading within a frame.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
