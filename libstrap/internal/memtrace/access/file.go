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

// Bounds on what a file may ask this package to remember, far above what programs need.
const (
	maxThreads  = 1 << 20
	maxRanges   = 1 << 20
	maxMapsText = 64 << 20
	maxProblems = 20
)

// Program is what the file says about the program and its recording.
type Program struct {
	PID         int64
	Exe         string
	Clock       string // "tsc" or "cntvct": the CPU's counter; "system"
	ClockEvery  int64  // accesses that share a time of the system's clock
	SampleEvery int64
	RealtimeNS  int64 // CLOCK_REALTIME at the start
	Ended       bool  // the program ended the recording
}

// index is where everything in the file is.
type index struct {
	program  Program
	threads  map[uint32]*run
	order    []*run // in the order of their first blocks
	maps     []moduleMap
	mapsText int64
	ranges   []label.Range
	open     map[uint64]int // live ranges by id
	blocks   int64
	records  int64
	seen     uint64
	lost     uint64
	size     int64
	problems []string
	hidden   int // problems beyond maxProblems
}

// run is a thread: its blocks in the file, whose times rise.
type run struct {
	thread uint32
	number int
	first  int64 // start of its first block
	blocks []int64
}

func (x *index) problem(format string, args ...any) {
	if len(x.problems) == maxProblems {
		x.hidden++
		return
	}
	x.problems = append(x.problems, fmt.Sprintf(format, args...))
}

// openRegular opens a regular file and nothing that could make the caller wait.
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

// readIndex walks the headers. What stands behind a damaged block is left out and
// reported; a torn last block keeps its whole records.
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

// add takes a block into the index. Its error ends the reading.
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
	// What threads without a buffer lost stands in the totals only.
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
		// A range that held for no time yet keeps its first nanosecond.
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
	size int64
	at   int64
	have []byte
	buf  [4 << 10]byte
	big  []byte
}

// bytes gives N bytes at an offset, valid until the next call; they must be there.
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

// block reads a header; a torn one is Corrupt.
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
