// Hash tables of times, of pairs with a region, and of numbers.

package analyse

import (
	"cmp"
	"math"
	"math/bits"
	"slices"
)

// The tables in this file hold values for single addresses and pages. Package spans holds values for
// the pages of long rows. A page is in only one of the two. If it leaves a table, its entry stays
// and is marked gone.
//
// The tables use open addressing with linear probing, and grow when three quarters full. An entry
// takes 16 bytes and a look-up one cache line. A Go map takes twice the memory and three times the
// time (BenchmarkTables). The top bits of a hash choose the share of a stage, so the tables use the
// low bits.

const (
	hashA = 0x9e3779b97f4a7c15
	hashB = 0xd1342543de82ef95
)

// hash mixes the two halves of a product of 128 bits, so that addresses at equal strides spread.
func hash(key uint64) uint64 {
	hi, lo := bits.Mul64(key^hashA, hashB)
	return hi ^ lo
}

func hashPair(key uint64, region uint32) uint64 {
	hi, lo := bits.Mul64(key^hashA, hashB+uint64(region)<<1)
	return hi ^ lo
}

const leastSlots = 16

// grownSlots returns the next size of a table with n slots. Small tables grow faster, because they
// soon grow again.
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

// gone is the count of an entry in pairs whose page is in a span now.
const gone = math.MaxUint32

// goneTime is the same for times. It is above every time + 1.
const goneTime = math.MaxUint64

// at returns a pointer to the time + 1 of an address, and adds the address with 0 if it is new. The
// caller must set it. The pointer is valid until the next call of at.
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

// touch reads the slot where the search for a hash starts. Stages touch the slots of several rows
// before they look these rows up, so that the processor loads the slots in parallel.
func (t *times) touch(h uint64) uint64 {
	if len(t.slots) == 0 {
		return 0
	}
	return t.slots[h&uint64(len(t.slots)-1)].key
}

// within returns the entries of the pages [low, high), in order. The key of a page is its number <<
// shift. The entries are valid until the next call of at.
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

// find returns the entry of an address, or nil if there is none.
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

// at returns a pointer to the count of a pair, and adds the pair with 0 if it is new. The caller must
// set it. The pointer is valid until the next call of at.
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

// touch reads the slot where the search for a hash starts; see times.touch.
func (p *pairs) touch(h uint64) uint64 {
	if len(p.slots) == 0 {
		return 0
	}
	return p.slots[h&uint64(len(p.slots)-1)].key
}

// within returns the entries of a region's pages [low, high), in order; see times.within.
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

// ids numbers distinct values from 0, in the order of their first occurrence.
type ids struct {
	values []int64
	slots  []uint32 // the number + 1; 0 is an empty slot
}

// number returns the number of a value, and whether the value is new.
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
