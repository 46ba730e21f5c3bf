// Package ahead reads parts of a file before they are needed.
//
// Long parts are read past the page cache, by several direct reads at a time: filling the page cache takes
// more of a processor than decoding some codecs. Short parts, and what the page cache has already, are left
// to the system.
package ahead

import (
	"io"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/pages"
	"github.com/libstrap/strap/libstrap/internal/procs"
)

const (
	// chunkBytes is how much one direct read reads. It begins at a multiple of it.
	chunkBytes = 1 << 20
	// mostReads is how many direct reads there are at the same time.
	mostReads = 4
	// longBytes is the least length of a part that is read directly.
	longBytes = 256 << 10
	// A disk with less than slowRate bytes a second is read through the page cache, if the file has room in it.
	// It is measured from measuredBytes on.
	slowRate      = 500e6
	measuredBytes = 64 << 20
	// staleCalls of start, for any files, is how long a file keeps memory that it does not need.
	staleCalls = 16
)

// mostChunks is how many chunks are in memory for one file: those that goroutines decode, and those that are
// read meanwhile.
var mostChunks = 8*procs.Count + mostReads

// File is a file for reading. It may be used from several goroutines. Close must be the last call.
type File struct {
	*os.File
	open  sync.Once
	ahead atomic.Pointer[ahead] // nil: there were no direct reads
}

// Part is a part of a file.
type Part struct{ From, End int64 }

// Prefetch starts to read parts, and does not wait for them. ReadAt then has them in memory.
//
// It reads long parts directly, as long as one call asks for no more than there is memory for: a MiB for each
// read, and 8 MiB for each processor. It lets the system read the others into the page cache. All of this is
// advice: what was not read ahead, ReadAt reads when it is called.
//
// A chunk of 1 MiB is kept until ReadAt has copied as many bytes as were asked for, until Used, or until ReadAt
// comes to parts of a later call. Its memory is used again, until Prefetch is called without parts, or often for
// other files.
func (f *File) Prefetch(parts []Part) {
	for _, p := range parts {
		if p.End-p.From >= longBytes {
			f.open.Do(func() { f.ahead.Store(openAhead(f.File)) })
			break
		}
	}
	if a := f.ahead.Load(); a != nil && len(parts) > 0 {
		parts = a.start(parts)
	} else if a != nil {
		a.rest()
	}
	for _, p := range parts {
		willNeed(f.File, p)
	}
}

// ReadAt reads from at, as io.ReaderAt.
func (f *File) ReadAt(b []byte, at int64) (n int, err error) {
	a := f.ahead.Load()
	if a == nil || at < 0 {
		return f.File.ReadAt(b, at)
	}
	for n < len(b) {
		from := at + int64(n)
		rest := b[n:min(int64(len(b)), int64(n)+chunkBytes-from%chunkBytes)]
		copied := a.copy(rest, from)
		if copied < len(rest) {
			var read int
			read, err = f.File.ReadAt(rest[copied:], from+int64(copied))
			copied += read
		}
		if n += copied; err != nil {
			return n, err
		}
	}
	return n, nil
}

// Used ends a reading: chunks that were used, and that the last call of Prefetch did not ask for, go.
func (f *File) Used() {
	if a := f.ahead.Load(); a != nil {
		a.forgetUsed()
	}
}

// Close closes the file.
func (f *File) Close() error {
	if a := f.ahead.Swap(nil); a != nil {
		a.close()
	}
	return f.File.Close()
}

// ahead has the chunks of a file that were asked for.
type ahead struct {
	plain  *os.File
	direct direct
	fits   bool // the page cache has room for the file

	mu      sync.Mutex
	chunks  map[int64]*chunk // by their number in the file
	queue   []*chunk         // to read, in turn
	free    []*pages.Memory  // for chunks
	mapped  int              // memories that are free or in use
	calls   int              // of start
	reached int              // the last call whose own chunks were used
	off     bool             // nothing is read directly any more
	reading int              // reads under way
	reads   sync.WaitGroup

	bytes int64         // that were read
	busy  time.Duration // with at least one read under way, until since
	since time.Time
}

// chunk is chunkBytes of the file.
type chunk struct {
	number      int64
	first, last int // the first and the last call that asked for it
	wanted      int // bytes that were asked for and not copied yet
	used        bool
	users       int // goroutines that wait for data, copy from it or read into it
	dropped     bool
	ready       chan struct{} // closed when data is there, or never will be
	data        *pages.Memory // nil before it is read
	size        int           // bytes of data that were read
}

// openAhead returns nil if there are no direct reads of the file.
func openAhead(f *os.File) *ahead {
	info, err := f.Stat()
	if err != nil {
		return nil
	}
	d, err := openDirect(f)
	if err != nil {
		return nil
	}
	// Each read keeps a thread that may run Go code. One more is for a thread of the host.
	procs.Need(procs.Count + mostReads + 1)
	adviseRandom(f, true)
	room, known := memory.Available()
	return &ahead{plain: f, direct: d, fits: known && info.Size() <= room/2, chunks: map[int64]*chunk{}}
}

