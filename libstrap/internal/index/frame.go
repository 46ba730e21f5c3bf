// Reads the framed messages of an index, and the columns of their record batches.

package index

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"strconv"

	"github.com/apache/arrow/go/v17/arrow"
)

// The file is an Arrow IPC stream,
// https://arrow.apache.org/docs/format/Columnar.html#ipc-streaming-format:
// a schema message, record batch messages, an end mark. One message is
//
//	0            4             8                 8+m               8+m+b
//	+------------+-------------+-----------------+-----------------+
//	| 0xffffffff | m: i32      | metadata (m)    | body (b)        |
//	+------------+-------------+-----------------+-----------------+
//	little endian              FlatBuffers, has b
//
// The end mark is a message with m = 0. This file decodes the messages, because the arrow module's reader
// allocates any size that a message claims.

const (
	prefixSize   = 8
	continuation = 0xffffffff

	metadataV5  = 4 // Schema.fbs, MetadataVersion
	schemaType  = 1 // Message.fbs, MessageHeader
	batchType   = 3
	maxKeyCount = 64      // most entries of schema metadata that are read
	maxFields   = 1 << 10 // most fields of a schema
)

var endMark = []byte{0xff, 0xff, 0xff, 0xff, 0, 0, 0, 0}

// message is one framed message.
type message struct {
	at, end int64
	kind    byte
	header  table
	body    []byte
	endMark bool
}

// fault tells why a message cannot be read. With cut the file ends before the message does. With foreign
// the bytes are right, but of another format or version. system is an error of the system: NoMemory, or
// an error of the file. Otherwise the bytes are wrong.
type fault struct {
	cut     bool
	reason  string
	foreign bool
	system  error
}

func failed(err error) *fault { return &fault{system: err, reason: err.Error()} }

func foreign(format string, args ...any) *fault {
	return &fault{reason: fmt.Sprintf(format, args...), foreign: true}
}

func (f *fault) Error() string { return f.reason }

func wrong(format string, args ...any) *fault {
	return &fault{reason: fmt.Sprintf(format, args...)}
}

// next reads the message at offset at of a file. The message is valid until the next call.
func next(file source, at int64) (message, *fault) {
	left := file.size() - at
	if left < prefixSize {
		return message{}, &fault{cut: true, reason: fmt.Sprintf("a message is cut off after %d bytes", left)}
	}
	prefix, bad := file.bytes(inPrefix, at, prefixSize)
	if bad != nil {
		return message{}, bad
	}
	if mark := binary.LittleEndian.Uint32(prefix); mark != continuation {
		return message{}, wrong("%#08x stands where a message begins", mark)
	}
	size := int64(int32(binary.LittleEndian.Uint32(prefix[4:])))
	if size == 0 {
		return message{at: at, end: at + prefixSize, endMark: true}, nil
	}
	if size < 0 || size%8 != 0 {
		return message{}, wrong("a message claims %d bytes of metadata", size)
	}
	if left -= prefixSize; size > left {
		return message{}, &fault{cut: true, reason: fmt.Sprintf("a message claims %d bytes of metadata, %d are there", size, left)}
	}
	metadata, bad := file.bytes(inMetadata, at+prefixSize, size)
	if bad != nil {
		return message{}, bad
	}
	f := &flat{buf: metadata}
	root := f.root()
	version, kind, header, length := root.i16(0), root.u8(1), root.table(2), root.i64(3)
	left -= size
	switch {
	case f.bad || header.pos == 0:
		return message{}, wrong("the metadata of a message is malformed")
	case version != metadataV5:
		return message{}, wrong("a message has metadata version V%d, not V5", int(version)+1)
	case length < 0 || length%8 != 0:
		return message{}, wrong("a message claims %d bytes of body", length)
	case length > left:
		return message{}, &fault{cut: true, reason: fmt.Sprintf("a message claims %d bytes of body, %d are there", length, left)}
	}
	body, bad := file.bytes(inBody, at+prefixSize+size, length)
	if bad != nil {
		return message{}, bad
	}
	return message{
		at: at, end: at + prefixSize + size + length,
		kind: kind, header: header, body: body,
	}, nil
}

