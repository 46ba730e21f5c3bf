// Finds the first tensor with a value that is not finite, and the first one with an unusual magnitude.

package session

import (
	"slices"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
)

const (
	// usualOver is the number of tensors of a layer whose median magnitude is the usual one.
	usualOver = 64
	// usualLeast is the least number of them.
	usualLeast = 16
)

// Alarm is a tensor with a value that is not finite, or an outlier.
type Alarm struct {
	Layer, Request, Call uint32
	Step, Token          int64
	Element              int64   // number of the first such element, row-major
	Value                float64 // of that element
	Usual                float64 // of an outlier: the usual largest magnitude of its layer; 0: it is none
	TimeNS               int64   // CLOCK_MONOTONIC at enqueue
	Thread               uint64
}

// alarm keeps the first tensor with a value that is not finite, and the first outlier.
type alarm struct {
	outlier float64 // see Options.RingOutlier

	mu    mutex[leafRank]
	first []Alarm       // at most one of each kind, as they came
	usual []*magnitudes // by the layer's id
}

func newAlarm(outlier float64) *alarm { return &alarm{outlier: outlier} }

// take returns the first such tensor since the last take, or the second if the last take returned the first.
func (a *alarm) take() (first Alarm, rang bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.first) == 0 {
		return Alarm{}, false
	}
	first = a.first[0]
	a.first = slices.Delete(a.first, 0, 1)
	return first, true
}

// inspect looks at the current packet of an emission, whose elements are in memory as stored. Converting
// and rounding have counted the finite values, so inspect looks through values that were only copied.
func (a *alarm) inspect(e *emission, stored []byte) {
	if e.twin { // the float16 before it was inspected
		return
	}
	t, p, finite := e.tensor, &e.part, e.packetLost.Count+e.packetLost.Overflow
	at, value := int64(-1), 0.0
	switch {
	case finite == p.count:
	case finite > 0: // large values may be infinite as stored
		at, value = t.firstNotFinite(p.start, p.count)
	default:
		if i := codec.FirstNotFinite(e.stored, stored); i >= 0 {
			at, value = int64(i), codec.ValueOf(e.stored, stored, i)
		}
	}
	if at >= 0 {
		a.ring(e, at, value, 0)
	} else if a.outlier > 0 && p.count > 0 && codec.HasLargest(e.stored) {
		a.compare(e, stored)
	}
}

// compare rings if the current packet is an outlier of its layer. Its values are finite.
func (a *alarm) compare(e *emission, stored []byte) {
	t, p := e.tensor, &e.part
	as := e.stored
	// Float16 does not hold the values, and they are at hand.
	original := e.conversion == nil && e.source != e.stored && (e.packetLost.Overflow > 0 || e.tiny)
	largest := 0.0
	if original {
		as = e.source
		t.pieces(p.start, p.count, func(_ int64, b []byte) bool {
			largest = max(largest, codec.Largest(as, b))
			return true
		})
	} else {
		largest = codec.Largest(as, stored)
	}
	usual := a.see(t.Layer, largest)
	if usual == 0 {
		return
	}
	at := int64(-1)
	find := func(from int64, b []byte) bool {
		i := codec.FirstOfMagnitude(as, b, largest)
		if at = from + int64(i); i < 0 {
			return true
		}
		largest = codec.ValueOf(as, b, i) // with its sign
		return false
	}
	if original {
		t.pieces(p.start, p.count, find)
	} else {
		find(0, stored)
	}
	a.ring(e, at, largest, usual)
}

// see adds the largest magnitude of a tensor to those of its layer. If that makes the tensor an outlier, see
// returns the usual one, otherwise 0.
func (a *alarm) see(layer uint32, largest float64) (usual float64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if n := int(layer) + 1; n > len(a.usual) {
		a.usual = append(a.usual, make([]*magnitudes, n-len(a.usual))...)
	}
	of := a.usual[layer]
	if of == nil {
		of = &magnitudes{}
		a.usual[layer] = of
	}
	return of.add(largest, a.outlier)
}

// ring keeps a tensor if it is the first of its kind.
func (a *alarm) ring(e *emission, at int64, value, usual float64) {
	t := e.tensor
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, before := range a.first {
		if (before.Usual > 0) == (usual > 0) {
			return
		}
	}
	a.first = append(a.first, Alarm{
		Layer: t.Layer, Request: t.Request, Call: t.Call, Step: t.Step, Token: t.Token,
		Element: e.part.start + at, Value: value, Usual: usual, TimeNS: t.TimeNS, Thread: t.Thread,
	})
}

// magnitudes are the largest magnitudes of the last tensors of a layer.
type magnitudes struct {
	last [usualOver]float64
	n    int // added so far
}

// add adds a magnitude. If it is above times the median of those before, add returns the median, otherwise 0.
func (m *magnitudes) add(largest, times float64) (median float64) {
	before := m.last[:min(m.n, usualOver)]
	below := 0
	for _, one := range before {
		if one*times < largest {
			below++
		}
	}
	// The median is so small only if half of the values are. That is rare, and sorting takes longer.
	if len(before) >= usualLeast && 2*below >= len(before) {
		sorted := slices.Clone(before)
		slices.Sort(sorted)
		half := len(sorted) / 2
		if median = sorted[half]; len(sorted)%2 == 0 {
			median = (median + sorted[half-1]) / 2
		}
		if !(largest > times*median) {
			median = 0
		}
	}
	m.last[m.n%usualOver] = largest
	m.n++
	return median
}

// firstNotFinite finds the first of the elements [start, start+count) that is not finite, counted from
// start. -1: there is none.
func (t *Tensor) firstNotFinite(start, count int64) (at int64, value float64) {
	at = -1
	t.pieces(start, count, func(from int64, b []byte) bool {
		i := codec.FirstNotFinite(t.DType, b)
		if i < 0 {
			return true
		}
		at, value = from+int64(i), codec.ValueOf(t.DType, b, i)
		return false
	})
	return at, value
}

// pieces calls f with the elements [start, start+count), row-major, piece by piece, until f returns false.
// from is the number of a piece's first element, counted from start.
func (t *Tensor) pieces(start, count int64, f func(from int64, b []byte) bool) {
	var piece [2048]float64 // aligned for all types
	size := int64(t.DType.Size())
	for done := int64(0); done < count; {
		n := min(count-done, int64(len(piece))*8/size)
		from := unsafe.Add(t.Data, (start+done)*size)
		if t.Strides != nil {
			from = unsafe.Pointer(&piece)
			codec.Gather(from, t.Data, int(size), t.Shape, t.Strides, start+done, n)
		}
		if !f(done, unsafe.Slice((*byte)(from), size*n)) {
			return
		}
		done += n
	}
}
