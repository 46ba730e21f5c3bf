package session

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/filelimit"
	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const (
	forever = time.Duration(-1)
	// patience is how much longer than its time limit a call may take in a test. The machine may be
	// busy, and the race detector on.
	patience = 5 * time.Second
)

func options(k codec.Kind) Options {
	return Options{Codec: k, Workers: 2, MaxMemory: 8 << 20}
}

func open(t testing.TB, path string, o Options) *Session {
	t.Helper()
	s, err := Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		s.Discard()
		<-s.life.finished
	})
	return s
}

func mustLayer(t testing.TB, s *Session, name string) uint32 {
	t.Helper()
	id, err := s.Layer("", name, "")
	if err != nil {
		t.Fatal(err)
	}
	return id
}

func float32s(n int, f func(i int) float32) []float32 {
	v := make([]float32, n)
	for i := range v {
		v[i] = f(i)
	}
	return v
}

// noise returns n values whose float16 form LZ4 cannot compress.
func noise(n int, seed uint64) []float32 {
	rng := rand.New(rand.NewPCG(seed, 2))
	return float32s(n, func(int) float32 { return float32(rng.NormFloat64()) })
}

// tensorOf returns a tensor over the memory of v. Its shape is [len(v)] by default.
func tensorOf[T any](layer uint32, d wire.DType, v []T, shape ...int64) *Tensor {
	if len(shape) == 0 {
		shape = []int64{int64(len(v))}
	}
	return &Tensor{
		Layer: layer, DType: d, Shape: shape, Step: -1, Token: -1,
		Data: unsafe.Pointer(unsafe.SliceData(v)),
	}
}

func enqueue(t testing.TB, s *Session, x *Tensor) {
	t.Helper()
	if err := s.Enqueue(x, forever); err != nil {
		t.Fatal(err)
	}
}

func flush(s *Session, timeout time.Duration) error {
	var cursor uint64
	return s.Flush(&cursor, timeout)
}

func checkpoint(s *Session, timeout time.Duration) (int64, error) {
	var cursor uint64
	return s.Checkpoint(&cursor, timeout)
}

func finish(t testing.TB, s *Session) {
	t.Helper()
	if err := s.Close(forever); err != nil {
		t.Fatal(err)
	}
}

// read returns the rows of a capture and their decoded payloads.
func read(t testing.TB, path string) (rows []wire.Row, payloads [][]byte) {
	t.Helper()
	r, err := reader.Open(path, reader.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if p := r.Info().Problem; p != "" {
		t.Fatalf("the capture has a problem: %s", p)
	}
	for i := range r.NumRows() {
		row, err := r.Row(i)
		if err != nil {
			t.Fatal(err)
		}
		var data []byte
		if row.Error == "" {
			n, err := r.DecodedLen(i)
			if err != nil {
				t.Fatal(err)
			}
			data = make([]byte, n)
			if err := r.ReadInto(i, data); err != nil {
				t.Fatal(err)
			}
		}
		rows, payloads = append(rows, row), append(payloads, data)
	}
	return rows, payloads
}

// halves returns the bytes of v as float16.
func halves(v []float32) []byte {
	out := make([]uint16, len(v))
	var st codec.Stats
	if len(v) > 0 {
		codec.Float32ToFloat16(unsafe.Pointer(unsafe.SliceData(out)), unsafe.Pointer(unsafe.SliceData(v)), len(v), 10, &st)
	}
	b := make([]byte, 0, 2*len(v))
	for _, h := range out {
		b = binary.LittleEndian.AppendUint16(b, h)
	}
	return b
}

// bytesOf returns the memory of v.
func bytesOf[T any](v []T) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(unsafe.SliceData(v))), len(v)*int(unsafe.Sizeof(v[0])))
}

