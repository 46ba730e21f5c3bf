// Writes an index: creates or resumes it, appends rows and closes it.

package index

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/ipc"

	"github.com/libstrap/strap/libstrap/internal/partial"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// maxPending is the most rows that wait for Flush. Append flushes before it adds one more. A batch of so
	// many rows takes some MB while it is made.
	maxPending = 1 << 13
	// maxRows is the most rows of a compressed batch. Earlier versions wrote so many.
	maxRows = 1 << 16
	// maxPendingText is the most bytes of text in the waiting rows. A single row may have more.
	maxPendingText = 4 << 20
	// maxText is the most bytes of text in one row. The rows of a capture have far less.
	maxText = 64 << 20
	// reserveBytes is the disk space that is reserved for the next batches.
	reserveBytes = 1 << 20
)

// Writer appends rows to an index. It is not safe for concurrent use.
//
// After a failed write the file ends with its last complete batch. The rows keep waiting, and the next Flush
// tries to write them again.
type Writer struct {
	path     string
	f        *os.File
	md       Metadata
	end      int64 // of the file
	reserved int64 // end of the reserved disk space
	rows     []wire.Row
	text     int  // bytes of text in rows
	synced   bool // the file's name is durable
	place    place
}

// place says how a new index gets to its path.
type place struct {
	created bool          // there was no file
	filled  bool          // the file at the path must be emptied, because the folder allows no replacement
	next    *partial.File // the file that will be renamed to target; nil: the file at the path is written
	target  string        // the path, with links followed
	aside   string        // the path of the old index meanwhile
}

// Create begins a new index at path and replaces a file there. captureID is 32 hexadecimal digits.
func Create(path, captureID string) (*Writer, error) {
	w, err := Prepare(path, captureID, true)
	if err != nil {
		return nil, err
	}
	if err := w.Begin(); err != nil {
		return nil, err
	}
	return w, nil
}

// Prepare makes a new index for path. The next call is Begin or Discard.
//
// Until then an index at path is renamed, because a stream must not be beside the index of another stream.
// If the folder does not allow this, the index stays, and Begin empties it.
//
// Errors: InvalidArgument if there is another file at path and overwrite is false, and errors of the system.
func Prepare(path, captureID string, overwrite bool) (w *Writer, err error) {
	if err := checkCaptureID(captureID); err != nil {
		return nil, err
	}
	w = &Writer{path: path, md: Metadata{CaptureID: captureID}}
	if w.f, err = openRegular(path, os.O_RDWR); errors.Is(err, status.NotFound) {
		w.place.created = true
		w.f, err = openRegular(path, os.O_RDWR|os.O_CREATE)
	}
	if err != nil {
		return nil, err
	}
	if err := w.prepare(overwrite); err != nil {
		return nil, errors.Join(err, w.Discard())
	}
	return w, nil
}

func (w *Writer) prepare(overwrite bool) (err error) {
	info, err := w.f.Stat()
	if err != nil {
		return status.FromOS(err, "cannot stat the index %q", w.path)
	}
	if info.Size() == 0 {
		return w.writeSchema()
	}
	w.place.filled = true
	if !overwrite {
		if _, err := beginning(w.f); errors.Is(err, status.Corrupt) {
			return status.New(status.InvalidArgument, "%q is no index of a capture: "+
				"give the stream another name, or give overwrite to replace it", w.path)
		} else if err != nil {
			return err
		}
	}
	if w.place.target, err = filepath.EvalSymlinks(w.path); err != nil { // replace the file, not a link to it
		return status.FromOS(err, "cannot follow %q", w.path)
	}
	next, err := partial.Create(w.place.target, 0o600)
	if partial.Refused(err) {
		return nil
	}
	if err != nil {
		return err
	}
	if w.place.aside, err = partial.Aside(w.place.target); err != nil {
		next.Discard()
		if partial.Refused(err) {
			return nil
		}
		return err
	}
	_ = w.f.Close() // which was only read
	w.f, w.place.next, w.place.filled = next.File, next, false
	if err := next.Inherit(info); err != nil {
		return err
	}
	return w.writeSchema()
}

