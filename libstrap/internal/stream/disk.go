package stream

import (
	"errors"
	"math"
	"os"
	"runtime"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/stopwatch"
)

// maxAhead bounds the disk blocks that are taken behind the end of the file.
const maxAhead = 256 << 20

// block is a stretch of the file in memory. It belongs to the Writer while that
// fills it, and to the disk between a job and its end.
type block struct {
	mem   []byte
	at    int64 // of mem in the file, a multiple of the alignment
	n     int   // bytes of it that are filled
	seen  int   // of those, in the file
	solid int   // of those, past the page cache: a multiple of the alignment
	end   int64 // of the last packet that ends in it; 0: none does
}

// reset makes it the block that begins at offset at.
func (b *block) reset(at int64) { *b = block{mem: b.mem, at: at} }

// patch replaces bytes of the file by p, which is to stand at offset at, as far as
// they are in the block.
func (b *block) patch(p []byte, at int64) {
	from, to := max(at, b.at), min(at+int64(len(p)), b.at+int64(b.n))
	if from < to {
		copy(b.mem[from-b.at:to-b.at], p[from-at:])
	}
}

// job asks for what is filled of a block to be written, after all jobs before.
type job struct {
	block *block        // nil: nothing
	done  chan struct{} // receives then, and the block stays its Writer's; nil: it is free
}

// disk writes blocks to the file, one behind the other, in a goroutine of its own.
//
// Whole blocks go past the page cache, where the file system lets them: copying
// there takes more time than the disk does. One write is under way at a time, for
// several would let the file's size pass bytes that are not written; the kernel
// splits a large write into many requests by itself. What does not fill a unit of
// alignment goes through the page cache, and again past it in a later write.
type disk struct {
	path    string
	f       *lockedFile // through the page cache
	direct  *os.File    // past it; nil: there is no such way
	align   int         // of what goes that way
	taken   int64       // end of the disk blocks taken ahead
	written atomic.Int64
	busy    stopwatch.Stopwatch

	jobs  chan job
	free  chan *block
	ended chan struct{}

	mu     sync.Mutex
	failed error

	begin   func(direct bool)
	writeAt func(f *os.File, b []byte, at int64) (int, error) // (*os.File).WriteAt but in tests
}

// newDisk serves f until its jobs are closed. begin is called in the thread that writes,
// first and where it no longer writes past the page cache; nil is fine.
func newDisk(path string, f *lockedFile, begin func(direct bool)) *disk {
	d := &disk{
		path: path, f: f, align: os.Getpagesize(),
		jobs: make(chan job, maxBlocks+1), free: make(chan *block, maxBlocks), ended: make(chan struct{}),
		writeAt: (*os.File).WriteAt, begin: begin,
	}
	if begin == nil {
		d.begin = func(bool) {}
	}
	if direct, align := openDirect(path, f.File); direct != nil {
		d.direct, d.align = direct, align
	}
	go d.serve(d.direct != nil)
	return d
}

func (d *disk) serve(direct bool) {
	defer close(d.ended)
	runtime.LockOSThread() // and never unlock: the thread ends with what begin made of it
	d.begin(direct)
	for j := range d.jobs {
		if b := j.block; b != nil && d.err() == nil {
			if err := d.guarded(b); err != nil {
				d.fail(err, b.at+int64(b.seen))
			} else if b.end > 0 {
				d.written.Store(b.end)
			}
		}
		if j.done != nil {
			j.done <- struct{}{}
		} else {
			d.free <- j.block
		}
	}
}

func (d *disk) guarded(b *block) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = status.New(status.Internal, "panic: %v\n%s", p, debug.Stack())
		}
	}()
	if err := d.put(b); err != nil {
		return status.FromOS(err, "cannot write to %q", d.path)
	}
	return nil
}