func TestPacketsComeBackInOrder(t *testing.T) {
	for _, k := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd} {
		t.Run(k.String(), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "a.stream")
			s := open(t, path, options(k))
			var want [][]byte
			for i := range 300 {
				layer := mustLayer(t, s, fmt.Sprintf("layer.%d", i%7))
				v := float32s(i*i%5000, func(j int) float32 { return float32(i) + float32(j)/100 })
				x := tensorOf(layer, wire.Float32, v)
				x.Step, x.Token, x.Call = int64(i/7), int64(i/14), uint32(i%2)
				enqueue(t, s, x)
				want = append(want, halves(v))
			}
			finish(t, s)
			rows, got := read(t, path)
			if len(rows) != len(want) {
				t.Fatalf("%d rows of %d", len(rows), len(want))
			}
			for i, row := range rows {
				if !bytes.Equal(got[i], want[i]) {
					t.Fatalf("packet %d differs", i)
				}
				if row.Sequence != uint64(i) || row.Layer != fmt.Sprintf("layer.%d", i%7) ||
					row.Step != int64(i/7) || row.Token != int64(i/14) || row.Call != uint32(i%2) ||
					row.Source != wire.Float32 || row.Stored != wire.Float16 || row.Codec != k.String() ||
					row.Shape[0] != int64(len(want[i])/2) {
					t.Fatalf("row %d: %+v", i, row)
				}
			}
			if st := s.Stats(); st.Packets != 300 || st.Tensors != 300 || st.QueuedPackets != 0 || st.QueuedBytes != 0 {
				t.Fatalf("stats %+v", st)
			}
		})
	}
}

// A tensor larger than the arena is captured whole, and the arena stays within its bound.
func TestLargerThanTheArena(t *testing.T) {
	for _, k := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd} {
		t.Run(k.String(), func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "a.stream")
			o := options(k)
			o.MaxMemory = 1 << 20
			s := open(t, path, o)
			layer := mustLayer(t, s, "big")
			v := float32s(3<<20, func(i int) float32 { return float32(i % 999) })
			for range 2 {
				enqueue(t, s, tensorOf(layer, wire.Float32, v, 3, 1<<20))
				enqueue(t, s, tensorOf(layer, wire.Float32, v[:100]))
			}
			finish(t, s)
			if st := s.Stats(); st.MemoryPeak > 1<<20 {
				t.Fatalf("took %d bytes of staging memory", st.MemoryPeak)
			}
			rows, got := read(t, path)
			if len(rows) != 4 {
				t.Fatalf("%d rows", len(rows))
			}
			for i, n := range []int{len(v), 100, len(v), 100} {
				if !bytes.Equal(got[i], halves(v[:n])) {
					t.Fatalf("packet %d differs", i)
				}
			}
			if math.IsNaN(rows[0].MSE) || rows[0].MSE > 0 {
				t.Fatalf("MSE of whole numbers below 2048: %v", rows[0].MSE)
			}
		})
	}
}

// A tensor larger than a packet may be becomes several packets, each with the whole shape.
func TestSplitIntoParts(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	o := options(codec.LZ4)
	o.split = 1000 // bytes, instead of 4 GiB
	s := open(t, path, o)
	v := float32s(1700, func(i int) float32 { return float32(i) })
	enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, v, 17, 100))
	finish(t, s)
	rows, got := read(t, path)
	if len(rows) != 4 || !bytes.Equal(bytes.Join(got, nil), halves(v)) {
		t.Fatalf("%d parts", len(rows))
	}
	for i, row := range rows {
		if row.Part != uint32(i) || row.Parts != 4 || row.Shape[0] != 17 || row.Shape[1] != 100 {
			t.Fatalf("part %d: %+v", i, row)
		}
	}
}

