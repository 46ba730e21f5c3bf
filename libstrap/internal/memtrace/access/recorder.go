// Writes the blocks of a running program to a file.

package access

import (
	"os"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Recorder is a sink of libstrap-access. It writes the blocks of a running program to a file, which
// Open reads. It is safe for concurrent use.
type Recorder struct {
	mu      sync.Mutex
	file    *os.File // nil after Close
	written int64    // bytes of whole blocks in the file
	err     error    // the first failure of the disk
}

// Create creates the file, or empties it if it exists.
func Create(path string) (*Recorder, error) {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o666)
	if err != nil {
		return nil, status.FromOS(err, "cannot record accesses to %s", path)
	}
	return &Recorder{file: f}, nil
}

// Write appends whole blocks. The first block of the file must be the start of a recording. If the
// disk fails, Write cuts the file back to its last whole block, and every later call returns that
// failure.
//
// Errors: InvalidArgument (the bytes are not whole blocks, or do not begin with a start), InvalidState
// (closed), NoSpace, IO.
func (r *Recorder) Write(blocks []byte) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.file == nil {
		return status.New(status.InvalidState, "the recording has been closed")
	}
	if r.err != nil {
		return r.err
	}
	if err := checkBlocks(blocks, r.written == 0); err != nil {
		return err
	}
	if _, err := r.file.Write(blocks); err != nil {
		r.err = status.FromOS(err, "cannot record accesses to %s", r.file.Name())
		if err := r.file.Truncate(r.written); err != nil {
			r.err = status.FromOS(err, "cannot record accesses to %s, and it is torn", r.file.Name())
		}
		return r.err
	}
	r.written += int64(len(blocks))
	return nil
}

func checkBlocks(b []byte, first bool) error {
	for at := 0; at < len(b); {
		var h block
		err := errMagic
		if len(b)-at >= headerBytes {
			h, err = parseBlock(b[at:])
		}
		if err == nil && first && at == 0 && h.kind != kindStart {
			err = status.New(status.InvalidArgument, "it is not the start of a recording")
		}
		if err == nil && h.bytes > uint64(len(b)-at-headerBytes) {
			err = status.New(status.InvalidArgument, "the block is %d bytes longer", h.bytes-uint64(len(b)-at-headerBytes))
		}
		if err != nil {
			return status.Wrap(status.InvalidArgument, err, "byte %d of %d", at, len(b))
		}
		at += headerBytes + int(h.bytes)
	}
	return nil
}

// Close closes the file. It returns the failure of an earlier Write, if there was one.
func (r *Recorder) Close() error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.file == nil {
		return status.New(status.InvalidState, "the recording has been closed")
	}
	err := r.file.Close()
	if err != nil {
		err = status.FromOS(err, "cannot record accesses to %s", r.file.Name())
	}
	if r.err != nil {
		err = r.err
	}
	r.file = nil
	return err
}