// Begin puts the index at its path. If Begin fails, the Writer is closed.
func (w *Writer) Begin() error {
	p := w.place
	switch {
	case p.next != nil:
		err := p.next.Rename()
		if err != nil {
			p.next.Discard()
		}
		w.place = place{}
		_ = os.Remove(p.aside) // after an error, the next Prepare for the path removes it
		return err
	case p.filled:
		err := w.f.Truncate(0)
		if err != nil {
			err = status.FromOS(err, "cannot empty the index %q", w.path)
		} else {
			err = w.writeSchema()
		}
		if err != nil {
			return errors.Join(err, w.f.Close())
		}
	}
	return nil
}

// Discard removes a new index before Begin. A file that was at its path is there again.
func (w *Writer) Discard() error {
	p, err := w.place, error(nil)
	switch {
	case p.next != nil:
		p.next.Discard()
		if err := os.Rename(p.aside, p.target); err != nil {
			return status.FromOS(err, "cannot put the index %q back, which is %q", w.path, p.aside)
		}
		return nil
	case p.created:
		var made string
		if made, err = filepath.EvalSymlinks(w.path); err == nil { // remove the new file, not a link to it
			err = os.Remove(made)
		}
	case !p.filled:
		err = w.f.Truncate(0)
	}
	return errors.Join(err, w.f.Close())
}

// New begins an index in an empty file. Unless New fails, the Writer closes the file.
func New(f *os.File, captureID string) (*Writer, error) {
	if err := checkCaptureID(captureID); err != nil {
		return nil, err
	}
	w := &Writer{path: f.Name(), f: f, md: Metadata{CaptureID: captureID}}
	if err := w.writeSchema(); err != nil {
		return nil, err
	}
	return w, nil
}

// CaptureID returns the id of the index's capture. No other capture has it.
func (w *Writer) CaptureID() string { return w.md.CaptureID }

func checkCaptureID(id string) error {
	if !IsCaptureID(id) {
		return status.New(status.InvalidArgument, "capture id %q is not 32 lower-case hexadecimal digits", id)
	}
	return nil
}

// IsCaptureID reports whether id is 32 lower-case hexadecimal digits.
func IsCaptureID(id string) bool {
	return len(id) == 32 && strings.Trim(id, "0123456789abcdef") == ""
}

// reserve reserves disk space for the next batches.
func (w *Writer) reserve() {
	if w.reserved-w.end < reserveBytes/2 {
		reserve(w.f, w.end, reserveBytes)
		w.reserved = w.end + reserveBytes
	}
}

// Append adds a copy of r to the rows that wait for Flush. In text that is not UTF-8 it puts U+FFFD. Before
// the rows take too much memory, Append flushes, and returns the error of that. r is added also then. Only
// if r has more than 64 MiB of text, Append returns InvalidArgument and does not add it.
func (w *Writer) Append(r *wire.Row) error {
	row := *r
	row.Shape = slices.Clone(r.Shape)
	for _, s := range textsOf(&row) {
		*s = strings.ToValidUTF8(*s, "\ufffd")
	}
	text := textOf(&row)
	if text > maxText {
		return status.New(status.InvalidArgument, "a row with %d bytes of text, at most %d fit the index", text, maxText)
	}
	var err error
	if len(w.rows) >= maxPending || w.text+text > maxPendingText {
		err = w.Flush()
	}
	w.rows = append(w.rows, row)
	w.text += text
	return err
}

func textsOf(r *wire.Row) [8]*string {
	return [...]*string{&r.Model, &r.Layer, &r.Path, &r.Codec, &r.Transform, &r.Parameters, &r.Request, &r.Error}
}

// textOf returns how many bytes of text a row has.
func textOf(r *wire.Row) int {
	n := 0
	for _, s := range textsOf(r) {
		n += len(*s)
	}
	return n
}

// Pending returns the number of rows that wait for Flush.
func (w *Writer) Pending() int { return len(w.rows) }

// Flush writes the waiting rows as one record batch, or as several after an earlier Flush failed.
func (w *Writer) Flush() error {
	for len(w.rows) > 0 {
		n, text := 1, textOf(&w.rows[0])
		for ; n < min(len(w.rows), maxPending) && text+textOf(&w.rows[n]) <= maxPendingText; n++ {
			text += textOf(&w.rows[n])
		}
		if err := w.writeBatch(w.rows[:n]); err != nil {
			return err
		}
		w.rows, w.text = slices.Delete(w.rows, 0, n), w.text-text
	}
	return nil
}

