// Finds the first tensor with a value that is not finite.

package session

import (
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
)

// Alarm is a tensor with a value that is not finite.
type Alarm struct {
	Layer, Request, Call uint32
	Step, Token          int64
	Element              int64   // number of the first such element, row-major
	Value                float64 // of that element
	TimeNS               int64   // CLOCK_MONOTONIC at enqueue
	Thread               uint64
}

// alarm keeps the first tensor with a value that is not finite.
type alarm struct {
	mu    mutex[leafRank]
	first Alarm
	rang  bool
}

// take returns the first such tensor since the last take.
func (a *alarm) take() (first Alarm, rang bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	first, rang = a.first, a.rang
	a.rang = false
	return first, rang
}

// inspect looks at the current packet of an emission, whose elements are in memory as stored. Converting
// and rounding have counted the finite values, so inspect looks through values that were only copied.
func (a *alarm) inspect(e *emission, stored []byte) {
	t, p, finite := e.tensor, &e.part, e.packetLost.Count+e.packetLost.Overflow
	if e.twin || finite == p.count { // of a twin the float16 before it was inspected
		return
	}
	at, value := int64(-1), 0.0
	if finite > 0 { // large values may be infinite as stored
		at, value = t.firstNotFinite(p.start, p.count)
	} else if i := codec.FirstNotFinite(e.stored, stored); i >= 0 {
		at, value = int64(i), codec.ValueOf(e.stored, stored, i)
	}
	if at < 0 {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.rang {
		return
	}
	a.rang = true
	a.first = Alarm{
		Layer: t.Layer, Request: t.Request, Call: t.Call, Step: t.Step, Token: t.Token,
		Element: p.start + at, Value: value, TimeNS: t.TimeNS, Thread: t.Thread,
	}
}

// firstNotFinite finds the first of the elements [start, start+count) that is not finite, counted from
// start. -1: there is none.
func (t *Tensor) firstNotFinite(start, count int64) (at int64, value float64) {
	var piece [2048]float64 // aligned for all types
	size := int64(t.DType.Size())
	for done := int64(0); done < count; {
		n := min(count-done, int64(len(piece))*8/size)
		from := unsafe.Add(t.Data, (start+done)*size)
		if t.Strides != nil {
			from = unsafe.Pointer(&piece)
			codec.Gather(from, t.Data, int(size), t.Shape, t.Strides, start+done, n)
		}
		b := unsafe.Slice((*byte)(from), size*n)
		if i := codec.FirstNotFinite(t.DType, b); i >= 0 {
			return done + int64(i), codec.ValueOf(t.DType, b, i)
		}
		done += n
	}
	return -1, 0
}
