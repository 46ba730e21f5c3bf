package probe

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func pointer[T any](value T) *T { return &value }

// reader is a process that waits for a line and then makes `n` reads of 4 KiB, past the page cache.
// `flags` are clone flags for namespaces of its own.
type reader struct {
	*exec.Cmd
	in  io.WriteCloser
	out bytes.Buffer
}

func newReader(t *testing.T, path string, n int, flags uintptr) *reader {
	t.Helper()
	script := fmt.Sprintf("read line; exec dd if=%s of=/dev/null bs=4096 iflag=direct count=%d", path, n)
	r := &reader{Cmd: exec.Command("sh", "-c", script)}
	r.SysProcAttr = &unix.SysProcAttr{Cloneflags: flags}
	r.Stderr = &r.out
	in, err := r.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	r.in = in
	if err := r.Start(); err != nil {
		if flags != 0 {
			t.Skip("no namespace of its own: ", err)
		}
		t.Fatal(err)
	}
	t.Cleanup(func() {
		r.Process.Kill()
		r.Wait()
	})
	return r
}

// readAll lets the readers read at the same time, and waits for them.
func readAll(t *testing.T, readers ...*reader) {
	t.Helper()
	for _, r := range readers {
		if _, err := io.WriteString(r.in, "go\n"); err != nil {
			t.Fatal(err)
		}
	}
	for _, r := range readers {
		if err := r.Wait(); err != nil {
			t.Fatalf("%v: %s", err, &r.out)
		}
	}
}

// expectReads fails the test unless the collector followed `n` reads and nothing else.
func expectReads(t *testing.T, b *Block, n uint64) {
	t.Helper()
	followed := uint64(0)
	for range 2 {
		s, err := b.Read()
		if err != nil {
			t.Fatal(err)
		}
		for _, one := range s.Operations {
			if one.Operation != "read" {
				t.Errorf("%+v", one)
			}
			followed += one.Completed
		}
		followed += s.Losses.UnseenEnd
		if s.Losses.UnseenStart != 0 || s.Diskstats != nil {
			t.Errorf("%+v, %+v", s.Losses, s.Diskstats)
		}
	}
	if followed != n {
		t.Errorf("%d reads were followed, of %d", followed, n)
	}
}

// schedule gives a device an I/O scheduler and turns merging off. With a scheduler, a request is
// often issued by another task than the one that queued it.
func schedule(t *testing.T, device, scheduler string) {
	t.Helper()
	queue := "/sys/block/" + device + "/queue/"
	schedulers, err := os.ReadFile(queue + "scheduler")
	if err != nil || !strings.Contains(string(schedulers), scheduler) {
		t.Skipf("no scheduler %s here: %s, %v", scheduler, schedulers, err)
	}
	before := string(schedulers)
	if _, rest, ok := strings.Cut(before, "["); ok {
		before, _, _ = strings.Cut(rest, "]")
	}
	set(t, queue+"scheduler", scheduler, before)
	set(t, queue+"nomerges", "2", "0")
}

// set writes a setting, and restores the old value after the test.
func set(t *testing.T, path, value, before string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(value), 0); err != nil {
		t.Skip(err)
	}
	t.Cleanup(func() { os.WriteFile(path, []byte(before), 0) })
}

func TestBlockFollowsAProcess(t *testing.T) {
	const size = 8 << 20
	for name, c := range map[string]struct {
		flags     uintptr
		scheduler string
	}{
		"here":                {0, "none"},
		"in a PID namespace":  {unix.CLONE_NEWPID, "none"},
		"through a scheduler": {0, "mq-deadline"},
	} {
		t.Run(name, func(t *testing.T) {
			path, device := loopDevice(t, size)
			schedule(t, device, c.scheduler)
			one, other := newReader(t, path, 200, c.flags), newReader(t, path, 300, 0)
			b := started(t, BlockOptions{Devices: []string{device}, PID: pointer(one.Process.Pid)})
			readAll(t, one, other)
			expectReads(t, b, 200)
		})
	}
}

// cgroupMount returns where a hierarchy of cgroups is mounted, or "".
func cgroupMount(t *testing.T, kind, option string) string {
	t.Helper()
	text, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(text), "\n") {
		words := strings.Fields(line)
		if len(words) > 3 && words[2] == kind && strings.Contains(","+words[3]+",", option) {
			return words[1]
		}
	}
	return ""
}

func TestBlockFollowsACgroup(t *testing.T) {
	const size = 8 << 20
	for _, kind := range []string{"cgroup2", "cgroup"} {
		t.Run(kind, func(t *testing.T) {
			option := ""
			if kind == "cgroup" {
				option = ",blkio,"
			}
			mount := cgroupMount(t, kind, option)
			if mount == "" {
				t.Skip("it is not mounted here")
			}
			outer := filepath.Join(mount, fmt.Sprint("strap-test-", os.Getpid()))
			inner := filepath.Join(outer, "below")
			for _, directory := range []string{outer, inner} {
				if err := os.Mkdir(directory, 0o755); err != nil {
					t.Skip("no cgroup can be made: ", err)
				}
				t.Cleanup(func() { os.Remove(directory) })
			}
			path, device := loopDevice(t, size)
			schedule(t, device, "mq-deadline")
			one, other := newReader(t, path, 200, 0), newReader(t, path, 300, 0)
			number := strconv.Itoa(one.Process.Pid)
			if err := os.WriteFile(filepath.Join(inner, "cgroup.procs"), []byte(number), 0); err != nil {
				t.Skip("no process can be put there: ", err)
			}
			b := started(t, BlockOptions{Devices: []string{device}, Cgroup: pointer(outer)})
			readAll(t, one, other)
			expectReads(t, b, 200)
		})
	}
}

func TestProcessesAndCgroupsThatCannotBe(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	thread := 0
	tasks, err := os.ReadDir("/proc/self/task")
	if err != nil {
		t.Fatal(err)
	}
	for _, task := range tasks {
		if n, _ := strconv.Atoi(task.Name()); n != os.Getpid() {
			thread = n
		}
	}
	for _, c := range []struct {
		options BlockOptions
		code    status.Code
		says    string
	}{
		{BlockOptions{PID: pointer(-5)}, status.InvalidArgument, "pid = -5"},
		{BlockOptions{PID: pointer(1 << 30)}, status.NotFound, "no process 1073741824"},
		{BlockOptions{PID: pointer(thread)}, status.NotFound, fmt.Sprintf("no process %d", thread)},
		{BlockOptions{Cgroup: pointer("/nosuch")}, status.NotFound, `"/nosuch"`},
		{BlockOptions{Cgroup: pointer(file)}, status.InvalidArgument, "directory of cgroup v2"},
		{BlockOptions{Cgroup: pointer("/proc")}, status.InvalidArgument, "directory of cgroup v2"},
	} {
		b, err := StartBlock(c.options)
		if err == nil {
			b.Close()
		}
		if !errors.Is(err, c.code) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v gave %v", c.options, err)
		}
	}
}
