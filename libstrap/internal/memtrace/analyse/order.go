// Keeps all rows of a trace, and sorts them by time if a row was late.

package analyse

import (
	"container/heap"
	"math/bits"
	"slices"
)

// journal is the stage that keeps all rows of the trace, packed. If a row is late, the stages that
// need the order of time run again, over the sorted rows of the journal.
type journal struct {
	store
	packer
	blocks []packed
	moved  int // the first blocks are in the spill: as many as this
}

func (j *journal) take(b *block) error {
	p := j.pack(b)
	j.blocks = append(j.blocks, p)
	j.held += int64(p.size)
	if j.held <= j.limit {
		return nil
	}
	j.held = 0
	rest := j.blocks[j.moved:]
	j.moved = len(j.blocks)
	return j.move(rest, j.spill)
}

// move writes packed blocks to the spill, and frees the memory of all blocks of the packer.
func (p *packer) move(blocks []packed, sp *spill) error {
	defer p.data.reset()
	size := int64(0)
	for i := range blocks {
		size += int64(blocks[i].size)
	}
	w, err := sp.writer(size)
	if err != nil {
		return err
	}
	for i := range blocks {
		b := &blocks[i]
		b.at = w.at()
		if err := w.write(b.data); err != nil {
			return err
		}
		b.data = nil
	}
	return w.flush()
}

const (
	// leastRun is the least number of rows that a run has room for, whatever the memory.
	leastRun = 1 << 17
	// sortBytes is the memory of a row while it is sorted: the row, its key, and a second place for
	// the key.
	sortBytes = 40 + 2*16
	// runPiece is the number of rows that are read back from a sorted run at once.
	runPiece = 1 << 11
)

// sorted calls yield with the rows in the order of time. Rows of the same time keep the order of the
// trace. It is a merge sort, with runs as long as memory (in bytes) allows.
func (j *journal) sorted(memory int, yield func(*row) error) error {
	return j.sortedBy(max(leastRun, memory/sortBytes), yield)
}

func (j *journal) sortedBy(runRows int, yield func(*row) error) error {
	var rows []row
	var p packer // of the runs
	var s sorter
	var runs [][]packed
	var buffer []byte
	for i := range j.blocks {
		var err error
		if rows, err = j.blocks[i].unpack(rows, j.spill, &buffer); err != nil {
			return err
		}
		last := i == len(j.blocks)-1
		if last && runs == nil {
			for _, k := range s.sort(rows) {
				if err := yield(&rows[k.at]); err != nil {
					return err
				}
			}
			return nil
		}
		if !last && len(rows)+blockRows <= runRows {
			continue
		}
		run, err := p.writeRun(rows, s.sort(rows), j.spill)
		if err != nil {
			return err
		}
		runs, rows = append(runs, run), rows[:0]
	}
	return merge(runs, j.spill, yield)
}

func (p *packer) writeRun(rows []row, order []sortKey, sp *spill) ([]packed, error) {
	var run []packed
	b := newBlock()
	for piece := range slices.Chunk(order, runPiece) {
		b.clear()
		for _, k := range piece {
			b.append(&rows[k.at])
		}
		run = append(run, p.pack(b))
	}
	return run, p.move(run, sp)
}

type sortKey struct {
	time uint64
	at   uint32
}

// sorter sorts rows by time. Its memory is reused.
type sorter struct{ keys, other []sortKey }

// sort returns the keys of the rows in the order of time. It is a stable radix sort, which skips bits
// that are equal in all times. The keys are valid until the next call.
func (s *sorter) sort(rows []row) []sortKey {
	s.keys, s.other = grown(s.keys, len(rows)), grown(s.other, len(rows))
	from, to := s.keys[:len(rows)], s.other[:len(rows)]
	if len(rows) == 0 {
		return from
	}
	all, some := ^uint64(0), uint64(0)
	for i := range rows {
		t := uint64(rows[i].time)
		from[i] = sortKey{t, uint32(i)}
		all, some = all&t, some|t
	}
	differ := all ^ some
	const digit = 11
	for shift := 0; differ>>shift != 0; shift += digit {
		shift += bits.TrailingZeros64(differ >> shift)
		var starts [1 << digit]int
		for i := range from {
			starts[from[i].time>>shift&(1<<digit-1)]++
		}
		at := 0
		for d, n := range starts {
			starts[d], at = at, at+n
		}
		for _, k := range from {
			d := k.time >> shift & (1<<digit - 1)
			to[starts[d]] = k
			starts[d]++
		}
		from, to = to, from
	}
	return from
}

// cursor reads the rows of a sorted run.
type cursor struct {
	number int
	rest   []packed
	rows   []row
	next   int
	buffer []byte
}

func (c *cursor) load(sp *spill) (ok bool, err error) {
	if c.next < len(c.rows) {
		return true, nil
	}
	if len(c.rest) == 0 {
		return false, nil
	}
	c.rows, err = c.rest[0].unpack(c.rows[:0], sp, &c.buffer)
	c.rest, c.next = c.rest[1:], 0
	return true, err
}

// cursors is a heap by the time of the next row, then by the number of the run.
type cursors []*cursor

func (h cursors) Len() int      { return len(h) }
func (h cursors) Swap(i, j int) { h[i], h[j] = h[j], h[i] }
func (h cursors) Less(i, j int) bool {
	a, b := h[i].rows[h[i].next].time, h[j].rows[h[j].next].time
	return a < b || a == b && h[i].number < h[j].number
}
func (h *cursors) Push(x any) { *h = append(*h, x.(*cursor)) }
func (h *cursors) Pop() any {
	last := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return last
}

func merge(runs [][]packed, sp *spill, yield func(*row) error) error {
	var h cursors
	for i, run := range runs {
		c := &cursor{number: i, rest: run}
		if _, err := c.load(sp); err != nil {
			return err
		}
		h = append(h, c)
	}
	heap.Init(&h)
	for len(h) > 0 {
		c := h[0]
		if err := yield(&c.rows[c.next]); err != nil {
			return err
		}
		c.next++
		more, err := c.load(sp)
		if err != nil {
			return err
		}
		if more {
			heap.Fix(&h, 0)
		} else {
			heap.Pop(&h)
		}
	}
	return nil
}