func (w *Writer) writeBatch(rows []wire.Row) error {
	schema := Schema(w.md)
	rec := Record(schema, rows)
	defer rec.Release()
	b, err := encode(schema, rec)
	if err != nil {
		return status.Wrap(status.Internal, err, "cannot encode %d rows of the index", len(rows))
	}
	m := messageIn(b, messageIn(b, 0).end) // the arrow module always writes a schema first
	if len(m.body) >= leastCompressed {
		return w.write(compressed(m))
	}
	return w.write(b[m.at:])
}

// writeSchema begins an empty file.
func (w *Writer) writeSchema() error {
	b, err := encode(Schema(w.md), nil)
	if err != nil {
		return status.Wrap(status.Internal, err, "cannot encode the schema of the index")
	}
	return w.write(b)
}

// encode makes the message of a schema and, if rec is not nil, the message of a batch.
func encode(schema *arrow.Schema, rec arrow.Record) ([]byte, error) {
	var b bytes.Buffer
	w := ipc.NewWriter(&b, ipc.WithSchema(schema))
	if rec != nil {
		if err := w.Write(rec); err != nil {
			return nil, err
		}
		return b.Bytes(), nil
	}
	if err := w.Close(); err != nil {
		return nil, err
	}
	return b.Bytes()[:b.Len()-len(endMark)], nil
}

// messageIn returns the message at offset at of the output of encode.
func messageIn(b []byte, at int64) message {
	m, bad := next(held(b), at)
	if bad != nil {
		panic("index: the arrow module wrote what cannot be read: " + bad.reason)
	}
	return m
}

// write appends b to the file, all of it or nothing.
func (w *Writer) write(b []byte) error {
	if _, err := w.f.WriteAt(b, w.end); err != nil {
		err = status.FromOS(err, "cannot write to the index %q", w.path)
		if cut := w.f.Truncate(w.end); cut != nil {
			err = errors.Join(err, status.FromOS(cut, "cannot cut the index %q back to its last batch", w.path))
		}
		return err
	}
	w.end += int64(len(b))
	w.reserve()
	return nil
}

// Sync flushes, and waits until the file and its name are durable. The names of all files that are in the
// folder become durable too.
func (w *Writer) Sync() error {
	if err := w.Flush(); err != nil {
		return err
	}
	if err := w.f.Sync(); err != nil {
		return status.FromOS(err, "cannot make the index %q durable", w.path)
	}
	if w.synced {
		return nil
	}
	if err := partial.SyncFolder(w.path); err != nil {
		return err
	}
	w.synced = true
	return nil
}

// Follow renames the index of a stream that was renamed while it was written. It returns whether the index
// is at the new path. It is not if there is another file, or if the index is no longer at the old path.
func (w *Writer) Follow(from, to string) (bool, error) {
	own, err := w.f.Stat()
	if err != nil {
		return false, status.FromOS(err, "cannot stat the index %q", w.path)
	}
	if there, err := os.Stat(to); err == nil {
		return os.SameFile(there, own), nil // renamed with the stream
	}
	if here, err := os.Stat(from); err != nil || !os.SameFile(here, own) {
		return false, nil
	}
	if err := os.Rename(from, to); err != nil {
		return false, status.FromOS(err, "cannot rename the index %q as its stream", w.path)
	}
	return true, nil
}

// Close flushes, writes the end mark, and closes the file. It closes the file also if writing fails.
func (w *Writer) Close() error { return w.release(w.finish()) }

// Seal is Close of an index that is made durable with its end mark before.
func (w *Writer) Seal() error {
	err := w.finish()
	if err == nil {
		err = w.Sync()
	}
	return w.release(err)
}

// release closes the file, and returns the first of err and its own errors.
func (w *Writer) release(err error) error {
	if cut := w.f.Truncate(w.end); cut != nil && err == nil { // frees the reserved disk space
		err = status.FromOS(cut, "cannot cut the index %q to its length", w.path)
	}
	if cerr := w.f.Close(); cerr != nil && err == nil {
		err = status.FromOS(cerr, "cannot close the index %q", w.path)
	}
	return err
}

