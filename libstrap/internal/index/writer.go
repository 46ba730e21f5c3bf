package index

import (
	"bytes"
	"errors"
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
	// maxText bounds the bytes of text that wait likewise, and those of one row.
	maxText = 4 << 20
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
}

// Create begins a new index at path, replacing what stands there. captureID is
// 32 hexadecimal digits.
func Create(path, captureID string) (*Writer, error) {
	if err := checkCaptureID(captureID); err != nil {
		return nil, err
	}
	f, err := openRegular(path, os.O_RDWR|os.O_CREATE|os.O_TRUNC)
	if err != nil {
		return nil, err
	}
	return New(f, captureID)
}

// New begins an index in an empty file, which is the writer's to close unless New fails.
func New(f *os.File, captureID string) (*Writer, error) {
	if err := checkCaptureID(captureID); err != nil {
		return nil, err
	}
	w := &Writer{path: f.Name(), f: f, md: Metadata{CaptureID: captureID}}
	w.reserve()
	return w, nil
}

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
// one: InvalidArgument, where it has more than 4 MiB of text.
func (w *Writer) Append(r *wire.Row) error {
	row := *r
	row.Shape = slices.Clone(r.Shape)
	text := 0
	for _, s := range []*string{
		&row.Model, &row.Layer, &row.Path, &row.Codec, &row.Transform, &row.Parameters, &row.Error,
	} {
		*s = strings.ToValidUTF8(*s, "\ufffd")
		text += len(*s)
	}
	if text > maxText {
		return status.New(status.InvalidArgument, "a row with %d bytes of text, at most %d fit the index", text, maxText)
	}
	var err error
	if len(w.rows) >= maxPending || w.text+text > maxText {
		err = w.Flush()
	}
	w.rows = append(w.rows, row)
	w.text += text
	return err
}

// Pending is the number of rows that wait for Flush.
func (w *Writer) Pending() int { return len(w.rows) }

// Flush writes the waiting rows as one record batch. The first one writes the
// schema before it, with the checksum of the first packet where that is among
// the rows.
func (w *Writer) Flush() error {
	if len(w.rows) == 0 {
		return nil
	}
	w.learnFirst()
	schema := Schema(w.md)
	rec := Record(schema, w.rows)
	defer rec.Release()
	b, err := encode(schema, rec)
	if err != nil {
		return status.Wrap(status.Internal, err, "cannot encode %d rows of the index", len(w.rows))
	}
	if w.end > 0 {
		b = b[schemaLength(b):]
	}
	if err := w.write(b); err != nil {
		return err
	}
	clear(w.rows)
	w.rows, w.text = w.rows[:0], 0
	return nil
}

// learnFirst notes the checksum of the packet at offset 0, as long as the
// schema is not written.
func (w *Writer) learnFirst() {
	if w.end > 0 {
		return
	}
	for i := range w.rows {
		if r := &w.rows[i]; r.Offset == 0 && hasCRC(r) {
			w.md.FirstCRC, w.md.HasFirst = r.CRC, true
			return
		}
	}
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

// schemaLength is the length of the schema message with which b begins: the
// arrow module writes one always, and an appended batch must have none.
func schemaLength(b []byte) int64 {
	m, bad := next(b, 0)
	if bad != nil {
		panic("index: the arrow module wrote what cannot be read: " + bad.reason)
	}
	return m.end
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
	var b []byte
	if w.end == 0 {
		schema, err := encode(Schema(w.md), nil)
		if err != nil {
			return status.Wrap(status.Internal, err, "cannot encode the schema of the index")
		}
		b = schema
	}
	return w.write(append(b, endMark...))
}

// Kept says what Resume left in an index.
type Kept struct {
	Rows         uint64
	NextSequence uint64 // one more than the last kept row's, 0 without rows
	End          int64  // of the last indexed packet in the stream
	CaptureID    string
}

// Resume opens the index at path to go on with a stream that was cut to cut
// bytes. It keeps the rows of packets that end there or before, and the notes
// of tensors before the first dropped one.
//
// Errors: NotFound (there is no index, or nothing in it yet), Corrupt (it is no
// index, or damaged, or that of another stream), and those of Open and of writing.
// The file is changed only once it was read without an error. A process that is killed
// here leaves the old index or the new one.
func Resume(path string, stream io.ReaderAt, cut int64) (*Writer, Kept, error) {
	if cut < 0 {
		return nil, Kept{}, status.New(status.InvalidArgument, "a stream cut to %d bytes", cut)
	}
	f, err := openRegular(path, os.O_RDWR)
	if err != nil {
		return nil, Kept{}, err
	}
	w, kept, err := resume(f, path, stream, cut)
	if err != nil {
		f.Close()
		return nil, Kept{}, err
	}
	if w.f != f { // a new file took its place
		f.Close()
	}
	return w, kept, nil
}

func resume(f *os.File, path string, stream io.ReaderAt, cut int64) (*Writer, Kept, error) {
	old, err := read(f, path, parse)
	if err != nil {
		return nil, Kept{}, err
	}
	if !old.Begun() {
		return nil, Kept{}, status.New(status.NotFound, "nothing stands in the index %q: %s", path, old.Problem)
	}
	if old.damage {
		return nil, Kept{}, status.New(status.Corrupt, "%q: %s", path, old.Problem)
	}
	kept := Kept{CaptureID: old.md.CaptureID}
	keep := old.keeper(cut)
	var packets []int // kept rows that have one
	var rest []int    // kept rows behind the batches that stay as they are
	whole := 0        // how many those are
	row := 0
	for k, rec := range old.records {
		first := len(rest)
		for i := range int(rec.NumRows()) {
			if r := rowOf(rec, i); keep(&r) {
				kept.add(&r)
				rest = append(rest, row)
				if r.Offset >= 0 {
					packets = append(packets, row)
				}
			}
			row++
		}
		if whole == k && len(rest)-first == int(rec.NumRows()) {
			whole, rest = k+1, rest[:0]
		}
	}
	reason, err := old.stranger(stream, cut, packets, kept.End)
	if err != nil {
		return nil, Kept{}, err
	}
	if reason != "" {
		return nil, Kept{}, status.New(status.Corrupt, "%q is the index of another stream: %s", path, reason)
	}
	w := &Writer{path: path, f: f, md: old.md, end: old.extents[whole].end}
	if kept.End == 0 || old.version != version {
		// The first packet is gone, or not there yet: what the schema says about it goes too.
		// All rows are written behind a new one, as are those of an older version.
		w.md.HasFirst, w.end = false, 0
		rest = rest[:0]
		for i := range old.NumRows() {
			if r := old.Row(i); keep(&r) {
				rest = append(rest, i)
			}
		}
	}
	if len(rest) > 0 {
		return w, kept, w.rewrite(old, rest)
	}
	return w, kept, w.cut(kept.Rows < uint64(old.NumRows()))
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
