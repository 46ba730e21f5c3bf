// Package index reads and writes NAME.stream.index, the Arrow file that describes the packets of a
// stream. docs/STREAM_FORMAT.md lists its columns.
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

// PathOf returns the path of the index of the stream at path.
func PathOf(path string) string { return path + ".index" }

// Metadata identifies the stream of an index.
type Metadata struct {
	CaptureID string // 32 hexadecimal digits
	FirstCRC  uint32 // CRC-32C of the payload of the packet at offset 0
	HasFirst  bool   // FirstCRC is set; in indexes that are written now only the packet's row has it
}

func (m Metadata) firstCRC() string {
	if !m.HasFirst {
		return ""
	}
	return strconv.FormatUint(uint64(m.FirstCRC), 10)
}

// File is an index in memory. It may be used from several goroutines.
type File struct {
	// Torn reports whether the file ends in another way than a finished index. Problem says how. The
	// File has the rows before. Damaged reports whether there are wrong bytes at the end. A capture that
	// is running or was killed leaves no wrong bytes.
	Torn    bool
	Damaged bool
	Problem string

	md       Metadata
	version  int
	schema   *arrow.Schema
	batches  []*batch
	ends     []int // for each batch, the number of rows up to its end
	messages []byteRange
	tornAt   int64
	size     int64  // of the file when it was read
	lastCRC  uint32 // of the last whole message; Continue knows by it that the file is the same
}

// batch has the rows of a record batch.
type batch struct {
	rows    int
	columns []cells
}

// byteRange is a range of bytes in the file.
type byteRange struct{ at, end int64 }

// Open reads the index at path. If the end of the file is missing or damaged, the File has the batches
// before, and sets Torn and Problem. This is also so for an empty file, which a capture leaves if it is
// killed early.
//
// Errors: NotFound, Permission, InvalidArgument (no regular file), IO, Corrupt (no index, or an index of
// another version), NoMemory (it needs more than half of the memory that this process can still have).
func Open(path string) (*File, error) {
	f, err := openRegular(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return read(f, path, parse)
}

func openRegular(path string, flags int) (*os.File, error) {
	// O_NONBLOCK: do not wait for a FIFO; it is refused below.
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

// Limits of an index. Batches are read one by one, and the cells of all batches are kept.
const (
	// mostHoles limits the holes of a file: its length is at most mostHoles times its written bytes.
	// Backups leave out pages of zeros, and a few columns are zeros. Files of at most freeHoles bytes
	// are not checked.
	mostHoles = 8
	freeHoles = 1 << 20
	// batchBytes is more than the objects of a batch take, beside the bytes that size counts.
	batchBytes = 12 << 10
)

// read reads the file at path, which f has open, with parse or parseAll.
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

// parse reads an index. It takes its memory from the budget.
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
	f.messages = append(f.messages, byteRange{0, m.end})
	if bad := f.readBatches(file, m.end, budget); bad != nil {
		return nil, bad
	}
	return f, nil
}

// readBatches adds the rows of the messages from offset at on. It returns a fault of memory or of the
// file. With any other fault the rows end, and the File is torn.
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
		// After a crash the last message can be cut, half written, or zeros.
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
	f.lastCRC, bad = checksum(file, f.lastMessage())
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
	f.messages = append(f.messages, byteRange{m.at, m.end})
	return nil
}

func (f *File) tear(at int64, why *fault) {
	f.Torn, f.Damaged, f.tornAt = true, !why.cut, at
	f.Problem = fmt.Sprintf("the index ends at byte %d: %s", at, why.reason)
}

// Begun reports whether the file has its schema. Without it there are no rows and no metadata.
func (f *File) Begun() bool { return len(f.messages) > 0 }

// Metadata returns the metadata of the index.
func (f *File) Metadata() Metadata { return f.md }

// Schema returns the Arrow schema of the records.
func (f *File) Schema() *arrow.Schema { return f.schema }

// NumRows returns the number of rows.
func (f *File) NumRows() int {
	if len(f.ends) == 0 {
		return 0
	}
	return f.ends[len(f.ends)-1]
}

// find returns the batch of row i, and the row's number in the batch.
func (f *File) find(i int) (b *batch, at int) {
	k := sort.SearchInts(f.ends, i+1)
	if k > 0 {
		at = f.ends[k-1]
	}
	return f.batches[k], i - at
}

// Row returns row i, from 0 to NumRows()-1. Its strings share memory with f.
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

// CRC returns the checksum of row i's payload. ok is false if it is not known.
func (f *File) CRC(i int) (crc uint32, ok bool) {
	b, at := f.find(i)
	c := &b.columns[columnCRC]
	return uint32(c.number(at)), !c.isNull(at)
}

// Plain returns the offset and the length of row i's packet, and the length of its decoded values. ok is
// false if there is no packet, or if the row does not give the length of the values: then the packet is a
// part of a tensor, or was found by scanning.
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

// Extent returns where row i's packet is in the stream. ok is false if it has none.
func (f *File) Extent(i int) (offset, length int64, ok bool) {
	b, at := f.find(i)
	if b.columns[columnOffset].isNull(at) {
		return 0, 0, false
	}
	offset, length = b.place(at)
	return offset, length, true
}

// HasName reports whether name is the name of row i's packet.
func (f *File) HasName(i int, name []byte) bool {
	b, at := f.find(i)
	if !b.columns[columnTransform].isNull(at) {
		return string(name) == f.packetName(i)
	}
	layer, path := b.columns[columnLayer].text(at), b.columns[columnPath].text(at)
	return len(name) == len(layer)+len(path) && string(name[:len(layer)]) == layer && string(name[len(layer):]) == path
}

// Codec returns the name of row i's codec.
func (f *File) Codec(i int) string {
	b, at := f.find(i)
	return b.columns[columnCodec].text(at)
}

// place returns the offset and the length of row i's packet.
func (f *File) place(i int) (offset, length int64) {
	b, at := f.find(i)
	return b.place(at)
}

// size returns how many bytes of cells the batch keeps.
func (b *batch) size() (size int64) {
	for i := range b.columns {
		size += b.columns[i].size()
	}
	return size
}

func (b *batch) place(at int) (offset, length int64) {
	return int64(b.columns[columnOffset].number(at)), int64(b.columns[columnLength].number(at))
}

// packetName returns the name of row i's packet.
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

// slice returns the rows [from, to) as a batch.
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

// Slice returns the rows [from, to), one Rows for each batch.
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

// Extents calls fn with the range of each row's packet in the stream, in row order, until fn returns
// false. It skips rows without a packet.
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