// A float32 twin follows a tensor with finite values beyond float16. Infinities need no twin.
func TestOverflowKeepsTheFloat32(t *testing.T) {
	for name, n := range map[string]int{"whole": 1000, "streamed": 1 << 21} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "a.stream")
			o := options(codec.Zstd)
			o.MaxMemory = 1 << 20
			s := open(t, path, o)
			v := float32s(n, func(i int) float32 { return float32(i % 1000) })
			v[n-1] = 70000
			enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, v))
			enqueue(t, s, tensorOf(mustLayer(t, s, "y"), wire.Float32, []float32{float32(math.Inf(1))}))
			finish(t, s)
			rows, got := read(t, path)
			if len(rows) != 3 || rows[0].Name() != "x" || rows[1].Name() != "x!float32" || rows[2].Name() != "y" {
				t.Fatalf("rows %+v", rows)
			}
			if rows[1].Stored != wire.Float32 || rows[1].Transform != wire.TransformOverflow {
				t.Fatalf("twin %+v", rows[1])
			}
			if !bytes.Equal(got[0], halves(v)) || !bytes.Equal(got[1], bytesOf(v)) {
				t.Fatal("payloads differ")
			}
			if st := s.Stats(); st.Overflowed != 1 || st.Convert.Overflow != 1 {
				t.Fatalf("stats %+v", st)
			}
		})
	}
}

// A tensor without a finite float16 value counts its overflows too.
func TestAllValuesMayOverflow(t *testing.T) {
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), options(codec.None))
	v := float32s(5, func(int) float32 { return 1e30 })
	enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, v))
	finish(t, s)
	if st := s.Stats(); st.Overflowed != 1 || st.Convert.Overflow != 5 {
		t.Errorf("stats %+v", st)
	}
}

func TestOtherTypesStayAsTheyAre(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, options(codec.LZ4))
	raw := make([]byte, 16*60)
	for i := range raw {
		raw[i] = byte(i * 7)
	}
	var types []wire.DType
	for d := wire.Float32; d.Valid(); d++ {
		if d != wire.Float32 {
			enqueue(t, s, tensorOf(mustLayer(t, s, d.String()), d, raw[:60*d.Size()], 3, 20))
			types = append(types, d)
		}
	}
	finish(t, s)
	rows, got := read(t, path)
	for i, d := range types {
		if rows[i].Source != d || rows[i].Stored != d || !bytes.Equal(got[i], raw[:60*d.Size()]) {
			t.Errorf("%s came back as %+v", d, rows[i])
		}
	}
}

func TestScalarsAndEmptyTensors(t *testing.T) {
	for _, k := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd} {
		path := filepath.Join(t.TempDir(), "a.stream")
		s := open(t, path, options(k))
		one := []float32{1.5}
		for _, name := range []string{"", "x"} {
			layer := mustLayer(t, s, name)
			enqueue(t, s, &Tensor{Layer: layer, DType: wire.Float32, Shape: []int64{}, Data: unsafe.Pointer(&one[0])})
			enqueue(t, s, &Tensor{Layer: layer, DType: wire.Int64, Shape: []int64{4, 0, 2}})
		}
		finish(t, s)
		rows, got := read(t, path)
		if len(rows) != 4 {
			t.Fatalf("%s: %d rows", k, len(rows))
		}
		for i := 0; i < 4; i += 2 {
			if len(rows[i].Shape) != 0 || !bytes.Equal(got[i], halves(one)) {
				t.Errorf("%s: scalar came back as %+v", k, rows[i])
			}
			if len(rows[i+1].Shape) != 3 || len(got[i+1]) != 0 || rows[i+1].Error != "" {
				t.Errorf("%s: empty tensor came back as %+v", k, rows[i+1])
			}
		}
		if data, err := os.ReadFile(path); err != nil || bytes.HasPrefix(data, make([]byte, 6)) {
			t.Errorf("%s: the stream holds six zero bytes, %v", k, err)
		}
	}
}

func TestThreadsKeepTheirOrder(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	s := open(t, path, o)
	checkThreads(t, s, path, 8, 200, func(layer uint32, i int) error {
		v := float32s(1+(i*997)%9000, func(int) float32 { return float32(i) })
		defer clear(v) // the caller may reuse its memory at once
		x := tensorOf(layer, wire.Float32, v)
		x.Step = int64(i)
		return s.Enqueue(x, forever)
	})
}

