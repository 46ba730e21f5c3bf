// Package index reads and writes NAME.stream.index, the Arrow file that says
// what the packets of a stream are. docs/STREAM_FORMAT.md lists its columns.
package index

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"sort"
	"strconv"
	"syscall"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// PathOf is the path of the index of the stream at path.
func PathOf(path string) string { return path + ".index" }

// Metadata says to which stream an index belongs.
type Metadata struct {
	CaptureID string // 32 hexadecimal digits
	FirstCRC  uint32 // CRC-32C of the payload of the packet at offset 0
	HasFirst  bool   // false: only the packet's row has it, as in all that is written now
}

func (m Metadata) firstCRC() string {
	if !m.HasFirst {
		return ""
	}
	return strconv.FormatUint(uint64(m.FirstCRC), 10)
}

// File is an index in memory. It may be used from several goroutines.
type File struct {
	// Torn: the file does not end as a finished index does. Problem says how.
	// Rows holds what stands before. Damaged: wrong bytes stand there; a capture that goes on or was
	// killed leaves none.
	Torn    bool
	Damaged bool
	Problem string

	md      Metadata
	version int
	schema  *arrow.Schema
	records []arrow.Record
	ends    []int // of each record: rows up to its end
	extents []extent
	tornAt  int64
	base    int64  // place in the file of the bytes that were parsed
	size    int64  // of the file when it was read
	last    []byte // the last whole message, which tells Continue that the file is the same
}

// extent is the place of a record's message in the file.
type extent struct{ at, end int64 }

// Open reads the index at path. A file whose end is missing or damaged gives
// the batches before, and says so in Torn and Problem; so does one that holds
// nothing yet, as a capture leaves it that was killed early.
//
// Errors: NotFound, Permission, InvalidArgument (no regular file), IO, Corrupt
// (no index, or one of another version), NoMemory (it takes more than half of the
// memory that this process can still have).
func Open(path string) (*File, error) {
	f, err := openRegular(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return read(f, path, parse)
}

func openRegular(path string, flags int) (*os.File, error) {
	// O_NONBLOCK: a FIFO is refused below, not waited for.
	f, err := os.OpenFile(path, flags|syscall.O_NONBLOCK, 0o666)
	if err != nil {
		return nil, status.FromOS(err, "cannot open the index %q", path)
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, status.FromOS(err, "cannot stat the index %q", path)
	}
	if !info.Mode().IsRegular() {
		f.Close()
		return nil, status.New(status.InvalidArgument, "the index %q is no regular file (%s)", path, info.Mode().Type())
	}
	return f, nil
}

// What an index may cost. Its bytes are read whole, and each batch has arrays that share
// them, and objects that say where.
const (
	// mostHoles is how often the written bytes of a file may fit its length: backups leave
	// out pages that are zero, and a few columns are. Up to freeHoles bytes nobody asks.
	mostHoles = 8
	freeHoles = 1 << 20
	// batchBytes is more than the objects of a batch take.
	batchBytes = 12 << 10
)

// read reads the file at path, which f has open, by way of parse or parseAll. It takes
// memory for the bytes that are written there, times mostHoles at most.
func read(f *os.File, path string, by func([]byte, *memory.Budget) (*File, *fault)) (*File, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, status.FromOS(err, "cannot stat the index %q", path)
	}
	size := info.Size()
	if size > freeHoles {
		if n := written(f, size, size/mostHoles); n < size/mostHoles {
			return nil, status.New(status.Corrupt,
				"%q is no index of a stream: of its %d bytes %d are written, the rest are holes", path, size, n)
		}
	}
	noMemory := func(cause error) error {
		return status.Wrap(status.NoMemory, cause,
			"cannot read the index %q of %d bytes: free memory, or move the index away: packets are found without it", path, size)
	}
	var budget memory.Budget
	if err := budget.Take(size); err != nil {
		return nil, noMemory(err)
	}
	b := make([]byte, size)
	n, err := f.ReadAt(b, 0)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, status.FromOS(err, "cannot read the index %q", path)
	}
	file, bad := by(b[:n], &budget)
	switch {
	case bad == nil:
		return file, nil
	case bad.memory != nil:
		return nil, noMemory(bad.memory)
	}
	return nil, status.New(status.Corrupt, "%q is no index of a stream: %s", path, bad.reason)
}

