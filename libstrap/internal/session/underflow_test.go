// Tests of values that are too small for float16.

package session

import (
	"bytes"
	"errors"
	"fmt"
	"path/filepath"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// tiny returns n values of about 1e-8, which are all zero as float16.
func tiny(n int) []float32 {
	return float32s(n, func(i int) float32 { return 1e-8 * (1 + float32(i%100)/100) })
}

// A tensor counts as underflowed if its values are too small for float16, and lose more than
// underflowBound.
func TestTensorsThatAreTooSmallForFloat16AreCounted(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		largeToo := tiny(1000)
		largeToo[3] = 0.5
		overflowing := tiny(1000)
		overflowing[3] = 1e30
		for name, c := range map[string]struct {
			values  []float32
			counted uint64
		}{
			"all tiny":            {tiny(1000), 1},
			"streamed":            {tiny(1 << 20), 1},
			"a tenth is lost":     {float32s(1000, func(i int) float32 { return 1e-7 }), 1},
			"subnormal":           {float32s(1000, func(i int) float32 { return 1e-6 * (1 + float32(i)/1000) }), 0},
			"some beside a large": {largeToo, 0},
			"zeros":               {make([]float32, 1000), 0},
			"empty":               {nil, 0},
			"overflowing":         {overflowing, 0}, // counts as overflowed instead, and has a twin
		} {
			for _, kind := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd} {
				t.Run(name+" "+kind.String(), func(t *testing.T) {
					o := options(kind)
					o.MaxMemory = 1 << 20
					path := filepath.Join(t.TempDir(), "a.packets")
					s := open(t, path, o)
					enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, c.values))
					finish(t, s)
					if st := s.Stats(); st.Underflowed != c.counted {
						t.Errorf("%d tensors are counted, not %d", st.Underflowed, c.counted)
					}
					if rows, _ := read(t, path); c.counted > 0 && len(rows) != 1 {
						t.Errorf("%d rows", len(rows))
					}
				})
			}
		}
	})
}

// The error bound holds for the loss of float16 too. If float16 breaks the bound, a float32 twin
// follows the float16 packet.
func TestFloat32IsStoredTooIfFloat16BreaksTheBound(t *testing.T) {
	small := float32s(1000, func(i int) float32 { return 1e-6 * (1 + float32(i)/1000) }) // 1.3e-4 is lost
	for _, c := range []struct {
		name   string
		kind   codec.Kind
		bound  float64
		values []float32
		twin   bool
	}{
		{"rounded", codec.Zstd, 1e-4, tiny(1000), true},
		{"streamed", codec.Zstd, 1e-4, tiny(1 << 20), true},
		{"archived", codec.Archive, 0, tiny(1000), true},
		{"subnormal", codec.LZ4, 1e-5, small, true},
		{"within its bound", codec.LZ4, 1e-2, small, false},
		{"within an archive's", codec.Archive, 0, small, false},
		{"a coarse bound", codec.None, 0.3, normals(1000), false},
	} {
		t.Run(c.name, func(t *testing.T) {
			o := options(c.kind)
			o.MaxMemory, o.ErrorBound = 1<<20, c.bound
			path := filepath.Join(t.TempDir(), "a.packets")
			s := open(t, path, o)
			enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, c.values))
			finish(t, s)
			rows, payloads := read(t, path)
			if st := s.Stats(); !c.twin {
				if st.Underflowed != 0 || len(rows) != 1 {
					t.Errorf("%d counted, %d rows", st.Underflowed, len(rows))
				}
			} else if st.Underflowed != 1 || st.Overflowed != 0 || len(rows) != 2 ||
				rows[1].Name() != "x!float32" || !bytes.Equal(payloads[1], bytesOf(c.values)) {
				t.Errorf("%d counted, rows %+v", st.Underflowed, rows)
			}
		})
	}
}