// checkThreads starts threads that each capture the steps 0, 1, ... to a layer of their own, and
// ends the session. It checks that each layer has its rows in order, and that all values of step i
// are i.
func checkThreads(t *testing.T, s *Session, path string, threads, each int, capture func(layer uint32, i int) error) {
	t.Helper()
	var all sync.WaitGroup
	for n := range threads {
		layer := mustLayer(t, s, fmt.Sprint(n))
		all.Go(func() {
			for i := range each {
				if err := capture(layer, i); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	finish(t, s)
	rows, got := read(t, path)
	next := map[string]int64{}
	for i, row := range rows {
		if row.Step != next[row.Layer] {
			t.Fatalf("layer %s: step %d after %d", row.Layer, row.Step, next[row.Layer]-1)
		}
		next[row.Layer]++
		want := halves(float32s(int(row.Shape[0]), func(int) float32 { return float32(row.Step) }))
		if row.Error == "" && !bytes.Equal(got[i], want) {
			t.Fatalf("layer %s, step %d differs", row.Layer, row.Step)
		}
	}
	if len(rows) != threads*each {
		t.Fatalf("%d rows", len(rows))
	}
}

// Without a flush, the writer's tick brings packets to the file.
func TestPacketsReachTheFileWithoutBeingAskedFor(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, options(codec.None))
	layer := mustLayer(t, s, "x")
	for n := range uint64(3) {
		enqueue(t, s, tensorOf(layer, wire.Float32, []float32{1, 2, 3}))
		for began := time.Now(); s.Stats().Packets <= n; time.Sleep(time.Millisecond) {
			if time.Since(began) > time.Minute {
				t.Fatal("the packet does not reach the file")
			}
		}
		if info, err := os.Stat(path); err != nil || info.Size() != int64(n+1)*(wire.HeaderSize+1+6) {
			t.Fatalf("%d packets are in a file of %d bytes, %v", n+1, info.Size(), err)
		}
	}
}

// The index is written again a second later, or 64 MiB of the stream later, whichever comes first.
func TestTheIndexFollowsTheStream(t *testing.T) {
	s, _ := withLayer(t, options(codec.LZ4))
	stopTicks(s)
	k := s.sink
	for _, lag := range []struct {
		time    time.Duration
		bytes   int64
		written bool
	}{{-time.Hour, 0, false}, {indexLag, 0, true}, {-time.Hour, indexLagBytes, true}} {
		enqueue(t, s, numbered(0, 0, 10))
		if err := flush(s, forever); err != nil {
			t.Fatal(err)
		}
		k.mu.Lock()
		k.indexed, k.indexedAt = time.Now().Add(-lag.time), k.stream.Written()-lag.bytes
		if err := k.writeIndexWhenDue(); err != nil {
			t.Error(err)
		}
		if written := k.index.Pending() == 0; written != lag.written {
			t.Errorf("%s and %d bytes later: the index is written: %t", lag.time, lag.bytes, written)
		}
		k.mu.Unlock()
	}
	finish(t, s)
}

// After a checkpoint the stream has the bytes that it covers, and the index lists their packets.
func TestCheckpointCoversWhatItSays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, options(codec.LZ4))
	layer := mustLayer(t, s, "x")
	enqueue(t, s, tensorOf(layer, wire.Float32, []float32{1, 2, 3}))
	offset, err := checkpoint(s, forever)
	if err != nil {
		t.Fatal(err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != offset || offset == 0 {
		t.Fatalf("offset %d of a file of %d bytes, %v", offset, info.Size(), err)
	}
	r, err := reader.Open(path, reader.Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer r.Close()
	if i := r.Info(); !i.Indexed || i.Packets != 1 || i.Scanned != 0 {
		t.Fatalf("during the capture a reader sees %+v", i)
	}
}

// Checkpoints cover the packets from before a resume too, also if no tensor came since.
func TestACheckpointOfNothingNew(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, options(codec.LZ4))
	if offset, err := checkpoint(s, forever); offset != 0 || err != nil {
		t.Errorf("of an empty stream: %d, %v", offset, err)
	}
	enqueue(t, s, tensorOf(mustLayer(t, s, "x"), wire.Float32, []float32{1, 2, 3}))
	want, err := checkpoint(s, forever)
	if err != nil {
		t.Fatal(err)
	}
	if again, err := checkpoint(s, forever); again != want || err != nil {
		t.Errorf("a second one: %d, not %d, %v", again, want, err)
	}
	finish(t, s)
	o := options(codec.LZ4)
	o.Resume, o.Cut = true, KeepAll
	s = open(t, path, o)
	if offset, err := checkpoint(s, forever); offset != want || err != nil {
		t.Errorf("of a resumed stream: %d, not %d, %v", offset, want, err)
	}
}

// Resuming cuts the stream to the given length, keeps the cut end in a .tail file, and refuses a
// length that is not the end of a packet.
func TestResumeCutsToTheCheckpoint(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, options(codec.LZ4))
	layer := mustLayer(t, s, "x")
	v := float32s(1000, func(i int) float32 { return float32(i) })
	enqueue(t, s, tensorOf(layer, wire.Float32, v[:10]))
	cut, err := checkpoint(s, forever)
	if err != nil {
		t.Fatal(err)
	}
	enqueue(t, s, tensorOf(layer, wire.Float32, v[:20]))
	finish(t, s)
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}

	o := options(codec.Zstd) // another codec: each packet knows its own
	o.Resume, o.Cut = true, cut
	s = open(t, path, o)
	enqueue(t, s, tensorOf(mustLayer(t, s, "y"), wire.Float32, v))
	finish(t, s)
	rows, got := read(t, path)
	if len(rows) != 2 || !bytes.Equal(got[0], halves(v[:10])) || !bytes.Equal(got[1], halves(v)) ||
		rows[1].Sequence != 1 || rows[0].Codec != "lz4" || rows[1].Codec != "zstd" {
		t.Fatalf("after resuming: %+v", rows)
	}
	if tail, err := os.ReadFile(path + ".tail-1"); err != nil || !bytes.Equal(tail, whole[cut:]) {
		t.Fatalf("the cut end: %d bytes, %v", len(tail), err)
	}

	o.Cut = cut + 1
	if _, err := Open(path, o); !errors.Is(err, status.Corrupt) {
		t.Fatalf("a cut inside a packet: %v", err)
	}
	o.Cut = 1 << 40
	if _, err := Open(path, o); !errors.Is(err, status.Corrupt) {
		t.Fatalf("a cut behind the end: %v", err)
	}
}

// Resuming a stream with no index, or an unreadable one, lists its packets in a new index.
func TestResumeWithoutAnIndexListsThePackets(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, options(codec.LZ4))
	enqueue(t, s, tensorOf(mustLayer(t, s, "old"), wire.Float32, []float32{1, 2}))
	finish(t, s)
	for _, damage := range []func() error{
		func() error { return os.Remove(path + ".index") },
		func() error { return os.WriteFile(path+".index", []byte("this is no index at all"), 0o666) },
	} {
		if err := damage(); err != nil {
			t.Fatal(err)
		}
		o := options(codec.None)
		o.Resume, o.Cut = true, KeepAll
		s = open(t, path, o)
		enqueue(t, s, tensorOf(mustLayer(t, s, "new"), wire.Float32, []float32{3}))
		finish(t, s)
		rows, got := read(t, path)
		last := len(rows) - 1
		if rows[0].Layer != "old" || !bytes.Equal(got[0], halves([]float32{1, 2})) ||
			rows[last].Layer != "new" || rows[last].Source != wire.Float32 {
			t.Fatalf("rows %+v", rows)
		}
	}
	if _, err := os.Stat(path + ".index.bad-1"); err != nil {
		t.Fatalf("the unreadable index was not set aside: %v", err)
	}
}

