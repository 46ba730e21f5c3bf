package analyse

import (
	"container/heap"
	"math/bits"
	"slices"
)

// journal is the stage that keeps the rows of a trace, packed, for the case that one
// of them turns out to be late: then the stages that need the order of time start
// again from here.
type journal struct {
	store
	packer
	blocks []packed
	moved  int // of the blocks, those in the spill
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

// move writes all that is packed to the spill.
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
	// leastRun is the least number of rows that are sorted at once.
	leastRun = 1 << 17
	// bytes of a row while it is sorted: itself, its key, and the key's other place
	sortBytes = 40 + 2*16
	// rows of the pieces in which sorted runs are read back
	runPiece = 1 << 11
)

// sorted gives the rows in the order of time, those of one time in the order in
// which they came: a merge sort, of runs as long as the memory allows.
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

// sorter sorts rows by time; it is memory to reuse.
type sorter struct{ keys, other []sortKey }

// sort is a stable radix sort, by those digits only in which the times differ.
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

// cursor walks a sorted run.
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

// cursors is a heap by the time of the next row, and by the run where they are equal.
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
