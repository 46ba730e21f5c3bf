// Walks the blocks of a file of libstrap-access, and makes an index of them.

package access

import (
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"syscall"

	"github.com/libstrap/strap/libstrap/internal/memtrace/label"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Limits on what this package keeps in memory of one file. Programs need far less.
const (
	maxThreads  = 1 << 20
	maxRanges   = 1 << 20
	maxMapsText = 64 << 20
	maxProblems = 20
)

// Program describes the program and its recording, as the file states them.
type Program struct {
	PID         int64
	Exe         string
	Clock       string // "tsc" or "cntvct", which are CPU counters, or "system"
	ClockEvery  int64  // accesses that share one reading of the system's clock; 0: a CPU counter
	SampleEvery int64
	RealtimeNS  int64 // CLOCK_REALTIME at the start
	Ended       bool  // the program ended the recording
}

// index is built from the headers of the file. It has the offsets of the blocks of accesses, and
// the contents of all other blocks.
type index struct {
	program  Program
	threads  map[uint32]*run
	order    []*run // the threads in the order of their first blocks
	maps     []moduleMap
	mapsText int64 // bytes of text in maps
	ranges   []label.Range
	open     map[uint64]int // id of a live range to its place in ranges
	blocks   int64
	records  int64
	seen     uint64
	lost     uint64
	size     int64 // of the file, in bytes
	problems []string
	hidden   int // problems beyond maxProblems
}

// run has the blocks of accesses of one thread, in the order of the file and so of time.
type run struct {
	thread uint32
	number int     // place in index.order
	first  int64   // start time of the first block, in ns
	blocks []int64 // offsets of the blocks in the file
}

func (x *index) problem(format string, args ...any) {
	if len(x.problems) == maxProblems {
		x.hidden++
		return
	}
	x.problems = append(x.problems, fmt.Sprintf(format, args...))
}

// openRegular opens a regular file. It refuses other files, which may block the caller.
func openRegular(path string) (*os.File, os.FileInfo, error) {
	f, err := os.OpenFile(path, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		return nil, nil, err
	}
	info, err := f.Stat()
	if err == nil && !info.Mode().IsRegular() {
		err = syscall.EINVAL
		if info.IsDir() {
			err = syscall.EISDIR
		}
	}
	if err != nil {
		f.Close()
		return nil, nil, err
	}
	return f, info, nil
}

// readIndex walks the headers of size bytes. A damaged header ends the walk, and the bytes from
// there on are a problem. Of a torn last block the whole records are kept.
func readIndex(in io.ReaderAt, size int64) (*index, error) {
	x := &index{size: size, threads: map[uint32]*run{}, open: map[uint64]int{}}
	w := window{in: in, size: size}
	for at := int64(0); at < size; {
		h, err := w.block(at)
		if err == nil && at == 0 && h.kind != kindStart {
			err = errMagic
		}
		if at == 0 && err != nil {
			if !errors.Is(err, status.Unsupported) && !errors.Is(err, status.IO) {
				err = status.Wrap(status.Corrupt, err, "this is no file of libstrap-access")
			}
			return nil, err
		}
		if errors.Is(err, status.IO) {
			return nil, err
		}
		if err != nil {
			x.problem("%d bytes from offset %d on are unreadable and left out: %v", size-at, at, err)
			break
		}
		x.blocks++
		if err := x.add(&w, &h); err != nil {
			return nil, err
		}
		if uint64(h.payload) < h.bytes {
			x.problem("the last block, at offset %d, has %d of its %d bytes: the file is torn", at, h.payload, h.bytes)
			break
		}
		at += headerBytes + h.payload
	}
	if x.blocks == 0 {
		return nil, status.New(status.Corrupt, "this is no file of libstrap-access: it is empty")
	}
	if !x.program.Ended {
		x.problem("the program did not end the recording: what its threads had buffered then is missing")
	}
	if x.lost > 0 {
		x.problem("%d accesses were lost: made while the same thread was recording, or without memory for its buffer", x.lost)
	}
	if x.hidden > 0 {
		x.problems = append(x.problems, fmt.Sprintf("and %d further problems", x.hidden))
	}
	return x, nil
}

// add adds a block to the index. An error ends the reading; a damaged block is only a problem.
func (x *index) add(w *window, h *block) error {
	var limit uint64
	switch h.kind {
	case kindAccesses:
		return x.addAccesses(h)
	case kindStart, kindEnd, kindMaps:
		limit = maxText
	case kindRange:
		limit = rangeBytes + maxName
	default:
		x.problem("the block at offset %d has the unknown kind %d", h.offset, h.kind)
		return nil
	}
	if h.bytes > limit {
		x.problem("the block at offset %d has %d bytes, more than its kind allows", h.offset, h.bytes)
		return nil
	}
	data, err := w.bytes(h.offset+headerBytes, int(h.payload))
	if err != nil {
		return err
	}
	switch h.kind {
	case kindStart:
		x.addStart(h, fields(data))
	case kindEnd:
		x.addEnd(fields(data))
	case kindMaps:
		x.addMaps(h, data)
	case kindRange:
		x.addRange(h, data)
	}
	return nil
}

func (x *index) addStart(h *block, f map[string]string) {
	if h.offset != 0 {
		x.problem("a second recording begins at offset %d", h.offset)
		return
	}
	x.program = Program{
		PID: number(f, "pid"), Exe: f["exe"], Clock: f["clock"], ClockEvery: number(f, "clock_every"),
		SampleEvery: number(f, "sample_every"), RealtimeNS: number(f, "realtime_ns"),
	}
}

func (x *index) addEnd(f map[string]string) {
	x.program.Ended = true
	// Losses of threads without a buffer are in no block, only in this total.
	if lost := number(f, "lost"); lost > 0 {
		x.lost = max(x.lost, uint64(lost))
	}
}

func (x *index) addAccesses(h *block) error {
	if h.bytes%recordBytes != 0 {
		x.problem("the block at offset %d has %d bytes, no whole records", h.offset, h.bytes)
	}
	x.records += h.payload / recordBytes
	x.seen += h.seen
	x.lost += h.lost
	r := x.threads[h.thread]
	if r == nil {
		if len(x.threads) == maxThreads {
			return status.New(status.Unsupported, "the file has more than %d threads", maxThreads)
		}
		r = &run{thread: h.thread, number: len(x.order), first: h.start}
		x.threads[h.thread] = r
		x.order = append(x.order, r)
	}
	if h.payload >= recordBytes {
		r.blocks = append(r.blocks, h.offset)
	}
	return nil
}

func (x *index) addMaps(h *block, text []byte) {
	if x.mapsText += int64(len(text)); x.mapsText > maxMapsText {
		x.problem("the module maps have more than %d bytes: those from offset %d on are left out", maxMapsText, h.offset)
		return
	}
	if n := len(x.maps); n > 0 && x.maps[n-1].number == h.maps {
		x.maps[n-1].text = append(x.maps[n-1].text, text...)
		return
	}
	if n := len(x.maps); n > 0 && h.maps < x.maps[n-1].number {
		x.problem("the module map at offset %d is out of order", h.offset)
		return
	}
	x.maps = append(x.maps, moduleMap{number: h.maps, text: append([]byte(nil), text...)})
}

func (x *index) addRange(h *block, data []byte) {
	e, err := parseRange(data)
	if err != nil {
		x.problem("the range at offset %d: %v", h.offset, err)
		return
	}
	if !e.added {
		i, ok := x.open[e.id]
		if !ok {
			x.problem("the range at offset %d ends, but did not begin", h.offset)
			return
		}
		delete(x.open, e.id)
		// A range that ends at the time of its begin lasts one nanosecond, so it is not empty.
		x.ranges[i].ToNS = max(h.start, x.ranges[i].FromNS+1)
		return
	}
	if len(x.ranges) == maxRanges {
		x.problem("more than %d ranges: that at offset %d is left out", maxRanges, h.offset)
		return
	}
	if h.start == math.MaxInt64 {
		x.problem("the range at offset %d begins at the end of time", h.offset)
		return
	}
	e.known.FromNS, e.known.ToNS = h.start, math.MaxInt64
	x.open[e.id] = len(x.ranges)
	x.ranges = append(x.ranges, e.known)
}

// window reads small pieces of a file through a buffer.
type window struct {
	in   io.ReaderAt
	size int64  // of the file
	at   int64  // offset of have in the file
	have []byte // the part of buf that is filled
	buf  [4 << 10]byte
	big  []byte // for pieces larger than buf
}

// bytes returns n bytes at an offset, valid until the next call. The file must have them.
func (w *window) bytes(at int64, n int) ([]byte, error) {
	if n > len(w.buf) {
		if cap(w.big) < n {
			w.big = make([]byte, n)
		}
		w.big = w.big[:n]
		return w.big, readAt(w.in, w.big, at)
	}
	if at < w.at || at+int64(n) > w.at+int64(len(w.have)) {
		w.at, w.have = at, w.buf[:min(int64(len(w.buf)), w.size-at)]
		if err := readAt(w.in, w.have, at); err != nil {
			w.have = nil
			return nil, err
		}
	}
	return w.have[at-w.at:][:n], nil
}

// block reads the header at an offset. A torn header is Corrupt.
func (w *window) block(at int64) (block, error) {
	if w.size-at < headerBytes {
		return block{}, status.New(status.Corrupt, "a header is torn")
	}
	b, err := w.bytes(at, headerBytes)
	if err != nil {
		return block{}, err
	}
	h, err := parseBlock(b)
	h.offset = at
	h.payload = int64(min(h.bytes, uint64(w.size-at-headerBytes)))
	return h, err
}

func readAt(in io.ReaderAt, b []byte, at int64) error {
	if n, err := in.ReadAt(b, at); n < len(b) {
		return status.FromOS(err, "cannot read the accesses at offset %d", at)
	}
	return nil
}
