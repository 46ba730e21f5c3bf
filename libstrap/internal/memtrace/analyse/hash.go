package analyse

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// The tables here have what is known of single addresses and pages, package spans what is
// known of the pages of long rows. A page is in one of them: where it leaves a table, its
// entry stays as `gone`.
//
// The tables here are open addressed with linear probing and grow at three quarters:
// 16 bytes an entry and one cache line a look-up, where a Go map takes twice the
// memory and three times the time (BenchmarkTables). The top bits of a hash choose
// the shard of a stage, so the tables use the bottom ones.

const (
	hashA = 0x9e3779b97f4a7c15
	hashB = 0xd1342543de82ef95
)

// hash mixes the 128 bits of a product, so that strided addresses spread.
func hash(key uint64) uint64 {
	hi, lo := bits.Mul64(key^hashA, hashB)
	return hi ^ lo
}

func hashPair(key uint64, region uint32) uint64 {
	hi, lo := bits.Mul64(key^hashA, hashB+uint64(region)<<1)
	return hi ^ lo
}

const leastSlots = 16

// grownSlots is the size of a table after n slots. Small ones grow faster: they are
// short-lived where more come.
func grownSlots(n int) int {
	if n < 1<<14 {
		return max(leastSlots, 4*n)
	}
	return 2 * n
}

// times holds a time for each address.
type times struct {
	slots []timeSlot
	used  int
}

type timeSlot struct {
	key  uint64
	time uint64 // the time + 1: 0 is an empty slot
}

// gone marks the entry of a page that a span has.
const gone = math.MaxUint32

// goneTime is gone for times, which end below it.
const goneTime = math.MaxUint64

// at is where the time + 1 of an address stands: 0 where it is new. The caller sets
// it. It is valid until the next call.
func (t *times) at(h, key uint64) *uint64 {
	mask := uint64(len(t.slots) - 1)
	for i := h; t.used > 0; i++ {
		s := &t.slots[i&mask]
		if s.key == key && s.time != 0 {
			return &s.time
		}
		if s.time == 0 {
			break
		}
	}
	return t.insert(h, key)
}

// touch reads the slot where the search for a hash starts. Stages do that for some
// rows before they look those up, so that the machine fetches the slots side by side.
func (t *times) touch(h uint64) uint64 {
	if len(t.slots) == 0 {
		return 0
	}
	return t.slots[h&uint64(len(t.slots)-1)].key
}

// within lists, in order, the entries of the pages [low, high), where the key of a page is
// its number << shift. They are valid until the next call of at.
func (t *times) within(low, high uint64, shift int) []*timeSlot {
	var found []*timeSlot
	take := func(s *timeSlot) {
		if s.time != 0 && s.time != goneTime {
			found = append(found, s)
		}
	}
	if high-low < uint64(len(t.slots)) {
		for page := low; page < high; page++ {
			if s := t.find(hash(page<<shift), page<<shift); s != nil {
				take(s)
			}
		}
		return found
	}
	for i := range t.slots {
		if s := &t.slots[i]; s.key>>shift >= low && s.key>>shift < high && s.key>>shift<<shift == s.key {
			take(s)
		}
	}
	slices.SortFunc(found, func(a, b *timeSlot) int { return cmp.Compare(a.key, b.key) })
	return found
}

// find is the entry of an address, nil where there is none.
func (t *times) find(h, key uint64) *timeSlot {
	mask := uint64(len(t.slots) - 1)
	for i := h; t.used > 0; i++ {
		s := &t.slots[i&mask]
		if s.time == 0 {
			break
		}
		if s.key == key {
			return s
		}
	}
	return nil
}

// ahead is the number of rows whose slots are touched before they are looked up.
const ahead = 32

func (t *times) insert(h, key uint64) *uint64 {
	if t.used >= len(t.slots)/4*3 {
		old := t.slots
		t.slots = zeros[timeSlot](grownSlots(len(old)))
		for _, s := range old {
			if s.time != 0 {
				*t.vacant(hash(s.key)) = s
			}
		}
	}
	t.used++
	s := t.vacant(h)
	s.key = key
	return &s.time
}