// metadata checks that the message is the schema of an index. It returns the index's metadata and version.
func (m message) metadata() (Metadata, int, *fault) {
	if m.kind != schemaType {
		return Metadata{}, 0, wrong("the first message is no schema (type %d)", m.kind)
	}
	f, schema := m.header.f, m.header
	keys := map[string][]byte{}
	for _, kv := range schema.tables(2, maxKeyCount) {
		switch key := kv.text(0); string(key) {
		case "format", "version", "capture_id", "first_crc32c":
			keys[string(key)] = kv.text(1)
		}
	}
	fields := schema.tables(1, maxFields)
	if f.bad {
		return Metadata{}, 0, wrong("the schema is malformed")
	}
	if string(keys["format"]) != format {
		return Metadata{}, 0, foreign("its format is %.40q, not %q", keys["format"], format)
	}
	v, err := strconv.Atoi(string(keys["version"]))
	if err != nil || v < 1 || v > version {
		return Metadata{}, 0, foreign("it has version %.40q, this library reads versions up to %d", keys["version"], version)
	}
	if endianness := schema.i16(0); endianness != 0 {
		return Metadata{}, 0, wrong("it is big endian")
	}
	known := columnsOf(v)
	for i, c := range known {
		want := fieldName(c.field)
		if i == len(fields) {
			return Metadata{}, 0, wrong("column %q is missing", want)
		}
		got := string(fields[i].text(0)) + ": " + typeName(fields[i])
		if f.bad {
			return Metadata{}, 0, wrong("the schema is malformed")
		}
		if got != want {
			return Metadata{}, 0, wrong("column %d is %.80q, not %q", i, got, want)
		}
	}
	if len(fields) > len(known) {
		return Metadata{}, 0, wrong("it has %d columns, not %d", len(fields), len(known))
	}
	md := Metadata{CaptureID: string(keys["capture_id"])}
	if s := keys["first_crc32c"]; len(s) > 0 {
		crc, err := strconv.ParseUint(string(s), 10, 32)
		if err != nil {
			return Metadata{}, 0, wrong("its first_crc32c is %.40q, no 32-bit number", s)
		}
		md.FirstCRC, md.HasFirst = uint32(crc), true
	}
	return md, v, nil
}

// fieldName describes a column, as in "step: int64?".
func fieldName(f arrow.Field) string {
	name := f.Name + ": " + f.Type.Name()
	if f.Type.ID() == arrow.LIST {
		name = f.Name + ": list<int64>"
	}
	if f.Nullable {
		name += "?"
	}
	return name
}

// typeName names the type of a Field table in the same way.
func typeName(field table) string {
	name := "unknown"
	switch t := field.table(3); field.u8(2) { // Schema.fbs, Type
	case 2:
		name = fmt.Sprintf("uint%d", t.i32(0))
		if t.u8(1) != 0 {
			name = fmt.Sprintf("int%d", t.i32(0))
		}
	case 3:
		if t.i16(0) == 2 {
			name = "float64"
		}
	case 5:
		name = "utf8"
	case 12:
		// Only one child, and no list of lists, so that the recursion ends here.
		if c := field.tables(5, 1); len(c) == 1 && c[0].u8(2) == 2 {
			name = "list<" + typeName(c[0]) + ">"
			name = trimNull(name)
		}
	}
	if field.table(4).pos != 0 {
		name += " (dictionary)"
	}
	if field.u8(1) != 0 {
		name += "?"
	}
	return name
}

// trimNull removes the mark of a nullable list element. Writers differ in it, and no element is null.
func trimNull(list string) string {
	if n := len(list); list[n-2] == '?' {
		return list[:n-2] + ">"
	}
	return list
}

