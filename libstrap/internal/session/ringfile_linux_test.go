// Tests of ring files on a file system that fills up.

package session

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
)

// The bookkeeping of tiny tensors makes a hole in the ring file. While another file has its room, larger tensors
// cannot have it: the oldest steps give way, and nothing else is lost. Later the ring takes the room again.
func TestTheOldestStepGivesWayWhileAHoleHasNoRoom(t *testing.T) {
	const mib, values, few = 1 << 20, 10_000, 4
	disk := tmpfs(t, 24*mib)
	o := ringFileOptions(t, codec.None)
	o.MaxMemory, o.RingFile = 16*mib, filepath.Join(disk, "ring")
	s := openRing(t, o)
	layers, next := layersOf(t, s, 40), int64(0)
	run := func(steps int, layers []uint32, n int) {
		for range steps {
			runStep(t, s, layers, next, n)
			endStep(t, s, next)
			next++
		}
	}
	// kept returns a salvaged copy of the file, and how many steps it has: all that the ring has, up to the newest.
	kept := func() (path string, steps int) {
		t.Helper()
		path, report := salvaged(t, die(t, o.RingFile))
		oldest := s.Stats().Ring.OldestStep
		for i, step := range report.Steps {
			if step.Step != oldest+int64(i) || !step.Whole() {
				t.Fatalf("step %d of the file: %+v", oldest+int64(i), step)
			}
		}
		if steps = len(report.Steps); int64(steps) != next-oldest {
			t.Fatalf("%d steps are in the file, and %d to %d in the ring", steps, oldest, next-1)
		}
		return path, steps
	}

	for s.Stats().Ring.GoneSteps < 100 {
		run(1, layers, 16)
	}
	_, tiny := kept()
	room := onDisk(t, o.RingFile)
	if room > 8*mib {
		t.Fatalf("the file takes %d bytes, so it has no hole", room)
	}
	filler := filepath.Join(disk, "filler")
	if err := os.WriteFile(filler, make([]byte, 24*mib), 0o600); err == nil {
		t.Fatal("the file system is not full")
	}

	run(1, layers[:few], values)
	if _, steps := kept(); steps < tiny-20 {
		t.Errorf("of %d steps %d are left after one of 160 kB", tiny, steps)
	}
	run(100, layers[:few], values)
	path, steps := kept()
	checkSteps(t, path, next-int64(steps), next-1, few, values)
	if each := int64(few * values * 4); int64(steps) < room/each-2 || onDisk(t, o.RingFile) > room {
		t.Errorf("%d steps of %d bytes are kept in %d", steps, each, room)
	}

	if err := os.Remove(filler); err != nil {
		t.Fatal(err)
	}
	run(150, layers[:few], values)
	path, steps = kept()
	checkSteps(t, path, next-int64(steps), next-1, few, values)
	if steps < 95 { // of 160 kB, in 16 MiB
		t.Errorf("%d steps are kept where there is room again", steps)
	}
	if n := s.Stats().Dropped; n > 0 {
		t.Errorf("%d tensors found no room", n)
	}
}

// tmpfs mounts a file system of so many bytes.
func tmpfs(t testing.TB, size int) string {
	t.Helper()
	folder := t.TempDir()
	if err := syscall.Mount("tmpfs", folder, "tmpfs", 0, fmt.Sprint("size=", size)); err != nil {
		t.Skipf("cannot mount a file system: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(folder, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return folder
}

// onDisk returns the bytes that a file takes on its file system.
func onDisk(t testing.TB, path string) int64 {
	t.Helper()
	var of syscall.Stat_t
	if err := syscall.Stat(path, &of); err != nil {
		t.Fatal(err)
	}
	return of.Blocks * 512
}
