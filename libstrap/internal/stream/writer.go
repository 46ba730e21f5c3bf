// Package stream writes the packet file: whole packets one behind the other, so
// that the file is readable up to its end at every moment, and at worst ends in
// one torn packet after a crash.
package stream

import (
	"errors"
	"fmt"
	"io"
	"os"
	"syscall"
	"time"

	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/stopwatch"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const bufferSize = 1 << 20

// Writer appends packets to a stream file. Not safe for concurrent use.
//
// A failed write cuts the file back to the last complete packet and makes the
// writer answer the same error from then on.
type Writer struct {
	path    string
	f       *os.File
	written int64  // complete packets in the file
	buf     []byte // complete packets behind them
	failed  error
	busy    stopwatch.Stopwatch
}

// Create opens path for a new stream and locks it. A stream that stands there
// is replaced, unless another capture holds it (status.Busy).
func Create(path string) (*Writer, error) {
	w, err := lock(path, os.O_RDWR|os.O_CREATE)
	if err != nil {
		return nil, err
	}
	if err := w.f.Truncate(0); err != nil {
		w.f.Close()
		return nil, status.FromOS(err, "cannot empty %q", path)
	}
	return w, nil
}

// KeepAll as the cut of Resume keeps every complete packet.
const KeepAll = -1

// Resume opens the stream at path to append to it. The file is cut back to cut
// bytes, or to its last complete packet with KeepAll; what stood behind is
// moved to path.tail-N, whose name is returned ("" where nothing was cut).
func Resume(path string, cut int64) (w *Writer, tail string, err error) {
	w, err = lock(path, os.O_RDWR)
	if err != nil {
		return nil, "", err
	}
	f := w.f
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
	if tail, err = moveTail(f, path, end, size); err != nil {
		return nil, "", err
	}
	w.written = end
	if _, err = f.Seek(end, io.SeekStart); err != nil {
		return nil, "", status.FromOS(err, "cannot seek in %q", path)
	}
	return w, tail, nil
}

func lock(path string, flags int) (*Writer, error) {
	// O_NONBLOCK: a FIFO is refused below, not waited for.
	f, err := os.OpenFile(path, flags|syscall.O_NONBLOCK, 0o666)
	if err != nil {
		if errors.Is(err, syscall.EISDIR) {
			return nil, status.Wrap(status.InvalidArgument, err, "%q is a directory, not a stream file", path)
		}
		return nil, status.FromOS(err, "cannot open %q for writing", path)
	}
	info, err := f.Stat()
	if err != nil {
		f.Close()
		return nil, status.FromOS(err, "cannot stat %q", path)
	}
	if !info.Mode().IsRegular() {
		f.Close()
		return nil, status.New(status.InvalidArgument,
			"%q is no regular file (%s): a stream is seekable", path, info.Mode().Type())
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		f.Close()
		if errors.Is(err, syscall.EWOULDBLOCK) {
			return nil, status.Wrap(status.Busy, err, "%q is being captured by another session", path)
		}
		return nil, status.FromOS(err, "cannot lock %q", path)
	}
	return &Writer{path: path, f: f, buf: make([]byte, 0, bufferSize)}, nil
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
func (w *Writer) Offset() int64 { return w.written + int64(len(w.buf)) }

// Written is the length of the complete packets in the file.
func (w *Writer) Written() int64 { return w.written }

// Busy is the time spent in write calls, one under way included. It may be called while
// another goroutine writes.
func (w *Writer) Busy() time.Duration { return w.busy.Total() }

// Append adds one complete packet (header, name, payload). It may stay in the
// buffer until Flush.
func (w *Writer) Append(packet []byte) error {
	if w.failed != nil {
		return w.failed
	}
	if len(w.buf)+len(packet) > cap(w.buf) {
		if err := w.Flush(); err != nil {
			return err
		}
	}
	if len(packet) >= cap(w.buf)/4 && len(w.buf) == 0 {
		return w.write(packet)
	}
	w.buf = append(w.buf, packet...)
	return nil
}

// Flush brings everything appended into the file.
func (w *Writer) Flush() error {
	if w.failed != nil || len(w.buf) == 0 {
		return w.failed
	}
	err := w.write(w.buf)
	w.buf = w.buf[:0]
	return err
}

// write puts whole packets behind the written ones.
func (w *Writer) write(b []byte) error {
	if err := w.raw(b); err != nil {
		return w.fail(err)
	}
	w.written += int64(len(b))
	return nil
}

func (w *Writer) raw(b []byte) error {
	defer w.busy.Start()()
	_, err := w.f.Write(b)
	return err
}

func (w *Writer) fail(cause error) error {
	w.failed = status.FromOS(cause, "cannot write to %q", w.path)
	if err := w.f.Truncate(w.written); err != nil {
		w.failed = errors.Join(w.failed, status.FromOS(err, "cannot cut %q back to its last packet", w.path))
	}
	w.buf = w.buf[:0]
	return w.failed
}

// Long is a packet that is written piece by piece, its payload's length not
// known before its end. While it is open nothing else can be appended.
type Long struct {
	w       *Writer
	name    []byte
	payload int64
}

// Begin starts a long packet. Until Finish the file ends in a torn packet, as
// wire.Unfinished says.
func (w *Writer) Begin(name []byte) (*Long, error) {
	if err := w.Flush(); err != nil {
		return nil, err
	}
	head := make([]byte, wire.HeaderSize, wire.HeaderSize+len(name))
	wire.PutHeader(head, len(name), wire.Unfinished)
	if err := w.raw(append(head, name...)); err != nil {
		return nil, w.fail(err)
	}
	return &Long{w: w, name: name}, nil
}

// Write adds to the payload.
func (l *Long) Write(b []byte) (int, error) {
	if l.w.failed != nil {
		return 0, l.w.failed
	}
	if l.payload+int64(len(b)) > wire.MaxPayload {
		return 0, status.New(status.Internal, "payload of more than %d bytes", int64(wire.MaxPayload))
	}
	if err := l.w.raw(b); err != nil {
		return 0, l.w.fail(err)
	}
	l.payload += int64(len(b))
	return len(b), nil
}

// Finish fills in the length and so makes the packet part of the stream; it
// returns its whole length.
func (l *Long) Finish() (length int64, err error) {
	w := l.w
	if w.failed != nil {
		return 0, w.failed
	}
	var head [wire.HeaderSize]byte
	wire.PutHeader(head[:], len(l.name), uint32(l.payload))
	if _, err := w.f.WriteAt(head[:], w.written); err != nil {
		return 0, w.fail(err)
	}
	length = int64(wire.HeaderSize+len(l.name)) + l.payload
	w.written += length
	return length, nil
}

// Abort takes the packet back: the file ends where it began.
func (l *Long) Abort() error {
	w := l.w
	if w.failed != nil {
		return w.failed
	}
	if err := w.f.Truncate(w.written); err != nil {
		return w.fail(err)
	}
	if _, err := w.f.Seek(w.written, io.SeekStart); err != nil {
		return w.fail(err)
	}
	return nil
}

// Sync flushes and waits until the file is durable.
func (w *Writer) Sync() error {
	if err := w.Flush(); err != nil {
		return err
	}
	if err := w.f.Sync(); err != nil {
		// After a failed fsync the kernel may have dropped the dirty pages:
		// trying again would report a success that means nothing.
		w.failed = status.FromOS(err, "cannot make %q durable", w.path)
		return w.failed
	}
	return nil
}

// Packets walks the complete packets in [from, Written()).
func (w *Writer) Packets(from int64, fn func(scan.Packet) error) error {
	_, err := scan.Packets(w.f, from, w.written, fn)
	return err
}

// Close flushes, and releases the file and its lock.
func (w *Writer) Close() error {
	err := w.Flush()
	if cerr := w.f.Close(); cerr != nil && err == nil {
		err = status.FromOS(cerr, "cannot close %q", w.path)
	}
	return err
}
