// Tests of rings in a file, which outlives the process.

package session

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"reflect"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/salvage"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// ringFileOptions are those of a ring of one MiB in a file.
func ringFileOptions(t testing.TB, k codec.Kind) Options {
	o := ringOptions(k)
	o.RingFile = filepath.Join(t.TempDir(), "ring")
	return o
}

// die returns a copy of a ring file as it is now, as if its process had died.
func die(t testing.TB, ring string) string {
	t.Helper()
	b, err := os.ReadFile(ring)
	if err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(t.TempDir(), "left")
	if err := os.WriteFile(left, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return left
}

func salvaged(t testing.TB, ring string) (path string, report salvage.RingReport) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "out.stream")
	report, err := salvage.Ring(ring, path, salvage.Options{})
	if err != nil {
		t.Fatal(err)
	}
	return path, report
}

func endStep(t testing.TB, s *Session, number int64) {
	t.Helper()
	if err := s.EndStep(number, forever); err != nil {
		t.Fatal(err)
	}
}

func TestARingFileHasTheLastWholeSteps(t *testing.T) {
	for _, kind := range []codec.Kind{codec.None, codec.LZ4, codec.Zstd} {
		t.Run(kind.String(), func(t *testing.T) {
			o := ringFileOptions(t, kind)
			s := openRing(t, o)
			layers := layersOf(t, s, 3)
			const n = 10_000
			for number := range int64(50) {
				runStep(t, s, layers, number, n)
				endStep(t, s, number)
			}
			oldest := s.Stats().Ring.OldestStep
			path, report := salvaged(t, die(t, o.RingFile))
			checkSteps(t, path, oldest, 49, 3, n)
			if len(report.Steps) < 5 || report.Packets != uint64(3*len(report.Steps)) || report.PID != int32(os.Getpid()) {
				t.Errorf("%+v", report)
			}
			for i, step := range report.Steps {
				if !step.Whole() || step.Step != oldest+int64(i) || step.Packets != 3 {
					t.Errorf("%+v", step)
				}
			}
			finish(t, s)
			if _, err := os.Stat(o.RingFile); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("after the end the file is there: %v", err)
			}
		})
	}
}

// What was salvaged has the rows and values that a dump has.
func TestSalvagedRowsAreThoseOfADump(t *testing.T) {
	o := ringFileOptions(t, codec.None)
	o.KeepFloat32, o.ErrorBound, o.Rank = false, 1e-4, 3
	s := openRing(t, o)
	layer, err := s.Layer("model", "mödel.0", "[1]")
	if err != nil {
		t.Fatal(err)
	}
	request, err := s.Request("a request")
	if err != nil {
		t.Fatal(err)
	}
	large := noise(600, 1)
	large[7] = 1e20 // has a twin
	for i, values := range [][]float32{noise(600, 2), large, {}} {
		x := tensorOf(layer, wire.Float32, values, int64(len(values)/2), 2)
		x.Step, x.Token, x.Call, x.Request, x.Thread, x.TimeNS = 7, 8, uint32(i), request, 9, int64(10+i)
		x.Transform, x.Parameters = "sampled", `{"rate": 1}`
		enqueue(t, s, x)
	}
	strided := tensorOf(layer, wire.BFloat16, make([]uint16, 30), 5, 3)
	strided.Strides = []int64{1, 5}
	enqueue(t, s, strided) // outside of any step: belongs to the step before
	path, report := salvaged(t, die(t, o.RingFile))
	dump := filepath.Join(t.TempDir(), "dump.stream")
	beginDump(t, s, dump)
	endDump(t, s)
	got, payloads := read(t, path)
	want, wanted := read(t, dump)
	notes := 0
	for i := range got {
		if got[i].Error != "" {
			notes++
			continue
		}
		k := i - notes
		got[i].Sequence, got[i].Offset = want[k].Sequence, want[k].Offset
		if fmt.Sprintf("%+v", got[i]) != fmt.Sprintf("%+v", want[k]) { // NaN is unequal to itself
			t.Errorf("salvaged %+v\ndumped   %+v", got[i], want[k])
		}
		if !bytes.Equal(payloads[i], wanted[k]) {
			t.Errorf("packet %d has other values", i)
		}
	}
	if len(got)-notes != len(want) || notes != 1 || len(report.Steps) != 1 || report.Steps[0].Ended {
		t.Errorf("%d rows, %d notes, a dump has %d rows: %+v", len(got), notes, len(want), report)
	}
}

