// Starts to read packets that will be needed soon.

package reader

import (
	"github.com/libstrap/strap/libstrap/internal/ahead"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// prefetchGap is the most bytes of other packets between two packets that are prefetched at once.
const prefetchGap = 64 << 10

// Prefetch starts to read the packets of rows, and does not wait for them. It skips rows without a packet.
// See ahead.File.Prefetch for how many bytes are kept, and how long.
//
// The error is NotFound if there is no such row.
func (r *Reader) Prefetch(rows []uint64) error {
	var parts []ahead.Part
	for _, row := range rows {
		if row >= uint64(r.NumRows()) {
			return status.New(status.NotFound, "row %d of %q, which has %d", row, r.path, r.NumRows())
		}
		offset, length, ok := r.extent(int(row))
		if !ok {
			continue
		}
		end := offset + length
		if k := len(parts) - 1; k >= 0 && offset >= parts[k].From && offset <= parts[k].End+prefetchGap {
			parts[k].End = max(parts[k].End, end)
		} else {
			parts = append(parts, ahead.Part{From: offset, End: end})
		}
	}
	r.f.Prefetch(parts)
	return nil
}

// extent returns where the packet of row i is in the file. ok is false if it has none.
func (r *Reader) extent(i int) (offset, length int64, ok bool) {
	at, scanned, err := r.find(i)
	if err != nil {
		return 0, 0, false
	}
	if scanned {
		p := r.found[at]
		return p.Offset, p.End() - p.Offset, true
	}
	return r.idx.Extent(at)
}
