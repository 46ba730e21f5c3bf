package index

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/bits"
	"strconv"
	"unicode/utf8"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
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
// and the end mark is a message of m = 0. It is decoded here and not by the
// arrow module's reader, which allocates whatever a message claims.

const (
	prefixSize   = 8
	continuation = 0xffffffff

	metadataV5  = 4 // Schema.fbs, MetadataVersion
	schemaType  = 1 // Message.fbs, MessageHeader
	batchType   = 3
	maxKeyCount = 64      // of schema metadata that is looked at
	maxFields   = 1 << 10 // of a schema
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

// fault is why a message cannot be read. cut: the file ends before it does;
// otherwise its bytes are wrong. foreign: they are right, and those of another file.
// memory: the NoMemory that ended the reading.
type fault struct {
	cut     bool
	reason  string
	foreign bool
	memory  error
}

func foreign(format string, args ...any) *fault {
	return &fault{reason: fmt.Sprintf(format, args...), foreign: true}
}

func (f *fault) Error() string { return f.reason }

func wrong(format string, args ...any) *fault {
	return &fault{reason: fmt.Sprintf(format, args...)}
}

// next reads the message at offset at of the file.
func next(file []byte, at int64) (message, *fault) {
	left := file[at:]
	if len(left) < prefixSize {
		return message{}, &fault{cut: true, reason: fmt.Sprintf("a message is cut off after %d bytes", len(left))}
	}
	if mark := binary.LittleEndian.Uint32(left); mark != continuation {
		return message{}, wrong("%#08x stands where a message begins", mark)
	}
	size := int64(int32(binary.LittleEndian.Uint32(left[4:])))
	if size == 0 {
		return message{at: at, end: at + prefixSize, endMark: true}, nil
	}
	if size < 0 || size%8 != 0 {
		return message{}, wrong("a message claims %d bytes of metadata", size)
	}
	left = left[prefixSize:]
	if size > int64(len(left)) {
		return message{}, &fault{cut: true, reason: fmt.Sprintf("a message claims %d bytes of metadata, %d are there", size, len(left))}
	}
	f := &flat{buf: left[:size:size]}
	root := f.root()
	version, kind, header, body := root.i16(0), root.u8(1), root.table(2), root.i64(3)
	left = left[size:]
	switch {
	case f.bad || header.pos == 0:
		return message{}, wrong("the metadata of a message is malformed")
	case version != metadataV5:
		return message{}, wrong("a message has metadata version V%d, not V5", int(version)+1)
	case body < 0 || body%8 != 0:
		return message{}, wrong("a message claims %d bytes of body", body)
	case body > int64(len(left)):
		return message{}, &fault{cut: true, reason: fmt.Sprintf("a message claims %d bytes of body, %d are there", body, len(left))}
	}
	return message{
		at: at, end: at + prefixSize + size + body,
		kind: kind, header: header, body: left[:body:body],
	}, nil
}

// metadata checks that the message is the schema of an index, and returns what
// it says about the stream, and its version.
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

// fieldName is what a column must be, as in "step: int64?".
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
		// One child, no list of lists: this does not recurse further.
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

// trimNull drops the mark of a nullable list element: writers differ in it, and
// no element is ever null.
func trimNull(list string) string {
	if n := len(list); list[n-2] == '?' {
		return list[:n-2] + ">"
	}
	return list
}

// batch reads the message as a record batch of an index of a version, whose arrays share
// the bytes of the file. Everything that a later access relies on is checked here.
func (m message) batch(schema *arrow.Schema, version int) (arrow.Record, *fault) {
	if m.kind != batchType {
		return nil, wrong("a message is no record batch (type %d)", m.kind)
	}
	f, header := m.header.f, m.header
	rows := header.i64(0)
	nodes, nodeCount := header.vector(1, 16)
	buffers, bufferCount := header.vector(2, 16)
	compressed := header.table(3).pos != 0
	if f.bad {
		return nil, wrong("the metadata of a record batch is malformed")
	}
	if compressed {
		return nil, wrong("a record batch is compressed")
	}
	// Eight bytes a row of the first column alone.
	if rows < 0 || rows > int64(len(m.body))/8 {
		return nil, wrong("a record batch claims %d rows in %d bytes", rows, len(m.body))
	}
	d := decoder{f: f, body: m.body, node: nodes, nodes: nodeCount, buffer: buffers, buffers: bufferCount}
	arrays := make([]arrow.Array, len(columns))
	for i, c := range columns {
		if c.since > version {
			arrays[i] = array.MakeArrayOfNull(memory.DefaultAllocator, c.field.Type, int(rows))
			continue
		}
		data, bad := d.column(c.field.Type, c.field.Nullable)
		if bad == nil && data.Len() != int(rows) {
			bad = wrong("%d rows of %d", data.Len(), rows)
		}
		if bad != nil {
			return nil, wrong("column %q of a record batch: %s", c.field.Name, bad.reason)
		}
		arrays[i] = array.MakeFromData(data)
	}
	if d.nodes != 0 || d.buffers != 0 {
		return nil, wrong("a record batch has %d columns and %d buffers too many", d.nodes, d.buffers)
	}
	offsets, lengths := arrays[columnOffset].(*array.Uint64), arrays[columnLength].(*array.Uint64)
	for i := range offsets.Len() {
		at, length := offsets.Value(i), lengths.Value(i)
		if offsets.IsValid(i) && (at > math.MaxInt64 || length > math.MaxInt64-at) {
			return nil, wrong("row %d of a record batch claims %d bytes at %d", i, length, at)
		}
	}
	return array.NewRecord(schema, arrays, rows), nil
}

// decoder goes through the nodes and buffers of a record batch, which stand in
// the order of the columns, each before its children.
type decoder struct {
	f               *flat
	body            []byte
	node, nodes     int // position of the next one, and how many are left
	buffer, buffers int
}

func (d *decoder) column(t arrow.DataType, nullable bool) (arrow.ArrayData, *fault) {
	if d.nodes == 0 {
		return nil, wrong("it is missing")
	}
	length, nulls := d.f.i64(d.node), d.f.i64(d.node+8)
	d.node, d.nodes = d.node+16, d.nodes-1
	if length < 0 || length > int64(len(d.body)) || nulls < 0 || nulls > length {
		return nil, wrong("it claims %d rows, %d of them null", length, nulls)
	}
	if nulls > 0 && !nullable {
		return nil, wrong("it has %d nulls", nulls)
	}
	n := int(length)
	validity, bad := d.next()
	if bad != nil {
		return nil, bad
	}
	if nulls == 0 {
		validity = nil
	} else if len(validity) < (n+7)/8 || n-ones(validity, n) != int(nulls) {
		return nil, wrong("its validity bitmap does not have %d nulls in %d rows", nulls, n)
	}
	values, bad := d.next()
	if bad != nil {
		return nil, bad
	}
	parts := [][]byte{validity, values}
	var children []arrow.ArrayData
	switch t := t.(type) {
	case arrow.FixedWidthDataType:
		if len(values) < n*t.Bytes() {
			return nil, wrong("%d bytes hold no %d values", len(values), n)
		}
	case *arrow.StringType:
		chars, bad := d.next()
		if bad != nil {
			return nil, bad
		}
		if bad := checkOffsets(values, n, len(chars)); bad != nil {
			return nil, bad
		}
		if bad := checkText(values, n, chars); bad != nil {
			return nil, bad
		}
		parts = append(parts, chars)
	case *arrow.ListType:
		child, bad := d.column(t.Elem(), false)
		if bad != nil {
			return nil, bad
		}
		if bad := checkOffsets(values, n, child.Len()); bad != nil {
			return nil, bad
		}
		children = []arrow.ArrayData{child}
	}
	shared := make([]*memory.Buffer, len(parts))
	for i, b := range parts {
		if b != nil {
			shared[i] = memory.NewBufferBytes(b)
		}
	}
	return array.NewData(t, n, shared, children, int(nulls), 0), nil
}

// next is the next buffer of the body.
func (d *decoder) next() ([]byte, *fault) {
	if d.buffers == 0 {
		return nil, wrong("a buffer is missing")
	}
	at, length := d.f.i64(d.buffer), d.f.i64(d.buffer+8)
	d.buffer, d.buffers = d.buffer+16, d.buffers-1
	size := int64(len(d.body))
	if at < 0 || length < 0 || at > size || length > size-at || at%8 != 0 {
		return nil, wrong("a buffer claims bytes %d to %d of a body of %d", at, at+length, size)
	}
	return d.body[at : at+length : at+length], nil
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

// checkOffsets checks that n lists lie one behind the other in limit elements.
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

// checkText checks that the n strings of checked offsets are UTF-8.
func checkText(offsets []byte, n int, chars []byte) *fault {
	if n == 0 {
		return nil
	}
	used := chars[offset(offsets, 0):offset(offsets, n)]
	if !utf8.Valid(used) {
		return wrong("its text is not UTF-8")
	}
	for i := range n {
		if o := offset(offsets, i); o < offset(offsets, n) && !utf8.RuneStart(chars[o]) {
			return wrong("string %d begins inside a character", i)
		}
	}
	return nil
}
