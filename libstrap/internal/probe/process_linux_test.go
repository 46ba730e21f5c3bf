package probe

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// performer is a program to watch. One of its threads makes a step each time that the test asks for
// it.
type performer struct {
	*exec.Cmd
	PID    int
	Thread uint32
	in     io.WriteCloser
	out    *bufio.Scanner
}

// begin starts the test binary as a performer of the steps named `what`, and waits until it is
// ready for the first.
func begin(t *testing.T, what string) *performer {
	t.Helper()
	program := exec.Command(os.Args[0])
	program.Env = append(os.Environ(), workload+"="+what)
	return beginProgram(t, program)
}

// beginProgram starts another program as a performer. The program must speak the same protocol: see
// steps.
func beginProgram(t *testing.T, program *exec.Cmd) *performer {
	t.Helper()
	p := &performer{Cmd: program}
	p.Stderr = os.Stderr
	in, err := p.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := p.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		p.Process.Kill()
		p.Wait()
	})
	p.in, p.out, p.PID = in, bufio.NewScanner(out), p.Process.Pid
	p.await(t)
	return p
}

// await waits until the performer is ready: it then writes the number of its thread.
func (p *performer) await(t *testing.T) {
	t.Helper()
	if !p.out.Scan() {
		t.Fatal("the watched program said nothing: ", p.out.Err())
	}
	thread, err := strconv.ParseUint(p.out.Text(), 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	p.Thread = uint32(thread)
}

// perform asks for the next step and waits until it is done.
func (p *performer) perform(t *testing.T) {
	t.Helper()
	p.begin(t)
	p.await(t)
}

func (p *performer) begin(t *testing.T) {
	t.Helper()
	if _, err := p.in.Write([]byte{'\n'}); err != nil {
		t.Fatal(err)
	}
}

// settle waits until the performer's thread sleeps in the read for the next step.
func (p *performer) settle(t *testing.T) {
	t.Helper()
	until(t, "it reads", func() bool {
		text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", p.PID, p.Thread))
		if err != nil {
			t.Fatal(err)
		}
		return strings.HasPrefix(string(text), fmt.Sprintf("%d 0x0 ", unix.SYS_READ))
	})
}

// leave lets the performer end, and waits for it.
func (p *performer) leave(t *testing.T) {
	t.Helper()
	p.in.Close()
	if err := p.Wait(); err != nil {
		t.Fatal(err)
	}
}

func until(t *testing.T, what string, true func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !true(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it never happens that ", what)
		}
	}
}

// Keep the process's first thread for the main goroutine, so that other goroutines run on other
// threads.
func init() { runtime.LockOSThread() }

// perform runs the performer's side in the watched program, on a thread other than the first. It
// makes one step for each byte on standard input.
func perform(what string) {
	done := make(chan error)
	go func() {
		runtime.LockOSThread()
		done <- steps(what)
	}()
	if err := <-done; err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func steps(what string) error {
	for order := make([]byte, 1); ; {
		fmt.Println(unix.Gettid())
		n, err := unix.Read(0, order)
		for err == unix.EINTR {
			n, err = unix.Read(0, order)
		}
		if n == 0 || err != nil {
			return err
		}
		if err := step(what); err != nil {
			return err
		}
	}
}

const (
	readers = 4    // threads in the step "read"
	reads   = 1000 // reads by each thread
	refused = 7    // reads of a bad file descriptor
	strange = 5    // calls with a number that no kernel has

	sleeps = 9 // sleeps in the step "sleep"
	aSleep = 20 * time.Millisecond
	// slept is how many of the sleeps a test must see at least. Some micro virtual machines hide
	// switches from process 1 to another process.
	slept = 6

	rivals = 4 // threads in the step "compete", all on one core
	aSpin  = 30 * time.Millisecond

	disk  = "STRAP_PROBE_DISK" // environment variable: the device that the step "disk" reads
	pulls = 300
)

func step(what string) error {
	switch what {
	case "read":
		return readZeros()
	case "sleep":
		for range sleeps {
			if err := sleep(aSleep); err != nil {
				return err
			}
		}
		return nil
	case "compete":
		return compete()
	case "disk":
		return pull(os.Getenv(disk))
	case "system":
		return tellSystem()
	case "execve":
		os.Setenv(workload, "read")
		return unix.Exec("/proc/self/exe", os.Args, os.Environ())
	}
	return fmt.Errorf("there is no workload %q", what)
}

// readZeros reads from /dev/zero with preadv, which Go's runtime never calls.
func readZeros() error {
	zeros, err := os.Open("/dev/zero")
	if err != nil {
		return err
	}
	defer zeros.Close()
	var group sync.WaitGroup
	errs := make([]error, readers)
	for i := range readers {
		group.Go(func() {
			runtime.LockOSThread() // not unlocked, so the thread ends with the goroutine
			page := [][]byte{make([]byte, 4096)}
			for range reads {
				if _, err := unix.Preadv(int(zeros.Fd()), page, 0); err != nil {
					errs[i] = err
				}
			}
		})
	}
	group.Wait()
	for range refused {
		if _, err := unix.Preadv(-1, nil, 0); err != unix.EBADF {
			errs = append(errs, fmt.Errorf("a read of no file gave %v", err))
		}
	}
	for range strange {
		if _, _, err := unix.Syscall(9999, 0, 0, 0); err != unix.ENOSYS {
			errs = append(errs, fmt.Errorf("call 9999 gave %v", err))
		}
	}
	return errors.Join(errs...)
}

// sleep sleeps in the kernel: in one call, unless a signal interrupts it.
func sleep(for_ time.Duration) error {
	left := unix.NsecToTimespec(for_.Nanoseconds())
	err := unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &left, &left)
	for err == unix.EINTR {
		err = unix.ClockNanosleep(unix.CLOCK_MONOTONIC, 0, &left, &left)
	}
	return err
}

