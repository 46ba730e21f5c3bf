// Tests of sessions that keep the last steps in memory, and of their dumps.

package session

import (
	"bytes"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/filelimit"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// ringOptions are those of a ring of one MiB.
func ringOptions(k codec.Kind) Options {
	o := options(k)
	o.Ring, o.MaxMemory, o.KeepFloat32 = true, 1<<20, true
	return o
}

func openRing(t testing.TB, o Options) *Session {
	t.Helper()
	s, err := Open("", o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = s.Close(forever) })
	return s
}

func beginDump(t testing.TB, s *Session, path string) string {
	t.Helper()
	id, err := s.BeginDump(path, false, forever)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// endDump ends a dump, and waits until it is durable and closed.
func endDump(t testing.TB, s *Session) {
	t.Helper()
	if err := s.EndDump(forever); err != nil {
		t.Fatal(err)
	}
	if _, err := checkpoint(s, forever); err != nil {
		t.Fatal(err)
	}
}

// runStep enqueues the tensors of one step: a float32 tensor for each layer, whose values tell step and layer.
func runStep(t testing.TB, s *Session, layers []uint32, number int64, n int) {
	for i, layer := range layers {
		x := tensorOf(layer, wire.Float32, ofStep(number, i, n))
		x.Step = number
		if err := s.Enqueue(x, forever); err != nil {
			t.Error(err)
		}
	}
}

func ofStep(number int64, layer, n int) []float32 {
	return float32s(n, func(i int) float32 { return float32(number)*1000 + float32(layer*100+i%100) })
}

// checkSteps fails unless a dump has exactly these steps, whole and in order.
func checkSteps(t testing.TB, path string, first, last int64, layers, n int) {
	t.Helper()
	rows, payloads := read(t, path)
	want := int(last-first+1) * layers
	if len(rows) != want {
		t.Fatalf("%d rows, not the %d of steps %d to %d", len(rows), want, first, last)
	}
	for i, row := range rows {
		number, layer := first+int64(i/layers), i%layers
		if row.Step != number || row.Layer != fmt.Sprint("layer", layer) || row.Sequence != uint64(i) {
			t.Fatalf("row %d is step %d of %s", i, row.Step, row.Layer)
		}
		if !bytes.Equal(payloads[i], bytesOf(ofStep(number, layer, n))) {
			t.Fatalf("step %d of %s has other values", number, row.Layer)
		}
	}
}

func layersOf(t testing.TB, s *Session, n int) (layers []uint32) {
	for i := range n {
		layers = append(layers, mustLayer(t, s, fmt.Sprint("layer", i)))
	}
	return layers
}

func TestARingKeepsTheLastWholeSteps(t *testing.T) {
	for _, kind := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd} {
		t.Run(kind.String(), func(t *testing.T) {
			s, folder := openRing(t, ringOptions(kind)), t.TempDir()
			layers := layersOf(t, s, 3)
			const n = 10_000 // 40,000 bytes: a MiB holds 8 steps
			for number := range int64(50) {
				runStep(t, s, layers, number, n)
			}
			kept := s.Stats().Ring
			if kept.Steps != 8 || kept.OldestStep != 42 || kept.Packets != 24 || kept.GoneSteps != 42 || kept.GonePackets != 126 {
				t.Fatalf("the ring has %+v", kept)
			}
			if kept.OldestTimeNS != 0 { // the tensors of this test have no time
				t.Errorf("the oldest tensor came at %d", kept.OldestTimeNS)
			}
			path := filepath.Join(folder, "first.stream")
			id := beginDump(t, s, path)
			for number := int64(50); number < 53; number++ {
				runStep(t, s, layers, number, n)
			}
			endDump(t, s)
			checkSteps(t, path, 42, 52, 3, n)
			found, err := index.Find(index.PathOf(path), mustOpen(t, path), size(t, path))
			if err != nil || found.CaptureID != id {
				t.Errorf("the id of the dump: %v", err)
			}
			_ = found.Close()
			if kept := s.Stats().Ring; kept.Steps != 0 || kept.Bytes != 0 || kept.OldestStep != -1 {
				t.Errorf("after the dump the ring has %+v", kept)
			}
			for number := int64(53); number < 70; number++ {
				runStep(t, s, layers, number, n)
			}
			path = filepath.Join(folder, "second.stream")
			beginDump(t, s, path)
			endDump(t, s)
			checkSteps(t, path, 62, 69, 3, n)
			if st := s.Stats(); st.MemoryPeak > st.MemoryLimit || st.QueuedPackets != 0 || st.QueuedBytes != 0 {
				t.Errorf("stats %+v", st)
			}
			finish(t, s)
		})
	}
}