func (w *Writer) finish() error {
	if err := w.Flush(); err != nil {
		return err
	}
	return w.write(endMark)
}

// Kept describes the rows of an index that stay when its stream is cut.
type Kept struct {
	Rows         uint64
	NextSequence uint64 // one more than the sequence of the last kept row; 0 without rows
	End          int64  // of the last indexed packet in the stream
	CaptureID    string // "": there is no index
}

// Found is the file at the path of an index, for a capture that goes on. The file does not change before
// Resume.
type Found struct {
	Kept
	// Lost tells why no row can be kept: NotFound if there is no index or it is empty, Corrupt if the
	// file is no index, or is damaged, or belongs to another stream. nil: rows can be kept.
	Lost error

	path  string
	f     *os.File // nil: there is no file
	old   *File
	whole int   // number of batches that stay unchanged
	rest  []int // kept rows behind these batches
	anew  bool  // write all rows again, with a new schema
}

// Find reads the index at path, for a stream that will be cut to cut bytes and continued. It keeps the
// rows of packets that end at cut or before, and the notes of tensors before the first dropped packet.
//
// Errors: those of Open except NotFound and Corrupt, and errors of reading the stream. The caller calls
// Resume or Close.
func Find(path string, stream io.ReaderAt, cut int64) (*Found, error) {
	if cut < 0 {
		return nil, status.New(status.InvalidArgument, "a stream cut to %d bytes", cut)
	}
	found := &Found{path: path}
	var err error
	if found.f, err = openRegular(path, os.O_RDWR); err == nil {
		err = found.read(stream, cut)
	}
	switch {
	case err == nil:
	case errors.Is(err, status.NotFound), errors.Is(err, status.Corrupt):
		found.Kept, found.Lost = Kept{CaptureID: found.CaptureID}, err
	default:
		return nil, errors.Join(err, found.Close())
	}
	return found, nil
}

func (f *Found) read(stream io.ReaderAt, cut int64) error {
	old, err := read(f.f, f.path, parse)
	if err != nil {
		return err
	}
	if !old.Begun() {
		return status.New(status.NotFound, "nothing stands in the index %q: %s", f.path, old.Problem)
	}
	f.old = old
	if IsCaptureID(old.md.CaptureID) {
		f.CaptureID = old.md.CaptureID
	}
	if old.Damaged {
		return status.New(status.Corrupt, "%q: %s", f.path, old.Problem)
	}
	packets := f.choose(old.keeper(cut))
	reason, err := old.stranger(stream, cut, packets, f.End)
	if err != nil {
		return err
	}
	if reason != "" {
		return status.New(status.Corrupt, "%q is the index of another stream: %s", f.path, reason)
	}
	if (f.End == 0 && old.md.HasFirst) || old.version != version || f.CaptureID == "" {
		// The schema changes: the first packet it knows is gone, or its version or its capture is
		// another one.
		f.anew, f.whole, f.rest = true, 0, f.rest[:0]
		for i := range old.NumRows() {
			if r := old.Row(i); old.keeper(cut)(&r) {
				f.rest = append(f.rest, i)
			}
		}
	}
	return nil
}

// choose finds the rows to keep. It returns those that have a packet.
func (f *Found) choose(keep func(*wire.Row) bool) (packets []int) {
	row := 0
	for k, b := range f.old.batches {
		first := len(f.rest)
		for i := range b.rows {
			if r := b.row(i); keep(&r) {
				f.add(&r)
				f.rest = append(f.rest, row)
				if r.Offset >= 0 {
					packets = append(packets, row)
				}
			}
			row++
		}
		if f.whole == k && len(f.rest)-first == b.rows {
			f.whole, f.rest = k+1, f.rest[:0]
		}
	}
	return packets
}

// Resume makes the index fit the stream, which was cut meanwhile. A file that cannot be used is renamed. If
// no rows can be kept, Resume begins a new index. captureID is the id of the index, if there is one and it
// has an id; else it is the id for the new index.
//
// If the process is killed here, there is the old index or the new one.
func (f *Found) Resume(captureID string) (*Writer, error) {
	w, err := f.resume(captureID)
	if w == nil || w.f != f.f { // a new file has replaced it
		_ = f.Close() // it was only read
	}
	return w, err
}

