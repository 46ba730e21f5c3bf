package label

import "math/bits"

// table maps keys to small values: open addressed with linear probing, at most three
// quarters full. A look-up reads one cache line, mostly; in a Go map it reads several.
type table[V any] struct {
	slots []slot[V]
	used  int
}

type slot[V any] struct {
	key   uint64
	value V
	taken bool
}

const leastSlots = 16

// hash mixes the 128 bits of a product, so that strided addresses spread.
func hash(key uint64) uint64 {
	hi, lo := bits.Mul64(key^0x9e3779b97f4a7c15, 0xd1342543de82ef95)
	return hi ^ lo
}

// find is where the value of a key stands, nil where there is none.
func (t *table[V]) find(key uint64) *V {
	if t.used == 0 {
		return nil
	}
	if s := t.probe(key); s.taken {
		return &s.value
	}
	return nil
}

// at is where the value of a key stands, zero where the key is new. It is valid until
// the next call for a new key.
func (t *table[V]) at(key uint64) *V {
	if t.used > 0 {
		if s := t.probe(key); s.taken {
			return &s.value
		}
	}
	if t.used >= len(t.slots)/4*3 {
		t.grow()
	}
	s := t.probe(key)
	s.key, s.taken = key, true
	t.used++
	return &s.value
}

// probe finds the slot of a key, or the free one where it would go.
func (t *table[V]) probe(key uint64) *slot[V] {
	mask := uint64(len(t.slots) - 1)
	for i := hash(key); ; i++ {
		if s := &t.slots[i&mask]; !s.taken || s.key == key {
			return s
		}
	}
}

func (t *table[V]) grow() {
	old := t.slots
	t.slots = make([]slot[V], max(leastSlots, 2*len(old)))
	for i := range old {
		if old[i].taken {
			*t.probe(old[i].key) = old[i]
		}
	}
}