// Resuming a stream beside the index of another capture sets that index aside, and lists the
// packets in a new one.
func TestTheIndexOfAnotherStreamIsSetAside(t *testing.T) {
	for name, n := range map[string]int{"other sizes": 70, "the same sizes": 100} {
		t.Run(name, func(t *testing.T) {
			folder := t.TempDir()
			capture := func(path string, n int, base float32, o Options) {
				s := open(t, path, o)
				layer := mustLayer(t, s, "layer")
				for i := range 10 {
					v := float32s(n, func(int) float32 { return base + float32(i) })
					enqueue(t, s, tensorOf(layer, wire.Float32, v))
				}
				finish(t, s)
			}
			path, other := filepath.Join(folder, "a.stream"), filepath.Join(folder, "b.stream")
			capture(path, 100, 0, options(codec.None))
			capture(other, n, 100, options(codec.None))
			if err := os.Rename(other+".index", path+".index"); err != nil {
				t.Fatal(err)
			}
			o := options(codec.None)
			o.Resume, o.Cut = true, KeepAll
			capture(path, 100, 10, o)
			rows, got := read(t, path)
			if len(rows) != 20 || rows[0].Source != 0 || rows[19].Source != wire.Float32 {
				t.Fatalf("%d rows, the first %+v", len(rows), rows[0])
			}
			for i := range rows {
				if want := halves(float32s(100, func(int) float32 { return float32(i) })); !bytes.Equal(got[i], want) {
					t.Errorf("row %d has other values", i)
				}
			}
			if _, err := os.Stat(path + ".index.bad-1"); err != nil {
				t.Errorf("the other index was not set aside: %v", err)
			}
		})
	}
}

