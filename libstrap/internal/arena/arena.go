// Package arena is the bounded staging memory into which enqueue copies tensors.
//
// An arena is one range of addresses outside the Go heap. A request gets the first gap that is large
// enough. So memory that packets have used is used again before new memory is touched. Touching memory
// for the first time costs more than copying a tensor into it.
package arena

import (
	"slices"
	"sort"
	"sync"

	"github.com/libstrap/strap/libstrap/internal/pages"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// MinLimit is the smallest limit that New accepts, in bytes.
const MinLimit = 1 << 20

const (
	pageSize  = 4096
	cacheLine = 64
	// trimBytes is the memory above the limit that trim leaves.
	trimBytes = 2 << 20
)

// Region is a part of the arena. Buf has the requested length.
type Region struct {
	Buf    []byte
	at     int // offset in the arena
	len    int // bytes that it takes in the arena
	beside int // bytes that count against the limit with it, and are elsewhere
}

// Offset returns where the region begins in the arena.
func (r Region) Offset() int { return r.at }

// Counted returns the bytes that were requested: those of Buf, and those that count beside it.
func (r Region) Counted() int { return len(r.Buf) + r.beside }

// Zero reports whether r was never allocated.
func (r Region) Zero() bool { return r.len == 0 }

// gap is a range of the arena that is in no region.
type gap struct{ from, to int }

// Arena allocates regions. Regions may be freed in any order and from any goroutine. TryAlloc is for one
// caller at a time.
type Arena struct {
	pages *pages.Memory
	from  int    // where mem begins in pages
	mem   []byte // the bytes of pages that regions are in

	mu     sync.Mutex
	free   []gap // by address; no two gaps touch each other
	used   int   // end of the memory that was ever in regions, as far as it is not given back
	top    int   // end of the memory that the system has provided
	most   int   // the largest top so far
	held   int64 // bytes in regions and beside them, as requested
	beside int64 // of these, the bytes beside regions
	live   int   // number of regions
	closed bool
	freed  chan struct{}
}

// New returns an arena of limit bytes. The arena takes memory from the system when it is used. If the
// system refuses so large a mapping (RLIMIT_AS, strict overcommit), the arena is smaller: see Limit.
func New(limit int64) (*Arena, error) {
	if limit < MinLimit {
		return nil, status.New(status.InvalidArgument,
			"memory limit of %d bytes is below the least possible %d", limit, MinLimit)
	}
	for n := limit; ; n = max(n/2, MinLimit) {
		n = n / cacheLine * cacheLine
		m, err := pages.Map(int(n))
		if err == nil {
			return &Arena{pages: m, mem: m.Bytes, free: []gap{{0, int(n)}}, freed: make(chan struct{}, 1)}, nil
		}
		if n == MinLimit {
			return nil, status.Wrap(status.NoMemory, err, "cannot map %d bytes of staging memory", n)
		}
	}
}

// On returns an arena in the bytes of m from `from` on, all of which the system has provided. The arena
// owns m. The contents of the other bytes do not change.
func On(m *pages.Memory, from int) *Arena {
	n := (len(m.Bytes) - from) / cacheLine * cacheLine
	return &Arena{
		pages: m, from: from, mem: m.Bytes[from:][:n:n], free: []gap{{0, n}}, used: n, top: n, most: n, freed: make(chan struct{}, 1),
	}
}

// Limit returns the most bytes that the arena takes from the system.
func (a *Arena) Limit() int64 { return int64(len(a.mem)) }

// MaxRegion returns the largest request that succeeds soon, if regions are freed in about the order in
// which they were allocated. A larger request, up to Limit, may find no gap until all regions are freed.
func (a *Arena) MaxRegion() int { return len(a.mem) / 4 }

// Freed returns a channel that receives a value after regions were freed. A caller waits on it after
// TryAlloc found no room.
func (a *Arena) Freed() <-chan struct{} { return a.freed }

// Usage returns the bytes taken from the system now, the most bytes taken so far, and the bytes that the
// regions were requested with.
func (a *Arena) Usage() (taken, peak, held int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	whole := func(end int) int64 { return int64(min((end+pageSize-1)/pageSize*pageSize, len(a.mem))) }
	if !a.unmapped() {
		taken = whole(a.top)
	}
	return taken, whole(a.most), a.held
}

// TryAlloc returns a region of n bytes. The bytes beside it are memory that its owner takes elsewhere, for as
// long as it has the region. They count against the limit, so that the arena stays that much smaller. ok is
// false if there is no room until a region is freed. The memory that was touched and the bytes beside regions
// are together at most the limit and trimBytes, as far as the memory at the end is free. After TryAlloc has
// returned a region, there is still room for a region of reserved bytes. The error is InvalidArgument if n with
// beside can never fit.
func (a *Arena) TryAlloc(n, beside, reserved int) (r Region, ok bool, err error) {
	if n < 0 || beside < 0 || n > len(a.mem)-beside {
		return Region{}, false, status.New(status.InvalidArgument,
			"region of %d bytes and %d beside it in a staging memory of %d", n, beside, len(a.mem))
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return Region{}, false, status.New(status.InvalidState, "the staging memory is closed")
	}
	need := align(max(n, 1))
	if a.held+int64(n+beside+reserved) > a.Limit() {
		return Region{}, false, nil
	}
	for i := range a.free {
		e := &a.free[i]
		if e.to-e.from < need || !a.fits(reserved, i, need) {
			continue
		}
		top, ok := a.pages.Provide(a.from+a.top, a.from+e.from+need)
		if !ok {
			return Region{}, false, nil
		}
		a.top = min(top-a.from, len(a.mem))
		r = Region{Buf: a.mem[e.from : e.from+n : e.from+n], at: e.from, len: need, beside: beside}
		if e.from += need; e.from == e.to {
			a.free = slices.Delete(a.free, i, i+1)
		}
		a.used = max(a.used, r.at+need)
		a.most = max(a.most, a.top)
		a.held += int64(n + beside)
		a.beside += int64(beside)
		a.live++
		a.trim()
		return r, true, nil
	}
	return Region{}, false, nil
}

// fits reports whether there is room for n bytes after taken bytes of gap i are allocated.
func (a *Arena) fits(n, i, taken int) bool {
	if n == 0 {
		return true
	}
	for k, e := range a.free {
		if k == i {
			e.from += taken
		}
		if e.to-e.from >= align(n) {
			return true
		}
	}
	return false
}

// Free frees a region. It ignores a zero region.
func (a *Arena) Free(r Region) {
	if r.Zero() {
		return
	}
	a.mu.Lock()
	a.held -= int64(r.Counted())
	a.beside -= int64(r.beside)
	a.live--
	a.put(gap{r.at, r.at + r.len})
	if a.unmapped() {
		a.pages.Release(a.top)
	}
	a.mu.Unlock()
	select {
	case a.freed <- struct{}{}:
	default:
	}
}

// put adds a gap and joins it with its neighbours.
func (a *Arena) put(e gap) {
	i := sort.Search(len(a.free), func(i int) bool { return a.free[i].from > e.from })
	before, behind := i > 0 && a.free[i-1].to == e.from, i < len(a.free) && a.free[i].from == e.to
	switch {
	case before && behind:
		a.free[i-1].to = a.free[i].to
		a.free = slices.Delete(a.free, i, i+1)
	case before:
		a.free[i-1].to = e.to
	case behind:
		a.free[i].from = e.from
	default:
		a.free = slices.Insert(a.free, i, e)
	}
}

// Close releases the memory as soon as all regions are freed.
func (a *Arena) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return
	}
	a.closed = true
	if a.unmapped() {
		a.pages.Release(a.top)
	}
}

