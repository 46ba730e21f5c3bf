// Parses the blocks that say where a range of memory begins or ends.

package access

import (
	"bytes"
	"encoding/binary"
	"math"

	"github.com/libstrap/strap/libstrap/internal/memtrace/label"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// regionTypes are the STRAP_REGION_ values of strap_access.h.
var regionTypes = map[uint32]string{1: "weight", 2: "kv_cache", 3: "activation", 4: "runtime"}

// rangeEvent is the begin or the end of a range.
type rangeEvent struct {
	id    uint64
	added bool        // the range begins
	known label.Range // without times
}

func parseRange(b []byte) (rangeEvent, error) {
	if len(b) < rangeBytes {
		return rangeEvent{}, status.New(status.Corrupt, "%d bytes are no range", len(b))
	}
	le := binary.LittleEndian
	e := rangeEvent{id: le.Uint64(b), added: le.Uint32(b[28:]) == 1}
	start, length, number := le.Uint64(b[8:]), le.Uint64(b[16:]), le.Uint32(b[24:])
	kind, ok := regionTypes[number]
	if !ok {
		return e, status.New(status.Corrupt, "type %d is unknown", number)
	}
	if length == 0 || length > math.MaxUint64-start {
		return e, status.New(status.Corrupt, "%d bytes at %#x", length, start)
	}
	name := bytes.ToValidUTF8(b[rangeBytes:], []byte("\uFFFD"))
	e.known = label.Range{Start: start, End: start + length, Type: kind, Name: string(name)}
	return e, nil
}