// Steps of several threads come interleaved, and dumps are written meanwhile. Each dump has whole steps, each
// step is in one dump at most, and after BeginDump nothing is lost.
func TestDumpsWhileThreadsCapture(t *testing.T) {
	s, folder := openRing(t, ringOptions(codec.None)), t.TempDir()
	layers := layersOf(t, s, 4)
	const n, threads, dumps = 5000, 3, 6
	var next atomic.Int64
	var done atomic.Bool
	var calls sync.WaitGroup
	for range threads {
		calls.Go(func() {
			for !done.Load() {
				runStep(t, s, layers, next.Add(1)-1, n)
			}
		})
	}
	var written []string
	for number := range dumps {
		before := next.Load()
		for next.Load() < before+40 {
			_ = s.Stats()
		}
		path := filepath.Join(folder, fmt.Sprint(number, ".stream"))
		beginDump(t, s, path)
		for from := next.Load(); next.Load() < from+40; {
			_ = s.Stats()
		}
		endDump(t, s)
		written = append(written, path)
	}
	done.Store(true)
	calls.Wait()
	finish(t, s)
	seen := map[int64]string{}
	for _, path := range written {
		rows, payloads := read(t, path)
		perStep, last := map[int64]int{}, map[uint64]int64{}
		for i, row := range rows {
			var layer int
			if _, err := fmt.Sscanf(row.Layer, "layer%d", &layer); err != nil {
				t.Fatal(err)
			}
			if row.Error != "" {
				t.Fatalf("step %d: %s", row.Step, row.Error)
			}
			if !bytes.Equal(payloads[i], bytesOf(ofStep(row.Step, layer, n))) {
				t.Fatalf("step %d of %s has other values", row.Step, row.Layer)
			}
			perStep[row.Step]++
			last[row.Thread] = row.Step
		}
		if len(perStep) < 30 {
			t.Errorf("%s has %d steps", path, len(perStep))
		}
		partial := 0
		for number, count := range perStep {
			if count != len(layers) {
				partial++ // the dump began or ended in the middle of it, once a thread
			}
			if before := seen[number]; before != "" && count == len(layers) {
				t.Errorf("step %d is in %s, too", number, before)
			}
			seen[number] = path
		}
		if partial > 2*threads {
			t.Errorf("%s has %d partial steps", path, partial)
		}
	}
}

