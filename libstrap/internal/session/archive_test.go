package session

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

func archiveOptions() Options {
	o := options(codec.Archive)
	o.MaxMemory = 1 << 20
	return o
}

// normals returns n values of the standard normal distribution, the same for each n.
func normals(n int) []float32 {
	rng := rand.New(rand.NewPCG(1, uint64(n)))
	return float32s(n, func(int) float32 { return float32(rng.NormFloat64()) })
}

// errorOf returns the squared error of a payload of float16: mse is its mean over the values,
// normalised is its sum over the sum of the squared values.
func errorOf(v []float32, payload []byte) (mse, normalised float64) {
	var errors, squares float64
	for i, x := range v {
		h := binary.LittleEndian.Uint16(payload[2*i:])
		y := math.Ldexp(float64(h&0x3FF)+1024*float64(min(h>>10&31, 1)), int(max(h>>10&31, 1))-25)
		if h&0x8000 != 0 {
			y = -y
		}
		errors += (float64(x) - y) * (float64(x) - y)
		squares += float64(x) * float64(x)
	}
	return errors / float64(len(v)), errors / squares
}

// The rows and the counters of an archive report the error that its values really have, which is
// within the bound.
func TestArchiveReportsItsError(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "a.archive")
		s := open(t, path, archiveOptions())
		layer := mustLayer(t, s, "x")
		var sent [][]float32
		for _, n := range []int{64, 1000, 5000, 100_000, 500_000} { // the last is streamed
			sent = append(sent, normals(n))
			enqueue(t, s, tensorOf(layer, wire.Float32, sent[len(sent)-1]))
		}
		finish(t, s)
		rows, got := read(t, path)
		var sum, values float64
		for i, v := range sent {
			mse, normalised := errorOf(v, got[i])
			if rows[i].Codec != "archive" || rows[i].Stored != wire.Float16 {
				t.Errorf("%d values: %+v", len(v), rows[i])
			}
			if normalised > codec.ArchiveDefaultBound || rows[i].MSE < mse || rows[i].MSE > 1.05*mse {
				t.Errorf("%d values: normalised error %g, mse %g, reported %g", len(v), normalised, mse, rows[i].MSE)
			}
			sum += rows[i].MSE * float64(len(v))
			values += float64(len(v))
		}
		st := s.Stats()
		if c := st.Convert; float64(c.Count) != values || math.Abs(c.SquareError-sum) > 1e-9*sum || c.MaxError < 0.03 || c.MaxError > 0.1 {
			t.Errorf("%+v, the rows say %g of %g values", c, sum, values)
		}
		if ratio := float64(st.RawBytes) / float64(st.StoredBytes); ratio < 5 {
			t.Errorf("ratio %.2f", ratio)
		}
	})
}

// An archive stores a tensor without loss if it is no float16, is too small, or would break the
// bound. A float32 twin follows a float16 packet that cannot hold the values.
func TestArchiveLeavesOtherTensorsAsTheyAre(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "a.archive")
		s := open(t, path, archiveOptions())
		layer := mustLayer(t, s, "x")
		ints := make([]int64, 1000)
		for i := range ints {
			ints[i] = int64(i * i)
		}
		v := normals(1000)
		small := float32s(1000, func(i int) float32 { return v[i] * 1e-7 }) // subnormal as float16
		nan := append(normals(1000), float32(math.NaN()))
		beyond := append(normals(1000), 1e6)
		doubles := make([]float64, 1000)
		for i := range doubles {
			doubles[i] = float64(v[i])
		}
		sent := []struct {
			x     *Tensor
			want  []byte
			codec string
		}{
			{tensorOf(layer, wire.Int64, ints), bytesOf(ints), "zstd"},
			{tensorOf(layer, wire.Float64, doubles), bytesOf(doubles), "zstd"},
			{tensorOf(layer, wire.Float32, v[:63]), halves(v[:63]), "zstd"},
			{tensorOf(layer, wire.Float32, v[:0], 0, 7), nil, "zstd"},
			{tensorOf(layer, wire.Float32, small), halves(small), "zstd"},
			{nil, bytesOf(small), "zstd"}, // the twin of small, because float16 breaks the bound
			{tensorOf(layer, wire.Float32, nan), halves(nan), "archive"},
			{tensorOf(layer, wire.Float32, beyond), halves(beyond), "archive"},
			{nil, bytesOf(beyond), "zstd"}, // the twin of beyond
		}
		for _, e := range sent {
			if e.x != nil {
				enqueue(t, s, e.x)
			}
		}
		finish(t, s)
		rows, got := read(t, path)
		if len(rows) != len(sent) {
			t.Fatalf("%d rows", len(rows))
		}
		for i, e := range sent {
			if rows[i].Codec != e.codec || !bytes.Equal(got[i], e.want) {
				t.Errorf("tensor %d: %s instead of %s, %d bytes of %d", i, rows[i].Codec, e.codec, len(got[i]), len(e.want))
			}
		}
		if !math.IsNaN(rows[0].MSE) || rows[6].MSE > 1e-7 || !(rows[4].MSE > 0) {
			t.Errorf("errors %g, %g, %g", rows[0].MSE, rows[4].MSE, rows[6].MSE)
		}
	})
}

// An archive of bfloat16 values has an error, and the counters of conversions include it.
func TestArchiveOfBFloat16CountsAsChanged(t *testing.T) {
	atEveryLevel(t, func(t *testing.T) {
		path := filepath.Join(t.TempDir(), "a.archive")
		s := open(t, path, archiveOptions())
		v := normals(2000)
		h := make([]uint16, len(v))
		for i, x := range v {
			h[i] = uint16(math.Float32bits(x) >> 16)
		}
		enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.BFloat16, h))
		finish(t, s)
		rows, _ := read(t, path)
		c := s.Stats().Convert
		if rows[0].Codec != "archive" || rows[0].Stored != wire.BFloat16 || c.Count != 2000 ||
			math.Abs(c.SquareError-2000*rows[0].MSE) > 1e-9*c.SquareError || c.SquareError > codec.ArchiveDefaultBound*c.SquareSum {
			t.Errorf("%+v, %+v", rows[0], c)
		}
	})
}

// A resumed archive keeps its packets, and uses the new error bound for the next ones.
func TestArchiveResumes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.archive")
	o := archiveOptions()
	v := normals(3000)
	s := open(t, path, o)
	enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, v))
	finish(t, s)
	_, before := read(t, path)
	if err := os.Remove(path + ".index"); err != nil {
		t.Fatal(err)
	}
	o.Resume, o.Cut, o.ErrorBound = true, KeepAll, 1e-3
	s = open(t, path, o)
	enqueue(t, s, tensorOf(mustLayer(t, s, "y"), wire.Float32, v))
	finish(t, s)
	rows, got := read(t, path)
	if len(rows) != 2 || rows[0].Codec != "archive" || rows[1].Codec != "archive" || !bytes.Equal(got[0], before[0]) {
		t.Fatalf("after resuming: %+v", rows)
	}
	if _, normalised := errorOf(v, got[1]); normalised < 7e-4 || normalised > 1e-3 {
		t.Errorf("normalised error %g for a bound of 1e-3", normalised)
	}
	if _, err := Open(filepath.Join(t.TempDir(), "a.stream"), o); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("an archive named .stream: %v", err)
	}
	o.ErrorBound = 0.011
	if _, err := Open(path, o); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a bound of 0.011: %v", err)
	}
}
