// Finds the values at some ranks of a multiset that lies in memory and in files.

package analyse

import (
	"math/bits"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// multiset is the union of several multisets. It finds values by their rank.
type multiset struct {
	narrow []*series[uint32]
	wide   []*series[uint64]
}

func union(parts ...*values) multiset {
	var m multiset
	for _, v := range parts {
		if v.narrow.n() > 0 {
			m.narrow = append(m.narrow, &v.narrow)
		}
		if v.wide != nil {
			m.wide = append(m.wide, v.wide)
		}
	}
	return m
}

func count[T uint32 | uint64](parts []*series[T]) uint64 {
	n := uint64(0)
	for _, s := range parts {
		n += s.n()
	}
	return n
}

// pick returns the values at the given ranks of the sorted multiset. Ranks count from 0 and must
// ascend.
func (m *multiset) pick(ranks []uint64, s *scratch) ([]uint64, error) {
	below := count(m.narrow)
	split := 0
	for split < len(ranks) && ranks[split] < below {
		split++
	}
	out := make([]uint64, 0, len(ranks))
	if split > 0 {
		picked, err := pick(m.narrow, ranks[:split], &s.narrow, &s.reader)
		if err != nil {
			return nil, err
		}
		for _, v := range picked {
			out = append(out, uint64(v))
		}
	}
	if split < len(ranks) {
		rest := make([]uint64, 0, len(ranks)-split)
		for _, r := range ranks[split:] {
			rest = append(rest, r-below)
		}
		if last := rest[len(rest)-1]; last >= count(m.wide) {
			return nil, lost(count(m.wide), last+1)
		}
		picked, err := pick(m.wide, rest, &s.wide, &s.reader)
		if err != nil {
			return nil, err
		}
		out = append(out, picked...)
	}
	return out, nil
}

// run is a value that occurs n times.
type run struct{ value, n uint64 }

// pickAmong is pick for the union of the multiset and the runs. The values of the runs must ascend.
func (m *multiset) pickAmong(runs []run, ranks []uint64, s *scratch) ([]uint64, error) {
	out := make([]uint64, len(ranks))
	var rest []uint64                   // ranks in the multiset alone
	var places []int                    // index in out of each of them
	before := make([]uint64, len(runs)) // values of the multiset below each run
	for i, r := range runs {
		if r.n == 0 {
			continue
		}
		var err error
		if before[i], err = m.less(r.value, &s.reader); err != nil {
			return nil, err
		}
	}
	for place, rank := range ranks {
		within := false
		for i, r := range runs {
			if r.n == 0 || rank < before[i] {
				continue
			}
			if within = rank-before[i] < r.n; within {
				out[place] = r.value
				break
			}
			rank -= r.n
		}
		if !within {
			rest, places = append(rest, rank), append(places, place)
		}
	}
	if len(rest) == 0 {
		return out, nil
	}
	picked, err := m.pick(rest, s)
	for i, v := range picked {
		out[places[i]] = v
	}
	return out, err
}

// less returns the number of values below x.
func (m *multiset) less(x uint64, r *recordReader) (uint64, error) {
	if x>>32 == 0 {
		return less(m.narrow, uint32(x), r)
	}
	n, err := less(m.wide, x, r)
	return n + count(m.narrow), err
}

func less[T uint32 | uint64](parts []*series[T], x T, r *recordReader) (uint64, error) {
	n := uint64(0)
	for _, s := range parts {
		below := uint64(0)
		err := scan(s, r, func(low, high T, n uint64) bool {
			if high < x {
				below += n
			}
			return low < x && x <= high
		}, func(piece []T) {
			for _, v := range piece {
				if v < x {
					below++
				}
			}
		})
		if err != nil {
			return 0, err
		}
		n += below << s.power
	}
	return n, nil
}

// scratch is memory that a worker reuses for its selections.
type scratch struct {
	narrow []uint32
	wide   []uint64
	reader recordReader
}

// gathered is the most values that a selection copies into memory.
const gathered = 1 << 16

const digitBits = 11

// cell is the range of the values whose bits above the next digit are prefix. It contains at least
// one of the wanted ranks.
type cell[T uint32 | uint64] struct {
	prefix T
	n      uint64                 // values in the cell
	ranks  []uint64               // the wanted ranks, from 0 at the cell's least value
	counts [1 << digitBits]uint64 // values by their next digit
}

// pick returns the values at the given ranks, which ascend. It is a radix selection from the top
// digit down. Each pass counts the next digit of the values in the cells with a wanted rank. When few
// enough values are left, gather copies them and selects among them. Values are only read. Of the
// groups of values in files only those are read that are partly in a cell with a wanted rank.
func pick[T uint32 | uint64](parts []*series[T], ranks []uint64, buffer *[]T, r *recordReader) ([]T, error) {
	var any T
	for _, s := range parts {
		s.seal()
		any |= s.any
	}
	cells := []*cell[T]{{n: count(parts), ranks: ranks}}
	shift := bits.Len64(uint64(any))
	for {
		left := uint64(0)
		for _, c := range cells {
			left += c.n
		}
		if left <= gathered {
			return gather(parts, cells, shift, buffer, r)
		}
		if shift == 0 {
			var out []T
			for _, c := range cells {
				for range c.ranks {
					out = append(out, c.prefix)
				}
			}
			return out, nil
		}
		width := min(digitBits, shift)
		shift -= width
		for _, s := range parts {
			err := scan(s, r, func(low, high T, n uint64) bool {
				if low>>shift == high>>shift {
					tallyGroup(cells, low>>shift, width, n<<s.power)
					return false
				}
				return overlaps(cells, low>>shift>>width, high>>shift>>width)
			}, func(piece []T) { tally(cells, piece, shift, width, 1<<s.power) })
			if err != nil {
				return nil, err
			}
		}
		var finer []*cell[T]
		for _, c := range cells {
			if found := c.counted(); found != c.n {
				return nil, lost(found, c.n)
			}
			finer = append(finer, c.split(width)...)
		}
		cells = finer
	}
}

func lost(found, wrote uint64) error {
	return status.New(status.Corrupt, "the records of a series have %d values, and not the %d that their counts say", found, wrote)
}

// tally counts the digit at shift of the values that are in a cell. Each value counts `times` times.
func tally[T uint32 | uint64](cells []*cell[T], piece []T, shift, width int, times uint64) {
	if len(cells) == 1 && cells[0].prefix == 0 && cells[0].n > 0 {
		c := cells[0]
		for _, v := range piece {
			if d := v >> shift; d < 1<<width {
				c.counts[d&(1<<digitBits-1)] += times
			}
		}
		return
	}
	for _, v := range piece {
		d := v >> shift
		for _, c := range cells {
			if d>>width == c.prefix {
				c.counts[d&(1<<width-1)&(1<<digitBits-1)] += times
				break
			}
		}
	}
}

// tallyGroup counts n values whose digit and the bits above it are d.
func tallyGroup[T uint32 | uint64](cells []*cell[T], d T, width int, n uint64) {
	for _, c := range cells {
		if d>>width == c.prefix {
			c.counts[d&(1<<width-1)&(1<<digitBits-1)] += n
			return
		}
	}
}

// overlaps reports whether a prefix in [low, high] is that of a cell.
func overlaps[T uint32 | uint64](cells []*cell[T], low, high T) bool {
	return slices.ContainsFunc(cells, func(c *cell[T]) bool { return low <= c.prefix && c.prefix <= high })
}

// counted returns the number of values that were counted.
func (c *cell[T]) counted() (n uint64) {
	for _, digit := range c.counts {
		n += digit
	}
	return n
}

// split returns the cells that are one digit finer and contain a wanted rank.
func (c *cell[T]) split(width int) []*cell[T] {
	var out []*cell[T]
	below, digit := uint64(0), 0
	for _, r := range c.ranks {
		for r >= below+c.counts[digit] {
			below += c.counts[digit]
			digit++
		}
		prefix := c.prefix<<width | T(digit)
		if len(out) == 0 || out[len(out)-1].prefix != prefix {
			out = append(out, &cell[T]{prefix: prefix, n: c.counts[digit]})
		}
		last := out[len(out)-1]
		last.ranks = append(last.ranks, r-below)
	}
	return out
}

// gather copies the values of each cell to buffer and returns the values at the cells' ranks.
func gather[T uint32 | uint64](parts []*series[T], cells []*cell[T], shift int, buffer *[]T, r *recordReader) ([]T, error) {
	room := 0
	for _, c := range cells {
		room += int(c.n)
	}
	if cap(*buffer) < room {
		*buffer = make([]T, max(room, 2*cap(*buffer)))
	}
	rest := (*buffer)[:room]
	found := make([][]T, len(cells))
	for i, c := range cells {
		found[i], rest = rest[:0:c.n], rest[c.n:]
	}
	all := len(cells) == 1 && cells[0].n == count(parts)
	for _, s := range parts {
		err := scan(s, r, func(low, high T, n uint64) bool {
			return overlaps(cells, low>>shift, high>>shift)
		}, func(piece []T) {
			if all && s.power == 0 {
				found[0] = append(found[0], piece...)
				return
			}
			for _, x := range piece {
				for i, c := range cells {
					if x>>shift == c.prefix {
						for range 1 << s.power {
							found[i] = append(found[i], x)
						}
					}
				}
			}
		})
		if err != nil {
			return nil, err
		}
	}
	var out []T
	for i, c := range cells {
		if uint64(len(found[i])) != c.n {
			return nil, lost(uint64(len(found[i])), c.n)
		}
		start := 0
		for _, r := range c.ranks {
			out = append(out, nth(found[i][start:], int(r)-start))
			start = int(r)
		}
	}
	return out, nil
}