// batch reads the message as a record batch of an index of a version. It checks everything that later reads
// rely on.
func (m message) batch(version int, r *room) (*batch, *fault) {
	if m.kind != batchType {
		return nil, wrong("a message is no record batch (type %d)", m.kind)
	}
	f, header := m.header.f, m.header
	rows := header.i64(0)
	nodes, nodeCount := header.vector(1, 16)
	buffers, bufferCount := header.vector(2, 16)
	compression := header.table(3)
	codec, method := compression.u8(0), compression.u8(1)
	if f.bad {
		return nil, wrong("the metadata of a record batch is malformed")
	}
	d := decoder{f: f, body: m.body, node: nodes, nodes: nodeCount, buffer: buffers, buffers: bufferCount, room: r}
	most := int64(len(m.body)) / 8 // the first column alone has eight bytes a row
	if compression.pos != 0 {
		if version < firstCompressed || codec != zstdCodec || method != 0 {
			return nil, wrong("a record batch is compressed as version %d is not (codec %d, method %d)", version, codec, method)
		}
		d.compressed, d.left, most = true, maxBatch, maxRows
	}
	if rows < 0 || rows > most {
		return nil, wrong("a record batch claims %d rows in %d bytes", rows, len(m.body))
	}
	b := &batch{rows: int(rows), columns: make([]cells, len(columns))}
	for i, c := range columns {
		if c.since > version {
			b.columns[i] = nullCells(b.rows)
			continue
		}
		column, bad := d.column(c.field.Type, c.field.Nullable)
		switch {
		case bad != nil && bad.system != nil:
			return nil, bad
		case bad == nil && column.rows != b.rows:
			bad = wrong("%d rows of %d", column.rows, rows)
		}
		if bad != nil {
			return nil, wrong("column %q of a record batch: %s", c.field.Name, bad.reason)
		}
		b.columns[i] = column
	}
	if d.nodes != 0 || d.buffers != 0 {
		return nil, wrong("a record batch has %d columns and %d buffers too many", d.nodes, d.buffers)
	}
	for i := range b.rows {
		at, length := b.columns[columnOffset].number(i), b.columns[columnLength].number(i)
		if !b.columns[columnOffset].isNull(i) && (at > math.MaxInt64 || length > math.MaxInt64-at) {
			return nil, wrong("row %d of a record batch claims %d bytes at %d", i, length, at)
		}
	}
	return b, nil
}

// decoder reads the nodes and buffers of a record batch. They are in the order of the columns, each column
// before its children.
type decoder struct {
	f               *flat
	body            []byte
	node, nodes     int // position of the next one, and how many are left
	buffer, buffers int
	compressed      bool
	left            int64 // bytes that buffers may still decompress to
	room            *room
}

// count returns the length of the next column, and how many of its cells are null.
func (d *decoder) count(nullable bool) (n, nulls int, bad *fault) {
	if d.nodes == 0 {
		return 0, 0, wrong("it is missing")
	}
	length, none := d.f.i64(d.node), d.f.i64(d.node+8)
	d.node, d.nodes = d.node+16, d.nodes-1
	if length < 0 || length > max(int64(len(d.body)), d.left) || none < 0 || none > length {
		return 0, 0, wrong("it claims %d rows, %d of them null", length, none)
	}
	if none > 0 && !nullable {
		return 0, 0, wrong("it has %d nulls", none)
	}
	return int(length), int(none), nil
}

