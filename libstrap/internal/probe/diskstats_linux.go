// Reads /proc/diskstats, and compares it with the requests that were followed.

package probe

import (
	"bufio"
	"maps"
	"os"
	"slices"
	"strconv"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/status"
)

const sectorBytes = 512 // the unit of /proc/diskstats, whatever sector size a device has

// diskCounts holds what the kernel has counted for a device since the device appeared.
type diskCounts struct {
	name              string
	requests, sectors [diskOperations]uint64
}

// requestFields and sectorFields are the positions of the counts in a line of /proc/diskstats, by
// operation. The file has no sectors for flushes.
var (
	requestFields = [diskOperations]int{3, 7, 18, 14}
	sectorFields  = [diskOperations]int{5, 9, 0, 16}
)

// readDiskstats reads a file like /proc/diskstats. The keys are ids of devices.
func readDiskstats(path string) (map[uint64]diskCounts, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, status.Wrap(status.IO, err, "the counts of the block devices cannot be read")
	}
	defer f.Close()
	out := map[uint64]diskCounts{}
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		number := func(at int) uint64 {
			n, _ := strconv.ParseUint(words[at], 10, 64)
			return n
		}
		if len(words) <= slices.Max(requestFields[:]) {
			continue
		}
		d := diskCounts{name: words[2]}
		for op := range diskOperations {
			d.requests[op] = number(requestFields[op])
			if sectorFields[op] != 0 {
				d.sectors[op] = number(sectorFields[op])
			}
		}
		out[number(0)<<20|number(1)] = d
	}
	if err := lines.Err(); err != nil {
		return nil, status.Wrap(status.IO, err, "%s cannot be read", path)
	}
	return out, nil
}

// diskKey is a device by its id, and an operation.
type diskKey struct {
	device uint64
	op     uint32
}

// tally counts the requests of one device and operation since the start.
type tally struct {
	followed, lost uint64
	// ended counts requests that have ended but still have an entry. A program may be about to
	// count them, or their end was missed.
	ended uint64
}

// reconciler compares what was followed with /proc/diskstats.
type reconciler struct {
	all   bool // report all devices, not only those in the tallies
	known map[diskKey]*reconciled
}

// reconciled is the state of one device and operation at the last call of next. low and high stay
// those of the start: /proc/diskstats had then between low and high more requests than were
// followed or lost. They differ because a request may complete between two readings.
type reconciled struct {
	low, high  int64
	difference int64 // reported so far
	requests   uint64
	sectors    uint64
	tally
}

func newReconciler(all bool) *reconciler {
	return &reconciler{all: all, known: map[diskKey]*reconciled{}}
}

// next returns what happened since the last call. The first call returns nothing. The tallies were
// read after `early` and before `late`.
func (r *reconciler) next(early, late map[uint64]diskCounts, tallies map[diskKey]tally) []DiskCounts {
	first := len(r.known) == 0
	out := []DiskCounts{}
	for _, id := range slices.Sorted(maps.Keys(late)) {
		_, seen := tallies[diskKey{id, 0}]
		if !seen && !r.all {
			continue
		}
		for op := range uint32(diskOperations) {
			key := diskKey{id, op}
			row := r.one(key, early[id], late[id], tallies[key], first)
			if row != (DiskCounts{}) && (seen || system.hasRequests(id)) && system.counts(id) {
				row.Device, row.Operation = Device{id, late[id].name}, Operations[op]
				out = append(out, row)
			}
		}
	}
	return out
}

// one returns a row without device and operation. It is all zero if nothing happened.
func (r *reconciler) one(key diskKey, early, late diskCounts, t tally, first bool) DiskCounts {
	requests, sectors := late.requests[key.op], late.sectors[key.op]
	mine := int64(t.followed + t.lost)
	low := int64(early.requests[key.op]) - mine - int64(t.ended)
	high := int64(requests) - mine
	before := r.known[key]
	switch {
	case before == nil && !first: // a new device, which has counted from 0
		before = &reconciled{}
	case before == nil, requests < before.requests: // the start, or another device took this id
		r.known[key] = &reconciled{low: low, high: high, requests: requests, sectors: sectors, tally: t}
		return DiskCounts{}
	}
	// The true difference lies between low - before.high and high - before.low. Move the reported
	// one only as far as needed to lie in that range.
	difference := max(min(before.difference, high-before.low), low-before.high)
	row := DiskCounts{
		Completed:  requests - before.requests,
		Bytes:      (sectors - before.sectors) * sectorBytes,
		Followed:   t.followed - before.followed,
		Lost:       t.lost - before.lost,
		Difference: difference - before.difference,
	}
	r.known[key] = &reconciled{
		low: before.low, high: before.high, difference: difference,
		requests: requests, sectors: sectors, tally: t,
	}
	return row
}