// With DropOnFull, a tensor that finds no room leaves a note in the index, and is counted.
func TestDropWhenFull(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	o := options(codec.Zstd)
	o.MaxMemory, o.DropOnFull, o.Workers = 1<<20, true, 1
	s := open(t, path, o)
	layer := mustLayer(t, s, "x")
	v := float32s(80_000, func(i int) float32 { return float32(i) * 0.37 })
	dropped := 0
	for range 300 {
		switch err := s.Enqueue(tensorOf(layer, wire.Float32, v), forever); {
		case errors.Is(err, ErrDropped):
			dropped++
		case err != nil:
			t.Fatal(err)
		}
	}
	finish(t, s)
	if dropped == 0 {
		t.Skip("this machine writes faster than it copies")
	}
	rows, _ := read(t, path)
	noted := 0
	for _, row := range rows {
		if row.Error != "" {
			noted++
		}
	}
	st := s.Stats()
	if len(rows) != 300 || noted != dropped || st.Dropped != uint64(dropped) ||
		st.Packets != uint64(300-dropped) || st.Failed != 0 || st.DroppedBytes != uint64(dropped)*320_000 {
		t.Fatalf("%d rows, %d notes, %d dropped, %+v", len(rows), noted, dropped, st)
	}
}

// A note is a row of the index without a packet. Its tensor counts as failed.
func TestNotes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, options(codec.None))
	layer := mustLayer(t, s, "x")
	enqueue(t, s, tensorOf(layer, wire.Int8, []int8{1}))
	if err := s.Note(&Tensor{Layer: layer, Step: 3, Token: -1}, "a sparse tensor"); err != nil {
		t.Fatal(err)
	}
	finish(t, s)
	rows, _ := read(t, path)
	if len(rows) != 2 || rows[1].Error != "a sparse tensor" || rows[1].Step != 3 || rows[1].Offset >= 0 {
		t.Fatalf("rows %+v", rows)
	}
	if st := s.Stats(); st.Failed != 1 || st.Packets != 1 {
		t.Fatalf("stats %+v", st)
	}
}