// compete runs threads that compute, all on one core.
func compete() error {
	runtime.GOMAXPROCS(rivals + 1)
	var cores, one unix.CPUSet
	if err := unix.SchedGetaffinity(0, &cores); err != nil {
		return err
	}
	for core := range len(cores) * 64 {
		if cores.IsSet(core) {
			one.Set(core)
			break
		}
	}
	var group sync.WaitGroup
	var here atomic.Int32
	errs := make([]error, rivals)
	for i := range rivals {
		group.Go(func() {
			runtime.LockOSThread()
			if errs[i] = unix.SchedSetaffinity(0, &one); errs[i] != nil {
				here.Add(1)
				return
			}
			for here.Add(1); here.Load() < rivals; {
			}
			for begin := cpuTime(); cpuTime() < begin+aSpin; {
			}
		})
	}
	group.Wait()
	return errors.Join(errs...)
}

// cpuTime returns the CPU time of the calling thread.
func cpuTime() time.Duration {
	var used unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_THREAD_CPUTIME_ID, &used); err != nil {
		panic(err)
	}
	return time.Duration(used.Nano())
}

// pull reads the first page of a device `pulls` times, past the page cache.
func pull(path string) error {
	f, err := os.OpenFile(path, os.O_RDONLY|unix.O_DIRECT, 0)
	if err != nil {
		return err
	}
	defer f.Close()
	page, err := unix.Mmap(-1, 0, 4096, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return err
	}
	defer unix.Munmap(page)
	for range pulls {
		if _, err := f.ReadAt(page, 0); err != nil {
			return err
		}
	}
	return nil
}

// watchers starts the collectors that watch one process, by kind.
var watchers = map[string]func(pid int) (Collector, error){
	"syscalls": func(pid int) (Collector, error) { return StartSyscalls(SyscallsOptions{PID: pid}) },
	"off_cpu":  func(pid int) (Collector, error) { return StartOffCPU(OffCPUOptions{PID: pid}) },
}

// eachWatcher runs a test for each of the watchers, and skips those that the machine cannot run.
func eachWatcher(t *testing.T, test func(t *testing.T, start func(pid int) (Collector, error))) {
	for kind, start := range watchers {
		t.Run(kind, func(t *testing.T) {
			c, err := start(0)
			if errors.Is(err, status.Permission) || errors.Is(err, status.Unsupported) {
				t.Skip(err)
			}
			if err != nil {
				t.Fatal(err)
			}
			c.Close()
			test(t, start)
		})
	}
}

func TestNoSuchProcess(t *testing.T) {
	threads := make(chan int)
	defer close(threads)
	go func() { // on another thread than the first, which init keeps
		runtime.LockOSThread()
		threads <- unix.Gettid()
		<-threads
	}()
	thread := <-threads
	eachWatcher(t, func(t *testing.T, start func(pid int) (Collector, error)) {
		over := begin(t, "read")
		over.leave(t)
		for _, c := range []struct {
			pid  int
			code status.Code
		}{{-1, status.InvalidArgument}, {1<<32 + over.PID, status.InvalidArgument}, {over.PID, status.NotFound}, {thread, status.NotFound}, {1 << 30, status.NotFound}} {
			_, err := start(c.pid)
			if !errors.Is(err, c.code) || !strings.Contains(err.Error(), strconv.Itoa(c.pid)) {
				t.Errorf("%d gave %v", c.pid, err)
			}
		}
	})
}

