// The records of packets in a ring file.

package ringfile

import (
	"encoding/binary"
	"encoding/hex"
	"math"
	"slices"
	"sync/atomic"
	"unicode/utf8"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// A record is in front of the elements of its packet:
//
//	0    8  state: wholeMagic if record and elements are whole
//	8    8  mark: what the step has, in the record of its first packet; 0: the step has not ended
//	16   4  CRC-32C of the capture's id, the record's offset, and the bytes from 20 to the record's end
//	20   4  bytes of the record
//	24   4  offset of the elements, from the record's beginning
//	28   4  CRC-32C of the elements
//	32   8  bytes of the elements
//	40   8  number of the packet, in the order in which packets came
//	48   8  number of the step's first packet
//	56      step, token, thread, time: 8 each, as in wire.Row
//	88      mean squared error, mean square: 8 each
//	104     part, parts, call: 4 each
//	116     types of source and elements, bits of mantissa, number of dimensions: 1 each
//	120     lengths of model, layer, path, request, transform, parameters: 4 each
//	144     shape: 8 for each dimension; the six texts
//
// The state is stored last, when all else and the elements are there, and is the first to be erased. Mark is
// stored at any time, as a whole:
//
//	0    4  packets of the step
//	4    2  tensors of the step that are no packets; 65535: so many or more
//	6    2  check: the low bits of the CRC-32C of the step's number and of the six bytes before
const (
	fixedSize  = 144
	wholeMagic = 0x4c4f4857_50525453 // "STRPWHOL"
	texts      = 6
	maxDims    = 64

	// maxRecord is more than the bytes of any record.
	maxRecord = 1 << 20
)

// key ties records to their capture and to their place, so that a copy of a record elsewhere is none.
type key uint32

func newKey(captureID string) (key, error) {
	id, err := hex.DecodeString(captureID)
	if err != nil || len(id) != idSize {
		return 0, status.New(status.Internal, "capture id %q of a ring file", captureID)
	}
	return key(crc32c.Checksum(id)), nil
}

func (k key) sum(at int64, record []byte) uint32 {
	var place [8]byte
	binary.LittleEndian.PutUint64(place[:], uint64(at))
	return crc32c.Update(crc32c.Update(uint32(k), place[:]), record[20:])
}

// Record is a packet of the file.
type Record struct {
	Row    wire.Row // CRC is that of the elements; Offset and Length are those in the ring file
	Number uint64   // by when the packet came
	First  uint64   // Number of the first packet of its step
	Mark   Mark
	At     int64 // offset in the file of the elements
	Bytes  int64 // of the elements
}

// Mark says what a step has that has ended.
type Mark struct {
	Ended   bool
	Packets uint32
	Others  uint16 // tensors without a packet
}

// RecordSize returns the bytes of the record of a row.
func RecordSize(dims int, text int) int { return (fixedSize + 8*dims + text + 7) &^ 7 }

// TextOf returns the bytes of the texts of a row.
func TextOf(r *wire.Row) int {
	n := 0
	for _, text := range textsOf(r) {
		n += len(*text)
	}
	return n
}

func textsOf(r *wire.Row) [texts]*string {
	return [texts]*string{&r.Model, &r.Layer, &r.Path, &r.Request, &r.Transform, &r.Parameters}
}

// Put writes a record at the beginning of b, which is at an offset of the arena. It is not whole until Commit.
// elements is their offset in b.
func (f *File) Put(b []byte, offset int, r *wire.Row, elements, bytes int, number, first uint64) {
	le := binary.LittleEndian
	b = b[:RecordSize(len(r.Shape), TextOf(r))]
	le.PutUint64(b[8:], 0)
	le.PutUint32(b[20:], uint32(len(b)))
	le.PutUint32(b[24:], uint32(elements))
	le.PutUint32(b[28:], r.CRC)
	for i, v := range [...]uint64{
		uint64(bytes), number, first, uint64(r.Step), uint64(r.Token), r.Thread, uint64(r.TimeNS),
		math.Float64bits(r.MSE), math.Float64bits(r.MeanSquare),
	} {
		le.PutUint64(b[32+8*i:], v)
	}
	le.PutUint32(b[104:], r.Part)
	le.PutUint32(b[108:], r.Parts)
	le.PutUint32(b[112:], r.Call)
	b[116], b[117], b[118], b[119] = byte(r.Source), byte(r.Stored), byte(r.Mantissa), byte(len(r.Shape))
	at := fixedSize
	for _, n := range r.Shape {
		le.PutUint64(b[at:], uint64(n))
		at += 8
	}
	for i, text := range textsOf(r) {
		le.PutUint32(b[120+4*i:], uint32(len(*text)))
		at += copy(b[at:], *text)
	}
	clear(b[at:])
	le.PutUint32(b[16:], f.key.sum(int64(HeadSize+offset), b))
}

// Commit makes a record whole. b begins at the record, as for the next functions.
func Commit(b []byte) { word(b, 0).Store(wholeMagic) }

// Erase makes a record none. Call it before the record or its elements change.
func Erase(b []byte) { word(b, 0).Store(0) }

// PutMark marks the step of a whole record, which is that of the step's first packet.
func PutMark(b []byte, first uint64, packets, others int) {
	m := uint64(uint32(packets)) | uint64(min(others, math.MaxUint16))<<32
	word(b, 8).Store(m | uint64(markCheck(first, m))<<48)
}

// word is a number that is stored as a whole. The machines that libstrap runs on are little endian.
func word(b []byte, at int) *atomic.Uint64 {
	return (*atomic.Uint64)(unsafe.Pointer(&b[at : at+8][0]))
}

func markCheck(first, m uint64) uint16 {
	var b [14]byte
	binary.LittleEndian.PutUint64(b[6:], first)
	binary.LittleEndian.PutUint32(b[:], uint32(m))
	binary.LittleEndian.PutUint16(b[4:], uint16(m>>32))
	return uint16(crc32c.Checksum(b[:]))
}

// parseMark reads a mark. One that is damaged counts as none.
func parseMark(m, first uint64) Mark {
	if m == 0 || uint16(m>>48) != markCheck(first, m) {
		return Mark{}
	}
	return Mark{Ended: true, Packets: uint32(m), Others: uint16(m >> 32)}
}

// parseFixed checks the fixed part of a record at an offset of the file, which has size bytes. It returns the
// bytes of the whole record, or false.
func parseFixed(b []byte, at, size int64) (record int, ok bool) {
	le := binary.LittleEndian
	if le.Uint64(b) != wholeMagic {
		return 0, false
	}
	length, elements, bytes := int64(le.Uint32(b[20:])), int64(le.Uint32(b[24:])), le.Uint64(b[32:])
	text, dims := uint64(0), int64(b[119])
	for i := range texts {
		text += uint64(le.Uint32(b[120+4*i:]))
	}
	if length > maxRecord || dims > maxDims || text > maxRecord || length != int64(RecordSize(int(dims), int(text))) ||
		elements < length || bytes > wire.MaxPayload || int64(bytes) > size-at-elements {
		return 0, false
	}
	return int(length), true
}

// parse reads a record whose fixed part was checked. It returns false if the record is damaged.
func (k key) parse(b []byte, at int64) (r Record, ok bool) {
	le := binary.LittleEndian
	if le.Uint32(b[16:]) != k.sum(at, b) {
		return r, false
	}
	var n [9]uint64
	for i := range n {
		n[i] = le.Uint64(b[32+8*i:])
	}
	r = Record{
		Number: n[1], First: n[2], Mark: parseMark(le.Uint64(b[8:]), n[2]),
		At: at + int64(le.Uint32(b[24:])), Bytes: int64(n[0]),
	}
	r.Row = wire.Row{
		Offset: at, Length: n[0], CRC: le.Uint32(b[28:]),
		Step: int64(n[3]), Token: int64(n[4]), Thread: n[5], TimeNS: int64(n[6]),
		MSE: math.Float64frombits(n[7]), MeanSquare: math.Float64frombits(n[8]),
		Part: le.Uint32(b[104:]), Parts: le.Uint32(b[108:]), Call: le.Uint32(b[112:]),
		Source: wire.DType(b[116]), Stored: wire.DType(b[117]), Mantissa: int8(b[118]), Codec: "none",
	}
	from := fixedSize
	r.Row.Shape = make([]int64, b[119])
	for i := range r.Row.Shape {
		r.Row.Shape[i] = int64(le.Uint64(b[from:]))
		from += 8
	}
	for i, text := range textsOf(&r.Row) {
		n := int(le.Uint32(b[120+4*i:]))
		*text = string(b[from:][:n])
		from += n
	}
	return r, r.fits()
}

// fits reports whether the row can be that of a packet.
func (r *Record) fits() bool {
	w := &r.Row
	for _, text := range textsOf(w) {
		if !utf8.ValidString(*text) {
			return false
		}
	}
	if slices.ContainsFunc(w.Shape, func(n int64) bool { return n < 0 }) {
		return false
	}
	if !w.Source.Valid() || !w.Stored.Valid() || w.Parts == 0 || w.Part >= w.Parts || len(w.Name()) > wire.MaxName {
		return false
	}
	whole := wire.TensorLen(w.Shape, w.Stored)
	return r.Bytes == whole || w.Parts > 1 && r.Bytes < whole
}
