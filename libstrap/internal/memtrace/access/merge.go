// Merges the accesses of all threads in the order of time.

package access

import (
	"container/heap"
	"io"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// The buffers of all open threads aim at bufferBytes together. Each has room for at least
// minRecords and at most maxRecords. At most maxOpen threads are open at a time, which bounds the
// memory.
const (
	bufferBytes = 32 << 20
	maxRecords  = 1 << 13
	minRecords  = 32
	maxOpen     = bufferBytes / (recordBytes * minRecords)
)

// row is an access with its time.
type row struct {
	record
	time   int64 // in ns
	thread uint32
	maps   uint32 // number of the module map
}

// cursor reads the records of one thread in their order.
type cursor struct {
	run    *run
	next   int   // index in run.blocks of the block to read after this one
	at     int64 // file offset of the first record not yet in buf
	left   int64 // records of the block not yet in buf
	header block
	buf    []byte // records that were read and not yet returned; a part of space
	space  []byte
	key    int64 // time of row; before the first row, a lower bound of its time
	row    row
	open   bool // space is allocated and row is set
}

// merger returns the rows of all threads in the order of time. Rows of the same time come in the
// order of the threads' first blocks. Rows of one thread keep their order.
type merger struct {
	in      io.ReaderAt
	window  window
	heap    cursors
	opened  int   // open cursors
	taken   int64 // records read so far, invalid ones too
	invalid int64
}

func newMerger(in io.ReaderAt, size int64, threads []*run) *merger {
	m := &merger{in: in, window: window{in: in, size: size}}
	for _, r := range threads {
		if len(r.blocks) > 0 {
			m.heap = append(m.heap, &cursor{run: r, key: r.first})
		}
	}
	heap.Init(&m.heap)
	return m
}

// rows calls give with each row in order, until give returns false or no row is left. done reports
// that no row is left. If give returned false for a row, the next call of rows begins with that
// row.
func (m *merger) rows(give func(*row) bool) (done bool, err error) {
	for len(m.heap) > 0 {
		c := m.heap[0]
		if !c.open {
			if err := m.openCursor(c); err != nil {
				return false, err
			}
			continue
		}
		second := m.second()
		for {
			if !give(&c.row) {
				return false, nil
			}
			more, err := m.advance(c)
			if err != nil {
				return false, err
			}
			if !more {
				heap.Pop(&m.heap)
				m.opened--
				c.space = nil
				break
			}
			if second != nil && !c.before(second) {
				heap.Fix(&m.heap, 0)
				break
			}
		}
	}
	return true, nil
}

// second returns the cursor that comes after the first one of the heap, or nil if there is none.
func (m *merger) second() *cursor {
	switch len(m.heap) {
	case 1:
		return nil
	case 2:
		return m.heap[1]
	}
	if m.heap[2].before(m.heap[1]) {
		return m.heap[2]
	}
	return m.heap[1]
}

func (m *merger) openCursor(c *cursor) error {
	if m.opened == maxOpen {
		return status.New(status.Unsupported, "more than %d threads record at the same time", maxOpen)
	}
	m.opened++
	c.open = true
	c.space = make([]byte, recordBytes*max(minRecords, min(maxRecords, bufferBytes/recordBytes/m.opened)))
	more, err := m.advance(c)
	if err != nil {
		return err
	}
	if !more {
		heap.Pop(&m.heap)
		m.opened--
		return nil
	}
	heap.Fix(&m.heap, 0)
	return nil
}

// advance sets c.row to the thread's next valid access. It returns false if there is none.
func (m *merger) advance(c *cursor) (bool, error) {
	for {
		for len(c.buf) == 0 {
			if c.left == 0 {
				if c.next == len(c.run.blocks) {
					return false, nil
				}
				h, err := m.window.block(c.run.blocks[c.next])
				if err != nil {
					return false, err
				}
				c.next++
				c.header, c.at, c.left = h, h.offset+headerBytes, h.payload/recordBytes
				continue
			}
			n := min(c.left, int64(len(c.space)/recordBytes))
			c.buf = c.space[:n*recordBytes]
			if err := readAt(m.in, c.buf, c.at); err != nil {
				return false, err
			}
			c.at += int64(len(c.buf))
			c.left -= n
		}
		r := parseRecord(c.buf)
		c.buf = c.buf[recordBytes:]
		m.taken++
		if !r.valid() {
			m.invalid++
			continue
		}
		// Keep the thread's own order, even if its clock went back.
		c.key = max(c.key, c.header.nanoseconds(r.tick))
		c.row = row{record: r, time: c.key, thread: c.header.thread, maps: c.header.maps}
		return true, nil
	}
}

func (c *cursor) before(d *cursor) bool {
	if c.key != d.key {
		return c.key < d.key
	}
	return c.run.number < d.run.number
}

type cursors []*cursor

func (h cursors) Len() int           { return len(h) }
func (h cursors) Less(i, j int) bool { return h[i].before(h[j]) }
func (h cursors) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *cursors) Push(x any)        { *h = append(*h, x.(*cursor)) }
func (h *cursors) Pop() any {
	old := *h
	last := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return last
}
