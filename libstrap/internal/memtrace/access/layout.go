// Package access reads what libstrap-access records: the loads and stores of an
// instrumented program, block by block and thread by thread, as batches of a memory
// trace in the order of time, with symbols from the program's ELF files.
//
// # Layout
//
// A file is a sequence of blocks, little-endian; libstrap/access/access.h writes them:
//
//	 0  u32  magic "SACB"
//	 4  u16  version, 1
//	 6  u16  kind
//	 8  u64  bytes of payload behind the header
//	16  u32  thread id
//	20  u32  number of the newest module map
//	24  i64  start_ns, CLOCK_MONOTONIC: tick 0 of a block of accesses, else the event
//	32  i64  end_ns, when the block was closed
//	40  u64  ticks, what the counter said then
//	48  u64  seen: accesses of the thread since its block before
//	56  u64  lost: further ones that were not recorded
//
// The first block is of kind start, its payload lines of "key value". Kind maps holds the
// executable lines of /proc/self/maps; blocks of one number belong together. Kind accesses
// holds records of 24 bytes: u64 address; u64 with the return address of the hook in bits
// 0 to 47 and the operation in 48 to 55 (1 load, 2 store, 3 both, 4 set: atomic); u32 ticks
// since the block's start; u32 bytes. Kind range holds u64 id, start and length, u32 type,
// u32 1 where the range begins or 0 where it ends, and a name. Kind end holds the totals; a
// file without it was not ended by its program.
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

// Text blocks of the runtime have at most 64 KiB, and names of ranges 255 bytes.
const (
	maxText = 1 << 16
	maxName = 255
)

// block is a header.
type block struct {
	kind            uint16
	bytes           uint64
	thread, maps    uint32
	start, end      int64
	ticks           uint64
	seen, lost      uint64
	offset, payload int64 // in the file: of the header, and how much of bytes is there
}

var errMagic = status.New(status.Corrupt, "no block begins here")

// parseBlock reads a header of headerBytes. Times are from 0 and do not run backwards.
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

// nanoseconds gives the time of a tick, on the line between the block's two ends.
func (h *block) nanoseconds(tick uint32) int64 {
	if uint64(tick) >= h.ticks {
		return h.end
	}
	hi, lo := bits.Mul64(uint64(h.end-h.start), uint64(tick))
	if hi == 0 {
		return h.start + int64(lo/h.ticks)
	}
	q, _ := bits.Div64(hi, lo, h.ticks) // tick < ticks, so that it fits
	return h.start + int64(q)
}

// record is an access.
type record struct {
	address, pc uint64
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

// valid tells whether a program can have made the access.
func (r *record) valid() bool {
	return r.op&opBoth != 0 && r.size != 0 && uint64(r.size-1) <= math.MaxUint64-r.address
}

// fields reads lines of "key value".
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
