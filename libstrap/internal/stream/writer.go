// Package stream writes the packet file: whole packets one behind the other, so
// that the file is readable up to its end at every moment, and at worst ends in
// one torn packet after a crash.
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
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	// maxBlocks is how many blocks there are at most: one that is filled, one that
	// is written, and one in case either takes longer.
	maxBlocks = 3
	// A block is as large as makes writes fast, but for captures of little memory.
	maxBlock = 8 << 20
	minBlock = 256 << 10
)

// Options of a Writer. The zero value is fit for use.
type Options struct {
	Memory int64             // bytes that its blocks may take, above 768 KiB; 0: 24 MiB
	Thread func(direct bool) // called in the thread that writes, first and when direct, past the page cache, changes
	Files  Files             // nil: those of the system

	Overwrite bool // Create replaces whatever file stands at the path
}

// block is the size of its blocks, a power of two.
func (o Options) block() int {
	size := maxBlock
	for o.Memory > 0 && size > minBlock && int64(size)*maxBlocks > o.Memory {
		size /= 2
	}
	return size
}

// Writer appends packets to a stream file. Not safe for concurrent use.
//
// Packets are copied into blocks, or made there (Place), which another goroutine writes as
// they fill. The blocks are a ring in one piece of memory: the one behind a block in the file
// is behind it in memory too, but for the first behind the last.
// After a failed write the file is cut back to its last complete packet, and the
// writer answers the same error from then on.
type Writer struct {
	path    string
	disk    *disk
	size    int // of a block
	pages   *pages.Memory
	ring    []byte   // all of them, the memory of maxBlocks
	blocks  []*block // those that were used so far
	turn    int      // the block that is taken next
	block   *block   // that is filled; nil: the next byte begins one
	offset  int64    // where the next byte will stand
	flushed int64    // of those before, in the file
	done    chan struct{}
}

// Create opens path for a new stream and locks it. A stream that stands there is replaced by a
// new file, so that whoever has it open goes on reading it. Where the folder lets no file take
// its place, it is emptied instead. beside, which may be nil, opens what belongs to the stream.
// If Create fails, the old stream stays as it was, and a new file is removed.
//
// Errors: Busy (another capture holds the stream), InvalidArgument (the file is no stream, and
// not to be overwritten), those of beside and of the system.
func Create(path string, o Options, beside func() error) (w *Writer, err error) {
	f, err := lock(path, os.O_RDWR|os.O_CREATE, o.Files)
	if err != nil {
		return nil, err
	}
	var next *successor // nil: f is emptied
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
			_ = f.Close() // which was only read
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

// ours is an error unless a capture made the file of size bytes at path: the index beside it has
// its first packet or none yet, or packets are all that it holds.
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
		path: path, disk: newDisk(path, f, o.Thread), size: o.block(), done: make(chan struct{}, 1),
	}
}

// KeepAll as the cut of Resume keeps every complete packet.
const KeepAll = -1

// Resume opens the stream at path to append to it. The file is cut back to cut
// bytes, or to its last complete packet with KeepAll; what stood behind is
// moved to path.tail-N, whose name is returned ("" where nothing was cut).
//
// check, which may be nil, looks at the stream and at the length that it will have. Where it
// fails the file stays as it was.
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

// moveTail copies the bytes [from, to) of f to a new file path.tail-N, makes it
// durable and cuts f.
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

// Offset is where the next packet will stand.
func (w *Writer) Offset() int64 { return w.offset }

// Written is the length of the complete packets in the file. It may be called
// while another goroutine writes, and so may Busy.
func (w *Writer) Written() int64 { return w.disk.written.Load() }

// Room is how many bytes Append takes without waiting for the disk.
func (w *Writer) Room() int64 {
	blocks := len(w.disk.free) + maxBlocks - len(w.blocks)
	room := int64(blocks) * int64(w.size)
	if w.block != nil {
		room += int64(len(w.block.mem) - w.block.n)
	}
	return room
}

