// Package stream writes the packet file. The file has whole packets, one after another, so it can be read
// up to its end at every moment. After a crash it ends with at most one torn packet.
package stream

import (
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/pages"
	"github.com/libstrap/strap/libstrap/internal/partial"
	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/stopwatch"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// maxBlocks is the most blocks of a Writer: one is filled, one is written, and one more in case
	// either takes longer.
	maxBlocks = 3
	// maxBlock is the bytes of a block that make writes fast. Captures with little memory have
	// smaller blocks, down to minBlock.
	maxBlock = 8 << 20
	minBlock = 256 << 10
)

// Options are the options of a Writer. The zero value is valid.
type Options struct {
	// Memory is the most bytes of all blocks, but they have at least 768 KiB. 0 means 24 MiB.
	Memory int64
	// Thread is called in the thread that writes: when it starts, and when direct changes. direct tells
	// whether it writes past the page cache. nil calls nothing.
	Thread func(direct bool)
	Files  Files // nil: the files of the system
	// Busy counts the time spent in write calls; several Writers may share it. nil: each has its own.
	Busy *stopwatch.Stopwatch

	Overwrite bool // Create replaces any file at the path
}

// block returns the bytes of a block, a power of two.
func (o Options) block() int {
	size := maxBlock
	for o.Memory > 0 && size > minBlock && int64(size)*maxBlocks > o.Memory {
		size /= 2
	}
	return size
}

// Writer appends packets to a stream file. It is not safe for concurrent use.
//
// Packets are copied into blocks, or made there (Place). Another goroutine writes full blocks to the file.
// The blocks are a ring in one piece of memory. The next block of the file is also the next in memory,
// except that the first block follows the last.
//
// After a failed write the file is cut back to its last complete packet, and all later calls return the
// same error.
type Writer struct {
	path    string
	disk    *disk
	size    int // of a block
	pages   *pages.Memory
	ring    []byte   // the memory of maxBlocks blocks
	blocks  []*block // blocks that were used so far
	turn    int      // index of the block that is used next
	block   *block   // block that is filled; nil: the next byte begins a block
	offset  int64    // offset of the next byte
	flushed int64    // bytes that Flush has brought into the file
	done    chan struct{}
}

// Create opens path for a new stream and locks it. If there is a stream at path, a new file replaces it.
// Readers that have the old file open can go on reading it. If the folder does not allow this, the old
// file is emptied instead. Create calls beside, which may be nil, to open the files that belong to the
// stream. If Create fails, the old stream is unchanged, and a new file is removed.
//
// Errors: Busy if another capture has the stream, InvalidArgument if the file is no stream and
// Options.Overwrite is not set, and the errors of beside and of the system.
func Create(path string, o Options, beside func() error) (w *Writer, err error) {
	f, err := lock(path, os.O_RDWR|os.O_CREATE, o.Files)
	if err != nil {
		return nil, err
	}
	var next *successor // nil: empty f
	defer func() {
		if err == nil {
			return
		}
		if next != nil {
			err = errors.Join(err, next.discard())
		}
		if f.created {
			err = errors.Join(err, os.Remove(path))
		}
		err = errors.Join(err, f.Close())
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, status.FromOS(err, "cannot stat %q", path)
	}
	if info.Size() > 0 {
		if !o.Overwrite {
			if err := ours(f, info.Size(), path); err != nil {
				return nil, err
			}
		}
		if next, err = f.succeed(path); err != nil && !partial.Refused(err) {
			return nil, err
		}
	}
	if beside != nil {
		if err := beside(); err != nil {
			return nil, err
		}
	}
	if next != nil {
		if err = next.partial.Rename(); err == nil {
			_ = f.Close() // f was only read
			return newWriter(path, next.lockedFile, o), nil
		}
		if !partial.Refused(err) {
			return nil, err
		}
		refused := next
		if next = nil; refused.discard() != nil {
			return nil, err
		}
	}
	if err := f.Truncate(0); err != nil {
		return nil, status.FromOS(err, "cannot empty %q", path)
	}
	return newWriter(path, f, o), nil
}

// ours returns an error unless a capture made the file of size bytes at path. A capture made it if the
// index beside it has its first packet or no packet yet, or if the file has packets alone.
func ours(f io.ReaderAt, size int64, path string) error {
	if index.Begins(index.PathOf(path), f) {
		return nil
	}
	_, err := scan.Packets(f, 0, size, func(scan.Packet) error { return nil })
	if errors.Is(err, status.Corrupt) {
		return status.Wrap(status.InvalidArgument, err,
			"%q is no stream of a capture: name another file, or give overwrite to replace it", path)
	}
	return err
}