func (f *Found) resume(captureID string) (*Writer, error) {
	if f.Lost != nil {
		if errors.Is(f.Lost, status.Corrupt) {
			if err := setAside(f.path); err != nil {
				return nil, err
			}
		}
		return Create(f.path, captureID)
	}
	w := &Writer{path: f.path, f: f.f, md: f.old.md, end: f.old.messages[f.whole].end}
	if f.anew {
		w.md, w.end = Metadata{CaptureID: captureID}, 0
	}
	var err error
	if f.anew || len(f.rest) > 0 {
		err = w.rewrite(f.old, f.rest)
	} else {
		err = w.cut(f.Rows < uint64(f.old.NumRows()))
	}
	if err != nil {
		return nil, err
	}
	return w, nil
}

// Close closes the file. The index stays unchanged.
func (f *Found) Close() error {
	if f.f == nil {
		return nil
	}
	return f.f.Close()
}

// setAside renames a file that is not the stream's index.
func setAside(path string) error {
	for n := 1; ; n++ {
		to := fmt.Sprintf("%s.bad-%d", path, n)
		if _, err := os.Lstat(to); errors.Is(err, os.ErrNotExist) {
			if err := os.Rename(path, to); err != nil {
				return status.FromOS(err, "cannot set the index %q aside, which is not that of the stream", path)
			}
			return nil
		}
	}
}

// cut ends the file behind the kept batches. rows tells whether rows are removed. Then cut waits for the
// disk: after a power failure the removed rows must not be there beside new packets.
func (w *Writer) cut(rows bool) error {
	if err := w.f.Truncate(w.end); err != nil {
		return status.FromOS(err, "cannot cut the index %q", w.path)
	}
	if !rows {
		return nil
	}
	if err := syncFile(w.f); err != nil {
		return status.FromOS(err, "cannot make the index %q durable", w.path)
	}
	return nil
}

// syncFile is (*os.File).Sync; tests replace it.
var syncFile = (*os.File).Sync

// rewrite makes a new file with the kept batches and with rows of the old index. When it is complete, it
// replaces the old file.
func (w *Writer) rewrite(old *File, rows []int) (err error) {
	path, err := filepath.EvalSymlinks(w.path) // replace the file, not a link to it
	if err != nil {
		return status.FromOS(err, "cannot write the index %q anew", w.path)
	}
	info, err := w.f.Stat()
	if err != nil {
		return status.FromOS(err, "cannot stat the index %q", w.path)
	}
	f, err := partial.Create(path, 0o600)
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			f.Discard()
		}
	}()
	if err := f.Chmod(info.Mode().Perm()); err != nil {
		return status.FromOS(err, "cannot set the permissions of %q", f.Name())
	}
	if _, err := io.Copy(f, io.NewSectionReader(w.f, 0, w.end)); err != nil {
		return status.FromOS(err, "cannot copy the index %q to %q", w.path, f.Name())
	}
	w.f = f.File
	if w.end == 0 {
		if err := w.writeSchema(); err != nil {
			return err
		}
	}
	for _, i := range rows {
		r := old.Row(i)
		if err := w.Append(&r); err != nil {
			return err
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	if err := f.Place(); err != nil {
		return err
	}
	w.synced = true
	return nil
}

// keeper returns a function that reports whether a row stays when the stream is cut.
func (f *File) keeper(cut int64) func(*wire.Row) bool {
	dropped := uint64(math.MaxUint64) // sequence of the first dropped packet
	f.Extents(func(row int, _, end int64) bool {
		if end > cut {
			dropped = min(dropped, f.Row(row).Sequence)
		}
		return true
	})
	return func(r *wire.Row) bool {
		if r.Offset < 0 {
			return r.Sequence < dropped
		}
		return r.Offset+int64(r.Length) <= cut
	}
}

func (k *Kept) add(r *wire.Row) {
	k.Rows++
	k.NextSequence = max(k.NextSequence, r.Sequence+1)
	if r.Offset >= 0 {
		k.End = max(k.End, r.Offset+int64(r.Length))
	}
}