func TestAStepLargerThanTheRing(t *testing.T) {
	s := openRing(t, ringOptions(codec.None))
	layers := layersOf(t, s, 30)
	const n = 25_000 // 100,000 bytes: ten of them fit
	dropped := 0
	for _, layer := range layers {
		x := tensorOf(layer, wire.Float32, ofStep(7, 0, n))
		x.Step = 7
		if err := s.Enqueue(x, forever); errors.Is(err, ErrDropped) {
			dropped++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	huge := tensorOf(layers[0], wire.Float32, make([]float32, 1<<19))
	huge.Step = 7
	if err := s.Enqueue(huge, forever); !errors.Is(err, ErrDropped) {
		t.Errorf("a tensor larger than the ring: %v", err)
	}
	if st := s.Stats(); dropped != 20 || st.Dropped != 21 || st.Ring.Steps != 1 || st.Ring.Packets != 10 {
		t.Errorf("%d tensors were dropped: %+v", dropped, st.Ring)
	}
	path := filepath.Join(t.TempDir(), "a.stream")
	beginDump(t, s, path)
	endDump(t, s)
	rows, _ := read(t, path)
	notes := 0
	for _, row := range rows {
		if row.Error != "" {
			notes++
		}
	}
	if len(rows) != 31 || notes != 21 {
		t.Errorf("%d rows, %d of them notes", len(rows), notes)
	}
}

func TestTheLimitsOfARing(t *testing.T) {
	for name, c := range map[string]struct {
		limit func(o *Options)
		kept  uint64
	}{
		"steps":   {func(o *Options) { o.RingSteps = 5 }, 5},
		"one":     {func(o *Options) { o.RingSteps = 1 }, 1},
		"seconds": {func(o *Options) { o.RingSeconds = 3 }, 4}, // one second a step: ages 0 to 3
		"both":    {func(o *Options) { o.RingSeconds, o.RingSteps = 3, 2 }, 2},
		"none":    {func(o *Options) {}, 40},
	} {
		t.Run(name, func(t *testing.T) {
			o := ringOptions(codec.None)
			c.limit(&o)
			s := openRing(t, o)
			layer := mustLayer(t, s, "layer0")
			for number := range int64(40) {
				x := tensorOf(layer, wire.Float32, ofStep(number, 0, 100))
				x.Step, x.TimeNS = number, number*1e9
				enqueue(t, s, x)
			}
			if st := s.Stats().Ring; st.Steps != c.kept || st.GoneSteps != 40-c.kept || st.OldestStep != int64(40-c.kept) {
				t.Errorf("%+v", st)
			}
			path := filepath.Join(t.TempDir(), "a.stream")
			beginDump(t, s, path)
			endDump(t, s)
			checkSteps(t, path, int64(40-c.kept), 39, 1, 100)
		})
	}
}

// Small tensors that find no room in the ring do not hold up those behind them.
func TestSmallTensorsOfAStepLargerThanTheRing(t *testing.T) {
	o, f := ringOptions(codec.None), &shelf{}
	o.Intake = f
	s := openRing(t, o)
	layer := layersOf(t, s, 1)[0]
	put := func(number int64, tensors int) {
		t.Helper()
		for range tensors {
			x := tensorOf(layer, wire.Float32, ofStep(number, 0, 4000))
			x.Step = number
			if !f.put(x) {
				t.Fatal("the shelf takes no tensor")
			}
		}
		if _, _, err := s.Alarm(forever); err != nil { // drains the shelf
			t.Fatal(err)
		}
	}
	put(0, 100) // 1.6 MB
	if st := s.Stats(); st.Ring.Steps != 1 || st.Dropped == 0 || st.Dropped+st.Ring.Packets != 100 {
		t.Errorf("%d tensors were dropped: %+v", st.Dropped, st.Ring)
	}
	dropped := s.Stats().Dropped
	put(1, 10)
	if st := s.Stats(); st.Ring.Steps != 1 || st.Ring.OldestStep != 1 || st.Dropped != dropped {
		t.Errorf("%d tensors were dropped: %+v", st.Dropped, st.Ring)
	}
}

// Two threads may begin steps 5 and 6, and the first tensor of 6 comes first.
func TestTheOldestStepIsTheOneWithTheLeastNumber(t *testing.T) {
	s := openRing(t, ringOptions(codec.None))
	layers := layersOf(t, s, 1)
	for _, number := range []int64{6, 5, 7} {
		runStep(t, s, layers, number, 10)
	}
	if kept := s.Stats().Ring; kept.OldestStep != 5 || kept.Steps != 3 {
		t.Errorf("%+v", kept)
	}
}

// A step that gave way while it ran does not come back in parts.
func TestTensorsOfAStepThatGaveWayAreLeftOut(t *testing.T) {
	s := openRing(t, ringOptions(codec.None))
	layers := layersOf(t, s, 2)
	const n = 10_000
	runStep(t, s, layers[:1], 0, n)
	for number := int64(1); number < 40; number++ {
		runStep(t, s, layers, number, n)
	}
	runStep(t, s, layers[1:], 0, n)
	path := filepath.Join(t.TempDir(), "a.stream")
	beginDump(t, s, path)
	endDump(t, s)
	checkSteps(t, path, 28, 39, 2, n)
	if gone := s.Stats().Ring; gone.GoneSteps != 28 || gone.GonePackets != 1+27*2+1 {
		t.Errorf("gave way: %+v", gone)
	}
}

func TestRefusalsOfARing(t *testing.T) {
	s, folder := openRing(t, ringOptions(codec.None)), t.TempDir()
	layers := layersOf(t, s, 1)
	runStep(t, s, layers, 0, 10)
	expect := func(what string, err error, code status.Code) {
		t.Helper()
		if status.CodeOf(err) != code {
			t.Errorf("%s: %v", what, err)
		}
	}
	expect("end before begin", s.EndDump(forever), status.InvalidState)
	_, err := s.BeginDump(filepath.Join(folder, "missing", "a.stream"), false, forever)
	expect("a folder that is missing", err, status.NotFound)
	_, err = s.Roll(filepath.Join(folder, "a.stream"), false, forever)
	expect("roll", err, status.InvalidState)
	path := filepath.Join(folder, "a.stream")
	beginDump(t, s, path)
	_, err = s.BeginDump(filepath.Join(folder, "b.stream"), false, forever)
	expect("a dump during a dump", err, status.InvalidState)
	endDump(t, s)
	checkSteps(t, path, 0, 0, 1, 10) // the refused dumps took nothing of it
	finish(t, s)
	_, err = s.BeginDump(filepath.Join(folder, "c.stream"), false, forever)
	expect("after the end", err, status.InvalidState)

	plain := open(t, filepath.Join(folder, "plain.stream"), options(codec.None))
	_, err = plain.BeginDump(path, true, forever)
	expect("a session without a ring", err, status.InvalidState)
	expect("and its end", plain.EndDump(forever), status.InvalidState)
	o := ringOptions(codec.None)
	o.Resume = true
	_, err = Open("", o)
	expect("a ring that resumes", err, status.InvalidArgument)
	for _, spoil := range []func(o *Options){
		func(o *Options) { o.RingSteps = -1 },
		func(o *Options) { o.RingSeconds = -1 },
		func(o *Options) { o.RingSeconds = math.NaN() },
		func(o *Options) { o.Ring, o.RingSteps = false, 1 },
		func(o *Options) { o.Ring, o.RingOutlier = false, 10 },
		func(o *Options) { o.RingOutlier = 1 },
		func(o *Options) { o.RingOutlier = math.NaN() },
	} {
		o := ringOptions(codec.None)
		spoil(&o)
		_, err = Open(filepath.Join(folder, "d.stream"), o)
		expect("limits that cannot be", err, status.InvalidArgument)
	}
}

// Threads that capture while the session ends leave no memory behind.
func TestAClosedRingFreesItsMemory(t *testing.T) {
	for _, end := range []func(s *Session) error{
		func(s *Session) error { return s.Close(forever) },
		func(s *Session) error { s.Discard(); return s.Close(forever) },
	} {
		s := openRing(t, ringOptions(codec.LZ4))
		layers := layersOf(t, s, 3)
		var calls sync.WaitGroup
		for i := range 3 {
			calls.Go(func() {
				for number := int64(i); ; number += 3 {
					x := tensorOf(layers[i], wire.Float32, ofStep(number, i, 20_000))
					x.Step = number
					if err := s.Enqueue(x, forever); err != nil {
						return
					}
				}
			})
		}
		for s.Stats().Ring.GoneSteps < 20 {
		}
		_ = end(s)
		calls.Wait()
		<-s.life.finished
		if st := s.Stats(); st.MemoryBytes != 0 || st.QueuedBytes != 0 {
			t.Errorf("%d bytes are left, %d in regions", st.MemoryBytes, st.QueuedBytes)
		}
	}
}

func TestTheFirstValueThatIsNotFiniteRaisesAnAlarm(t *testing.T) {
	bad := math.Float32frombits(0x7FC0_0000)
	for name, c := range map[string]struct {
		keep bool
		at   func(s *Session, layer uint32) (x *Tensor, element int64)
	}{
		"converted": {false, func(s *Session, layer uint32) (*Tensor, int64) {
			v := noise(30_000, 1)
			v[29_999] = bad
			return tensorOf(layer, wire.Float32, v), 29_999
		}},
		"beside values beyond float16": {false, func(s *Session, layer uint32) (*Tensor, int64) {
			v := noise(30_000, 1)
			v[5], v[70] = 1e30, bad
			return tensorOf(layer, wire.Float32, v), 70
		}},
		"strided": {false, func(s *Session, layer uint32) (*Tensor, int64) {
			v := noise(100*100, 1)
			v[3*100+7] = bad
			x := tensorOf(layer, wire.Float32, v, 100, 100)
			x.Strides = []int64{1, 100}
			return x, 7*100 + 3
		}},
		"as it is": {true, func(s *Session, layer uint32) (*Tensor, int64) {
			v := noise(1000, 1)
			v[17] = float32(math.Inf(1))
			return tensorOf(layer, wire.Float32, v), 17
		}},
		"rounded": {false, func(s *Session, layer uint32) (*Tensor, int64) {
			v := make([]uint16, 1000)
			for i := range v {
				v[i] = 0x3F81 // 1.0078
			}
			v[3], v[500] = 0x7F7F, 0x7F80 // the largest value, and infinity
			return tensorOf(layer, wire.BFloat16, v), 500
		}},
		"all": {false, func(s *Session, layer uint32) (*Tensor, int64) {
			return tensorOf(layer, wire.Float32, []float32{bad, bad, bad}), 0
		}},
		"bfloat16": {false, func(s *Session, layer uint32) (*Tensor, int64) {
			v := make([]uint16, 1000)
			v[999] = 0x7FC0
			return tensorOf(layer, wire.BFloat16, v), 999
		}},
	} {
		t.Run(name, func(t *testing.T) {
			o := ringOptions(codec.None)
			if o.KeepFloat32 = c.keep; name == "rounded" {
				o.ErrorBound = 1e-3
			}
			s := openRing(t, o)
			layers := layersOf(t, s, 3)
			runStep(t, s, layers, 0, 100)
			huge := tensorOf(layers[0], wire.Float32, []float32{1e30}) // is finite
			enqueue(t, s, huge)
			if _, rang, err := s.Alarm(forever); rang || err != nil {
				t.Fatalf("an alarm before the fault: %v", err)
			}
			x, element := c.at(s, layers[1])
			x.Step, x.Call, x.TimeNS = 5, 2, 77
			enqueue(t, s, x)
			x.Layer = layers[2]
			enqueue(t, s, x) // a later one
			got, rang, err := s.Alarm(forever)
			if err != nil || !rang || got.Layer != layers[1] || got.Step != 5 || got.Call != 2 || got.TimeNS != 77 ||
				got.Element != element || !math.IsNaN(got.Value) && !math.IsInf(got.Value, 1) {
				t.Errorf("the alarm is %+v %v %v", got, rang, err)
			}
			if _, rang, _ := s.Alarm(forever); rang {
				t.Error("the alarm was taken")
			}
		})
	}
	plain := open(t, filepath.Join(t.TempDir(), "a.stream"), options(codec.None))
	if _, _, err := plain.Alarm(forever); status.CodeOf(err) != status.InvalidState {
		t.Errorf("a session without a ring: %v", err)
	}
}

// A dump that the disk refuses is lost behind its last whole packet. The ring then keeps what comes, and
// another dump has it.
func TestAFailedDumpDoesNotEndTheRing(t *testing.T) {
	if !filelimit.Alone(t) {
		return
	}
	for _, kind := range []codec.Kind{codec.None, codec.Zstd} {
		o := ringOptions(kind)
		o.MaxMemory = 4 << 20
		s, folder := openRing(t, o), t.TempDir()
		layers := layersOf(t, s, 3)
		const n = 10_000
		step := int64(0)
		run := func(steps int) {
			for range steps {
				x := tensorOf(layers[0], wire.Float32, noise(n, uint64(step)))
				x.Step = step
				enqueue(t, s, x)
				runStep(t, s, layers[1:], step, n)
				step++
			}
		}
		run(20)
		first, second := filepath.Join(folder, "a.stream"), filepath.Join(folder, "b.stream")
		beginDump(t, s, first)
		lift := filelimit.Set(t, 5<<18)
		run(20) // to a dump that fails meanwhile
		if err := s.EndDump(forever); err != nil {
			t.Fatal(err)
		}
		if _, err := checkpoint(s, forever); !errors.Is(err, syscall.EFBIG) {
			t.Fatalf("checkpoint of a dump that failed: %v", err)
		}
		if _, err := checkpoint(s, forever); err != nil {
			t.Fatalf("the error came again: %v", err)
		}
		lift()
		r, err := reader.Open(first, reader.Options{})
		if err != nil {
			t.Fatal(err)
		}
		if i := r.Info(); i.Packets < 1 || i.Packets >= 120 || i.ValidBytes != i.FileBytes {
			t.Fatalf("the dump that failed has %+v", i)
		}
		r.Close()
		run(5)
		if kept := s.Stats().Ring; kept.Steps != 5 || kept.OldestStep != 40 {
			t.Fatalf("the ring has %+v", kept)
		}
		beginDump(t, s, second)
		endDump(t, s)
		rows, _ := read(t, second)
		if len(rows) != 15 || rows[0].Step != 40 || rows[14].Step != 44 {
			t.Fatalf("the second dump has %d rows", len(rows))
		}
		beginDump(t, s, filepath.Join(folder, "c.stream"))
		run(3)
		lift = filelimit.Set(t, 4096)
		if err := s.Close(forever); !errors.Is(err, syscall.EFBIG) {
			t.Fatalf("close during a dump that fails: %v", err)
		}
		lift()
	}
}

// An outlier is told with its element, value and usual magnitude, also if float16 cannot hold the tensor.
func TestAnOutlierIsFound(t *testing.T) {
	for name, c := range map[string]struct {
		keep    bool
		usual   float32
		outlier float32
	}{
		"float32 as it is":   {true, 3, -400},
		"as float16":         {false, 3, 400},
		"beyond float16":     {false, 3, -1e20},
		"too small for half": {false, 3e-12, 4e-10},
	} {
		t.Run(name, func(t *testing.T) {
			o := ringOptions(codec.None)
			o.KeepFloat32, o.RingOutlier = c.keep, 100
			s := openRing(t, o)
			layers := layersOf(t, s, 2)
			step := int64(0)
			put := func(largest float32) {
				v := make([]float32, 500)
				for i := range v {
					v[i] = c.usual / 2 * float32(i%2)
				}
				v[77] = largest
				x := tensorOf(layers[1], wire.Float32, v, 20, 25)
				if step%2 == 1 {
					x.Shape, x.Strides = []int64{25, 20}, []int64{1, 25}
				}
				x.Step, step = step, step+1
				enqueue(t, s, x)
				x.Layer = layers[0] // which has other magnitudes
				v[77] = 1e3 * c.usual
				enqueue(t, s, x)
			}
			quiet := func(what string) {
				t.Helper()
				if got, rang, err := s.Alarm(forever); rang || err != nil {
					t.Fatalf("%s: %+v %v", what, got, err)
				}
			}
			put(c.outlier)
			quiet("the first tensor")
			for range 15 {
				put(c.usual)
			}
			put(99 * c.usual)
			quiet("below the limit")
			put(c.outlier)
			put(float32(math.NaN()))
			got, rang, err := s.Alarm(forever)
			const element = 2*20 + 3 // the step is an odd one, which is transposed
			if err != nil || !rang || got.Layer != layers[1] || got.Step != step-2 {
				t.Fatalf("the outlier is %+v %v %v", got, rang, err)
			}
			close := func(a float64, b float32) bool { return math.Abs(a/float64(b)-1) < 1e-3 }
			if got.Element != element || !close(got.Value, c.outlier) || !close(got.Usual, c.usual) {
				t.Errorf("the outlier is %+v, not %g at %d, with %g usual", got, c.outlier, element, c.usual)
			}
			if got, rang, err = s.Alarm(forever); err != nil || !rang || !math.IsNaN(got.Value) || got.Usual != 0 || got.Step != step-1 {
				t.Errorf("the NaN is %+v %v %v", got, rang, err)
			}
			quiet("both were taken")
			for range 40 { // then the outlier is usual
				put(c.outlier)
			}
			_, _, _ = s.Alarm(forever)
			put(c.outlier)
			quiet("a lasting change")
		})
	}
}

// The median is that of a plain sort, and a magnitude is an outlier exactly above it.
func TestTheUsualMagnitudeIsTheMedian(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	var m magnitudes
	var seen []float64
	for range 3000 {
		largest := math.Exp(rng.NormFloat64())
		sorted := slices.Sorted(slices.Values(seen[max(0, len(seen)-usualOver):]))
		want := 0.0
		if n := len(sorted); n >= usualLeast {
			median := (sorted[n/2] + sorted[(n-1)/2]) / 2
			if largest > 2*median {
				want = median
			}
		}
		if got := m.add(largest, 2); got != want {
			t.Fatalf("%g after %d tensors: %g, not %g", largest, len(seen), got, want)
		}
		seen = append(seen, largest)
	}
}

// What Go keeps of a packet counts against the limit: the ring takes its memory and no more, however small the
// tensors are.
func TestTinyTensorsTakeNoMoreThanTheLimit(t *testing.T) {
	o := ringOptions(codec.LZ4)
	o.MaxMemory = 16 << 20
	s := openRing(t, o)
	layers := layersOf(t, s, 40)
	alive := func() int64 {
		var m runtime.MemStats
		runtime.GC()
		runtime.GC() // the pool keeps entries for one collection more
		runtime.ReadMemStats(&m)
		return int64(m.HeapAlloc)
	}
	before := alive()
	for step := range int64(400) {
		runStep(t, s, layers, step, 16)
	}
	heap, st := alive()-before, s.Stats()
	packets := int64(st.Ring.Packets)
	if st.Ring.GoneSteps == 0 || packets < 5000 {
		t.Fatalf("%d packets are kept, and %d steps gave way", packets, st.Ring.GoneSteps)
	}
	if each := heap / packets; each > keptCost/2 || each < keptCost/4 {
		t.Errorf("a packet takes %d bytes of the heap, where %d count", each, keptCost/2)
	}
	if all := int64(st.MemoryBytes) + 2*heap; all > o.MaxMemory+2<<20 { // the arena has whole huge pages
		t.Errorf("%d bytes are taken of %d", all, o.MaxMemory)
	}
}

// The memory of a ring is bounded also for tensors that are smaller than their bookkeeping, and while a dump
// is written. In a ring file their bookkeeping takes the place of a part of the file.
func TestTinyTensorsTakeTheMemoryOfARing(t *testing.T) {
	if testing.Short() || runtime.GOOS != "linux" {
		t.Skip("measures the memory of the process by the counters of Linux")
	}
	for _, file := range []string{"", filepath.Join(t.TempDir(), "ring")} {
		t.Run(map[bool]string{true: "in memory", false: "in a file"}[file == ""], func(t *testing.T) {
			o := ringOptions(codec.LZ4)
			o.MaxMemory, o.RingFile = 100e6, file
			debug.FreeOSMemory()
			if err := os.WriteFile("/proc/self/clear_refs", []byte("5"), 0); err != nil {
				t.Skip(err) // VmHWM is not that of this test
			}
			before := kilobytes(t, "VmRSS")
			s := openRing(t, o)
			layers, steps := layersOf(t, s, 40), int64(0)
			for ; s.Stats().Ring.GoneSteps < 500; steps++ {
				runStep(t, s, layers, steps, 64)
			}
			full := kilobytes(t, "VmRSS") - before
			beginDump(t, s, filepath.Join(t.TempDir(), "dump"))
			runStep(t, s, layers, steps, 64)
			endDump(t, s)
			peak := kilobytes(t, "VmHWM") - before
			if full > 100e3 || peak > 180e3 {
				t.Errorf("a ring of 100 MB takes %d kB when it is full, and up to %d kB", full, peak)
			}
		})
	}
	if n := unsafe.Sizeof(entry{}); n > 512 {
		t.Errorf("an entry takes %d bytes, more than keptCost counts", n)
	}
}

// kilobytes reads a field of /proc/self/status.
func kilobytes(t *testing.T, field string) (n int) {
	t.Helper()
	status, err := os.ReadFile("/proc/self/status")
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(status), field+":")
	if _, err := fmt.Sscan(rest, &n); err != nil {
		t.Fatalf("%s: %v", field, err)
	}
	return n
}