func newWriter(path string, f *lockedFile, o Options) *Writer {
	return &Writer{
		path: path, disk: newDisk(path, f, o.Thread, o.Busy), size: o.block(), done: make(chan struct{}, 1),
	}
}

// KeepAll is the cut of Resume that keeps every complete packet.
const KeepAll = -1

// Resume opens the stream at path to append to it. It cuts the file back to cut bytes, or with KeepAll to
// its last complete packet. The bytes behind are moved to path.tail-N. tail is this name, or "" if nothing
// was cut.
//
// Resume calls check, which may be nil, with the stream and the length that it will have. If check fails,
// the file is unchanged.
func Resume(path string, cut int64, o Options, check func(stream io.ReaderAt, end int64) error) (w *Writer, tail string, err error) {
	f, err := lock(path, os.O_RDWR, o.Files)
	if err != nil {
		return nil, "", err
	}
	defer func() {
		if err != nil {
			f.Close()
		}
	}()
	info, err := f.Stat()
	if err != nil {
		return nil, "", status.FromOS(err, "cannot stat %q", path)
	}
	size := info.Size()
	if cut > size {
		return nil, "", status.New(status.Corrupt,
			"%q has %d bytes, the checkpoint covers %d: this is not its stream", path, size, cut)
	}
	until := size
	if cut >= 0 {
		until = cut
	}
	end, err := scan.Packets(f, 0, until, func(scan.Packet) error { return nil })
	if err != nil && !errors.Is(err, status.Corrupt) {
		return nil, "", err
	}
	if cut >= 0 && end != cut {
		return nil, "", status.New(status.Corrupt,
			"%q: no packet ends at the checkpoint's offset %d: this is not its stream", path, cut)
	}
	if end == 0 && size > 0 && cut < 0 && !index.Begins(index.PathOf(path), f) {
		return nil, "", status.Wrap(status.Corrupt, err,
			"%q is no stream of a capture: move it away, or name another file", path)
	}
	if check != nil {
		if err := check(f, end); err != nil {
			return nil, "", err
		}
	}
	if tail, err = moveTail(f.File, path, end, size); err != nil {
		return nil, "", err
	}
	w = newWriter(path, f, o)
	if err = w.rewind(end); err != nil {
		return nil, "", errors.Join(err, w.Close())
	}
	w.disk.written.Store(end)
	return w, tail, nil
}

// moveTail copies the bytes [from, to) of f to a new file path.tail-N, makes that file durable, and cuts
// f.
func moveTail(f *os.File, path string, from, to int64) (name string, err error) {
	if from == to {
		return "", nil
	}
	var t *os.File
	for n := 1; t == nil; n++ {
		name = fmt.Sprintf("%s.tail-%d", path, n)
		t, err = os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o666)
		if err != nil && !errors.Is(err, os.ErrExist) {
			return "", status.FromOS(err, "cannot create %q for the cut end of the stream", name)
		}
	}
	_, err = io.Copy(t, io.NewSectionReader(f, from, to-from))
	if err == nil {
		err = t.Sync()
	}
	if cerr := t.Close(); err == nil {
		err = cerr
	}
	if err != nil {
		return "", errors.Join(status.FromOS(err, "cannot copy the cut end of the stream to %q", name), os.Remove(name))
	}
	if err := f.Truncate(from); err != nil {
		return "", status.FromOS(err, "cannot cut %q", path)
	}
	return name, nil
}

// Offset returns the offset of the next packet.
func (w *Writer) Offset() int64 { return w.offset }

// Written returns the length of the complete packets in the file. Written and Busy may be called while
// another goroutine uses the Writer.
func (w *Writer) Written() int64 { return w.disk.written.Load() }

// Room returns how many bytes Append takes without waiting for the disk.
func (w *Writer) Room() int64 {
	blocks := len(w.disk.free) + maxBlocks - len(w.blocks)
	room := int64(blocks) * int64(w.size)
	if w.block != nil {
		room += int64(len(w.block.mem) - w.block.n)
	}
	return room
}

// Passed returns the length of the bytes that are in the file, or will be there without a Flush.
func (w *Writer) Passed() int64 {
	if b := w.block; b != nil {
		return b.at + int64(b.seen)
	}
	return w.offset
}

