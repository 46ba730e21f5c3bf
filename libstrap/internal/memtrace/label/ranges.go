// Finds the memory of known use that an address lies in at a time.

package label

import (
	"math"
	"sort"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Range is memory of known use: the addresses [Start, End) at the times [FromNS, ToNS). If both times
// are 0, the use is known for all times. ID 0 asks for an id: weights get their shared one, other
// types a new one.
type Range struct {
	Start  uint64 `json:"start"`
	End    uint64 `json:"end"`
	FromNS int64  `json:"from_ns"`
	ToNS   int64  `json:"to_ns"`
	Type   string `json:"region_type"`
	ID     int64  `json:"region_id"`
	Name   string `json:"name"`
}

// rangeIndex finds the range of an address and a time. If several ranges hold both, it takes the
// narrowest. Among equally narrow ones it takes the one given last.
type rangeIndex struct {
	ranges []Range
	// bounds cut the addresses into pieces. over[i] lists the ranges that cover
	// [bounds[i], bounds[i+1]), the best one first.
	bounds []uint64
	over   [][]int32
}

func newRangeIndex(ranges []Range) (*rangeIndex, error) {
	x := &rangeIndex{ranges: append([]Range(nil), ranges...)}
	for i := range x.ranges {
		r := &x.ranges[i]
		if err := checkType(r.Type); err != nil {
			return nil, status.Wrap(status.InvalidArgument, err, "range %d", i)
		}
		if r.FromNS == 0 && r.ToNS == 0 {
			r.ToNS = math.MaxInt64
		}
		if r.End <= r.Start || r.ToNS <= r.FromNS || r.ID < 0 {
			return nil, status.New(status.InvalidArgument,
				"range %d: addresses %#x to %#x, times %d to %d, id %d", i, r.Start, r.End, r.FromNS, r.ToNS, r.ID)
		}
		x.bounds = append(x.bounds, r.Start, r.End)
	}
	sort.Slice(x.bounds, func(i, j int) bool { return x.bounds[i] < x.bounds[j] })
	distinct := x.bounds[:0]
	for i, b := range x.bounds {
		if i == 0 || b != distinct[len(distinct)-1] {
			distinct = append(distinct, b)
		}
	}
	x.bounds = distinct
	x.over = make([][]int32, len(x.bounds))
	best := make([]int32, len(x.ranges))
	for i := range best {
		best[i] = int32(i)
	}
	sort.Slice(best, func(i, j int) bool {
		a, b := x.ranges[best[i]], x.ranges[best[j]]
		if wa, wb := a.End-a.Start, b.End-b.Start; wa != wb {
			return wa < wb
		}
		return best[i] > best[j]
	})
	for _, number := range best {
		r := x.ranges[number]
		for i := x.piece(r.Start); i < len(x.bounds) && x.bounds[i] < r.End; i++ {
			x.over[i] = append(x.over[i], number)
		}
	}
	return x, nil
}

// piece returns the last piece that begins at or before an address, or -1 if there is none.
func (x *rangeIndex) piece(address uint64) int {
	return sort.Search(len(x.bounds), func(i int) bool { return x.bounds[i] > address }) - 1
}

// find returns the number of the range of an address and a time, or -1 if there is none.
func (x *rangeIndex) find(address uint64, ns int64) int32 {
	i := x.piece(address)
	if i < 0 {
		return -1
	}
	for _, number := range x.over[i] {
		if r := &x.ranges[number]; r.FromNS <= ns && ns < r.ToNS {
			return number
		}
	}
	return -1
}
