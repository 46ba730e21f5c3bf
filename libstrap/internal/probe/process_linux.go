// Finds the process to watch. Page faults are counted in system_linux.go.

package probe

import (
	"errors"
	"math"
	"os"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/bpf"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// process is the process to watch. pid may belong to another process later. The pidfd, and kernel
// with start, always mean this one.
type process struct {
	pid    int    // in the PID namespace of this process
	handle int    // a pidfd
	kernel int32  // the kernel's own number of it
	start  uint64 // when it began, on CLOCK_MONOTONIC in ns
}

// openProcess finds a process by its number in this process's PID namespace. 0 means this process.
//
// Errors: InvalidArgument; NotFound, also for the number of a thread; Permission and Unsupported as
// explain returns them.
func openProcess(pid int) (*process, error) {
	if pid < 0 || pid > math.MaxInt32 {
		return nil, status.New(status.InvalidArgument, "pid = %d: give the number of a process", pid)
	}
	if pid == 0 {
		pid = os.Getpid()
	}
	// The handle keeps meaning this process, even if its number is reused.
	handle, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return nil, processError(pid, err)
	}
	p := &process{pid: pid, handle: handle}
	if err := p.find(); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

const noSelf = "/proc/self does not lead to this process"

const foreignProc = "/proc is of another PID namespace: mount -t proc proc /proc, in a mount namespace of its own (unshare --mount-proc)"

// needProc fails if /proc would tell of another process with the same number.
func needProc() error {
	if !ownProc("/proc") {
		return status.New(status.Unsupported, foreignProc)
	}
	return nil
}

// needSelf fails if /proc lacks this process. The loader of programs reads /proc/self.
func needSelf() error {
	if !hasSelf("/proc") {
		return status.New(status.Unsupported, noSelf+": "+foreignProc)
	}
	return nil
}

func processError(pid int, err error) error {
	switch {
	case errors.Is(err, unix.ENOSYS):
		return status.Wrap(status.Unsupported, err, "processes cannot be watched before Linux 5.3")
	case errors.Is(err, unix.ESRCH), errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOENT):
		return status.New(status.NotFound, "there is no process %d: ps -e lists them", pid)
	}
	return status.FromOS(err, "process %d cannot be watched", pid)
}

// find sets kernel and start by running the iterator of process.bpf.c.
func (p *process) find() error {
	spec, err := bpf.LoadProcess()
	if err == nil {
		err = spec.Variables[bpf.ProcessVarWanted].Set(int32(p.pid))
	}
	if err != nil {
		return explain(err)
	}
	collection, err := ebpf.NewCollection(spec)
	if err != nil {
		return explain(err)
	}
	defer collection.Close()
	list, err := link.AttachIter(link.IterOptions{Program: collection.Programs[bpf.ProcessProgFind]})
	if err != nil {
		return explain(err)
	}
	defer list.Close()
	err = records(list, func(r *bpf.ProcessProcessRecord) { p.kernel, p.start = r.Process, r.StartNs })
	if err != nil {
		return err
	}
	if over, err := p.ended(); err != nil || !over && p.kernel != 0 {
		return err
	}
	return processError(p.pid, unix.ESRCH)
}

// set sets the variables that tell programs which process to watch. Call it before they are loaded.
func (p *process) set(spec *ebpf.CollectionSpec, watchStart int64) error {
	return errors.Join(
		spec.Variables["process"].Set(p.kernel),
		spec.Variables["process_start_ns"].Set(p.start),
		spec.Variables["watch_start_ns"].Set(uint64(watchStart)),
	)
}

// ended reports whether all threads of the process have ended.
func (p *process) ended() (bool, error) {
	for {
		n, err := unix.Poll([]unix.PollFd{{Fd: int32(p.handle), Events: unix.POLLIN}}, 0)
		if err == nil {
			return n > 0, nil
		}
		if !errors.Is(err, unix.EINTR) {
			return false, status.FromOS(err, "process %d cannot be asked whether it has ended", p.pid)
		}
	}
}

func (p *process) close() { unix.Close(p.handle) }
