// Package reader reads captures: a stream with its index, or without an index by scanning.
package reader

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"slices"
	"sort"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/libstrap/strap/libstrap/internal/ahead"
	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// Options are the options of Open.
type Options struct {
	IgnoreIndex bool // find all packets by scanning
}

// Info describes an open stream.
type Info struct {
	Indexed    bool   // the index is used
	Rows       uint64 // packets, and notes of tensors without a packet
	Packets    uint64
	Scanned    uint64 // packets that were found by scanning
	FileBytes  int64  // length of the stream
	ValidBytes int64  // bytes of complete packets from its beginning
	Live       bool   // a capture is writing the stream
	Problem    string // problems of the stream or the index, "" if there are none
}

// Reader is an open stream. It may be used from several goroutines. Close must be the last call.
type Reader struct {
	path     string
	options  Options
	f        *ahead.File
	users    *atomic.Int32 // number of readers that share f
	start    int64         // least offset of the first row's packet
	follows  bool          // skips packets that are not in the index yet, while a capture writes
	listed   int           // rows before the packets that were found behind the index's end
	size     int64         // of the stream
	idx      *index.File   // nil: not used
	found    []scan.Packet // packets that were found by scanning, in order
	segments []segment
	info     Info

	once sync.Once
	rows []index.Rows
}

// segment is a run of rows. They are rows of the index, or found packets.
type segment struct {
	row, count int  // first row of the Reader, and number of rows
	first      int  // first row of the index, or first found packet
	scanned    bool // they are found packets
}

// Open opens the stream at path, and path.index beside it.
//
// The index is used if it belongs to the stream: the first packet has the index's checksum, the packets
// do not overlap, and the first and the last packet are at the index's offsets. Packets that the index
// does not list are found by scanning. If the index does not belong to the stream, all packets are found by
// scanning. Info.Problem tells this, and also if the stream or the index is torn.
//
// Errors: NotFound, Permission, InvalidArgument (no regular file), IO, Corrupt (the file does not begin
// with a packet, and no index says that its first packet was being written).
//
// While a capture writes the stream, the end of the index and of the last packet may be missing. This is
// no problem.
func Open(path string, o Options) (*Reader, error) {
	f, err := openStream(path)
	if err != nil {
		return nil, err
	}
	r := &Reader{path: path, options: o, f: &ahead.File{File: f}, users: new(atomic.Int32)}
	r.users.Store(1)
	if err := r.open(o); err != nil {
		f.Close()
		return nil, err
	}
	return r, nil
}

func openStream(path string) (*os.File, error) {
	// O_NONBLOCK: do not wait for a FIFO; it is refused below.
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, status.FromOS(err, "cannot open the stream %q", path)
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, status.FromOS(err, "cannot stat the stream %q", path)
	}
	if !info.Mode().IsRegular() {
		f.Close()
		return nil, status.New(status.InvalidArgument, "%q is no regular file (%s), so it is no stream", path, info.Mode().Type())
	}
	return f, nil
}

func (r *Reader) open(o Options) error {
	begun := false // an index says that a capture began here
	r.info.Live = isLocked(r.f.File)
	if !o.IgnoreIndex {
		idx, err := index.Open(index.PathOf(r.path))
		switch {
		case err == nil:
			begun = true
			r.info.Live = r.info.Live || idx.Torn && isLocked(r.f.File) // the capture may have just begun
			if idx.Torn && (idx.Damaged || !r.info.Live) {
				r.problem("%s", idx.Problem)
			}
			if idx.Begun() {
				r.idx = idx
			}
		case !errors.Is(err, status.NotFound):
			r.problem("the index is ignored: %v", err)
		}
	}
	return r.arrange(begun)
}

// arrange puts the rows in order after the index was read. begun tells whether an index says that a
// capture began here.
func (r *Reader) arrange(begun bool) error {
	// Get the size after the index was read. So the stream of a running capture has all packets that
	// the index lists.
	info, err := r.f.Stat()
	if err != nil {
		return status.FromOS(err, "cannot stat the stream %q", r.path)
	}
	r.size = info.Size()
	r.info.FileBytes = r.size

	rows := 0
	if r.idx != nil {
		reason, err := r.belongs()
		if err != nil {
			return err
		}
		if reason != "" {
			r.problem("the index is ignored: %s", reason)
			r.idx, begun = nil, false
		} else {
			rows = r.fitting()
		}
	}
	r.info.Indexed = r.idx != nil
	tear, atEnd, err := r.layout(rows)
	switch {
	case err != nil:
		return err
	case tear == nil:
	case r.info.Packets == 0 && !begun:
		return status.Wrap(status.Corrupt, tear, "%q is no stream", r.path)
	case !atEnd || !r.info.Live:
		r.problem("%v", tear)
	}
	return nil
}

// isLocked reports whether a capture has locked the file. On a file system without locks it returns false.
func isLocked(f *os.File) bool {
	fd := int(f.Fd())
	switch err := syscall.Flock(fd, syscall.LOCK_SH|syscall.LOCK_NB); {
	case err == nil:
		_ = syscall.Flock(fd, syscall.LOCK_UN) // after an error, closing the file unlocks it
		return false
	default:
		return errors.Is(err, syscall.EWOULDBLOCK)
	}
}

