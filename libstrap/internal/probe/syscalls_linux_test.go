package probe

import (
	"errors"
	"os"
	"reflect"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func startedSyscalls(t *testing.T, pid int) *Syscalls {
	t.Helper()
	s, err := StartSyscalls(SyscallsOptions{PID: pid})
	if errors.Is(err, status.Permission) || errors.Is(err, status.Unsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func readSyscalls(t *testing.T, s *Syscalls) *SyscallsSnapshot {
	t.Helper()
	snapshot, err := s.Read()
	if err != nil {
		t.Fatal(err)
	}
	return snapshot
}

func (s *SyscallsSnapshot) of(name string) SyscallCounts {
	i := slices.IndexFunc(s.Syscalls, func(c SyscallCounts) bool { return c.Name == name })
	if i < 0 {
		return SyscallCounts{}
	}
	return s.Syscalls[i]
}

func TestSyscallsOfAProcess(t *testing.T) {
	p := begin(t, "read")
	s := startedSyscalls(t, p.PID)
	p.perform(t)
	page := [][]byte{make([]byte, 1)}
	zeros, err := os.Open("/dev/zero")
	if err != nil {
		t.Fatal(err)
	}
	defer zeros.Close()
	for range 100 { // the same call from another process, which must not count
		if _, err := unix.Preadv(int(zeros.Fd()), page, 0); err != nil {
			t.Fatal(err)
		}
	}
	snapshot := readSyscalls(t, s)
	if snapshot.PID != p.PID || snapshot.Ended {
		t.Errorf("%+v", snapshot)
	}
	got := snapshot.of("preadv")
	if got.Syscall != unix.SYS_PREADV || got.Count != readers*reads+refused || got.Errors != refused {
		t.Errorf("%+v, want %d of which %d fail", got, readers*reads+refused, refused)
	}
	total, least := uint64(0), uint64(0)
	for _, b := range got.Latency {
		total += b.Count
		if b.Slot > 0 {
			least += b.Count * b.Low * 1000
		}
	}
	if total != got.Count || got.TotalNS < least {
		t.Errorf("%+v: a histogram of %d calls, of at least %d ns", got, total, least)
	}
	if snapshot.Losses.OtherABI != strange || snapshot.Losses.NoRoom+snapshot.Losses.Missed != 0 {
		t.Errorf("%+v, want %d of another ABI", snapshot.Losses, strange)
	}
	// Each snapshot counts only its own interval.
	if again := readSyscalls(t, s).of("preadv"); again.Count != 0 {
		t.Errorf("a second time: %+v", again)
	}
	p.perform(t)
	if again := readSyscalls(t, s).of("preadv"); again.Count != got.Count {
		t.Errorf("done again: %+v", again)
	}
}

func TestSyscallsTakeTheirTime(t *testing.T) {
	p := begin(t, "sleep")
	s := startedSyscalls(t, p.PID)
	p.perform(t)
	got := readSyscalls(t, s).of("clock_nanosleep")
	if got.Count < sleeps || time.Duration(got.TotalNS) < sleeps*aSleep {
		t.Errorf("%+v, want %d of %v", got, sleeps, aSleep)
	}
	if high := got.Latency[len(got.Latency)-1].High; time.Duration(high)*time.Microsecond < aSleep {
		t.Errorf("none took %v: %+v", aSleep, got.Latency)
	}
}

// inFlight returns the call that a thread is in, or the zero value.
func (s *SyscallsSnapshot) inFlight(thread uint32) SyscallInFlight {
	i := slices.IndexFunc(s.InFlight, func(f SyscallInFlight) bool { return f.Thread == thread })
	if i < 0 {
		return SyscallInFlight{}
	}
	return s.InFlight[i]
}

func TestSyscallsInFlight(t *testing.T) {
	p := begin(t, "read")
	p.settle(t)
	s := startedSyscalls(t, p.PID)
	first := readSyscalls(t, s).inFlight(p.Thread)
	if first.Name != "read" || !first.Before {
		t.Errorf("called before: %+v", first)
	}
	p.perform(t)
	p.settle(t)
	first = readSyscalls(t, s).inFlight(p.Thread)
	before := stamp(time.Now(), 0).MonotonicNS
	sleep(aSleep)
	later := readSyscalls(t, s)
	second := later.inFlight(p.Thread)
	if second.Name != "read" || second.Before || second.AgeNS < first.AgeNS+later.MonotonicNS-before {
		t.Errorf("called meanwhile: %+v, then %+v", first, second)
	}
	if !slices.IsSortedFunc(later.InFlight, func(a, b SyscallInFlight) int { return int(b.AgeNS - a.AgeNS) }) {
		t.Errorf("not by age: %+v", later.InFlight)
	}
	// Kill it inside the call.
	if err := p.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	p.Wait()
	for range 2 {
		last := readSyscalls(t, s)
		if !last.Ended || len(last.InFlight) != 0 {
			t.Errorf("it has been killed: %+v", last)
		}
	}
}

func TestSyscallsOfAProcessThatEnds(t *testing.T) {
	p := begin(t, "read")
	s := startedSyscalls(t, p.PID)
	p.perform(t)
	p.leave(t)
	last := readSyscalls(t, s)
	if got := last.of("preadv"); !last.Ended || got.Count != readers*reads+refused {
		t.Errorf("ended: %v, %+v", last.Ended, got)
	}
	empty := readSyscalls(t, s)
	if !empty.Ended || len(empty.Syscalls)+len(empty.InFlight) != 0 || empty.Losses != (SyscallLosses{}) {
		t.Errorf("a second time: %+v", empty)
	}
	if empty.Syscalls == nil || empty.InFlight == nil {
		t.Error("empty lists are no null in JSON")
	}
}

// If a thread other than the first calls execve, it takes the number of the process.
func TestSyscallsAfterExecve(t *testing.T) {
	p := begin(t, "execve")
	s := startedSyscalls(t, p.PID)
	p.perform(t)
	if got := readSyscalls(t, s).of("execve"); got.Count != 1 || got.Errors != 0 {
		t.Errorf("%+v", got)
	}
	p.perform(t)
	snapshot := readSyscalls(t, s)
	if got := snapshot.of("preadv"); got.Count != readers*reads+refused {
		t.Errorf("%+v, want %d", got, readers*reads+refused)
	}
	if snapshot.Ended {
		t.Error("it goes on")
	}
}

func TestSyscallsOfThisProcess(t *testing.T) {
	s := startedSyscalls(t, 0)
	for range 100 {
		unix.Preadv(-1, nil, 0)
	}
	snapshot := readSyscalls(t, s)
	if got := snapshot.of("preadv"); snapshot.PID != os.Getpid() || got.Count != 100 || got.Errors != 100 {
		t.Errorf("%d: %+v", snapshot.PID, got)
	}
}

func TestSyscallNames(t *testing.T) {
	got := []string{syscallName(unix.SYS_READ), syscallName(unix.SYS_FUTEX), syscallName(500), syscallName(otherABI)}
	if want := []string{"read", "futex", "syscall_500", "other_abi"}; !reflect.DeepEqual(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