// Threads capture, dumps are written, steps give way. A copy of the file in the midst of it is worse than a kill:
// it is of no one moment. No packet of it has wrong values all the same.
func TestNoTornPacketIsSalvaged(t *testing.T) {
	for _, kind := range []codec.Kind{codec.None, codec.Zstd} {
		t.Run(kind.String(), func(t *testing.T) {
			o := ringFileOptions(t, kind)
			s := openRing(t, o)
			layers := layersOf(t, s, 4)
			const n, threads = 5000, 3
			var next atomic.Int64
			var done atomic.Bool
			var calls sync.WaitGroup
			defer calls.Wait()
			defer done.Store(true)
			for range threads {
				calls.Go(func() {
					for !done.Load() {
						number := next.Add(1) - 1
						runStep(t, s, layers, number, n)
						if err := s.EndStep(number, forever); err != nil {
							t.Error(err)
						}
					}
				})
			}
			taken := 0
			for round := range 5 {
				for from := next.Load(); next.Load() < from+20; {
					_ = s.Stats()
				}
				if round%4 == 3 {
					beginDump(t, s, filepath.Join(t.TempDir(), "a.stream"))
				}
				path, report := salvaged(t, die(t, o.RingFile))
				rows, payloads := read(t, path)
				for i, row := range rows {
					var layer int
					if row.Error != "" {
						continue
					}
					if _, err := fmt.Sscanf(row.Layer, "layer%d", &layer); err != nil {
						t.Fatal(err)
					}
					if !bytes.Equal(payloads[i], bytesOf(ofStep(row.Step, layer, n))) {
						t.Fatalf("step %d of %s has other values", row.Step, row.Layer)
					}
				}
				for _, step := range report.Steps {
					if step.Whole() && step.Packets != 4 {
						t.Errorf("a whole step of 4 packets: %+v", step)
					}
				}
				taken += len(rows)
				if round%4 == 3 {
					endDump(t, s)
				}
			}
			if taken < 100 {
				t.Errorf("%d rows in all", taken)
			}
		})
	}
}

// What a step has lost, and a step that runs, are told.
func TestStepsThatAreNotWholeAreTold(t *testing.T) {
	o, f := ringFileOptions(t, codec.None), &shelf{}
	o.Intake = f
	s := openRing(t, o)
	layers := layersOf(t, s, 2)
	runStep(t, s, layers, 0, 1000)
	endStep(t, s, 0)
	runStep(t, s, layers, 1, 1000)
	note := tensorOf(layers[0], wire.Float32, []float32{})
	note.Step = 1
	if err := s.Note(note, "a reason"); err != nil {
		t.Fatal(err)
	}
	endStep(t, s, 1)
	runStep(t, s, layers[:1], 2, 1000)
	endStep(t, s, 2)
	late := tensorOf(layers[1], wire.Float32, ofStep(2, 1, 1000)) // after the end
	late.Step = 2
	enqueue(t, s, late)
	runStep(t, s, layers, 3, 1000)
	small := tensorOf(layers[1], wire.Float32, ofStep(4, 1, 10))
	small.Step = 4
	if !f.put(small) { // waits, and is in the ring when the step ends
		t.Fatal("the shelf takes no tensor")
	}
	endStep(t, s, 4)
	endStep(t, s, 77) // has no tensor
	left := die(t, o.RingFile)
	path, report := salvaged(t, left)
	want := []salvage.RingStep{
		{Step: 0, Packets: 2, Ended: true},
		{Step: 1, Packets: 2, Ended: true, NotCaptured: 1},
		{Step: 2, Packets: 2, Ended: true},
		{Step: 3, Packets: 2},
		{Step: 4, Packets: 1, Ended: true},
	}
	if !reflect.DeepEqual(report.Steps, want) {
		t.Errorf("%+v", report.Steps)
	}
	notes := map[int64]string{}
	rows, _ := read(t, path)
	for _, row := range rows {
		if row.Error != "" {
			notes[row.Step] = row.Error
		}
	}
	if len(rows) != 11 || len(notes) != 2 || notes[1] != "1 tensors of this step could not be captured" ||
		notes[3] != "the ring file does not say that this step had ended" {
		t.Errorf("%d rows, notes %v", len(rows), notes)
	}
	damage(t, left, ofStep(0, 0, 1000)[999])
	if _, report = salvaged(t, left); report.Damaged != 1 || report.Steps[0].Missing != 1 || report.Steps[0].Whole() {
		t.Errorf("after damage %+v", report)
	}
}