// Passed is the length of what is in the file or comes there without a Flush.
func (w *Writer) Passed() int64 {
	if b := w.block; b != nil {
		return b.at + int64(b.seen)
	}
	return w.offset
}

// Busy is the time spent in write calls, one under way included.
func (w *Writer) Busy() time.Duration { return w.disk.busy.Total() }

// Append adds one complete packet (header, name, payload). It may stay in memory
// until Flush, and the error of a write may be the answer to a later call.
func (w *Writer) Append(packet []byte) error {
	if err := w.fill(packet); err != nil {
		return err
	}
	w.mark()
	return nil
}

// Place is the memory of the next n bytes of the stream, for a packet that is made there and
// then added by Commit, or is not, with nothing else in between; nil where it has to wait for
// the disk, or would go around the ring's end.
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

// space is where the next bytes go; not empty.
func (w *Writer) space() ([]byte, error) {
	w.pass()
	if w.block == nil {
		if err := w.take(); err != nil {
			return nil, err
		}
	}
	return w.block.mem[w.block.n:], nil
}

// advance says that n bytes of the space are filled.
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

// take gets a block for what begins at the offset. It waits for the disk where
// all are on their way there.
func (w *Writer) take() error {
	if err := w.mapRing(); err != nil {
		w.disk.refuse(err) // a packet may be half in the blocks before
		return err
	}
	if w.turn == len(w.blocks) {
		w.blocks = append(w.blocks, &block{mem: w.ring[w.turn*w.size:][:w.size:w.size]})
	} else {
		<-w.disk.free // the one whose turn it is: they are written in their order
	}
	b := w.blocks[w.turn]
	w.turn = (w.turn + 1) % maxBlocks
	b.reset(w.offset)
	w.block = b
	return w.disk.err()
}

// mapRing maps the memory of the blocks, once.
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

// Flush brings everything appended into the file.
func (w *Writer) Flush() error {
	if w.flushed < w.offset {
		w.disk.jobs <- job{w.block, w.done}
		<-w.done
		w.flushed = w.offset
	}
	return w.disk.err()
}

// rewind makes the file end at offset at, which is in it, and nothing of it be
// under way.
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

// Long is a packet that is written piece by piece, its payload's length not
// known before its end. While it is open nothing else can be appended.
type Long struct {
	w       *Writer
	at      int64
	name    int // its length
	payload int64
}

// Begin starts a long packet. Until Finish the file ends in a torn packet, as
// wire.Unfinished says.
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

// Finish fills in the length and so makes the packet part of the stream; it
// returns its whole length.
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

// Abort takes the packet back: the file ends where it began.
func (l *Long) Abort() error {
	if err := l.w.Flush(); err != nil {
		return err
	}
	return l.w.rewind(l.at)
}

// Sync flushes and waits until the file is durable.
func (w *Writer) Sync() error {
	if err := w.Flush(); err != nil {
		return err
	}
	// Both ways lead to one inode, whose bytes, length and blocks this covers.
	if err := w.disk.f.Sync(); err != nil {
		// After a failed fsync the kernel may have dropped the dirty pages:
		// trying again would report a success that means nothing.
		w.disk.refuse(status.FromOS(err, "cannot make %q durable", w.path))
	}
	return w.disk.err()
}

// Packets walks the complete packets in [from, Written()).
func (w *Writer) Packets(from int64, fn func(scan.Packet) error) error {
	_, err := scan.Packets(w.disk.f, from, w.Written(), fn)
	return err
}

// Stands reports whether the file is still at its path, which is absolute. If it is not, now is
// where it is, or "" if it is nowhere.
func (w *Writer) Stands(path string) (stands bool, now string, err error) {
	if stands, err = w.disk.f.stands(path); stands || err != nil {
		return stands, "", err
	}
	return false, w.disk.f.now(), nil
}

// ReadAt reads what is written.
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
