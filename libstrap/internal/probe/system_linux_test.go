package probe

import (
	"encoding/json"
	"errors"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strconv"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/bpf"
	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	workload = "STRAP_PROBE_WORKLOAD" // set: the test binary is the watched program; what it does
	pages    = 3000
	spin     = 300 * time.Millisecond
	rest     = 400 * time.Millisecond
)

func TestMain(m *testing.M) {
	switch name := os.Getenv(workload); name {
	case "":
		os.Exit(m.Run())
	case "work":
		work()
	default:
		perform(name)
	}
}

// work touches fresh pages, computes on one thread, and sleeps.
func work() {
	runtime.LockOSThread()
	memory, err := unix.Mmap(-1, 0, pages*4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		panic(err)
	}
	unix.Madvise(memory, unix.MADV_NOHUGEPAGE)
	for i := 0; i < len(memory); i += 4096 {
		memory[i] = 1
	}
	for begin := time.Now(); time.Since(begin) < spin; {
	}
	time.Sleep(rest)
}

func startedSystem(t *testing.T) *System {
	t.Helper()
	s, err := StartSystem(SystemOptions{})
	if errors.Is(err, status.Permission) || errors.Is(err, status.Unsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func runWorkload(t *testing.T) (pid string, usage *syscall.Rusage, life time.Duration) {
	t.Helper()
	program := exec.Command(os.Args[0])
	program.Env = append(os.Environ(), workload+"=work", "GOMAXPROCS=1")
	begin := time.Now()
	if err := program.Run(); err != nil {
		t.Fatal(err)
	}
	return strconv.Itoa(program.Process.Pid), program.ProcessState.SysUsage().(*syscall.Rusage), time.Since(begin)
}

// The kernel reports to a parent what its child used. The snapshot must agree.
func TestSystemAgreesWithRusage(t *testing.T) {
	s := startedSystem(t)
	pid, usage, life := runWorkload(t)
	snapshot, err := s.Read()
	if err != nil {
		t.Fatal(err)
	}
	p := snapshot.Processes[pid]
	if p == nil {
		t.Fatalf("%s is not there", pid)
	}
	if want := filepath.Base(os.Args[0]); p.Name == "" || p.Name != want[:min(len(want), 15)] {
		t.Errorf("name %q, want %q", p.Name, want)
	}
	cpu := time.Duration(usage.Utime.Nano() + usage.Stime.Nano())
	if on := time.Duration(p.OnCPUNS); on < cpu-cpu/10 || on > cpu+cpu/10+5*time.Millisecond {
		t.Errorf("%v on a core; the parent was told %v", on, cpu)
	}
	// The kernel still counts some faults between the record of a process's end and its death.
	if faults := p.MinorFaults + p.MajorFaults; faults < pages || faults > uint64(usage.Minflt+usage.Majflt) ||
		faults+20 < uint64(usage.Minflt+usage.Majflt) {
		t.Errorf("%d faults; the parent was told %d", faults, usage.Minflt+usage.Majflt)
	}
	if p.MajorFaults > uint64(usage.Majflt) {
		t.Errorf("%d major faults; the parent was told %d", p.MajorFaults, usage.Majflt)
	}
	if off := time.Duration(p.OffCPUNS); off < rest || p.RunQueueNS > p.OffCPUNS {
		t.Errorf("%v off the cores, %v of that waiting; it lived for %v", off, time.Duration(p.RunQueueNS), life)
	}
	if snapshot.OffCPUNS[pid] != p.OffCPUNS || snapshot.PageFaults[pid] != p.MinorFaults+p.MajorFaults {
		t.Errorf("%d and %d differ from %+v", snapshot.OffCPUNS[pid], snapshot.PageFaults[pid], p)
	}
	if snapshot, err = s.Read(); err != nil || snapshot.Processes[pid] != nil {
		t.Errorf("a second time: %+v, %v", snapshot.Processes[pid], err)
	}
}

// told is what a program in a PID namespace reports.
type told struct {
	Child    int // a process that has run and ended
	Snapshot *SystemSnapshot
}

var watching *System

// tellSystem runs a child. The first call then starts to watch; later calls print a snapshot. The
// child comes first because os/exec starts an extra process before its first child, to test pidfds.
func tellSystem() (err error) {
	child := exec.Command("true")
	if err := child.Run(); err != nil {
		return err
	}
	if watching == nil {
		watching, err = StartSystem(SystemOptions{})
		return err
	}
	snapshot, err := watching.Read()
	if err != nil {
		return err
	}
	return json.NewEncoder(os.Stdout).Encode(told{child.Process.Pid, snapshot})
}

func TestSystemKnowsItsPIDNamespaceAlone(t *testing.T) {
	startedSystem(t).Close()
	inside := inPIDNamespace(t, []string{"--mount-proc"})
	inside.Env = append(os.Environ(), workload+"=system")
	p := beginProgram(t, inside)
	p.perform(t)
	for range 20 { // processes outside of the namespace
		if err := exec.Command("true").Run(); err != nil {
			t.Fatal(err)
		}
	}
	p.begin(t)
	var said told
	if !p.out.Scan() {
		t.Fatal("the program inside said nothing: ", p.out.Err())
	}
	if err := json.Unmarshal(p.out.Bytes(), &said); err != nil {
		t.Fatal(err)
	}
	p.await(t)
	p.leave(t)
	child := strconv.Itoa(said.Child)
	if got, want := slices.Sorted(maps.Keys(said.Snapshot.Processes)), []string{"1", child}; !slices.Equal(got, want) {
		t.Errorf("processes %v, want %v", got, want)
	}
	if name := said.Snapshot.Processes[child]; name == nil || name.Name != "true" {
		t.Errorf("the child is %+v", name)
	}
	if said.Snapshot.Scope != PIDNamespace {
		t.Errorf("scope %q", said.Snapshot.Scope)
	}
}

// The counts of a living process are those of each interval.
func TestSystemIntervalsAddUp(t *testing.T) {
	s := startedSystem(t)
	pid := strconv.Itoa(os.Getpid())
	var before, after unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_SELF, &before); err != nil {
		t.Fatal(err)
	}
	if _, err := s.Read(); err != nil {
		t.Fatal(err)
	}
	total := Process{}
	for range 5 {
		work()
		snapshot, err := s.Read()
		if err != nil {
			t.Fatal(err)
		}
		total.add(*snapshot.Processes[pid])
	}
	if err := unix.Getrusage(unix.RUSAGE_SELF, &after); err != nil {
		t.Fatal(err)
	}
	faults := uint64(after.Minflt + after.Majflt - before.Minflt - before.Majflt)
	if got := total.MinorFaults + total.MajorFaults; got < 5*pages || got > faults {
		t.Errorf("%d faults of %d", got, faults)
	}
	cpu := time.Duration(after.Utime.Nano() + after.Stime.Nano() - before.Utime.Nano() - before.Stime.Nano())
	if on := time.Duration(total.OnCPUNS); on < cpu/2 || on > cpu+cpu/10+50*time.Millisecond {
		t.Errorf("%v on a core of %v", on, cpu)
	}
}

func TestZombieIsCountedOnce(t *testing.T) {
	s := startedSystem(t)
	program := exec.Command(os.Args[0])
	program.Env = append(os.Environ(), workload+"=work")
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	pid := strconv.Itoa(program.Process.Pid)
	deadline := time.Now().Add(time.Minute)
	for seen := uint64(0); ; {
		snapshot, err := s.Read()
		if err != nil {
			t.Fatal(err)
		}
		if p := snapshot.Processes[pid]; p != nil {
			seen += p.MinorFaults
		}
		stat, err := os.ReadFile("/proc/" + pid + "/stat")
		if err != nil {
			t.Fatal(err)
		}
		if zombie := len(stat) > 0 && reflect.DeepEqual(stateOf(stat), byte('Z')); zombie {
			for range 3 {
				if snapshot, err = s.Read(); err != nil {
					t.Fatal(err)
				}
				if p := snapshot.Processes[pid]; p != nil {
					seen += p.MinorFaults
				}
			}
			if err := program.Wait(); err != nil {
				t.Fatal(err)
			}
			usage := program.ProcessState.SysUsage().(*syscall.Rusage)
			if seen > uint64(usage.Minflt) || seen < pages {
				t.Errorf("%d faults of %d", seen, usage.Minflt)
			}
			return
		}
		if time.Now().After(deadline) {
			t.Fatal("it does not end")
		}
		time.Sleep(20 * time.Millisecond)
	}
}

// The record of a thread is kept until its end is read, however long the thread exits.
func TestThreadThatIsLongInExiting(t *testing.T) {
	type records = map[threadKey]bpf.TasksTaskRecord
	key := threadKey{7, 1}
	s := &System{before: records{key: {RunNs: 5}}}
	leave := func(exiting bool, ended records) bool {
		s.before, s.leaving = s.leave(records{}, map[threadKey]bool{key: exiting}, ended)
		return s.before[key].RunNs == 5
	}
	for range 3 {
		if !leave(true, nil) {
			t.Error("it is forgotten while it exits")
		}
	}
	if !leave(false, nil) || leave(false, nil) {
		t.Error("of one that is gone the record is kept for one snapshot")
	}
	s.before = records{key: {RunNs: 5}}
	if leave(true, records{key: {RunNs: 6}}) {
		t.Error("it is kept beyond its end")
	}
}

// stateOf returns the state letter in /proc/PID/stat, which follows the name in parentheses.
func stateOf(stat []byte) byte {
	for i := len(stat) - 1; i >= 0; i-- {
		if stat[i] == ')' {
			return stat[i+2]
		}
	}
	return 0
}

func TestPressure(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) {
		if err := os.WriteFile(filepath.Join(folder, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	write("io", "some avg10=1.50 avg60=0.25 avg300=0.00 total=123456\nfull avg10=0.00 avg60=0.00 avg300=0.00 total=7\n")
	write("cpu", "some avg10=0.00 avg60=0.00 avg300=0.00 total=1\n") // without a line "full", as before Linux 5.13
	got, err := pressure(folder)
	want := map[string]map[string]Stall{
		"io":  {"some": {1.5, 0.25, 0, 123456}, "full": {0, 0, 0, 7}},
		"cpu": {"some": {0, 0, 0, 1}},
	}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%v, %v", got, err)
	}
	write("memory", "some avg10=x\n")
	if _, err := pressure(folder); !errors.Is(err, status.Corrupt) {
		t.Error(err)
	}
}

func TestClosedSystem(t *testing.T) {
	s := startedSystem(t)
	s.Close()
	s.Close()
	if _, err := s.Read(); !errors.Is(err, status.InvalidState) {
		t.Error(err)
	}
}
