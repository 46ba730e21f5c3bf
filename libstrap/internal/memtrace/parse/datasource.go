// Reads the operation and the level of an access from the data source that perf prints.

package parse

import (
	"bytes"
	mathbits "math/bits"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// perf's column data_src holds a number, laid out as perf_event_open(2) says under
// PERF_SAMPLE_DATA_SRC. Then it holds the same in words, cut to 99 bytes in all:
//
//	68100142 |OP LOAD|LVL L1 hit|SNP None|TLB L1 or L2 hit|LCK No|BLK  N/A
//
// Before Linux 5.19 the words begin with the level. The latest releases have more words behind
// BLK. The number is decoded here, because the words differ between releases.

var (
	operation = []byte("|OP ")
	snoop     = []byte("|SNP ")
	lock      = []byte("|LCK ")
	blocked   = []byte("|BLK ")
)

// dataSourceOf reads the data source behind an address. It returns the number, and the text
// behind the words. The verdict is skipped if there is no data source. It is malformed if the
// words have no number before them: perf printed no address, and the number was read as one.
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

// behindWords cuts off the words before the first number. A word that perf cut may look like a
// number, as "Add" of "Addr"; the function number does not take it for one.
func behindWords(text []byte) []byte {
	for i := 0; ; {
		start := spaceEnd(text, i)
		if start == len(text) || number(text, start, i) >= 0 {
			return text[i:]
		}
		i = tokenEnd(text, start)
	}
}

// lastNumber returns where the last number of text starts, or -1.
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

// Fields of the number: bits 0-4 are the operation, 5-18 the level, 33-36 the level's number, 37
// says remote.
const (
	opNA       = 0x01
	opLoad     = 0x02
	opStore    = 0x04
	opPrefetch = 0x08
	opExecute  = 0x10

	levelNumberNA = 0xf
)

// opOf returns what the access did. ok is false if the number does not say it.
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

// levelNames are the values of cache_level: the level that served an access or, with " miss"
// behind it, a level that did not.
var levelNames []string

// level returns the place of a level in levelNames, and adds the level if it is new. Its miss has
// the next place.
func level(name string) int32 {
	code := slices.Index(levelNames, name)
	if code < 0 {
		code = len(levelNames)
		levelNames = append(levelNames, name, name+" miss")
	}
	return int32(code)
}

// localLevels and remoteLevels hold levels by the level's number, without the remote bit and with
// it. oldLevels holds levels by the bits of the field level, from bit 3 of the field on. Kernels
// before 4.14 give that field only.
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

// levelOf returns the level that served the access. If the number names only a level that did not,
// levelOf returns the miss of that level. It returns noLevel if the number names none.
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