// Busy returns the time spent in write calls, including a call that is under way.
func (w *Writer) Busy() time.Duration { return w.disk.busy.Total() }

// TakeMemory gives a new Writer the blocks of another one with the same Options.Memory. Flush must have
// written all bytes of the other one, which can only be synced and closed from then on.
func (w *Writer) TakeMemory(from *Writer) {
	w.pages, w.ring = from.pages, from.ring
	for at := range from.blocks {
		w.blocks = append(w.blocks, &block{mem: w.ring[at*w.size:][:w.size:w.size]})
		w.disk.free <- w.blocks[at]
	}
	from.pages, from.ring, from.blocks, from.block = nil, nil, nil, nil
}

// Append adds one complete packet (header, name, payload). The packet may stay in memory until Flush. A
// later call may return the error of its write.
func (w *Writer) Append(packet []byte) error {
	if err := w.fill(packet); err != nil {
		return err
	}
	w.mark()
	return nil
}

// Place returns the memory of the next n bytes of the stream. The caller makes a packet there, and adds it
// with Commit or gives it up, before any other call. Place returns nil if the packet would have to wait
// for the disk, or would go beyond the ring's end.
func (w *Writer) Place(n int) []byte {
	if w.disk.err() != nil || int64(n) > w.Room() || w.mapRing() != nil {
		return nil
	}
	from := w.turn * w.size
	if b := w.block; b != nil && b.n < len(b.mem) {
		from = (w.turn+maxBlocks-1)%maxBlocks*w.size + b.n
	}
	if from+n > len(w.ring) {
		return nil
	}
	return w.ring[from : from+n : from+n]
}

// Commit adds the complete packet of n bytes that was made in Place(n); see Append.
func (w *Writer) Commit(n int) error {
	for n > 0 {
		room, err := w.space()
		if err != nil {
			return err
		}
		n -= w.advance(min(n, len(room)))
	}
	w.mark()
	return nil
}

// fill copies bytes into blocks.
func (w *Writer) fill(p []byte) error {
	if err := w.disk.err(); err != nil {
		return err
	}
	for len(p) > 0 {
		room, err := w.space()
		if err != nil {
			return err
		}
		p = p[w.advance(copy(room, p)):]
	}
	return nil
}

// space returns the memory of the next bytes. It is not empty.
func (w *Writer) space() ([]byte, error) {
	w.pass()
	if w.block == nil {
		if err := w.take(); err != nil {
			return nil, err
		}
	}
	return w.block.mem[w.block.n:], nil
}

// advance counts n bytes of the space as filled, and returns n.
func (w *Writer) advance(n int) int {
	w.block.n += n
	w.offset += int64(n)
	return n
}

// mark ends a packet.
func (w *Writer) mark() {
	if w.block != nil {
		w.block.end = w.offset
	}
	w.pass()
}

// pass gives a full block to the disk.
func (w *Writer) pass() {
	if b := w.block; b != nil && b.n == len(b.mem) {
		w.block = nil
		w.disk.jobs <- job{block: b}
	}
}

// take begins a block at the offset. It waits for the disk if no block is free.
func (w *Writer) take() error {
	if err := w.mapRing(); err != nil {
		w.disk.refuse(err) // half of a packet may be in earlier blocks
		return err
	}
	if w.turn == len(w.blocks) {
		w.blocks = append(w.blocks, &block{mem: w.ring[w.turn*w.size:][:w.size:w.size]})
	} else {
		<-w.disk.free // it is the block at turn: blocks are written in order
	}
	b := w.blocks[w.turn]
	w.turn = (w.turn + 1) % maxBlocks
	b.reset(w.offset)
	w.block = b
	return w.disk.err()
}

// mapRing maps the memory of the blocks, if it is not mapped.
func (w *Writer) mapRing() error {
	if w.ring != nil {
		return nil
	}
	m, err := pages.Map(w.size * maxBlocks)
	if err != nil {
		return status.Wrap(status.NoMemory, err, "cannot map %d bytes to write from", w.size*maxBlocks)
	}
	w.pages, w.ring = m, m.Bytes
	return nil
}

// Flush writes all appended bytes to the file.
func (w *Writer) Flush() error {
	if w.flushed < w.offset {
		w.disk.jobs <- job{w.block, w.done}
		<-w.done
		w.flushed = w.offset
	}
	return w.disk.err()
}