func (r *Reader) problem(format string, args ...any) {
	if r.info.Problem != "" {
		r.info.Problem += "; "
	}
	r.info.Problem += fmt.Sprintf(format, args...)
}

// belongs returns the reason why the index does not belong to the stream, or "". Packets behind the end
// of the file are no reason, because a crash can lose them.
func (r *Reader) belongs() (reason string, err error) {
	first, last := -1, -1
	pos := int64(0)
	r.idx.Extents(func(row int, offset, end int64) bool {
		switch {
		case end-offset < wire.HeaderSize:
			reason = fmt.Sprintf("row %d claims a packet of %d bytes", row, end-offset)
		case offset < pos:
			reason = fmt.Sprintf("row %d begins at byte %d, inside the packet before it", row, offset)
		case end <= r.size:
			if first < 0 {
				first = row
			}
			last, pos = row, end
			return true
		}
		return false
	})
	if reason != "" {
		return reason, nil
	}
	if sum, ok := r.idx.FirstCRC(); ok && !r.follows {
		p, err := scan.ReadAt(r.f, 0, r.size)
		switch {
		case errors.Is(err, status.Corrupt):
			// There is no first packet to compare. If a row claims it, the check below fails.
		case err != nil:
			return "", err
		default:
			got, err := r.sum(p)
			if err != nil {
				return "", err
			}
			if got != sum {
				return fmt.Sprintf("its first packet has checksum %08x, that of the stream %08x", sum, got), nil
			}
		}
	}
	for _, row := range []int{first, last} {
		if row < 0 {
			continue
		}
		w := r.idx.Row(row)
		if _, err := r.header(&w); errors.Is(err, status.Corrupt) {
			return fmt.Sprintf("row %d: %v", row, err), nil
		} else if err != nil {
			return "", err
		}
	}
	return "", nil
}

// sum returns the CRC-32C of a packet's payload.
func (r *Reader) sum(p scan.Packet) (uint32, error) {
	var sum crc32c.Sum
	if _, err := io.Copy(&sum, io.NewSectionReader(r.f, p.PayloadOffset, int64(p.PayloadLen))); err != nil {
		return 0, r.readError(err, p.Name, p.Offset)
	}
	return uint32(sum), nil
}

// header reads the packet of a row of the index. The error is Corrupt if the stream has another packet
// there.
func (r *Reader) header(w *wire.Row) (scan.Packet, error) {
	name := w.Name()
	p, err := scan.ReadAt(r.f, w.Offset, r.size)
	if err != nil {
		return p, r.wrap(status.Wrap(status.CodeOf(err), err, "packet %s", label(name, w.Offset)))
	}
	if p.Name != name || p.End() != w.Offset+int64(w.Length) {
		return p, status.New(status.Corrupt,
			"packet %.80q with %d bytes stands at byte %d of the stream, the index lists %.80q with %d",
			p.Name, p.End()-p.Offset, w.Offset, name, w.Length)
	}
	return p, nil
}

// fitting returns the number of rows before the first packet that is not complete in the file.
func (r *Reader) fitting() int {
	rows, lost := r.idx.NumRows(), 0
	r.idx.Extents(func(row int, _, end int64) bool {
		if lost > 0 || end > r.size {
			rows = min(rows, row)
			lost++
		}
		return true
	})
	if lost > 0 {
		r.problem("the stream ends before %d packets that the index lists", lost)
	}
	return rows
}

// layout puts the first rows of the index, and the packets that it finds by scanning around them, in the
// order of the stream. tear tells where bytes are no packet for the first time. atEnd reports whether no
// packet of the index is behind the tear.
func (r *Reader) layout(rows int) (tear *scan.Tear, atEnd bool, err error) {
	pos, placed := r.start, 0
	explore := func(to int64) {
		if err != nil || pos >= to {
			return
		}
		before := len(r.found)
		end, e := scan.Packets(r.f, pos, to, func(p scan.Packet) error {
			r.found = append(r.found, p)
			return nil
		})
		r.place(true, before, len(r.found))
		var t *scan.Tear
		if errors.As(e, &t) {
			if tear == nil {
				tear, r.info.ValidBytes = t, end
			}
		} else if e != nil {
			err = r.wrap(e)
		}
	}
	if r.idx != nil {
		r.idx.Extents(func(row int, offset, end int64) bool {
			if row >= rows {
				return false
			}
			r.info.Packets++
			if offset > pos {
				r.place(false, placed, row)
				placed = row
				explore(offset)
			}
			pos = end
			return err == nil
		})
		r.place(false, placed, rows)
	}
	atEnd = tear == nil
	r.listed = int(r.info.Rows)
	if r.follows && r.info.Live && r.idx != nil {
		r.info.ValidBytes = pos
	} else {
		explore(r.size)
		if tear == nil {
			r.info.ValidBytes = r.size
		}
	}
	if r.idx == nil {
		r.listed = int(r.info.Rows)
	}
	r.info.Scanned = uint64(len(r.found))
	r.info.Packets += r.info.Scanned
	return tear, atEnd, err
}