// Of a step that ran when a dump ended, the dump has a part. The ring file does not say that its part is whole.
func TestAStepThatADumpDividesIsNotWhole(t *testing.T) {
	o := ringFileOptions(t, codec.None)
	s := openRing(t, o)
	layers := layersOf(t, s, 2)
	beginDump(t, s, filepath.Join(t.TempDir(), "dump.stream"))
	runStep(t, s, layers[:1], 5, 1000)
	endDump(t, s)
	runStep(t, s, layers[1:], 5, 1000)
	endStep(t, s, 5)
	runStep(t, s, layers, 6, 1000)
	endStep(t, s, 6)
	_, report := salvaged(t, die(t, o.RingFile))
	want := []salvage.RingStep{{Step: 5, Packets: 1}, {Step: 6, Packets: 2, Ended: true}}
	if !reflect.DeepEqual(report.Steps, want) {
		t.Errorf("%+v", report.Steps)
	}
}

// damage changes the last place of a file that holds a value.
func damage(t testing.TB, path string, value float32) {
	t.Helper()
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	at := bytes.LastIndex(b, bytesOf([]float32{value}))
	b[at] ^= 0x10
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestRefusalsOfARingFile(t *testing.T) {
	o := ringFileOptions(t, codec.None)
	s := openRing(t, o)
	expect := func(what string, o Options, code status.Code) {
		t.Helper()
		other, err := Open("", o)
		if status.CodeOf(err) != code {
			t.Errorf("%s: %v", what, err)
		}
		if err == nil {
			_ = other.Close(forever)
		}
	}
	expect("another session has the file", o, status.Busy)
	if _, err := salvage.Ring(o.RingFile, filepath.Join(t.TempDir(), "a.stream"), salvage.Options{}); !errors.Is(err, status.Busy) {
		t.Errorf("a salvage of a running session: %v", err)
	}
	left := die(t, o.RingFile)
	finish(t, s)
	if err := os.Rename(left, o.RingFile); err != nil {
		t.Fatal(err)
	}
	expect("a dead process left the file", o, status.InvalidState)
	if err := os.WriteFile(o.RingFile, []byte("a text"), 0o600); err != nil {
		t.Fatal(err)
	}
	expect("another file", o, status.InvalidArgument)
	if b, err := os.ReadFile(o.RingFile); err != nil || string(b) != "a text" {
		t.Errorf("the other file has changed: %q, %v", b, err)
	}
	if err := os.Remove(o.RingFile); err != nil {
		t.Fatal(err)
	}
	missing := o
	missing.RingFile = filepath.Join(o.RingFile, "ring")
	expect("a folder that is missing", missing, status.NotFound)
	without := o
	without.Ring = false
	expect("a file without a ring", without, status.InvalidArgument)
	again := openRing(t, o) // nothing is left of the refused ones
	if err := os.Rename(o.RingFile, o.RingFile+".moved"); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(o.RingFile, []byte("of others"), 0o600); err != nil {
		t.Fatal(err)
	}
	finish(t, again)
	if b, err := os.ReadFile(o.RingFile); err != nil || string(b) != "of others" {
		t.Errorf("the end removed the file of others: %v", err)
	}
	plain := open(t, filepath.Join(t.TempDir(), "plain.stream"), options(codec.None))
	if err := plain.EndStep(0, forever); !errors.Is(err, status.InvalidState) {
		t.Errorf("the end of a step without a ring: %v", err)
	}
}
