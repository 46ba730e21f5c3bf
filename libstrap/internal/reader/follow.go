// Reads the rows that were added to a capture since it was opened.

package reader

import (
	"errors"
	"os"

	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Follow returns a Reader of the rows of r from row first on, and of the rows that were added since r was
// opened. It returns nil if nothing changed. r stays valid. Both Readers must be closed.
//
// The work is proportional to the new rows. While a capture writes the stream, Follow skips packets that
// are not in the index yet. A later Follow has them, with their rows.
//
// Errors: NotFound if another file is at the stream's path, or the stream was cut back; InvalidArgument if
// first is behind the rows that the index of r lists; those of Open.
func (r *Reader) Follow(first int) (*Reader, error) {
	if first < 0 || first > r.listed {
		return nil, status.New(status.InvalidArgument,
			"first = %d: %q can be followed from row 0 to %d on", first, r.path, r.listed)
	}
	size, err := r.sizeNow()
	if err != nil {
		return nil, err
	}
	// Ask first whether a capture is writing. If it has ended, all its rows are there afterwards.
	live := isLocked(r.f.File)
	if r.idx == nil && r.NumRows() == 0 && !r.options.IgnoreIndex {
		return r.anew(live, size)
	}
	if same, err := r.unchanged(live, size); same || err != nil {
		return nil, err
	}
	if err := r.hasLast(size); err != nil {
		return nil, err
	}
	n := &Reader{path: r.path, options: r.options, f: r.f, users: r.users, follows: true}
	n.info.Live = live
	if n.start, err = r.endBefore(first); err != nil {
		return nil, err
	}
	if r.idx != nil {
		if n.idx, err = r.idx.Continue(index.PathOf(r.path), r.indexedBefore(first)); err != nil {
			return nil, err
		}
		if n.idx.Torn && (n.idx.Damaged || !live) {
			n.problem("%s", n.idx.Problem)
		}
	}
	if err := n.arrange(true); err != nil {
		return nil, err
	}
	n.users.Add(1)
	return n, nil
}

// sizeNow returns the length of the stream. The stream must still be at its path.
func (r *Reader) sizeNow() (int64, error) {
	own, err := r.f.Stat()
	if err != nil {
		return 0, r.wrap(status.FromOS(err, "cannot stat"))
	}
	there, err := os.Stat(r.path)
	if err != nil {
		return 0, status.FromOS(err, "the stream %q was removed or renamed while it was followed", r.path)
	}
	if !os.SameFile(own, there) {
		return 0, status.New(status.NotFound, "another file took the place of the stream %q while it was followed: open it anew", r.path)
	}
	return own.Size(), nil
}

// anew opens the stream again, if it was empty before.
func (r *Reader) anew(live bool, size int64) (*Reader, error) {
	if live == r.info.Live && size == r.size {
		if have, err := os.Stat(index.PathOf(r.path)); err != nil || have.Size() == 0 {
			return nil, nil
		}
	}
	n := &Reader{path: r.path, options: r.options, f: r.f, users: r.users, follows: true}
	if err := n.open(r.options); err != nil {
		return nil, err
	}
	n.users.Add(1)
	return n, nil
}

// unchanged reports whether a Reader that is opened now would have the same rows.
func (r *Reader) unchanged(live bool, size int64) (bool, error) {
	if live != r.info.Live {
		return false, nil
	}
	if r.idx == nil || !live {
		return size == r.size, nil
	}
	have, err := os.Stat(index.PathOf(r.path))
	if err != nil {
		return false, status.FromOS(err, "cannot stat the index of %q", r.path)
	}
	return have.Size() == r.idx.Size() && r.listed == r.NumRows(), nil
}

// hasLast returns an error if the stream no longer has the last packet of r.
func (r *Reader) hasLast(size int64) error {
	offset, end, err := r.lastBefore(r.NumRows())
	if err != nil || end == 0 {
		return err
	}
	p, err := scan.ReadAt(r.f, offset, size)
	if err == nil && p.End() == end {
		return nil
	}
	if err != nil && !errors.Is(err, status.Corrupt) {
		return r.wrap(err)
	}
	return status.New(status.NotFound,
		"the stream %q was cut back while it was followed, as by a capture that resumes: open it anew", r.path)
}

// endBefore returns the least offset of a row's packet.
func (r *Reader) endBefore(row int) (int64, error) {
	_, end, err := r.lastBefore(row)
	return max(end, r.start), err
}

// lastBefore returns the range of the last packet before a row. end is 0 if there is none.
func (r *Reader) lastBefore(row int) (offset, end int64, err error) {
	for i := row - 1; i >= 0 && end == 0; i-- {
		w, err := r.Row(i)
		if err != nil {
			return 0, 0, err
		}
		if w.Offset >= 0 {
			offset, end = w.Offset, w.Offset+int64(w.Length)
		}
	}
	return offset, end, nil
}

// indexedBefore returns how many rows before a row are in the index.
func (r *Reader) indexedBefore(row int) int {
	n := 0
	for _, s := range r.segments {
		if !s.scanned {
			n += max(0, min(s.count, row-s.row))
		}
	}
	return n
}
