package reader

import "github.com/libstrap/strap/libstrap/internal/status"

// prefetchGap is the most bytes of other packets between two packets that are prefetched at once.
const prefetchGap = 64 << 10

// Prefetch asks the system to read the packets of rows into the page cache, and does not wait for them. It
// skips rows without a packet. It is advice: where the system takes none, nothing happens.
//
// The error is NotFound if there is no such row.
func (r *Reader) Prefetch(rows []uint64) error {
	var from, end int64 // of the packets that are not advised yet
	for _, row := range rows {
		if row >= uint64(r.NumRows()) {
			return status.New(status.NotFound, "row %d of %q, which has %d", row, r.path, r.NumRows())
		}
		offset, length, ok := r.extent(int(row))
		if !ok {
			continue
		}
		if offset < from || offset > end+prefetchGap {
			willNeed(r.f, from, end-from)
			from = offset
			end = offset
		}
		end = max(end, offset+length)
	}
	willNeed(r.f, from, end-from)
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
