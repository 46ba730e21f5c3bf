// The stages for the tables over time, which split a trace into windows of equal width.

package analyse

import (
	"math/bits"

	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
)

// windows splits the time of a trace into at most limit windows of equal width. The length of the
// trace is not known in advance. So the width in ns is a power of two that doubles when there are
// more windows. A window starts at a multiple of its width. Each region type has a cell of type C
// for each window, from the first to the last window in which the type occurs.
type windows[C any] struct {
	limit     int    // twice Options.Windows
	shift     int    // the width is 1 << shift ns
	low, high uint64 // numbers of the first and the last window
	some      bool   // there is at least one window
	types     []span[C]
	add       func(to, from *C) // adds a cell to another
}

// span has the cells of one region type. first is the number of the window of cells[0].
type span[C any] struct {
	first uint64
	cells []C
}

// at returns the cell of a type at a time. It is valid until the next call.
func (w *windows[C]) at(kind uint32, time int64) *C {
	s := &w.types[kind]
	if i := uint64(time)>>w.shift - s.first; i < uint64(len(s.cells)) {
		return &s.cells[i]
	}
	return w.reach(s, uint64(time))
}

// reach extends a span to a time and returns the cell there.
func (w *windows[C]) reach(s *span[C], time uint64) *C {
	at := time >> w.shift
	if !w.some {
		w.low, w.high, w.some = at, at, true
	}
	w.low, w.high = min(w.low, at), max(w.high, at)
	for w.high-w.low >= uint64(w.limit) {
		w.double()
	}
	at = time >> w.shift
	switch n := uint64(len(s.cells)); {
	case n == 0:
		s.first = at
		s.cells = make([]C, 1)
	case at < s.first:
		s.cells = append(make([]C, s.first-at, s.first-at+n), s.cells...)
		s.first = at
	case at-s.first >= n:
		s.cells = grown(s.cells, int(at-s.first+1))
	}
	return &s.cells[at-s.first]
}

// double doubles the width: it adds up each two neighbouring windows.
func (w *windows[C]) double() {
	w.shift++
	w.low, w.high = w.low>>1, w.high>>1
	for i := range w.types {
		s := &w.types[i]
		if len(s.cells) == 0 {
			continue
		}
		first := s.first >> 1
		last := (s.first + uint64(len(s.cells)) - 1) >> 1
		cells := make([]C, last-first+1)
		for j := range s.cells {
			w.add(&cells[(s.first+uint64(j))>>1-first], &s.cells[j])
		}
		s.first, s.cells = first, cells
	}
}

// traffic has the bytes and accesses of a region type in a window, of loads at 0 and of stores at 1.
type traffic struct{ bytes, accesses [2]uint64 }

// bandwidth is the stage for bandwidth_over_time.
type bandwidth struct{ windows[traffic] }

func newBandwidth(n int) *bandwidth {
	return &bandwidth{windows[traffic]{limit: 2 * n, add: func(to, from *traffic) {
		for op := range to.bytes {
			to.bytes[op] += from.bytes[op]
			to.accesses[op] += from.accesses[op]
		}
	}}}
}

func (s *bandwidth) take(b *block) error {
	s.types = grown(s.types, b.types)
	for i, tag := range b.tag[:b.n] {
		t := s.at(tag>>1, b.time[i])
		if b.pages == nil {
			t.accesses[tag&1]++
		} else {
			t.accesses[tag&1] += b.pages[i]
		}
		if b.length != nil {
			t.bytes[tag&1] += b.length[i]
		}
	}
	return nil
}

// arrivals counts the accesses to pages in a window by the time of the previous access to the same
// page by the same type. Entry n counts the accesses for which the highest bit in which the two times
// differ is n-1. Entry 64 counts the first accesses. Both times are in the same window of width
// 1 << shift exactly if n <= shift. So the number of distinct pages of a window is the sum of the
// entries above shift. That holds also for a window that double put together.
type arrivals [65]uint64

// pageWindows is the stage for working_set_over_time. It needs the rows in the order of time.
type pageWindows struct {
	windows[arrivals]
	latest []times                       // for each type: the time of the latest access to each page
	long   map[uint32]*spans.Map[uint64] // the same for the pages of long rows: the time + 1
}

func newPageWindows(n int) *pageWindows {
	return &pageWindows{windows: windows[arrivals]{limit: 2 * n, add: func(to, from *arrivals) {
		for i, n := range from {
			to[i] += n
		}
	}}}
}

func (s *pageWindows) take(b *block) error {
	s.types = grown(s.types, b.types)
	s.latest = grown(s.latest, b.types)
	for i, tag := range b.tag[:b.n] {
		s.access(tag>>1, b.pageOf(i), b.time[i])
		if b.pages != nil {
			low, high := behind(b, i)
			if high-low >= longRow {
				s.row(tag>>1, low, high, b.time[i])
				continue
			}
			for ; low < high; low++ {
				s.access(tag>>1, low, b.time[i])
			}
		}
	}
	return nil
}

func (s *pageWindows) access(kind uint32, page uint64, time int64) {
	latest := s.latest[kind].at(hash(page), page)
	before := *latest
	*latest = uint64(time) + 1
	if before == 0 || before == goneTime {
		before = 0
		if long := s.long[kind]; long != nil {
			before = lift(long, page)
		}
	}
	s.arrive(kind, before, time, 1)
}

// row processes the accesses to the pages [low, high) of a long row, without its first page.
func (s *pageWindows) row(kind uint32, low, high uint64, time int64) {
	long := longOf(&s.long, kind)
	long.Each(low, high, func(low, high, before uint64) {
		n := high - low
		if before == 0 {
			singles := s.latest[kind].within(low, high, 0)
			for _, single := range singles {
				s.arrive(kind, single.time, time, 1)
				single.time = goneTime
			}
			n -= uint64(len(singles))
		}
		s.arrive(kind, before, time, n)
	})
	long.Set(low, high, spans.Span[uint64]{Low: low, High: high, Value: uint64(time) + 1})
}

// arrive counts n accesses to pages. before is the time of their latest access + 1, or 0 if there was
// none.
func (s *pageWindows) arrive(kind uint32, before uint64, time int64, n uint64) {
	back := 64
	if before != 0 {
		back = bits.Len64((before - 1) ^ uint64(time))
	}
	if back > s.shift {
		s.at(kind, time)[back] += n
	}
}

func (s *pageWindows) forget() { s.types, s.latest, s.long = nil, nil, nil }

// unique returns the number of distinct pages of a window of width 1 << shift.
func (a *arrivals) unique(shift int) uint64 {
	n := uint64(0)
	for back := shift + 1; back < len(a); back++ {
		n += a[back]
	}
	return n
}