// put writes what is filled of a block and not yet in the file.
func (d *disk) put(b *block) error {
	defer d.busy.Start()()
	if whole := b.n / d.align * d.align; d.direct != nil && whole > b.solid {
		// A page with bytes that a reader may have in its cache is made whole there
		// first: the rest of it would be zeros if it was still cached afterwards,
		// or after a power failure.
		if err := d.putCached(b, roundUp(b.seen, d.align)); err != nil {
			return err
		}
		if err := d.putDirect(b, whole); err != nil {
			return err
		}
	}
	return d.putCached(b, b.n)
}

func (d *disk) putCached(b *block, to int) error {
	if b.seen >= to {
		return nil
	}
	n, err := d.writeAt(d.f.File, b.mem[b.seen:to], b.at+int64(b.seen))
	b.seen += n
	return err
}

// putDirect leaves the bytes to putCached where the file system refuses them.
func (d *disk) putDirect(b *block, to int) error {
	d.takeAhead(b.at+int64(b.solid), b.at+int64(to))
	n, err := d.writeAt(d.direct, b.mem[b.solid:to], b.at+int64(b.solid))
	b.seen = max(b.seen, b.solid+n)
	if errors.Is(err, syscall.EINVAL) {
		d.direct.Close() // all it wrote was answered
		d.direct = nil
		d.begin(false)
		return nil
	}
	if err == nil {
		b.solid = to
	}
	return err
}

// patch replaces bytes in the middle of the file. No job is under way.
func (d *disk) patch(p []byte, at int64) error {
	defer d.busy.Start()()
	if n, err := d.writeAt(d.f.File, p, at); err != nil {
		d.fail(status.FromOS(err, "cannot write to %q", d.path), at+int64(n))
	}
	return d.err()
}

// takeAhead takes disk blocks for the bytes [from, to) and some behind them, at
// most as many as the file has, and a sixteenth of what is free: so that the file
// lies in few pieces, and others find room as long as there is some.
func (d *disk) takeAhead(from, to int64) {
	if to <= d.taken || to < minBlock {
		return
	}
	ahead := min(to, maxAhead, freeBytes(d.f.File)/16) / minBlock * minBlock
	if ahead == 0 {
		return
	}
	if err := preallocate(d.f.File, from, to+ahead-from); err != nil {
		d.taken = math.MaxInt64 // it does without
		return
	}
	d.taken = to + ahead
}

// trim gives blocks that were taken behind the file's end back.
func (d *disk) trim() {
	if d.taken == 0 {
		return
	}
	if info, err := d.f.Stat(); err == nil {
		// What fails here costs room, no bytes.
		_ = d.f.Truncate(info.Size())
	}
}

// cut makes the file end at offset end.
func (d *disk) cut(end int64) error {
	d.taken = 0
	err := d.f.Truncate(end)
	if err == nil {
		return nil
	}
	if info, failed := d.f.Stat(); failed == nil && info.Size() == end {
		return nil // all that stays are disk blocks that were taken ahead
	}
	return status.FromOS(err, "cannot cut %q back to its last packet", d.path)
}

// fail ends the writing after a write that left valid bytes in the file: it is
// cut back to the last complete packet.
func (d *disk) fail(cause error, valid int64) {
	end, _ := scan.Packets(d.f, d.written.Load(), valid, func(scan.Packet) error { return nil })
	d.written.Store(end)
	d.refuse(errors.Join(cause, d.cut(end)))
}

// refuse makes err the answer to all that follows, if nothing failed before.
func (d *disk) refuse(err error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.failed == nil {
		d.failed = err
	}
}

func (d *disk) err() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.failed
}

// close waits until all jobs are done and closes the file.
func (d *disk) close() error {
	close(d.jobs)
	<-d.ended
	d.trim()
	if d.direct != nil {
		d.direct.Close()
	}
	if err := d.f.Close(); err != nil {
		return status.FromOS(err, "cannot close %q", d.path)
	}
	return nil
}

func roundUp(n, unit int) int { return (n + unit - 1) / unit * unit }