// place appends the rows [from, to) of the index, or the found packets [from, to).
func (r *Reader) place(scanned bool, from, to int) {
	if from < to {
		r.segments = append(r.segments, segment{row: int(r.info.Rows), count: to - from, first: from, scanned: scanned})
		r.info.Rows += uint64(to - from)
	}
}

// Info describes the stream.
func (r *Reader) Info() Info { return r.info }

// NumRows returns the number of rows: packets, and notes of tensors without a packet.
func (r *Reader) NumRows() int { return int(r.info.Rows) }

// find returns the number of row i in the index, or among the found packets if scanned is true.
func (r *Reader) find(i int) (at int, scanned bool, err error) {
	if i < 0 || i >= r.NumRows() {
		return 0, false, status.New(status.NotFound, "row %d of %q, which has %d", i, r.path, r.NumRows())
	}
	k := sort.Search(len(r.segments), func(k int) bool { return r.segments[k].row > i }) - 1
	s := r.segments[k]
	return s.first + i - s.row, s.scanned, nil
}

// Row returns row i, or NotFound if there are fewer rows. For a packet that was found by scanning, Layer
// is its name, Sequence its row number, and Codec the codec that the payload's first bytes show. Its other
// fields are unknown: Source, Stored and Shape are zero.
func (r *Reader) Row(i int) (wire.Row, error) {
	at, scanned, err := r.find(i)
	if err != nil {
		return wire.Row{}, err
	}
	if scanned {
		return ScannedRow(r.found[at], uint64(i)), nil
	}
	return r.idx.Row(at), nil
}

// ScannedRow returns the row of a packet that was found by scanning.
func ScannedRow(p scan.Packet, sequence uint64) wire.Row {
	return wire.Row{
		Sequence: sequence, Offset: p.Offset, Length: uint64(p.End() - p.Offset), Parts: 1, Layer: p.Name,
		Step: -1, Token: -1, Codec: codec.Detect(p.Head()).String(), MSE: math.NaN(), MeanSquare: math.NaN(),
	}
}

// Records returns all rows as record batches, in row order. Without names they have all columns of the
// index. With names they have these columns, and text columns are dictionaries. A batch is made when it is
// asked for, also after Close, and is valid until the next one.
//
// Errors: InvalidArgument if there is no column of a name.
func (r *Reader) Records(names ...string) (array.RecordReader, error) {
	schema := index.Schema(index.Metadata{})
	switch {
	case len(names) > 0:
		some, missing, ok := index.Select(names)
		if !ok {
			return nil, status.New(status.InvalidArgument, "the index has no column %q", missing)
		}
		schema = some
	case r.idx != nil:
		schema = r.idx.Schema()
	}
	r.once.Do(r.gather)
	return &records{recorder: index.NewRecorder(schema), left: r.rows}, nil
}

// gather collects the rows of Records.
func (r *Reader) gather() {
	for _, s := range r.segments {
		if !s.scanned {
			r.rows = append(r.rows, r.idx.Slice(s.first, s.first+s.count)...)
			continue
		}
		const batch = 1 << 12 // rows; a name has up to 64 KiB
		row := s.row
		for some := range slices.Chunk(r.found[s.first:s.first+s.count], batch) {
			rows := make([]wire.Row, len(some))
			for i, p := range some {
				rows[i] = ScannedRow(p, uint64(row))
				row++
			}
			r.rows = append(r.rows, index.RowsOf(rows))
		}
	}
}

// records is a RecordReader of rows.
type records struct {
	recorder *index.Recorder
	left     []index.Rows
	now      arrow.Record
}

func (r *records) Retain()               {}
func (r *records) Release()              {}
func (r *records) Err() error            { return nil }
func (r *records) Schema() *arrow.Schema { return r.recorder.Schema() }
func (r *records) Record() arrow.Record  { return r.now }

func (r *records) Next() bool {
	if r.now = nil; len(r.left) == 0 {
		return false
	}
	r.now, r.left = r.recorder.Record(r.left[0]), r.left[1:]
	return true
}

// Close closes the stream, if no other reader shares it.
func (r *Reader) Close() error {
	if r.users.Add(-1) > 0 {
		return nil
	}
	if err := r.f.Close(); err != nil {
		return r.wrap(status.FromOS(err, "cannot close"))
	}
	return nil
}

// wrap adds the stream's path to an error. The code is InvalidState if the stream was closed.
func (r *Reader) wrap(err error) error {
	code := status.CodeOf(err)
	if errors.Is(err, os.ErrClosed) {
		code = status.InvalidState
	}
	return status.Wrap(code, err, "%q", r.path)
}

func (r *Reader) readError(err error, name string, offset int64) error {
	return r.wrap(status.FromOS(err, "cannot read packet %s", label(name, offset)))
}

// label returns a packet's name and offset for a message.
func label(name string, offset int64) string {
	const most = 200
	if len(name) > most {
		name = strings.ToValidUTF8(name[:most], "") + "..."
	}
	return fmt.Sprintf("%q at byte %d", name, offset)
}
