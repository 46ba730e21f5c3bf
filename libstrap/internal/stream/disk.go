// Writes blocks to the file, in a goroutine of its own.

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

// maxAhead is the most bytes of disk blocks that are allocated behind the end of the file.
const maxAhead = 256 << 20

// block is a range of the file in memory. It belongs to the Writer while the Writer fills it, and to the
// disk from a job to the job's end.
type block struct {
	mem   []byte
	at    int64 // offset of mem in the file, a multiple of the alignment
	n     int   // filled bytes of mem
	seen  int   // of n, bytes that are in the file
	solid int   // of n, bytes that a direct write has written; a multiple of the alignment
	end   int64 // end of the last packet that ends in the block; 0: no packet does
}

// reset makes it an empty block that begins at offset at.
func (b *block) reset(at int64) { *b = block{mem: b.mem, at: at} }

// patch replaces the bytes at offset at of the file by p, as far as the block has these bytes.
func (b *block) patch(p []byte, at int64) {
	from, to := max(at, b.at), min(at+int64(len(p)), b.at+int64(b.n))
	if from < to {
		copy(b.mem[from-b.at:to-b.at], p[from-at:])
	}
}

// job asks the disk to write the filled bytes of a block, after all earlier jobs.
type job struct {
	block *block        // nil: write nothing
	done  chan struct{} // receives a value when the job is done; the Writer keeps the block. nil: the block becomes free
}

// disk writes blocks to the file, one after another, in a goroutine of its own.
//
// If the file system allows it, whole blocks are written past the page cache: copying them there takes
// more time than the disk does. There is one write at a time. With several writes the file's size could
// pass bytes that are not written yet, and the kernel splits a large write into many requests anyway.
// Bytes that do not fill a unit of alignment go through the page cache, and are written directly with a
// later write.
type disk struct {
	path    string
	f       *lockedFile  // for writes through the page cache
	direct  *os.File     // for direct writes; nil: there are none
	align   int          // of direct writes
	taken   int64        // end of the disk blocks that are allocated ahead
	written atomic.Int64 // end of the last complete packet in the file
	busy    *stopwatch.Stopwatch

	jobs  chan job
	free  chan *block
	ended chan struct{}

	mu     sync.Mutex
	failed error

	begin   func(direct bool)
	writeAt func(f *os.File, b []byte, at int64) (int, error) // (*os.File).WriteAt; tests replace it
}

// newDisk starts a disk for f, which ends when its jobs are closed. The thread that writes calls begin
// when it starts, and again when direct writes end. begin and busy may be nil.
func newDisk(path string, f *lockedFile, begin func(direct bool), busy *stopwatch.Stopwatch) *disk {
	if busy == nil {
		busy = &stopwatch.Stopwatch{}
	}
	d := &disk{
		path: path, f: f, align: os.Getpagesize(), busy: busy,
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
	runtime.LockOSThread() // never unlocked: the thread ends with its changes by begin
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

// put writes the filled bytes of a block that are not yet in the file.
func (d *disk) put(b *block) error {
	defer d.busy.Start()()
	if whole := b.n / d.align * d.align; d.direct != nil && whole > b.solid {
		// A reader may have the last page of the file in the page cache. Fill that page through
		// the cache before the direct write. Otherwise its rest would be zeros, if it was still
		// cached after the direct write, or after a power failure.
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

// putDirect writes bytes past the page cache. If the file system refuses this, putCached writes them.
func (d *disk) putDirect(b *block, to int) error {
	d.takeAhead(b.at+int64(b.solid), b.at+int64(to))
	n, err := d.writeAt(d.direct, b.mem[b.solid:to], b.at+int64(b.solid))
	b.seen = max(b.seen, b.solid+n)
	if errors.Is(err, syscall.EINVAL) {
		d.direct.Close() // no write is under way
		d.direct = nil
		d.begin(false)
		return nil
	}
	if err == nil {
		b.solid = to
	}
	return err
}

// patch replaces bytes in the middle of the file. No job may be under way.
func (d *disk) patch(p []byte, at int64) error {
	defer d.busy.Start()()
	if n, err := d.writeAt(d.f.File, p, at); err != nil {
		d.fail(status.FromOS(err, "cannot write to %q", d.path), at+int64(n))
	}
	return d.err()
}

// takeAhead allocates disk blocks for the bytes [from, to) and for more bytes behind them: at most as
// many as the file has, and at most a sixteenth of the free bytes. So the file is in few pieces, and
// other programs still find room.
func (d *disk) takeAhead(from, to int64) {
	if to <= d.taken || to < minBlock {
		return
	}
	ahead := min(to, maxAhead, freeBytes(d.f.File)/16) / minBlock * minBlock
	if ahead == 0 {
		return
	}
	if err := preallocate(d.f.File, from, to+ahead-from); err != nil {
		d.taken = math.MaxInt64 // do not try again
		return
	}
	d.taken = to + ahead
}

// trim frees the disk blocks behind the file's end.
func (d *disk) trim() {
	if d.taken == 0 {
		return
	}
	if info, err := d.f.Stat(); err == nil {
		// An error costs disk space, but no bytes of the stream.
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
		return nil // only disk blocks that were allocated ahead remain
	}
	return status.FromOS(err, "cannot cut %q back to its last packet", d.path)
}

// fail ends the writing after a failed write. The bytes before offset valid are in the file. fail cuts the
// file back to its last complete packet.
func (d *disk) fail(cause error, valid int64) {
	end, _ := scan.Packets(d.f, d.written.Load(), valid, func(scan.Packet) error { return nil })
	d.written.Store(end)
	d.refuse(errors.Join(cause, d.cut(end)))
}

// refuse makes err the error of all later calls, unless there is an earlier error.
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