// parse reads an index out of its bytes, which the result keeps. The budget has room for
// what it takes beside them.
func parse(b []byte, budget *memory.Budget) (*File, *fault) {
	f := &File{schema: Schema(Metadata{}), version: version}
	if len(b) == 0 {
		f.tear(0, &fault{cut: true, reason: "nothing was written yet"})
		return f, nil
	}
	m, bad := next(b, 0)
	if bad != nil {
		if !bad.cut {
			return nil, bad
		}
		f.tear(0, bad)
		return f, nil
	}
	if m.endMark {
		return nil, wrong("it is an Arrow stream without a schema")
	}
	if f.md, f.version, bad = m.metadata(); bad != nil {
		return nil, bad
	}
	f.schema = Schema(f.md)
	f.extents, f.last = append(f.extents, extent{0, m.end}), b[:m.end]
	if bad := f.batches(b, m.end, budget); bad != nil {
		return nil, bad
	}
	return f, nil
}

// batches adds the rows of the messages that stand in b from at on. The fault is that of memory:
// any other is where the rows end.
func (f *File) batches(b []byte, at int64, budget *memory.Budget) *fault {
	f.size = f.base + int64(len(b))
	for {
		if at == int64(len(b)) {
			f.tear(at, &fault{cut: true, reason: "the end mark is missing"})
			return nil
		}
		m, bad := next(b, at)
		if bad == nil && m.endMark {
			if m.end < int64(len(b)) {
				f.tear(m.end, wrong("%d bytes stand behind the end mark", int64(len(b))-m.end))
			}
			return nil
		}
		if bad == nil {
			bad = f.add(m, budget)
		}
		switch {
		case bad == nil:
			f.last, at = b[m.at:m.end], m.end
		case bad.memory != nil:
			return bad
		default:
			// A crash leaves a last message cut, half written or as zeros.
			bad.cut = bad.cut || m.end == int64(len(b)) || isZero(b[at:])
			f.tear(at, bad)
			return nil
		}
	}
}

// add adds the rows of a message, which must be a record batch.
func (f *File) add(m message, budget *memory.Budget) *fault {
	takes := int64(batchBytes)
	if f.version < version {
		takes += 2 * int64(len(m.body)) // columns that it does not have
	}
	if err := budget.Take(takes); err != nil {
		return &fault{memory: err, reason: err.Error()}
	}
	rec, bad := m.batch(f.schema, f.version)
	if bad != nil {
		return bad
	}
	f.records = append(f.records, rec)
	f.ends = append(f.ends, f.NumRows()+int(rec.NumRows()))
	f.extents = append(f.extents, extent{f.base + m.at, f.base + m.end})
	return nil
}

func isZero(b []byte) bool { return len(bytes.Trim(b, "\x00")) == 0 }

func (f *File) tear(at int64, why *fault) {
	f.Torn, f.Damaged, f.tornAt = true, !why.cut, f.base+at
	f.Problem = fmt.Sprintf("the index ends at byte %d: %s", f.tornAt, why.reason)
}

// Begun reports whether the file has its schema; without it there are no rows
// and no metadata.
func (f *File) Begun() bool { return len(f.extents) > 0 }

// Metadata says to which stream the index belongs.
func (f *File) Metadata() Metadata { return f.md }

// Schema is the Arrow schema of the records.
func (f *File) Schema() *arrow.Schema { return f.schema }

// Records are the record batches in row order. They live as long as f and must
// not be released.
func (f *File) Records() []arrow.Record { return f.records }

// NumRows is the number of rows.
func (f *File) NumRows() int {
	if len(f.ends) == 0 {
		return 0
	}
	return f.ends[len(f.ends)-1]
}

// find is the record that holds row i, and the row's place in it.
func (f *File) find(i int) (rec arrow.Record, at int) {
	k := sort.SearchInts(f.ends, i+1)
	if k > 0 {
		at = f.ends[k-1]
	}
	return f.records[k], i - at
}

