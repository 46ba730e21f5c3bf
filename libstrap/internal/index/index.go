// Package index reads and writes NAME.stream.index, the Arrow file that says
// what the packets of a stream are. docs/STREAM_FORMAT.md lists its columns.
package index

import (
	"errors"
	"fmt"
	"os"
	"sort"
	"strconv"
	"syscall"

	"github.com/apache/arrow/go/v17/arrow"

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
	batches []*batch
	ends    []int // of each batch: rows up to its end
	extents []extent
	tornAt  int64
	size    int64  // of the file when it was read
	lastCRC uint32 // of the last whole message; it tells Continue that the file is the same
}

// batch is the rows of a record batch.
type batch struct {
	rows    int
	columns []cells
}

// extent is the place of a batch's message in the file.
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

// What an index may cost. Its batches are read one by one, and the cells of all are kept.
const (
	// mostHoles is how often the written bytes of a file may fit its length: backups leave
	// out pages that are zero, and a few columns are. Up to freeHoles bytes nobody asks.
	mostHoles = 8
	freeHoles = 1 << 20
	// batchBytes is more than the objects of a batch take, without what size counts.
	batchBytes = 12 << 10
)

// read reads the file at path, which f has open, by way of parse or parseAll.
func read(f *os.File, path string, by func(source, *memory.Budget) (*File, *fault)) (*File, error) {
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
	var budget memory.Budget
	file, bad := by(&opened{f: f, length: size, budget: &budget}, &budget)
	switch {
	case bad == nil:
		return file, nil
	case errors.Is(bad.system, status.NoMemory):
		return nil, status.Wrap(status.NoMemory, bad.system,
			"cannot read the index %q of %d bytes: free memory, or move the index away: packets are found without it", path, size)
	case bad.system != nil:
		return nil, status.FromOS(bad.system, "cannot read the index %q", path)
	}
	return nil, status.New(status.Corrupt, "%q is no index of a stream: %s", path, bad.reason)
}

// parse reads an index. The budget has room for what it takes.
func parse(file source, budget *memory.Budget) (*File, *fault) {
	f := &File{schema: Schema(Metadata{}), version: version}
	size := file.size()
	if size == 0 {
		f.tear(0, &fault{cut: true, reason: "nothing was written yet"})
		return f, nil
	}
	m, bad := next(file, 0)
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
	f.extents = append(f.extents, extent{0, m.end})
	if bad := f.readBatches(file, m.end, budget); bad != nil {
		return nil, bad
	}
	return f, nil
}

// readBatches adds the rows of the messages from offset at on. The fault is that of memory or of
// the file: any other is where the rows end.
func (f *File) readBatches(file source, at int64, budget *memory.Budget) *fault {
	size, r := file.size(), room{budget: budget}
	for {
		if at == size {
			f.tear(at, &fault{cut: true, reason: "the end mark is missing"})
			break
		}
		m, bad := next(file, at)
		if bad == nil && m.endMark {
			if m.end < size {
				f.tear(m.end, wrong("%d bytes stand behind the end mark", size-m.end))
			}
			break
		}
		if bad == nil {
			bad = f.add(m, &r)
		}
		if bad == nil {
			at = m.end
			continue
		}
		if bad.system != nil {
			return bad
		}
		// A crash leaves a last message cut, half written or as zeros.
		if !bad.cut && m.end != size {
			var failure *fault
			if bad.cut, failure = zeroFrom(file, at); failure != nil {
				return failure
			}
		}
		bad.cut = bad.cut || m.end == size
		f.tear(at, bad)
		break
	}
	var bad *fault
	f.size = size
	f.lastCRC, bad = checksum(file, f.lastExtent())
	return bad
}

// add adds the rows of a message, which must be a record batch.
func (f *File) add(m message, r *room) *fault {
	if err := r.budget.Take(batchBytes); err != nil {
		return failed(err)
	}
	b, bad := m.batch(f.version, r)
	if bad != nil {
		return bad
	}
	if err := r.budget.Take(b.size()); err != nil {
		return failed(err)
	}
	f.batches = append(f.batches, b)
	f.ends = append(f.ends, f.NumRows()+b.rows)
	f.extents = append(f.extents, extent{m.at, m.end})
	return nil
}

func (f *File) tear(at int64, why *fault) {
	f.Torn, f.Damaged, f.tornAt = true, !why.cut, at
	f.Problem = fmt.Sprintf("the index ends at byte %d: %s", at, why.reason)
}

// Begun reports whether the file has its schema; without it there are no rows
// and no metadata.
func (f *File) Begun() bool { return len(f.extents) > 0 }

// Metadata says to which stream the index belongs.
func (f *File) Metadata() Metadata { return f.md }