func TestClosedWatcher(t *testing.T) {
	eachWatcher(t, func(t *testing.T, start func(pid int) (Collector, error)) {
		c, err := start(0)
		if err != nil {
			t.Fatal(err)
		}
		c.Close()
		c.Close()
		if _, err := c.Snapshot(); !errors.Is(err, status.InvalidState) {
			t.Error(err)
		}
	})
}

// inPIDNamespace returns a command that runs the test binary as process 1 of a new PID namespace.
// `more` are further flags of unshare.
func inPIDNamespace(t *testing.T, more []string, arguments ...string) *exec.Cmd {
	t.Helper()
	unshare, err := exec.LookPath("unshare")
	if err != nil || os.Getuid() != 0 {
		t.Skip("it takes root and unshare")
	}
	flags := append([]string{"--pid", "--fork", "--kill-child"}, more...)
	if err := exec.Command(unshare, append(flags, "true")...).Run(); err != nil {
		t.Skip("no namespaces: ", err)
	}
	return exec.Command(unshare, append(append(flags, os.Args[0]), arguments...)...)
}

// In a container, processes have other numbers than the kernel's own.
func TestProcessInAPIDNamespace(t *testing.T) {
	inside := inPIDNamespace(t, []string{"--mount-proc"}, "-test.v",
		"-test.run=^(TestSyscallsOfAProcess|TestWaitsOfAProcess|TestNoSuchProcess|TestSystemAgreesWithRusage)$")
	if out, err := inside.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

// With the /proc of another PID namespace, a number leads to another process, and so to wrong
// names.
func TestProcOfAnotherNamespaceIsRefused(t *testing.T) {
	inside := inPIDNamespace(t, nil, "-test.v", "-test.run=^TestRefusedForItsProc$")
	inside.Env = append(os.Environ(), outer+"=1")
	if out, err := inside.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestRefusedForItsProc") {
		t.Errorf("%v\n%s", err, out)
	}
}

// A mount namespace may have the /proc of a PID namespace that does not contain this process, as
// after nsenter --mount into a container. Then /proc does not list this process.
func TestProcWithoutThisProcessIsRefused(t *testing.T) {
	inPIDNamespace(t, []string{"--mount-proc"}) // skips the test if there are no namespaces
	inside := exec.Command("unshare", "--mount", "sh", "-c", `unshare --pid --fork mount -t proc proc /proc && exec "$0" "$@"`,
		os.Args[0], "-test.v", "-test.run=^TestRefusedWithoutSelf$")
	inside.Env = append(os.Environ(), outer+"=1")
	if out, err := inside.CombinedOutput(); err != nil || !strings.Contains(string(out), "--- PASS: TestRefusedWithoutSelf") {
		t.Errorf("%v\n%s", err, out)
	}
}

func TestRefusedWithoutSelf(t *testing.T) {
	if os.Getenv(outer) == "" {
		t.Skip("TestProcWithoutThisProcessIsRefused runs it")
	}
	for kind := range collectors {
		_, err := Start(kind, nil)
		if !errors.Is(err, status.Unsupported) || !strings.HasPrefix(err.Error(), "/proc/self does not lead to this process: ") ||
			!strings.HasSuffix(err.Error(), foreignProc) {
			t.Errorf("%s: %v", kind, err)
		}
	}
	if r := Check(); !r.Permitted() || r.Works("system") {
		t.Errorf("%+v", r)
	}
}

const outer = "STRAP_PROBE_OUTER_PROC" // set: /proc is of another PID namespace

func TestRefusedForItsProc(t *testing.T) {
	if os.Getenv(outer) == "" {
		t.Skip("TestProcOfAnotherNamespaceIsRefused runs it")
	}
	_, calls := StartSyscalls(SyscallsOptions{})
	_, waits := StartOffCPU(OffCPUOptions{Stacks: true})
	for _, err := range []error{calls, waits} {
		if !errors.Is(err, status.Unsupported) || !strings.Contains(err.Error(), "mount -t proc proc /proc") {
			t.Error(err)
		}
	}
}
