// Package arena is the bounded staging memory that enqueue copies tensors into.
//
// Memory comes from the system in chunks, outside the Go heap, and only as far
// as packets need it at the same time: a freed chunk is the next to be used
// again. Small requests share a chunk one behind the other, larger ones get a
// chunk of their own. What is taken from the system never passes the limit.
package arena

import (
	"sync"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// MinLimit is the smallest limit that New accepts, in bytes.
const MinLimit = 1 << 20

const (
	pageSize     = 4096
	maxChunk     = 4 << 20
	chunkDivisor = 16 // of the limit, for the shared chunk
	ownDivisor   = 4  // a request over this share of a chunk gets its own
)

// Region is a piece of the arena; Buf has the requested length.
type Region struct {
	Buf   []byte
	chunk *chunk
}

// Zero reports whether r was never allocated, or was freed.
func (r Region) Zero() bool { return r.chunk == nil }

type chunk struct {
	mem  []byte
	used int // bytes handed out, for the shared chunk
	refs int // regions alive
}

// Arena hands out regions. Regions may be freed in any order and from any
// goroutine; TryAlloc is for one caller at a time.
type Arena struct {
	limit int64
	share int // size of the shared chunk

	mu      sync.Mutex
	taken   int64 // from the system
	peak    int64
	held    int64 // in regions
	current *chunk
	free    []*chunk
	closed  bool
	freed   chan struct{}
}

// New returns an arena that takes at most limit bytes from the system.
func New(limit int64) (*Arena, error) {
	if limit < MinLimit {
		return nil, status.New(status.InvalidArgument,
			"memory limit of %d bytes is below the least possible %d", limit, MinLimit)
	}
	share := min(int(limit/chunkDivisor), maxChunk) / pageSize * pageSize
	return &Arena{limit: limit, share: share, freed: make(chan struct{}, 1)}, nil
}

// Limit is the most bytes taken from the system.
func (a *Arena) Limit() int64 { return a.limit }

// MaxRegion is the largest request that succeeds once all else is freed.
func (a *Arena) MaxRegion() int { return int(a.limit / 4) }

// Freed receives a value after regions were freed; for the caller whose
// TryAlloc had no room.
func (a *Arena) Freed() <-chan struct{} { return a.freed }

// Usage reports the bytes taken from the system now, at most so far, and those
// that regions hold.
func (a *Arena) Usage() (taken, peak, held int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.taken, a.peak, a.held
}

// TryAlloc returns a region of n bytes, or ok = false when there is no room
// before something is freed. The error is NoMemory when the system refuses and
// InvalidArgument when n can never fit.
func (a *Arena) TryAlloc(n int) (r Region, ok bool, err error) {
	if n < 0 || n > a.MaxRegion() {
		return Region{}, false, status.New(status.InvalidArgument,
			"region of %d bytes in a staging memory of %d", n, a.limit)
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.closed {
		return Region{}, false, status.New(status.InvalidState, "the staging memory is closed")
	}
	n = max(n, 1)
	var c *chunk
	if n > a.share/ownDivisor {
		c, err = a.take(sizeClass(n))
	} else if c = a.current; c == nil || c.used+n > len(c.mem) {
		if c, err = a.take(a.share); c != nil {
			a.retire()
			a.current = c
		}
	}
	if c == nil {
		return Region{}, false, err
	}
	buf := c.mem[c.used : c.used+n : c.used+n]
	c.used += align(n)
	c.refs++
	a.held += int64(n)
	return Region{Buf: buf, chunk: c}, true, nil
}

// Free gives a region back; a zero region is ignored.
func (a *Arena) Free(r Region) {
	if r.chunk == nil {
		return
	}
	a.mu.Lock()
	c := r.chunk
	c.refs--
	a.held -= int64(len(r.Buf))
	if c.refs == 0 {
		c.used = 0
		if c != a.current {
			a.put(c)
		}
	}
	a.mu.Unlock()
	select {
	case a.freed <- struct{}{}:
	default:
	}
}

// Close gives all memory back to the system as soon as its regions are freed.
func (a *Arena) Close() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.closed = true
	a.retire()
	a.shrink(a.limit)
}

// retire stops handing out of the current chunk.
func (a *Arena) retire() {
	if c := a.current; c != nil && c.refs == 0 {
		a.put(c)
	}
	a.current = nil
}

func (a *Arena) put(c *chunk) {
	a.free = append(a.free, c)
	if a.closed {
		a.shrink(a.limit)
	}
}

// take finds a free chunk of size bytes or a little more, or maps a new one,
// unmapping free ones where the limit asks for it.
func (a *Arena) take(size int) (*chunk, error) {
	best := -1
	for i := len(a.free) - 1; i >= 0; i-- {
		have := len(a.free[i].mem)
		if have >= size && have <= 2*size && (best < 0 || have < len(a.free[best].mem)) {
			best = i
		}
	}
	if best >= 0 {
		c := a.free[best]
		a.free = append(a.free[:best], a.free[best+1:]...)
		return c, nil
	}
	if need := a.taken + int64(size) - a.limit; need > 0 {
		if c := a.current; c != nil && c.refs == 0 {
			a.retire()
		}
		if a.shrink(need) < need {
			return nil, nil
		}
	}
	mem, err := mapMemory(size)
	if err != nil {
		return nil, status.Wrap(status.NoMemory, err, "cannot map %d bytes of staging memory", size)
	}
	a.taken += int64(size)
	a.peak = max(a.peak, a.taken)
	return &chunk{mem: mem}, nil
}

// shrink unmaps free chunks until need bytes are given back.
func (a *Arena) shrink(need int64) (given int64) {
	for len(a.free) > 0 && given < need {
		c := a.free[0]
		a.free = append(a.free[:0], a.free[1:]...)
		unmapMemory(c.mem)
		given += int64(len(c.mem))
		a.taken -= int64(len(c.mem))
	}
	return given
}

// align keeps regions of a shared chunk on cache lines.
func align(n int) int { return (n + 63) &^ 63 }

// sizeClass rounds n up to one of eight sizes per power of two, so that chunks
// find a second use.
func sizeClass(n int) int {
	step := pageSize
	for step*16 < n {
		step *= 2
	}
	return (n + step - 1) / step * step
}
