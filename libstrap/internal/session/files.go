// Begins or resumes the files of a session's first segment.

package session

import (
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"math"
	"path/filepath"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/stream"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// files are the first segment of a session.
type files struct {
	segment
	sequence uint64 // of the next row
}

// openFiles begins or resumes the segment at path.
func openFiles(path string, o *Options, with stream.Options) (f files, err error) {
	home, err := filepath.Abs(path)
	if err != nil {
		return f, status.FromOS(err, "cannot open %q", path)
	}
	if with.Overwrite = o.Overwrite; o.Resume {
		f, err = resumeFiles(path, o, with)
	} else {
		f, err = createFiles(path, o, with)
	}
	f.path, f.home = path, home
	return f, err
}

func createFiles(path string, o *Options, with stream.Options) (f files, err error) {
	f.stream, err = stream.Create(path, with, func() (err error) {
		f.index, err = index.Prepare(index.PathOf(path), newCaptureID(), o.Overwrite)
		return err
	})
	if err != nil {
		if f.index != nil {
			err = errors.Join(err, f.index.Discard())
		}
		return f, err
	}
	if err = f.index.Begin(); err != nil {
		return f, errors.Join(err, f.stream.Close())
	}
	return f, nil
}

func newCaptureID() string {
	var id [16]byte
	rand.Read(id[:]) // never fails, crypto/rand
	return hex.EncodeToString(id[:])
}

// resumeFiles opens stream and index to append to them. An index that is missing, or of another
// stream, is begun anew: scanning lists the packets of the stream. No file is changed before both
// are open and checked.
func resumeFiles(path string, o *Options, with stream.Options) (f files, err error) {
	var found *index.Found
	f.stream, _, err = stream.Resume(path, o.Cut, with, func(r io.ReaderAt, end int64) (err error) {
		if found, err = index.Find(index.PathOf(path), r, end); err != nil {
			return err
		}
		return o.expects(path, found.CaptureID)
	})
	if err != nil {
		if found != nil {
			err = errors.Join(err, found.Close())
		}
		return f, err
	}
	id := o.CaptureID
	if id == "" && found.Lost == nil {
		id = found.CaptureID
	}
	if id == "" {
		id = newCaptureID()
	}
	if f.index, err = found.Resume(id); err != nil {
		return f, errors.Join(err, f.stream.Close())
	}
	f.sequence = found.NextSequence
	err = f.stream.Packets(found.End, func(p scan.Packet) error {
		row := wire.Row{
			Sequence: f.sequence, Offset: p.Offset, Length: uint64(p.End() - p.Offset), Parts: 1,
			Layer: p.Name, Codec: codec.Detect(p.Head()).String(), Step: -1, Token: -1,
			MSE: math.NaN(), MeanSquare: math.NaN(),
		}
		f.sequence++
		return f.index.Append(&row)
	})
	if err != nil {
		return f, errors.Join(err, f.index.Close(), f.stream.Close())
	}
	return f, nil
}

// expects refuses to resume another capture than the caller means. A lost index does not say which
// capture it was of.
func (o *Options) expects(path, id string) error {
	if want := o.CaptureID; want != "" && id != "" && id != want {
		return status.New(status.Corrupt,
			"%q holds capture %s, not capture %s (capture_id): another capture has taken its place; "+
				"give no capture_id to append to it", path, id, want)
	}
	return nil
}
