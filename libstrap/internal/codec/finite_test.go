package codec

import (
	"encoding/binary"
	"math"
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/wire"
)

// notFinite tells for each 16-bit or 8-bit word of a type whether it is infinite or NaN, in plain terms.
func notFinite(t wire.DType, w uint16) bool {
	switch t {
	case wire.Float16:
		return w>>10&0x1F == 0x1F
	case wire.BFloat16:
		return w>>7&0xFF == 0xFF
	case wire.Float8E5M2:
		return w>>2&0x1F == 0x1F
	case wire.Float8E4M3FN:
		return w&0x7F == 0x7F
	case wire.Float8E4M3FNUZ, wire.Float8E5M2FNUZ:
		return w == 0x80
	case wire.Float8E8M0FNU:
		return w == 0xFF
	}
	return false
}

func TestEachWordOfTheSmallFloatsIsToldRight(t *testing.T) {
	for _, kind := range []wire.DType{
		wire.Float16, wire.BFloat16, wire.Float8E5M2, wire.Float8E4M3FN, wire.Float8E4M3FNUZ,
		wire.Float8E5M2FNUZ, wire.Float8E8M0FNU,
	} {
		for w := range 1 << (8 * kind.Size()) {
			// At each place of a group, among words that are finite and have all other bits.
			for _, at := range []int{0, 1, 15, 16, 37} {
				b := make([]byte, 40*kind.Size())
				put(b, kind.Size(), at, uint16(w))
				want := -1
				if notFinite(kind, uint16(w)) {
					want = at
				}
				if got := FirstNotFinite(kind, b); got != want {
					t.Fatalf("%v: word %#x at %d: found %d, not %d", kind, w, at, got, want)
				}
			}
		}
	}
}

func put(b []byte, size, at int, w uint16) {
	if size == 1 {
		b[at] = byte(w)
	} else {
		binary.NativeEndian.PutUint16(b[2*at:], w)
	}
}

func TestTheFirstValueThatIsNotFinite(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	for range 2000 {
		n := r.IntN(200)
		v := make([]float32, n)
		want := -1
		for i := range v {
			v[i] = math.Float32frombits(r.Uint32())
			if x := float64(v[i]); want < 0 && (math.IsInf(x, 0) || math.IsNaN(x)) {
				want = i
			}
		}
		b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), 4*n)
		if got := FirstNotFinite(wire.Float32, b); got != want {
			t.Fatalf("%v: found %d, not %d", v, got, want)
		}
		if want >= 0 {
			if got := ValueOf(wire.Float32, b, want); math.Float32bits(float32(got))&0x7F80_0000 != 0x7F80_0000 {
				t.Fatalf("the value is %v", got)
			}
		}
	}
	wide := make([]float64, 9)
	wide[8] = math.Inf(-1)
	b := unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(wide))), 8*len(wide))
	if at := FirstNotFinite(wire.Float64, b); at != 8 || ValueOf(wire.Float64, b, 8) != math.Inf(-1) {
		t.Errorf("found %d", at)
	}
	if at := FirstNotFinite(wire.Complex128, b[8:]); at != 3 {
		t.Errorf("complex: found %d", at)
	}
	if at := FirstNotFinite(wire.Int64, b); at != -1 {
		t.Errorf("an integer is not finite at %d", at)
	}
}

func BenchmarkFirstNotFinite(b *testing.B) {
	data := make([]byte, 1<<16)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if FirstNotFinite(wire.BFloat16, data) >= 0 {
			b.Fatal("zeros are finite")
		}
	}
}
