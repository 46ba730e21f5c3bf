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
	// maxPending is how many rows wait for Flush; one more flushes by itself.
	maxPending = 1 << 16
	// maxPendingText bounds the bytes of text in these rows, but for those of one row.
	maxPendingText = 4 << 20
	// maxText bounds the bytes of text of one row. A capture's own rows have far less.
	maxText = 64 << 20
	// reserveBytes is the disk room kept for batches to come.
	reserveBytes = 1 << 20
)

// Writer appends rows to an index. Not safe for concurrent use.
//
// A failed write leaves the file with its last complete batch, and the rows
// waiting: the next Flush tries them again.
type Writer struct {
	path     string
	f        *os.File
	md       Metadata
	end      int64 // of the file
	reserved int64 // end of the disk room taken ahead
	rows     []wire.Row
	text     int  // bytes of it in rows
	synced   bool // the file's name is durable
	place    place
}

// place is how a new index comes to its path.
type place struct {
	created bool          // nothing stood there
	filled  bool          // what stands there is emptied, for the folder lets nothing take its place
	next    *partial.File // what takes the place; nil: the file at the path is written
	target  string        // whose place it takes: the path, links followed
	aside   string        // where what stood there is meanwhile
}

// Create begins a new index at path, replacing what stands there. captureID is
// 32 hexadecimal digits.
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

// Prepare makes a new index for path. The next call is Begin, or Discard.
//
// An index that stands there goes aside until then, for a stream is not to stand beside the index
// of another. Where the folder does not let it, it stays, and is emptied by Begin.
//
// Errors: InvalidArgument (something else stands there, and is not to be overwritten), and those
// of the system.
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
	if w.place.target, err = filepath.EvalSymlinks(w.path); err != nil { // a link stays
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

// Begin gives the index its place. It says from now on to which capture it belongs. Where Begin
// fails the writer is closed.
func (w *Writer) Begin() error {
	p := w.place
	switch {
	case p.next != nil:
		err := p.next.Rename()
		if err != nil {
			p.next.Discard()
		}
		w.place = place{}
		_ = os.Remove(p.aside) // else the next Prepare for the path removes it
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

// Discard gives a new index up before Begin, and leaves what stood at its path as it was.
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
		if made, err = filepath.EvalSymlinks(w.path); err == nil { // a link that led nowhere stays
			err = os.Remove(made)
		}
	case !p.filled:
		err = w.f.Truncate(0)
	}
	return errors.Join(err, w.f.Close())
}

// New begins an index in an empty file, which is the writer's to close unless New fails.
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

// CaptureID tells the capture of this index from every other.
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

// reserve keeps room on the disk for the next batches.
func (w *Writer) reserve() {
	if w.reserved-w.end < reserveBytes/2 {
		reserve(w.f, w.end, reserveBytes)
		w.reserved = w.end + reserveBytes
	}
}

// Append adds a copy of r to the rows that wait for Flush. Text that is not
// UTF-8 is made so, by U+FFFD. It flushes by itself before the rows take too
// much memory, and returns what that returned; r itself is kept in any case but
// one: InvalidArgument, where it has more than 64 MiB of text.
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

// textOf is how many bytes of text a row has.
func textOf(r *wire.Row) int {
	n := 0
	for _, s := range textsOf(r) {
		n += len(*s)
	}
	return n
}

// Pending is the number of rows that wait for Flush.
func (w *Writer) Pending() int { return len(w.rows) }

// Flush writes the waiting rows as one record batch, or as several where an earlier Flush failed.
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
	m := messageIn(b, messageIn(b, 0).end) // behind a schema, which the arrow module writes always
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

// encode makes the messages of a schema and, where rec is not nil, of a batch.
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

// messageIn is the message at offset at of what encode made.
func messageIn(b []byte, at int64) message {
	m, bad := next(held(b), at)
	if bad != nil {
		panic("index: the arrow module wrote what cannot be read: " + bad.reason)
	}
	return m
}

// write puts b at the end of the file, all of it or nothing.
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

// Sync flushes, and waits until the file and its name are durable; with it the
// names of all files that stood in the directory before.
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

// Follow renames the index for a stream that was renamed while it was written. It reports whether
// the index is at the new path: not if something else stands there, or the index is no longer at
// the old one.
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

// Close flushes, writes the end mark and closes the file, which it does also
// when writing fails.
func (w *Writer) Close() error {
	err := w.finish()
	if cut := w.f.Truncate(w.end); cut != nil && err == nil { // gives the reserve back
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

// Kept says which rows of an index stay when its stream is cut.
type Kept struct {
	Rows         uint64
	NextSequence uint64 // one more than the last kept row's, 0 without rows
	End          int64  // of the last indexed packet in the stream
	CaptureID    string // "": no index was there, or what stood there is none
}

// Found is what stands at the path of an index, for a capture that goes on. Nothing of it is
// changed before Resume.
type Found struct {
	Kept
	// Lost is why none of the rows can be kept: NotFound (there is no index, or nothing in it
	// yet) or Corrupt (it is no index, or damaged, or that of another stream). nil: they can.
	Lost error

	path  string
	f     *os.File // nil: there is none
	old   *File
	whole int   // batches that stay as they are
	rest  []int // kept rows behind those
	anew  bool  // all rows are written behind a new schema
}

// Find reads the index at path to go on with a stream that is to be cut to cut bytes. It
// keeps the rows of packets that end there or before, and the notes of tensors before the
// first dropped one.
//
// Errors: those of Open but NotFound and Corrupt, and of reading the stream. The caller
// calls Resume or Close.
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
		// The schema says something else than before: of a first packet that is gone, of the
		// version, or which capture this is.
		f.anew, f.whole, f.rest = true, 0, f.rest[:0]
		for i := range old.NumRows() {
			if r := old.Row(i); old.keeper(cut)(&r) {
				f.rest = append(f.rest, i)
			}
		}
	}
	return nil
}

// choose finds the rows to keep, and returns those that have a packet.
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

// Resume makes the index what it is to be beside the stream, which was cut meanwhile. One
// that is lost is begun anew, and one that cannot be used is set aside before. captureID is
// that of the index, unless it is lost or has none.
//
// A process that is killed here leaves the old index or the new one.
func (f *Found) Resume(captureID string) (*Writer, error) {
	w, err := f.resume(captureID)
	if w == nil || w.f != f.f { // a new file took its place
		_ = f.Close() // which was only read
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
	w := &Writer{path: f.path, f: f.f, md: f.old.md, end: f.old.extents[f.whole].end}
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

// Close leaves the index as it is.
func (f *Found) Close() error {
	if f.f == nil {
		return nil
	}
	return f.f.Close()
}

// setAside renames a file that is not the index of the stream.
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

// cut ends the file behind the batches that it keeps. It waits for the disk where rows go:
// after a power failure they must not stand beside packets that took the place of theirs.
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

// syncFile is File.Sync but in tests.
var syncFile = (*os.File).Sync

// rewrite makes a new file of the batches that stay and of rows of the old index, which
// takes the place of the old one when it is whole.
func (w *Writer) rewrite(old *File, rows []int) (err error) {
	path, err := filepath.EvalSymlinks(w.path) // a link stays
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

// keeper tells which rows stay when the stream is cut.
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