// start asks for parts. It returns the parts that are not read directly.
func (a *ahead) start(parts []Part) (rest []Part) {
	a.takeTurn()
	if !a.isOn() {
		a.rest()
		return parts
	}
	var chunks []chunk
	for _, p := range parts {
		if p.End-p.From < longBytes {
			rest = append(rest, p)
		} else if own := chunksOf(p, a.plain); len(chunks)+len(own) > mostChunks {
			rest = append(rest, p)
		} else {
			chunks = append(chunks, own...)
		}
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.calls++
	for _, one := range chunks {
		c := a.chunks[one.number]
		if c == nil {
			c = &one
			c.first, c.ready = a.calls, make(chan struct{})
			a.chunks[c.number] = c
			a.queue = append(a.queue, c)
		} else {
			c.wanted += one.wanted
		}
		c.last = a.calls
	}
	a.work()
	return rest
}

// turns has the last call of start of each open file.
var turns = struct {
	sync.Mutex
	calls int
	last  map[*ahead]int
}{last: map[*ahead]int{}}

// takeTurn begins a call of start. Files whose last call was long ago give their memory back: a data set can
// have many files, and reads them in turn.
func (a *ahead) takeTurn() {
	var stale []*ahead
	turns.Lock()
	turns.calls++
	turns.last[a] = turns.calls
	for b, call := range turns.last {
		if turns.calls-call > staleCalls {
			stale = append(stale, b)
			delete(turns.last, b)
		}
	}
	turns.Unlock()
	for _, b := range stale {
		b.rest()
	}
}

// chunksOf returns the chunks of a part that the page cache does not have.
func chunksOf(p Part, f *os.File) (chunks []chunk) {
	for k := p.From / chunkBytes; k*chunkBytes < p.End; k++ {
		from, end := max(p.From, k*chunkBytes), min(p.End, (k+1)*chunkBytes)
		if !cached(f, Part{from, end}) {
			chunks = append(chunks, chunk{number: k, wanted: int(end - from)})
		}
	}
	return chunks
}

// isOn reports whether there are direct reads. It turns them off if the disk is slow and the page cache has
// room for the file: then a second pass over it finds it there.
func (a *ahead) isOn() bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	busy := a.busy
	if a.reading > 0 {
		busy += time.Since(a.since)
	}
	if a.fits && a.bytes >= measuredBytes && float64(a.bytes) < slowRate*busy.Seconds() {
		a.turnOff()
	}
	return !a.off
}

// turnOff leaves the file to the system from now on.
func (a *ahead) turnOff() {
	if !a.off {
		a.off = true
		adviseRandom(a.plain, false)
	}
}

// work starts reads while there is memory for them.
func (a *ahead) work() {
	for a.reading < mostReads && len(a.queue) > 0 {
		m := a.take()
		if m == nil {
			return
		}
		c := a.queue[0]
		a.queue = a.queue[1:]
		c.data = m
		c.users++
		if a.reading == 0 {
			a.since = time.Now()
		}
		a.reading++
		a.reads.Go(func() { a.read(c) })
	}
}

// take returns memory for a chunk, or nil. If the system has none, nothing is read ahead any more.
func (a *ahead) take() *pages.Memory {
	if last := len(a.free) - 1; last >= 0 {
		m := a.free[last]
		a.free = a.free[:last]
		return m
	}
	if a.mapped == mostChunks {
		return nil
	}
	m, err := pages.Map(chunkBytes)
	if err != nil {
		a.turnOff()
		for len(a.queue) > 0 {
			a.drop(a.queue[0])
		}
		return nil
	}
	a.mapped++
	return m
}

// read reads a chunk. A failure is left to ReadAt, which tries again and has the error.
func (a *ahead) read(c *chunk) {
	n, err := a.direct.read(c.data.Bytes, c.number*chunkBytes)
	a.mu.Lock()
	defer a.mu.Unlock()
	c.size = n
	close(c.ready)
	a.bytes += int64(n)
	if a.reading--; a.reading == 0 {
		a.busy += time.Since(a.since)
	}
	if err != nil {
		a.turnOff()
	}
	a.leave(c)
}

// copy copies what the chunk of at has, and returns how many bytes. It waits for the chunk.
func (a *ahead) copy(b []byte, at int64) int {
	a.mu.Lock()
	c := a.chunks[at/chunkBytes]
	if c == nil {
		a.mu.Unlock()
		return 0
	}
	c.users++
	if c.first > a.reached {
		a.reached = c.first
		for _, other := range a.chunks {
			if other.last < a.reached {
				a.drop(other)
			}
		}
		a.work()
	}
	a.mu.Unlock()

	<-c.ready
	n := 0
	if from := int(at % chunkBytes); from < c.size {
		n = copy(b, c.data.Bytes[from:c.size])
	}

	a.mu.Lock()
	defer a.mu.Unlock()
	c.used = true
	if c.wanted -= n; c.wanted <= 0 {
		a.drop(c)
	}
	a.leave(c)
	return n
}

func (a *ahead) forgetUsed() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.chunks {
		if c.used && c.last < a.calls {
			a.drop(c)
		}
	}
	a.work()
}

// leave ends a use of a chunk. It gives back the memory of a dropped one.
func (a *ahead) leave(c *chunk) {
	c.users--
	if c.dropped {
		a.reclaim(c)
	}
	a.work()
}

// drop forgets a chunk.
func (a *ahead) drop(c *chunk) {
	if c.dropped {
		return
	}
	c.dropped = true
	delete(a.chunks, c.number)
	if k := slices.Index(a.queue, c); k >= 0 {
		a.queue = slices.Delete(a.queue, k, k+1)
		close(c.ready)
	}
	a.reclaim(c)
}

func (a *ahead) reclaim(c *chunk) {
	if c.users == 0 && c.data != nil {
		a.free = append(a.free, c.data)
		c.data = nil
	}
}

// rest drops all chunks, and gives back the memory that nobody uses.
func (a *ahead) rest() {
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, c := range a.chunks {
		a.drop(c)
	}
	for _, m := range a.free {
		m.Release(chunkBytes)
	}
	a.mapped -= len(a.free)
	a.free = nil
}

func (a *ahead) close() {
	turns.Lock()
	delete(turns.last, a)
	turns.Unlock()
	a.rest()
	a.reads.Wait()
	a.rest()
	a.direct.close()
}

var _ io.ReaderAt = (*File)(nil)