// Schema is the Arrow schema of the records.
func (f *File) Schema() *arrow.Schema { return f.schema }

// NumRows is the number of rows.
func (f *File) NumRows() int {
	if len(f.ends) == 0 {
		return 0
	}
	return f.ends[len(f.ends)-1]
}

// find is the batch that holds row i, and the row's place in it.
func (f *File) find(i int) (b *batch, at int) {
	k := sort.SearchInts(f.ends, i+1)
	if k > 0 {
		at = f.ends[k-1]
	}
	return f.batches[k], i - at
}

// Row is row i of 0 to NumRows()-1. Its strings share memory with f.
func (f *File) Row(i int) wire.Row {
	b, at := f.find(i)
	return b.row(at)
}

func (b *batch) row(at int) wire.Row {
	r := unknownRow()
	for k, c := range columns {
		c.get(&b.columns[k], at, &r)
	}
	return r
}

// CRC is the checksum of row i's payload; ok is false where it is not known.
func (f *File) CRC(i int) (crc uint32, ok bool) {
	b, at := f.find(i)
	c := &b.columns[columnCRC]
	return uint32(c.number(at)), !c.isNull(at)
}

// Plain is where the packet of row i stands, its length, and that of its values. ok is false where
// there is no packet, or where the row does not tell the length of the values: the packet is a part of a
// tensor, or was found by scanning.
func (f *File) Plain(i int) (offset, length, values int64, ok bool) {
	b, at := f.find(i)
	shape := &b.columns[columnShape]
	if b.columns[columnOffset].isNull(at) || b.columns[columnParts].number(at) > 1 ||
		shape.isNull(at) || b.columns[columnStored].isNull(at) {
		return 0, 0, 0, false
	}
	stored := wire.ParseDType(b.columns[columnStored].text(at))
	if !stored.Valid() {
		return 0, 0, 0, false
	}
	var some [8]int64
	values = wire.TensorLen(shape.appendList(some[:0], at), stored)
	offset, length = b.place(at)
	return offset, length, values, true
}

// HasName reports whether the packet of row i has a name.
func (f *File) HasName(i int, name []byte) bool {
	b, at := f.find(i)
	if !b.columns[columnTransform].isNull(at) {
		return string(name) == f.packetName(i)
	}
	layer, path := b.columns[columnLayer].text(at), b.columns[columnPath].text(at)
	return len(name) == len(layer)+len(path) && string(name[:len(layer)]) == layer && string(name[len(layer):]) == path
}

// Codec is the name of that of row i.
func (f *File) Codec(i int) string {
	b, at := f.find(i)
	return b.columns[columnCodec].text(at)
}

// place is where the packet of row i stands, and its length.
func (f *File) place(i int) (offset, length int64) {
	b, at := f.find(i)
	return b.place(at)
}

// size is how many bytes of cells the batch keeps.
func (b *batch) size() (size int64) {
	for i := range b.columns {
		size += b.columns[i].size()
	}
	return size
}

func (b *batch) place(at int) (offset, length int64) {
	return int64(b.columns[columnOffset].number(at)), int64(b.columns[columnLength].number(at))
}

// packetName is the name of the packet of row i.
func (f *File) packetName(i int) string {
	b, at := f.find(i)
	var r wire.Row
	for _, k := range []int{columnLayer, columnPath, columnTransform} {
		columns[k].get(&b.columns[k], at, &r)
	}
	return r.Name()
}

// Rows are some rows of one batch.
type Rows struct {
	batch    *batch
	from, to int
}

// slice is the rows [from, to).
func (b *batch) slice(from, to int) *batch {
	if from == 0 && to == b.rows {
		return b
	}
	s := &batch{rows: to - from, columns: make([]cells, len(b.columns))}
	for k := range b.columns {
		s.columns[k] = b.columns[k].slice(from, to)
	}
	return s
}

// Slice is the rows [from, to), batch by batch.
func (f *File) Slice(from, to int) []Rows {
	var out []Rows
	start := 0
	for k, b := range f.batches {
		if from, to := max(from, start), min(to, f.ends[k]); from < to {
			out = append(out, Rows{b, from - start, to - start})
		}
		start = f.ends[k]
	}
	return out
}

// Extents calls fn with the place of every row's packet in the stream, in row
// order, until it answers false. Rows without a packet are left out.
func (f *File) Extents(fn func(row int, offset, end int64) bool) {
	start := 0
	for k, b := range f.batches {
		for i := range b.rows {
			if b.columns[columnOffset].isNull(i) {
				continue
			}
			at, length := b.place(i)
			if !fn(start+i, at, at+length) {
				return
			}
		}
		start = f.ends[k]
	}
}