func (t *times) vacant(h uint64) *timeSlot {
	mask := uint64(len(t.slots) - 1)
	for i := h; ; i++ {
		if s := &t.slots[i&mask]; s.time == 0 {
			return s
		}
	}
}

// pairs holds a count for each pair of an address or page and a region.
type pairs struct {
	slots []pairSlot
	used  int
}

type pairSlot struct {
	key    uint64
	region uint32
	count  uint32 // 0 is an empty slot
}

// at is where the count of a pair stands: 0 where it is new. The caller sets it. It
// is valid until the next call.
func (p *pairs) at(h, key uint64, region uint32) *uint32 {
	mask := uint64(len(p.slots) - 1)
	for i := h; p.used > 0; i++ {
		s := &p.slots[i&mask]
		if s.key == key && s.region == region && s.count != 0 {
			return &s.count
		}
		if s.count == 0 {
			break
		}
	}
	return p.insert(h, key, region)
}

// touch is as that of times.
func (p *pairs) touch(h uint64) uint64 {
	if len(p.slots) == 0 {
		return 0
	}
	return p.slots[h&uint64(len(p.slots)-1)].key
}

// within is as that of times, for the pairs of a region.
func (p *pairs) within(low, high uint64, shift int, region uint32) []*pairSlot {
	var found []*pairSlot
	take := func(s *pairSlot) {
		if s.count != 0 && s.count != gone && s.region == region {
			found = append(found, s)
		}
	}
	if high-low < uint64(len(p.slots)) {
		for page := low; page < high; page++ {
			if s := p.find(hashPair(page<<shift, region), page<<shift, region); s != nil {
				take(s)
			}
		}
		return found
	}
	for i := range p.slots {
		if s := &p.slots[i]; s.key>>shift >= low && s.key>>shift < high && s.key>>shift<<shift == s.key {
			take(s)
		}
	}
	slices.SortFunc(found, func(a, b *pairSlot) int { return cmp.Compare(a.key, b.key) })
	return found
}

func (p *pairs) find(h, key uint64, region uint32) *pairSlot {
	mask := uint64(len(p.slots) - 1)
	for i := h; p.used > 0; i++ {
		s := &p.slots[i&mask]
		if s.count == 0 {
			break
		}
		if s.key == key && s.region == region {
			return s
		}
	}
	return nil
}

func (p *pairs) insert(h, key uint64, region uint32) *uint32 {
	if p.used >= len(p.slots)/4*3 {
		old := p.slots
		p.slots = zeros[pairSlot](grownSlots(len(old)))
		for _, s := range old {
			if s.count != 0 {
				*p.vacant(hashPair(s.key, s.region)) = s
			}
		}
	}
	p.used++
	s := p.vacant(h)
	s.key, s.region = key, region
	return &s.count
}

func (p *pairs) vacant(h uint64) *pairSlot {
	mask := uint64(len(p.slots) - 1)
	for i := h; ; i++ {
		if s := &p.slots[i&mask]; s.count == 0 {
			return s
		}
	}
}

// ids numbers distinct values from 0 in the order of their first sight.
type ids struct {
	values []int64
	slots  []uint32 // the number + 1: 0 is an empty slot
}

// number gives the number of a value and whether it is new.
func (d *ids) number(v int64) (n uint32, fresh bool) {
	h := hash(uint64(v))
	mask := uint64(len(d.slots) - 1)
	for i := h; len(d.slots) > 0; i++ {
		n := d.slots[i&mask]
		if n == 0 {
			break
		}
		if d.values[n-1] == v {
			return n - 1, false
		}
	}
	if len(d.values) >= len(d.slots)/4*3 {
		d.slots = make([]uint32, max(leastSlots, 2*len(d.slots)))
		for i, v := range d.values {
			*d.vacant(hash(uint64(v))) = uint32(i) + 1
		}
	}
	d.values = append(d.values, v)
	*d.vacant(h) = uint32(len(d.values))
	return uint32(len(d.values)) - 1, true
}

func (d *ids) vacant(h uint64) *uint32 {
	mask := uint64(len(d.slots) - 1)
	for i := h; ; i++ {
		if s := &d.slots[i&mask]; *s == 0 {
			return s
		}
	}
}
