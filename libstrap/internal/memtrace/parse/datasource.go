package parse

import (
	"bytes"
	mathbits "math/bits"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// perf's data_src column: the number, as perf_event_open(2) lays it out
// (PERF_SAMPLE_DATA_SRC), then the same in words, cut to 99 bytes in all:
//
//	68100142 |OP LOAD|LVL L1 hit|SNP None|TLB L1 or L2 hit|LCK No|BLK  N/A
//
// Before Linux 5.19 the words begin with the level; the latest have more behind BLK.
// The number is decoded here, since the words differ between releases.

var (
	operation = []byte("|OP ")
	snoop     = []byte("|SNP ")
	lock      = []byte("|LCK ")
	blocked   = []byte("|BLK ")
)

// dataSourceOf splits what stands behind an address at the data source. Skipped:
// there is none. Malformed: its words are there, but no number of its own before
// them, as where the address was not printed and the number was taken for it.
func dataSourceOf(text []byte) (source uint64, behind []byte, what verdict) {
	if bytes.IndexByte(text, '|') < 0 {
		return 0, nil, skipped
	}
	words, at := bytes.Index(text, operation), 0
	if words >= 0 {
		at = tokenStart(text, len(trimEnd(text[:words])))
	} else if words = bytes.Index(text, snoop); words >= 0 {
		at = lastNumber(text[:words])
	} else {
		return 0, nil, skipped
	}
	if at < 0 {
		return 0, nil, malformed
	}
	source, end, ok := hexadecimal(text, at)
	if !ok || end >= words || class[text[end]]&isSpace == 0 {
		return 0, nil, malformed
	}
	behind = text[words:]
	for _, tag := range [][]byte{snoop, lock, blocked} {
		if i := bytes.Index(behind, tag); i >= 0 {
			behind = behind[i+len(tag):]
		}
	}
	return source, behindWords(behind), accepted
}

// behindWords leaves out the words before the first number. What looks like a
// number may be a piece of one: "Add" of "Addr".
func behindWords(text []byte) []byte {
	for i := 0; ; {
		start := spaceEnd(text, i)
		if start == len(text) || number(text, start, i) >= 0 {
			return text[i:]
		}
		i = tokenEnd(text, start)
	}
}

// lastNumber is where the last number of text starts, or -1.
func lastNumber(text []byte) int {
	at := -1
	for i := 0; i < len(text); {
		start := spaceEnd(text, i)
		if number(text, start, i) >= 0 {
			at = start
		}
		i = tokenEnd(text, start)
	}
	return at
}

func tokenStart(text []byte, i int) int {
	for i > 0 && class[text[i-1]]&isSpace == 0 {
		i--
	}
	return i
}

// The fields of the number: bits 0-4 operation, 5-18 level, 33-36 level number,
// 37 remote.
const (
	opNA       = 0x01
	opLoad     = 0x02
	opStore    = 0x04
	opPrefetch = 0x08
	opExecute  = 0x10

	levelNumberNA = 0xf
)

// opOf is what the access did; false where the number does not say it.
func opOf(source uint64) (op trace.Op, ok bool) {
	switch did := source & 0x1f; {
	case did&(opNA|opLoad|opStore) == opStore:
		return trace.Store, true
	case did&(opNA|opStore) == 0 && did&(opLoad|opPrefetch|opExecute) != 0:
		return trace.Load, true
	default:
		return 0, false
	}
}

// levelNames are the values of cache_level: what served an access or, with
// " miss" behind it, what did not.
var levelNames []string

// level is a level's place in levelNames; the next is that of its miss.
func level(name string) int32 {
	code := slices.Index(levelNames, name)
	if code < 0 {
		code = len(levelNames)
		levelNames = append(levelNames, name, name+" miss")
	}
	return int32(code)
}

// The levels by their number, without and with the remote bit; and by the bits of
// the level from bit 3 on, which are all that kernels before 4.14 give.
var localLevels, remoteLevels, oldLevels [16]int32

func init() {
	for n, name := range [16]string{
		1: "L1", 2: "L2", 3: "L3", 4: "L4", 5: "L2 MHB", 6: "memory-side cache", 7: "L0",
		8: "uncached", 9: "CXL", 10: "I/O", 11: "any cache", 12: "LFB", 13: "RAM", 14: "PMEM",
	} {
		localLevels[n], remoteLevels[n], oldLevels[n] = noLevel, noLevel, noLevel
		if name != "" {
			localLevels[n], remoteLevels[n] = level(name), level("remote "+name)
		}
	}
	for i, name := range []string{
		"L1", "LFB", "L2", "L3", "RAM", "remote RAM", "remote RAM", "remote cache",
		"remote cache", "I/O", "uncached",
	} {
		oldLevels[i] = level(name)
	}
}

// levelOf is the level that served the access, or its miss where the number only
// says which did not.
func levelOf(source uint64) int32 {
	bits := source >> 5 & 0x3fff
	code := noLevel
	if n := source >> 33 & 0xf; n != 0 && n != levelNumberNA {
		code = localLevels[n]
		if source>>37&1 != 0 {
			code = remoteLevels[n]
		}
	} else if old := bits >> 3; old != 0 {
		code = oldLevels[mathbits.TrailingZeros64(old)]
	}
	if hit, miss := bits&2 != 0, bits&4 != 0; miss && !hit && code != noLevel {
		code++
	}
	return code
}
