package codec

import (
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/wire"
)

// At each level of the processor the largest magnitude is that of a plain loop, wherever it stands.
func TestLargestIsThatOfAPlainLoop(t *testing.T) {
	for _, level := range Levels() {
		before := UseLevel(level)
		for _, kind := range []wire.DType{wire.Float16, wire.BFloat16, wire.Float32, wire.Float64} {
			rng := rand.New(rand.NewPCG(1, 2))
			for n := range 200 {
				b := make([]byte, n*kind.Size())
				for i := range b {
					b[i] = byte(rng.Uint32())
				}
				want, at := 0.0, -1
				for i := range n {
					if v := math.Abs(ValueOf(kind, b, i)); math.IsNaN(v) || math.IsInf(v, 0) {
						copy(b[i*kind.Size():], make([]byte, kind.Size())) // the values are finite
					} else if v > want || i == 0 {
						want, at = v, i
					}
				}
				if got := Largest(kind, b); got != want {
					t.Fatalf("%s, %v: the largest of %d is %g, not %g", level, kind, n, got, want)
				}
				if got := FirstOfMagnitude(kind, b, want); n > 0 && want > 0 && got != at {
					t.Fatalf("%s, %v: it is element %d of %d, not %d", level, kind, got, n, at)
				}
			}
		}
		UseLevel(before)
	}
}

func BenchmarkLargest(b *testing.B) {
	data := make([]byte, 1<<20)
	rng := rand.New(rand.NewPCG(1, 2))
	for i := 0; i < len(data); i += 2 {
		binary.NativeEndian.PutUint16(data[i:], uint16(rng.Uint32())&0x3FFF)
	}
	for _, kind := range []wire.DType{wire.Float16, wire.Float32, wire.Float64} {
		b.Run(fmt.Sprint(kind), func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				Largest(kind, data)
			}
		})
		b.Run(fmt.Sprint("finite/", kind), func(b *testing.B) {
			b.SetBytes(int64(len(data)))
			for b.Loop() {
				FirstNotFinite(kind, data)
			}
		})
	}
}