// After a failed write, Enqueue and Close return the error, and the stream ends with a whole packet.
func TestFailingDiskStopsTheCaptureNotTheCaller(t *testing.T) {
	if !filelimit.Alone(t) {
		return
	}
	for _, n := range []int{500, 3 << 20} { // whole packets, and streamed ones
		path := filepath.Join(t.TempDir(), "a.stream")
		o := options(codec.None)
		o.MaxMemory = 1 << 20
		s := open(t, path, o)
		layer := mustLayer(t, s, "x")
		v := float32s(n, func(i int) float32 { return float32(i) })
		enqueue(t, s, tensorOf(layer, wire.Float32, v[:100]))
		if err := flush(s, forever); err != nil {
			t.Fatal(err)
		}
		lift := filelimit.Set(t, 1<<20)
		var err error
		for range 1 << 16 {
			if err = s.Enqueue(tensorOf(layer, wire.Float32, v), forever); err != nil {
				break
			}
		}
		if !errors.Is(err, status.IO) || !errors.Is(err, syscall.EFBIG) {
			t.Fatalf("enqueue on a failing disk: %v", err)
		}
		if err := s.Close(forever); !errors.Is(err, status.IO) {
			t.Fatalf("close after a failure: %v", err)
		}
		if st := s.Stats(); st.QueuedPackets != 0 || st.QueuedBytes != 0 {
			t.Fatalf("%d packets of %d bytes still wait after a failure", st.QueuedPackets, st.QueuedBytes)
		}
		lift()
		r, err := reader.Open(path, reader.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if i := r.Info(); i.Packets < 1 || i.ValidBytes != i.FileBytes {
			t.Fatalf("after the failure a reader sees %+v", i)
		}
		r.Close()
	}
}

// A large tensor that is enqueued in many calls, each of which times out, is stored whole.
func TestTimeoutLosesNothing(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	o := options(codec.Zstd)
	o.MaxMemory, o.Workers = 1<<20, 1
	s := open(t, path, o)
	layer := mustLayer(t, s, "x")
	v := float32s(2<<20, func(i int) float32 { return float32(i%50000) * 0.71 })
	timeouts := 0
	for i := range 3 {
		x := tensorOf(layer, wire.Float32, v[i:])
		for {
			err := s.Enqueue(x, 0)
			if err == nil {
				break
			}
			if !errors.Is(err, status.Timeout) {
				t.Fatal(err)
			}
			timeouts++
			time.Sleep(time.Millisecond)
		}
	}
	finish(t, s)
	if timeouts == 0 {
		t.Fatal("a tensor larger than the staging memory never timed out")
	}
	_, got := read(t, path)
	for i := range 3 {
		if want := halves(v[i:]); !bytes.Equal(got[i], want) {
			for j := range want {
				if want[j] != got[i][j] {
					t.Fatalf("packet %d differs from byte %d of %d: %x for %x", i, j, len(want), got[i][j:j+16], want[j:j+16])
				}
			}
		}
	}
}

// Abandon, or Close, turns a tensor that is half enqueued into a note.
func TestAbandonTakesThePacketBack(t *testing.T) {
	for _, atClose := range []bool{false, true} {
		path := filepath.Join(t.TempDir(), "a.stream")
		o := options(codec.LZ4)
		o.MaxMemory = 1 << 20
		s := open(t, path, o)
		layer := mustLayer(t, s, "x")
		v := float32s(8<<20, func(i int) float32 { return float32(i%50000) * 0.71 })
		enqueue(t, s, tensorOf(layer, wire.Float32, v[:10]))
		x := tensorOf(layer, wire.Float32, v)
		for x.Cursor&1 == 0 { // at first there may be no room at all
			if err := s.Enqueue(x, 0); !errors.Is(err, status.Timeout) {
				t.Fatalf("a huge tensor at once: %v", err)
			}
		}
		if !atClose {
			if err := s.Abandon(x.Cursor); err != nil {
				t.Fatal(err)
			}
			if err := s.Enqueue(x, 0); !errors.Is(err, status.InvalidArgument) {
				t.Fatalf("a cursor that was abandoned: %v", err)
			}
			enqueue(t, s, tensorOf(layer, wire.Float32, v[:20]))
		}
		finish(t, s)
		rows, got := read(t, path)
		if len(got[0]) != 20 || rows[1].Error == "" {
			t.Fatalf("rows %+v", rows)
		}
		if !atClose && (len(rows) != 3 || len(got[2]) != 40) {
			t.Fatalf("rows %+v", rows)
		}
	}
}

// Invalid paths, names and tensors are refused, and leave no rows. A closed session takes no tensor.
func TestRefusals(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "a.stream")
	s := open(t, path, options(codec.LZ4))
	if _, err := Open(path, options(codec.LZ4)); !errors.Is(err, status.Busy) {
		t.Errorf("a second capture to one file: %v", err)
	}
	if _, err := Open(dir, options(codec.LZ4)); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a directory: %v", err)
	}
	if _, err := Open(filepath.Join(dir, "no", "x"), options(codec.LZ4)); !errors.Is(err, status.NotFound) {
		t.Errorf("a missing folder: %v", err)
	}
	if _, err := Open("/dev/null", options(codec.LZ4)); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a device: %v", err)
	}
	if _, err := s.Layer("", "a\xffb", ""); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a name that is not UTF-8: %v", err)
	}
	longest := string(bytes.Repeat([]byte("n"), wire.MaxName))
	if _, err := s.Layer("", longest, "x"); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a name too long: %v", err)
	}
	layer := mustLayer(t, s, longest)
	enqueue(t, s, tensorOf(layer, wire.Float32, []float32{1e9}))
	one := []float32{1}
	data := unsafe.Pointer(&one[0])
	for what, x := range map[string]*Tensor{
		"layer":  {Layer: 99, DType: wire.Float32, Shape: []int64{1}, Data: data},
		"dtype":  {DType: 77, Shape: []int64{1}, Data: data},
		"shape":  {DType: wire.Float32, Shape: []int64{-1}, Data: data},
		"huge":   {DType: wire.Float32, Shape: []int64{1 << 40, 1 << 40}, Data: data},
		"null":   {DType: wire.Float32, Shape: []int64{1}},
		"dims":   {DType: wire.Float32, Shape: make([]int64, 65), Data: data},
		"cursor": {DType: wire.Float32, Shape: []int64{1}, Data: data, Cursor: 5},
	} {
		if err := s.Enqueue(x, forever); !errors.Is(err, status.InvalidArgument) {
			t.Errorf("%s: %v", what, err)
		}
	}
	finish(t, s)
	if err := s.Enqueue(tensorOf(layer, wire.Float32, one), forever); !errors.Is(err, status.InvalidState) {
		t.Errorf("enqueue after close: %v", err)
	}
	rows, _ := read(t, path)
	if len(rows) != 2 || rows[0].Layer != longest || rows[1].Error == "" {
		t.Errorf("the longest name: %d rows", len(rows))
	}
}

// The arena's limit is at most the memory that the system has left.
func TestACaptureLeavesMemoryToOthers(t *testing.T) {
	left, ok := memory.Available()
	if !ok {
		t.Skip("this system does not tell its free memory")
	}
	if got := memoryLimit(1 << 60); got > left {
		t.Fatalf("a limit of %d bytes where %d are left", got, left)
	}
}

func BenchmarkEnqueue(b *testing.B) {
	for _, n := range []int{768, 1 << 20} {
		b.Run(fmt.Sprint(n), func(b *testing.B) {
			s := open(b, filepath.Join(b.TempDir(), "a.stream"), Options{Codec: codec.None, Workers: 2, MaxMemory: 1 << 30})
			x := tensorOf(mustLayer(b, s, "x"), wire.Float32, make([]float32, n))
			b.SetBytes(int64(4 * n))
			b.ReportAllocs()
			for b.Loop() {
				enqueue(b, s, x)
			}
		})
	}
}
