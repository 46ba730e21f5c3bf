package session

import (
	"bytes"
	"math/rand/v2"
	"path/filepath"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// hasten captures at least 100 packets, and more until one was hastened or 2,000 were not, with
// a slow codec. It returns the statistics.
func hasten(t *testing.T, change func(*Options)) Stats {
	t.Helper()
	path := filepath.Join(t.TempDir(), "a.stream")
	o := options(codec.LZ4)
	o.Level, o.Workers, o.MaxMemory = 9, 1, 8<<20
	change(&o)
	s := open(t, path, o)
	layer := mustLayer(t, s, "a")
	random := rand.New(rand.NewPCG(1, 2))
	values := float32s(100_000, func(int) float32 { return float32(random.IntN(50)) })
	n := 0
	for ; n < 100 || n < 2000 && o.TargetRate > 1 && s.Stats().Hastened == 0; n++ {
		enqueue(t, s, tensorOf(layer, wire.Float32, values))
	}
	finish(t, s)
	_, payloads := read(t, path)
	if len(payloads) != n {
		t.Fatalf("%d packets of %d", len(payloads), n)
	}
	for i, p := range payloads {
		if !bytes.Equal(p, halves(values)) {
			t.Fatalf("packet %d of another content", i)
		}
	}
	return s.Stats()
}

func TestPacketsAreHastenedBeforeACallerWaits(t *testing.T) {
	st := hasten(t, func(o *Options) { o.TargetRate = 1e15 })
	if st.Hastened == 0 || st.Hastened == st.Packets {
		t.Errorf("%d of %d packets were hastened", st.Hastened, st.Packets)
	}
}

func TestNothingIsHastenedAboveTheTargetRate(t *testing.T) {
	if st := hasten(t, func(o *Options) { o.TargetRate = 1 }); st.Hastened != 0 {
		t.Errorf("%d packets were hastened", st.Hastened)
	}
}

func TestNothingIsHastenedWithoutATarget(t *testing.T) {
	if st := hasten(t, func(*Options) {}); st.Hastened != 0 {
		t.Errorf("%d packets were hastened", st.Hastened)
	}
}

func TestRawPacketsAndArchivesAreNotHastened(t *testing.T) {
	for _, k := range []codec.Kind{codec.None, codec.Archive} {
		path := filepath.Join(t.TempDir(), "a.archive")
		o := options(k)
		o.Workers, o.MaxMemory, o.TargetRate = 1, 2<<20, 1e15
		s := open(t, path, o)
		layer := mustLayer(t, s, "a")
		for range 100 {
			enqueue(t, s, tensorOf(layer, wire.Float32, float32s(100_000, func(i int) float32 { return float32(i % 1000) })))
		}
		finish(t, s)
		if st := s.Stats(); st.Hastened != 0 {
			t.Errorf("%s: %d packets were hastened", k, st.Hastened)
		}
	}
}
