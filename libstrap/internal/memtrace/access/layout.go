// Package access reads the files of libstrap-access, which hold the loads and stores of an
// instrumented program in blocks, each of one thread. Package access returns them as batches of a
// memory trace, in the order of time over all threads, with symbols from the program's ELF files.
//
// # Layout
//
// A file is a sequence of blocks, little-endian; libstrap/access/access.h writes them:
//
//	 0  u32  magic "SACB"
//	 4  u16  version, 1
//	 6  u16  kind
//	 8  u64  bytes of payload after the header
//	16  u32  thread id
//	20  u32  number of the newest module map
//	24  i64  start_ns, CLOCK_MONOTONIC: time of tick 0 of a block of accesses, or of the event
//	32  i64  end_ns, CLOCK_MONOTONIC when the block was closed
//	40  u64  ticks: the counter at end_ns
//	48  u64  seen: accesses of the thread since its previous block
//	56  u64  lost: further accesses that were not recorded
//
// The kinds of blocks and their payloads:
//
//   - 1 start, the first block: lines of "key value".
//   - 2 maps: the executable lines of /proc/self/maps. Blocks of one number belong together.
//   - 3 accesses: records of 24 bytes. u64 address; u64 with the return address of the hook in
//     bits 0 to 47 and the operation in bits 48 to 55 (1 load, 2 store, 3 both; 4 set: atomic);
//     u32 ticks since the block's start; u32 size in bytes.
//   - 4 range: u64 id, u64 start, u64 length, u32 type, u32 1 if the range begins or 0 if it
//     ends; its name.
//   - 5 end: the totals, as lines of "key value". It is missing if the program did not end the
//     recording.
package access

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/bits"
	"strconv"

	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	blockMagic   = 0x42434153
	blockVersion = 1
	headerBytes  = 64
	recordBytes  = 24
	rangeBytes   = 32

	kindStart    = 1
	kindMaps     = 2
	kindAccesses = 3
	kindRange    = 4
	kindEnd      = 5

	opLoad  = 1
	opStore = 2
	opBoth  = opLoad | opStore
)

// maxText and maxName are the limits that libstrap-access keeps, in bytes: of the text of one
// block, and of the name of a range.
const (
	maxText = 1 << 16
	maxName = 255
)

// block is a header and its place in the file.
type block struct {
	kind            uint16
	bytes           uint64
	thread, maps    uint32
	start, end      int64
	ticks           uint64
	seen, lost      uint64
	offset, payload int64 // offset of the header; bytes of the payload that the file has
}

var errMagic = status.New(status.Corrupt, "no block begins here")

// parseBlock reads a header from headerBytes bytes. It leaves offset and payload 0. Negative times,
// and an end before the start, are Corrupt.
func parseBlock(b []byte) (block, error) {
	le := binary.LittleEndian
	if le.Uint32(b) != blockMagic {
		return block{}, errMagic
	}
	if v := le.Uint16(b[4:]); v != blockVersion {
		return block{}, status.New(status.Unsupported,
			"a block of version %d: this build reads version %d", v, blockVersion)
	}
	h := block{
		kind: le.Uint16(b[6:]), bytes: le.Uint64(b[8:]),
		thread: le.Uint32(b[16:]), maps: le.Uint32(b[20:]),
		start: int64(le.Uint64(b[24:])), end: int64(le.Uint64(b[32:])),
		ticks: le.Uint64(b[40:]), seen: le.Uint64(b[48:]), lost: le.Uint64(b[56:]),
	}
	if h.start < 0 || h.end < h.start {
		return block{}, status.New(status.Corrupt, "times %d to %d", h.start, h.end)
	}
	return h, nil
}

// nanoseconds returns the time of a tick in ns. It interpolates linearly between the start and the
// end of the block.
func (h *block) nanoseconds(tick uint32) int64 {
	if uint64(tick) >= h.ticks {
		return h.end
	}
	hi, lo := bits.Mul64(uint64(h.end-h.start), uint64(tick))
	if hi == 0 {
		return h.start + int64(lo/h.ticks)
	}
	q, _ := bits.Div64(hi, lo, h.ticks) // the quotient fits, because tick < ticks
	return h.start + int64(q)
}

// record is one access.
type record struct {
	address, pc uint64 // pc is the return address of the hook
	op          uint8
	tick, size  uint32
}

func parseRecord(b []byte) record {
	le := binary.LittleEndian
	pc := le.Uint64(b[8:])
	return record{
		address: le.Uint64(b), pc: pc & (1<<48 - 1), op: uint8(pc >> 48),
		tick: le.Uint32(b[16:]), size: le.Uint32(b[20:]),
	}
}

// valid reports whether a program can have made the access.
func (r *record) valid() bool {
	return r.op&opBoth != 0 && r.size != 0 && uint64(r.size-1) <= math.MaxUint64-r.address
}

// fields parses lines of "key value". It skips lines without a space.
func fields(text []byte) map[string]string {
	out := map[string]string{}
	for line := range bytes.Lines(text) {
		key, value, ok := bytes.Cut(bytes.TrimSuffix(line, []byte("\n")), []byte(" "))
		if ok {
			out[string(key)] = string(bytes.ToValidUTF8(value, []byte("\uFFFD")))
		}
	}
	return out
}

func number(fields map[string]string, key string) int64 {
	n, err := strconv.ParseInt(fields[key], 10, 64)
	if err != nil {
		return 0
	}
	return n
}