// rewind makes the file end at offset at. All bytes before must be in the file, and no job under way.
func (w *Writer) rewind(at int64) error {
	if err := w.disk.cut(at); err != nil {
		w.disk.refuse(err)
		return err
	}
	keep := at % int64(w.disk.align)
	w.offset, w.flushed = at-keep, at
	if w.block != nil {
		w.block.reset(w.offset)
	} else if err := w.take(); err != nil {
		return err
	}
	b := w.block
	if _, err := w.disk.f.ReadAt(b.mem[:keep], w.offset); err != nil {
		err = status.FromOS(err, "cannot read the end of %q", w.path)
		w.disk.refuse(err)
		return err
	}
	b.n, b.seen, w.offset = int(keep), int(keep), at
	return nil
}

// Long is a packet that is written piece by piece. The length of its payload is not known before its end.
// Until Finish or Abort nothing else can be appended.
type Long struct {
	w       *Writer
	at      int64
	name    int // length of the name
	payload int64
}

// Begin starts a long packet. Until Finish the file ends with a torn packet; see wire.Unfinished.
func (w *Writer) Begin(name []byte) (*Long, error) {
	l := &Long{w: w, at: w.offset, name: len(name)}
	head := make([]byte, wire.HeaderSize, wire.HeaderSize+len(name))
	wire.PutHeader(head, len(name), wire.Unfinished)
	return l, w.fill(append(head, name...))
}

// Write adds to the payload.
func (l *Long) Write(b []byte) (int, error) {
	if l.payload+int64(len(b)) > wire.MaxPayload {
		return 0, status.New(status.Internal, "payload of more than %d bytes", int64(wire.MaxPayload))
	}
	if err := l.w.fill(b); err != nil {
		return 0, err
	}
	l.payload += int64(len(b))
	return len(b), nil
}

// Finish writes the payload's length to the header. This makes the packet part of the stream. Finish
// returns the length of the whole packet.
func (l *Long) Finish() (length int64, err error) {
	w := l.w
	var head [wire.HeaderSize]byte
	wire.PutHeader(head[:], l.name, uint32(l.payload))
	if b := w.block; b == nil || l.at < b.at+int64(b.seen) {
		// The header is in the file, or on its way there.
		if err := w.Flush(); err != nil {
			return 0, err
		}
		if err := w.disk.patch(head[:], l.at); err != nil {
			return 0, err
		}
		w.disk.written.Store(w.offset)
	}
	if b := w.block; b != nil {
		b.patch(head[:], l.at)
	}
	w.mark()
	return int64(wire.HeaderSize+l.name) + l.payload, w.disk.err()
}

// Abort removes the packet. The file ends where the packet began.
func (l *Long) Abort() error {
	if err := l.w.Flush(); err != nil {
		return err
	}
	return l.w.rewind(l.at)
}

// Sync flushes, and waits until the file is durable.
func (w *Writer) Sync() error {
	if err := w.Flush(); err != nil {
		return err
	}
	// Both open files are one inode. This makes its bytes, its length and its blocks durable.
	if err := w.disk.f.Sync(); err != nil {
		// After a failed fsync the kernel may have dropped the dirty pages. A second fsync would
		// succeed without having written them.
		w.disk.refuse(status.FromOS(err, "cannot make %q durable", w.path))
	}
	return w.disk.err()
}

// Packets walks the complete packets in [from, Written()).
func (w *Writer) Packets(from int64, fn func(scan.Packet) error) error {
	_, err := scan.Packets(w.disk.f, from, w.Written(), fn)
	return err
}

// Stands reports whether the file is still at path, which is its absolute path. If it is not, now is its
// path, or "" if it has none.
func (w *Writer) Stands(path string) (stands bool, now string, err error) {
	if stands, err = w.disk.f.stands(path); stands || err != nil {
		return stands, "", err
	}
	return false, w.disk.f.now(), nil
}

// ReadAt reads from the file.
func (w *Writer) ReadAt(b []byte, at int64) (int, error) { return w.disk.f.ReadAt(b, at) }

// Close flushes, and releases the file and its lock.
func (w *Writer) Close() error {
	err := w.Flush()
	if cerr := w.disk.close(); err == nil {
		err = cerr
	}
	if w.pages != nil {
		w.pages.Release(len(w.blocks) * w.size)
	}
	return err
}
