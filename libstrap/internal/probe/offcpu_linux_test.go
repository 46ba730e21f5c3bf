package probe

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/libstrap/strap/bpf"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func startedOffCPU(t *testing.T, o OffCPUOptions) *OffCPU {
	t.Helper()
	c, err := StartOffCPU(o)
	if errors.Is(err, status.Permission) || errors.Is(err, status.Unsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func readOffCPU(t *testing.T, c *OffCPU) *OffCPUSnapshot {
	t.Helper()
	snapshot, err := c.Read()
	if err != nil {
		t.Fatal(err)
	}
	for _, w := range snapshot.Waits {
		waits, parts := uint64(0), uint64(0)
		for _, b := range w.Latency {
			waits += b.Count
		}
		for _, b := range w.RunQueue {
			parts += b.Count
		}
		if waits != w.Count || parts != w.Count || w.SleepNS+w.RunQueueNS != w.TotalNS {
			t.Errorf("%+v", w)
		}
	}
	return snapshot
}

func (s *OffCPUSnapshot) of(reason string) WaitCounts {
	i := slices.IndexFunc(s.Waits, func(w WaitCounts) bool { return w.Reason == reason })
	if i < 0 {
		return WaitCounts{}
	}
	return s.Waits[i]
}

func TestWaitsOfAProcess(t *testing.T) {
	p := begin(t, "sleep")
	c := startedOffCPU(t, OffCPUOptions{PID: p.PID})
	p.perform(t)
	snapshot := readOffCPU(t, c)
	got := snapshot.of("sleeping")
	if got.Count < slept || time.Duration(got.SleepNS) < slept*aSleep*9/10 {
		t.Errorf("%+v, want %d of %v", got, slept, aSleep)
	}
	if high := got.Latency[len(got.Latency)-1].High; time.Duration(high)*time.Microsecond < aSleep*9/10 {
		t.Errorf("none took %v: %+v", aSleep, got.Latency)
	}
	if snapshot.PID != p.PID || snapshot.Ended || snapshot.Stacks != nil {
		t.Errorf("%+v", snapshot)
	}
	if l := snapshot.Losses; l.NoRoom+l.NoStack+l.Missed != 0 {
		t.Errorf("%+v", l)
	}
}

func TestWaitsOfThreadsThatCompete(t *testing.T) {
	p := begin(t, "compete")
	c := startedOffCPU(t, OffCPUOptions{PID: p.PID})
	p.perform(t)
	got := readOffCPU(t, c).of("preempted")
	// Until the first thread on the core is done, all others wait at least as long as it computes.
	if got.Count == 0 || time.Duration(got.RunQueueNS) < aSpin || got.SleepNS != 0 {
		t.Errorf("%+v", got)
	}
}

func TestWaitsForADisk(t *testing.T) {
	path, _ := loopDevice(t, 1<<20)
	t.Setenv(disk, path)
	p := begin(t, "disk")
	c := startedOffCPU(t, OffCPUOptions{PID: p.PID})
	p.perform(t)
	// The disk may answer before the thread sleeps, so not every read is a wait.
	if got := readOffCPU(t, c).of("io_wait"); got.Count == 0 || got.TotalNS == 0 {
		t.Errorf("%+v, after %d reads", got, pulls)
	}
}

// wait returns the wait that a thread is in, or the zero value.
func (s *OffCPUSnapshot) wait(thread uint32) WaitInFlight {
	i := slices.IndexFunc(s.InFlight, func(w WaitInFlight) bool { return w.Thread == thread })
	if i < 0 {
		return WaitInFlight{}
	}
	return s.InFlight[i]
}

func TestWaitsInFlight(t *testing.T) {
	p := begin(t, "read")
	p.settle(t)
	c := startedOffCPU(t, OffCPUOptions{PID: p.PID})
	first := readOffCPU(t, c).wait(p.Thread)
	if first.Reason != "sleeping" || !first.Before || first.Ready {
		t.Errorf("since before: %+v", first)
	}
	p.perform(t)
	p.settle(t)
	until(t, "it sleeps", func() bool {
		first = readOffCPU(t, c).wait(p.Thread)
		return first.Reason == "sleeping" && !first.Before
	})
	before := stamp(time.Now(), 0).MonotonicNS
	if err := sleep(aSleep); err != nil {
		t.Fatal(err)
	}
	later := readOffCPU(t, c)
	second := later.wait(p.Thread)
	if second.Reason != "sleeping" || second.Ready || second.AgeNS < first.AgeNS+later.MonotonicNS-before {
		t.Errorf("meanwhile: %+v, then %+v", first, second)
	}
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	p.Wait()
	if last := readOffCPU(t, c); !last.Ended || len(last.InFlight) != 0 || len(last.Waits) == 0 {
		t.Errorf("it has been killed: %+v", last)
	}
	empty := readOffCPU(t, c)
	if !empty.Ended || len(empty.InFlight)+len(empty.Waits) != 0 || empty.Losses != (OffCPULosses{}) {
		t.Errorf("a second time: %+v", empty)
	}
	if empty.Waits == nil || empty.InFlight == nil {
		t.Error("empty lists are no null in JSON")
	}
}

// A thread that has ended leaves no entry behind.
func TestWaitsOfThreadsThatEnd(t *testing.T) {
	p := begin(t, "read")
	c := startedOffCPU(t, OffCPUOptions{PID: p.PID})
	for range 3 {
		p.perform(t)
	}
	until(t, "only threads that live are known", func() bool {
		known := 0
		var thread int32
		var entry [32]byte
		all := c.program.collection.Maps[bpf.OffCPUMapThreads].Iterate()
		for all.Next(&thread, &entry) {
			known++
		}
		if err := all.Err(); err != nil {
			t.Fatal(err)
		}
		living, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", p.PID))
		if err != nil {
			t.Fatal(err)
		}
		return known <= len(living)
	})
}

// sleeper is a program whose functions have names. go test links its own binaries without symbols.
const sleeper = `package main

import (
	"runtime"
	"syscall"
)

func main() {
	runtime.LockOSThread()
	for order := make([]byte, 1); ; {
		say(syscall.Gettid())
		if n, err := syscall.Read(0, order); n == 0 || err != nil {
			return
		}
		for range %d {
			outer()
		}
	}
}

func say(n int) {
	line := []byte{'\n'}
	for ; n > 0; n /= 10 {
		line = append([]byte{byte('0' + n%%10)}, line...)
	}
	syscall.Write(1, line)
}

//go:noinline
func outer() { inner() }

//go:noinline
func inner() {
	length := syscall.NsecToTimespec(%d)
	syscall.Nanosleep(&length, nil)
}
`

func TestStacksOfWaits(t *testing.T) {
	program := filepath.Join(t.TempDir(), "sleeper")
	source := fmt.Sprintf(sleeper, sleeps, aSleep.Nanoseconds())
	if err := os.WriteFile(program+".go", []byte(source), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.Command("go", "build", "-o", program, program+".go").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	p := beginProgram(t, exec.Command(program))
	c := startedOffCPU(t, OffCPUOptions{PID: p.PID, Stacks: true})
	p.perform(t)
	p.settle(t)
	var all []*OffCPUSnapshot
	var reads *OffCPUSnapshot
	until(t, "it sleeps", func() bool {
		reads = readOffCPU(t, c)
		all = append(all, reads)
		return reads.wait(p.Thread).Stack != nil
	})
	if reader := reads.wait(p.Thread); !slices.Contains(reader.User, "main.main") {
		t.Errorf("it reads at %+v", *reader.Stack)
	}
	asleep := slices.IndexFunc(all[0].Stacks, func(s StackWaits) bool { return slices.Contains(s.User, "main.inner") })
	if asleep < 0 {
		t.Fatalf("it has slept, but not in %+v", all[0].Stacks)
	}
	place := all[0].Stacks[asleep]
	if place.Reason != "sleeping" || place.Count < slept || time.Duration(place.TotalNS) < slept*aSleep*9/10 {
		t.Errorf("%+v, want %d of %v", place, slept, aSleep)
	}
	outer := []int{slices.Index(place.User, "main.inner"), slices.Index(place.User, "main.outer"), slices.Index(place.User, "main.main")}
	if !slices.IsSorted(outer) || outer[0] < 0 {
		t.Errorf("not from the innermost: %q", place.User)
	}
	if hidden := strings.HasPrefix(place.Kernel[0], "0x"); !hidden && !strings.HasPrefix(place.Kernel[0], "schedule") {
		t.Errorf("not from the scheduler on: %q", place.Kernel)
	}
	// Every wait that has a reason has a stack too.
	p.leave(t)
	waits, stacks := map[string]uint64{}, map[string]uint64{}
	for _, s := range append(all, readOffCPU(t, c)) {
		for _, w := range s.Waits {
			waits[w.Reason] += w.Count
		}
		for _, w := range s.Stacks {
			stacks[w.Reason] += w.Count
		}
		if s.Losses.NoStack != 0 {
			t.Errorf("%+v", s.Losses)
		}
	}
	if !maps.Equal(waits, stacks) {
		t.Errorf("%v waits, %v by stack", waits, stacks)
	}
}

func TestWaitsOfThisProcess(t *testing.T) {
	c := startedOffCPU(t, OffCPUOptions{})
	if err := sleep(aSleep); err != nil {
		t.Fatal(err)
	}
	snapshot := readOffCPU(t, c)
	if got := snapshot.of("sleeping"); snapshot.PID != os.Getpid() || got.Count == 0 {
		t.Errorf("%d: %+v", snapshot.PID, got)
	}
}
