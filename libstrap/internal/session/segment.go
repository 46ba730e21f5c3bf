// A stream of the capture with its index.

package session

import (
	"errors"
	"fmt"
	"os"

	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/stream"
)

// segment is a stream of the capture, with its index. A capture that rolls writes several segments,
// one after another.
type segment struct {
	path   string // as the host gave it, for errors
	home   string // the path, absolute, for a host that changes its working directory
	stream *stream.Writer
	index  *index.Writer
}

// hasFiles reports whether it is a segment. The sink of a ring has none between two dumps.
func (s *segment) hasFiles() bool { return s.stream != nil }

// displaced returns an error if the stream is no longer at its path. The index follows the stream
// to its new place, unless another file stands there.
func (s *segment) displaced() error {
	stands, now, err := s.stream.Stands(s.home)
	if stands || err != nil {
		return err
	}
	if now == "" {
		return status.New(status.NotFound, "%q was removed during its capture, or another file took its name: "+
			"its packets are lost; capture again, and move the file when the capture has ended", s.path)
	}
	followed, err := s.index.Follow(index.PathOf(s.home), index.PathOf(now))
	if err != nil {
		return err
	}
	beside := "its index is beside it"
	if !followed {
		beside = fmt.Sprintf("its index is not beside it: rename %q to %q", index.PathOf(s.path), index.PathOf(now))
	}
	return status.New(status.NotFound, "%q was renamed to %q during its capture, and has all packets; %s",
		s.path, now, beside)
}

// seal makes the files durable and closes them. All packets are in the file, and their rows in the
// index.
func (s *segment) seal() error {
	displaced := s.displaced()
	synced := s.stream.Sync()
	return errors.Join(synced, s.index.Seal(), s.stream.Close(), displaced)
}

// discard removes the files of a segment without packets.
func (s *segment) discard() error {
	if !s.hasFiles() {
		return nil
	}
	return errors.Join(s.index.Close(), s.stream.Close(), os.Remove(index.PathOf(s.home)), os.Remove(s.home))
}