func (d *decoder) column(t arrow.DataType, nullable bool) (cells, *fault) {
	n, nulls, bad := d.count(nullable)
	if bad != nil {
		return cells{}, bad
	}
	validity, bad := d.next(0)
	if bad != nil {
		return cells{}, bad
	}
	if nulls > 0 && (len(validity) < (n+7)/8 || n-ones(validity, n) != nulls) {
		return cells{}, wrong("its validity bitmap does not have %d nulls in %d rows", nulls, n)
	}
	values, bad := d.next(1)
	if bad != nil {
		return cells{}, bad
	}
	c := validCells(n, nulls, validity)
	switch t := t.(type) {
	case arrow.FixedWidthDataType:
		if len(values) < n*t.Bytes() {
			return cells{}, wrong("%d bytes hold no %d values", len(values), n)
		}
		c.setNumbers(values, t.Bytes(), d.room)
	case *arrow.StringType:
		chars, bad := d.next(2)
		if bad != nil {
			return cells{}, bad
		}
		if bad := checkOffsets(values, n, len(chars)); bad != nil {
			return cells{}, bad
		}
		return c, c.setTexts(values, chars, 1, d.room)
	case *arrow.ListType:
		elements, bad := d.elements()
		if bad != nil {
			return cells{}, bad
		}
		if bad := checkOffsets(values, n, len(elements)/8); bad != nil {
			return cells{}, bad
		}
		return c, c.setTexts(values, elements, 8, d.room)
	}
	return c, nil
}

// elements returns the bytes of the int64 elements of lists.
func (d *decoder) elements() ([]byte, *fault) {
	n, _, bad := d.count(false)
	if bad != nil {
		return nil, bad
	}
	if _, bad := d.next(2); bad != nil { // the validity bitmap; no element is null
		return nil, bad
	}
	values, bad := d.next(2)
	if bad == nil && len(values)/8 < n {
		bad = wrong("%d bytes hold no %d values", len(values), n)
	}
	if bad != nil {
		return nil, bad
	}
	return values[:8*n], nil
}

// next returns the next buffer of the body, decompressed into buffer `into` of the room. It is valid until
// that buffer is used again.
func (d *decoder) next(into int) ([]byte, *fault) {
	if d.buffers == 0 {
		return nil, wrong("a buffer is missing")
	}
	at, length := d.f.i64(d.buffer), d.f.i64(d.buffer+8)
	d.buffer, d.buffers = d.buffer+16, d.buffers-1
	size := int64(len(d.body))
	if at < 0 || length < 0 || at > size || length > size-at || at%8 != 0 {
		return nil, wrong("a buffer claims bytes %d to %d of a body of %d", at, at+length, size)
	}
	b := d.body[at : at+length : at+length]
	if !d.compressed || length == 0 {
		return b, nil
	}
	if length < 8 {
		return nil, wrong("a compressed buffer of %d bytes", length)
	}
	plain := int64(binary.LittleEndian.Uint64(b))
	if b = b[8:]; plain == notCompressed {
		return b, nil
	}
	if plain < 0 || plain > d.left {
		return nil, wrong("a buffer claims to decompress to %d bytes, at most %d fit", plain, d.left)
	}
	d.left -= plain
	return d.room.decompress(into, b, plain)
}

// ones counts the set bits among the first n.
func ones(bitmap []byte, n int) int {
	count := 0
	for _, b := range bitmap[:n/8] {
		count += bits.OnesCount8(b)
	}
	if n%8 != 0 {
		count += bits.OnesCount8(bitmap[n/8] & (1<<(n%8) - 1))
	}
	return count
}

func offset(offsets []byte, i int) int {
	return int(int32(binary.LittleEndian.Uint32(offsets[4*i:])))
}

// checkOffsets checks that n lists follow each other within limit elements.
func checkOffsets(offsets []byte, n, limit int) *fault {
	if n == 0 {
		return nil
	}
	if len(offsets)/4 < n+1 {
		return wrong("%d bytes hold no %d offsets", len(offsets), n+1)
	}
	last := 0
	for i := range n + 1 {
		o := offset(offsets, i)
		if o < last {
			return wrong("offset %d is %d, behind %d", i, o, last)
		}
		last = o
	}
	if last > limit {
		return wrong("the last offset is %d of %d", last, limit)
	}
	return nil
}