// unmapped reports whether the memory was released.
func (a *Arena) unmapped() bool { return a.closed && a.live == 0 }

// align rounds n up to whole cache lines.
func align(n int) int { return (n + cacheLine - 1) / cacheLine * cacheLine }

// Touch takes the first n bytes, or all if there are fewer, from the system now, for later requests.
func (a *Arena) Touch(n int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	end := int(min(n, a.Limit()))
	if a.closed || end <= a.top {
		return
	}
	a.pages.Touch(end)
	a.top, a.most = end, max(a.most, end)
}

// GiveBack returns to the system what Touch has taken and no region has ever used.
func (a *Arena) GiveBack() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.closed {
		a.giveBack(a.used)
	}
}

// trim gives memory at the end back that is in no region, if all that was touched and what counts beside
// regions are more than the limit.
func (a *Arena) trim() {
	above := int(a.beside) + a.top - len(a.mem)
	if above <= trimBytes {
		return
	}
	if last := len(a.free) - 1; last >= 0 && a.free[last].to == len(a.mem) {
		a.giveBack(max(a.free[last].from, a.top-above))
	}
}

// giveBack returns the memory behind n bytes to the system, as far as it can.
func (a *Arena) giveBack(n int) {
	if n < a.top {
		a.top = a.pages.GiveBack(a.from+n, a.from+a.top) - a.from
		a.used = min(a.used, a.top)
	}
}