// If float16 breaks the bound in one part of a split tensor, float32 of the whole tensor is stored.
func TestAPartThatBreaksTheBound(t *testing.T) {
	o := options(codec.None)
	o.split, o.ErrorBound = 2*300, bound
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	v := append(normals(300), tiny(300)...)
	enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, v))
	finish(t, s)
	rows, payloads := read(t, path)
	if len(rows) != 2+4 || s.Stats().Underflowed != 1 || !bytes.Equal(bytes.Join(payloads[2:], nil), bytesOf(v)) {
		t.Errorf("%d counted, rows %+v", s.Stats().Underflowed, rows)
	}
}

// If the host converted the tensor, only the host has the float32 values. The underflow is counted,
// but no twin can be stored.
func TestAConversionThatLostTheValuesIsCounted(t *testing.T) {
	for _, errorBound := range []float64{0, bound} {
		t.Run(fmt.Sprint(errorBound), func(t *testing.T) {
			o := options(codec.LZ4)
			o.ErrorBound = errorBound
			path := filepath.Join(t.TempDir(), "a.stream")
			s := open(t, path, o)
			layer := mustLayer(t, s, "x")
			enqueue(t, s, convertedBefore(layer, tiny(1000), 1000))
			enqueue(t, s, convertedBefore(layer, normals(1000), 1000))
			finish(t, s)
			if rows, _ := read(t, path); len(rows) != 2 || s.Stats().Underflowed != 1 {
				t.Errorf("%d counted, rows %+v", s.Stats().Underflowed, rows)
			}
		})
	}
}

func TestFloat32ThatIsKeptLosesNothing(t *testing.T) {
	for _, kind := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd, codec.Archive} {
		t.Run(kind.String(), func(t *testing.T) {
			o := options(kind)
			o.KeepFloat32 = true
			path := filepath.Join(t.TempDir(), "a.packets")
			s := open(t, path, o)
			v := tiny(1000)
			enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, v))
			finish(t, s)
			rows, payloads := read(t, path)
			if len(rows) != 1 || rows[0].Stored != wire.Float32 || s.Stats().Underflowed != 0 || !bytes.Equal(payloads[0], bytesOf(v)) {
				t.Errorf("%d counted, rows %+v", s.Stats().Underflowed, rows)
			}
		})
	}
}

// The first part breaks the bound, and the call times out behind it. The repeated calls still store
// the float32 twin.
func TestAKnownUnderflowOutlivesATimeout(t *testing.T) {
	o := options(codec.None)
	o.MaxMemory, o.ErrorBound, o.split = 1<<20, bound, 2*50_000
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	v := append(tiny(50_000), normals(3_950_000)...) // the first part is in before the memory is full
	x := tensorOf(mustLayer(t, s, "x"), wire.Float32, v)
	calls := 1
	for ; ; calls++ {
		if err := s.Enqueue(x, 0); err == nil {
			break
		} else if !errors.Is(err, status.Timeout) {
			t.Fatal(err)
		}
	}
	finish(t, s)
	if calls < 2 {
		t.Skip("it went in at once")
	}
	_, payloads := read(t, path)
	if s.Stats().Underflowed != 1 || len(payloads) != 80+160 || !bytes.Equal(bytes.Join(payloads[80:], nil), bytesOf(v)) {
		t.Errorf("%d counted, %d packets after %d calls", s.Stats().Underflowed, len(payloads), calls)
	}
}

// If the float32 twin is dropped, its note says that the float16 packet breaks the bound.
func TestTheNoteOfADroppedTwinTellsWhatFloat16Lost(t *testing.T) {
	o := options(codec.None)
	o.MaxMemory, o.DropOnFull, o.ErrorBound = 1<<20, true, bound
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, o)
	v := tiny(1 << 18) // the float16 has room, the float32 has not
	if err := s.Enqueue(tensorOf(mustLayer(t, s, "x"), wire.Float32, v), forever); !errors.Is(err, ErrDropped) {
		t.Fatal(err)
	}
	finish(t, s)
	rows, _ := read(t, path)
	want := "float32 values too small for float16 are stored with an error above the bound: their packet was "
	if len(rows) != 2 || !bytes.HasPrefix([]byte(rows[1].Error), []byte(want)) {
		t.Errorf("rows %+v", rows)
	}
}