// Row is row i of 0 to NumRows()-1. Its strings share memory with f.
func (f *File) Row(i int) wire.Row {
	rec, at := f.find(i)
	return rowOf(rec, at)
}

func rowOf(rec arrow.Record, at int) wire.Row {
	r := unknownRow()
	for k, c := range columns {
		c.get(rec.Column(k), at, &r)
	}
	return r
}

// CRC is the checksum of row i's payload; ok is false where it is not known.
func (f *File) CRC(i int) (crc uint32, ok bool) {
	rec, at := f.find(i)
	col := rec.Column(columnCRC).(*array.Uint32)
	return col.Value(at), col.IsValid(at)
}

// Plain is where the packet of row i stands, its length, and that of its values. ok is false where
// there is no packet, or where the row does not tell the length of the values: the packet is a part of a
// tensor, or was found by scanning.
func (f *File) Plain(i int) (offset, length, values int64, ok bool) {
	rec, at := f.find(i)
	shapes := rec.Column(columnShape).(*array.List)
	if rec.Column(columnOffset).IsNull(at) || rec.Column(columnParts).(*array.Uint32).Value(at) > 1 ||
		shapes.IsNull(at) || rec.Column(columnStored).IsNull(at) {
		return 0, 0, 0, false
	}
	stored := wire.ParseDType(rec.Column(columnStored).(*array.String).Value(at))
	if !stored.Valid() {
		return 0, 0, 0, false
	}
	from, to := shapes.ValueOffsets(at)
	values = wire.TensorLen(shapes.ListValues().(*array.Int64).Int64Values()[from:to], stored)
	offset, length = f.place(i)
	return offset, length, values, true
}

// HasName reports whether the packet of row i has a name.
func (f *File) HasName(i int, name []byte) bool {
	rec, at := f.find(i)
	if rec.Column(columnTransform).IsValid(at) {
		return string(name) == f.packetName(i)
	}
	layer, path := rec.Column(columnLayer).(*array.String).Value(at), rec.Column(columnPath).(*array.String).Value(at)
	return len(name) == len(layer)+len(path) && string(name[:len(layer)]) == layer && string(name[len(layer):]) == path
}

// Codec is the name of that of row i.
func (f *File) Codec(i int) string {
	rec, at := f.find(i)
	return rec.Column(columnCodec).(*array.String).Value(at)
}

// place is where the packet of row i stands, and its length.
func (f *File) place(i int) (offset, length int64) {
	rec, at := f.find(i)
	return int64(rec.Column(columnOffset).(*array.Uint64).Value(at)), int64(rec.Column(columnLength).(*array.Uint64).Value(at))
}

// packetName is the name of the packet of row i.
func (f *File) packetName(i int) string {
	rec, at := f.find(i)
	var r wire.Row
	for _, k := range []int{columnLayer, columnPath, columnTransform} {
		columns[k].get(rec.Column(k), at, &r)
	}
	return r.Name()
}

// Slice is the rows [from, to) as records, which must not be released.
func (f *File) Slice(from, to int) []arrow.Record {
	var out []arrow.Record
	start := 0
	for k, rec := range f.records {
		a, b := max(from, start), min(to, f.ends[k])
		switch {
		case a >= b:
		case a == start && b == f.ends[k]:
			out = append(out, rec)
		default:
			out = append(out, rec.NewSlice(int64(a-start), int64(b-start)))
		}
		start = f.ends[k]
	}
	return out
}

// Extents calls fn with the place of every row's packet in the stream, in row
// order, until it answers false. Rows without a packet are left out.
func (f *File) Extents(fn func(row int, offset, end int64) bool) {
	start := 0
	for k, rec := range f.records {
		offsets := rec.Column(columnOffset).(*array.Uint64)
		lengths := rec.Column(columnLength).(*array.Uint64)
		for i := range offsets.Len() {
			if offsets.IsNull(i) {
				continue
			}
			at := int64(offsets.Value(i))
			if !fn(start+i, at, at+int64(lengths.Value(i))) {
				return
			}
		}
		start = f.ends[k]
	}
}
