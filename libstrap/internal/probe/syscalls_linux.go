// The collector of the system calls of a process.

package probe

import (
	"cmp"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/cilium/ebpf/link"

	"github.com/libstrap/strap/bpf"
	"github.com/libstrap/strap/libstrap/internal/status"
)

//go:generate go run syscalls_generate.go .

// SyscallsOptions choose the process that a Syscalls follows.
type SyscallsOptions struct {
	// PID is the process, numbered as in the PID namespace of this process. 0: this process.
	PID int `json:"pid"`
}

// Special numbers that stand in place of a system call's, as in syscalls.bpf.c.
const (
	maxSyscalls  uint32 = 512
	otherABI            = maxSyscalls     // a call with the number of another ABI
	calledBefore        = maxSyscalls + 1 // called before the start
)

// SyscallCounts counts the calls with one number that returned in the interval.
type SyscallCounts struct {
	Syscall uint32   `json:"syscall"` // its number on this architecture
	Name    string   `json:"name"`
	Count   uint64   `json:"count"`
	Errors  uint64   `json:"errors"`
	TotalNS uint64   `json:"total_ns"`
	Latency []Bucket `json:"latency_histogram"` // us
}

// SyscallInFlight describes a thread that is in a call.
type SyscallInFlight struct {
	Name   string `json:"name"`
	Thread uint32 `json:"thread"`
	AgeNS  int64  `json:"age_ns"`
	Before bool   `json:"before_start"` // it called before the start; age_ns counts from the start
}

// SyscallLosses counts the calls of the interval that the other counts lack.
type SyscallLosses struct {
	UnseenStart uint64 `json:"unseen_start"` // called before the start, or refused by a filter (seccomp)
	OtherABI    uint64 `json:"other_abi"`    // numbered as in a 32-bit kernel, or a number that no call has
	NoRoom      uint64 `json:"no_room"`      // the kernel had no memory for the thread's entry
	Missed      uint64 `json:"missed"`       // events skipped: they interrupted the handling of another
}

// SyscallsSnapshot holds what a Syscalls saw in an interval. It marshals to the documented line of
// JSON.
type SyscallsSnapshot struct {
	Stamp
	PID      int               `json:"pid"`
	Ended    bool              `json:"ended"`
	Syscalls []SyscallCounts   `json:"syscalls"` // by total time, the longest first
	InFlight []SyscallInFlight `json:"inflight"` // the oldest first
	Losses   SyscallLosses     `json:"losses"`
}

// HasEnded reports whether the process has ended.
func (s *SyscallsSnapshot) HasEnded() bool { return s.Ended }

// Syscalls follows the system calls of one process.
type Syscalls struct {
	process *process
	program *loaded
	list    *link.Iter
	begin   int64 // CLOCK_MONOTONIC

	mu     sync.Mutex
	closed bool
	before map[uint32]bpf.SyscallsSyscallCounts
	losses SyscallLosses
	read   time.Time
}

// StartSyscalls loads the programs and begins to follow a process's system calls.
//
// Errors: InvalidArgument; NotFound if there is no such process; Permission; Unsupported if the
// kernel cannot run the programs.
func StartSyscalls(o SyscallsOptions) (*Syscalls, error) {
	if err := needProc(); err != nil {
		return nil, err
	}
	p, err := openProcess(o.PID)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	s := &Syscalls{process: p, before: map[uint32]bpf.SyscallsSyscallCounts{}, read: now, begin: stamp(now, 0).MonotonicNS}
	if err := s.start(); err != nil {
		s.Close()
		return nil, explain(err)
	}
	return s, nil
}

func (s *Syscalls) start() error {
	spec, err := bpf.LoadSyscalls()
	if err != nil {
		return err
	}
	if err := s.process.set(spec, s.begin); err != nil {
		return err
	}
	if runtime.GOARCH == "arm64" {
		if err := spec.Variables[bpf.SyscallsVarArm64].Set(uint32(1)); err != nil {
			return err
		}
	}
	// Attach this first. Otherwise a call could be seen to begin whose end is missed.
	if s.program, err = start(spec, bpf.SyscallsProgLeave); err != nil {
		return err
	}
	s.list, err = link.AttachIter(link.IterOptions{Program: s.program.collection.Programs[bpf.SyscallsProgListInflight]})
	return err
}

// Close stops the programs and frees the maps. Calling it again does nothing.
func (s *Syscalls) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	if s.list != nil {
		s.list.Close()
	}
	if s.program != nil {
		s.program.close()
	}
	s.process.close()
}

// Snapshot calls Read, for the interface Collector.
func (s *Syscalls) Snapshot() (any, error) { return s.Read() }

// Read returns what happened since the last call, or since the start.
func (s *Syscalls) Read() (*SyscallsSnapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, status.New(status.InvalidState, "the collector is closed")
	}
	ended, err := s.process.ended() // asked before the counts are read, so that those are final
	if err != nil {
		return nil, err
	}
	if ended {
		s.program.detach()
	}
	now := time.Now()
	out := &SyscallsSnapshot{Stamp: stamp(now, now.Sub(s.read)), PID: s.process.pid, Ended: ended}
	s.read = now
	if out.Syscalls, err = s.counts(); err != nil {
		return nil, err
	}
	if out.InFlight, err = s.inFlight(); err != nil {
		return nil, err
	}
	if err := s.lost(&out.Losses); err != nil {
		return nil, err
	}
	return out, nil
}

// counts returns the counts of each call that has returned since the last snapshot.
func (s *Syscalls) counts() ([]SyscallCounts, error) {
	var seen [maxSyscalls]uint8
	if err := s.program.collection.Variables[bpf.SyscallsVarSeen].Get(&seen); err != nil {
		return nil, explain(err)
	}
	out := []SyscallCounts{}
	for number := range maxSyscalls {
		if seen[number] == 0 {
			continue
		}
		var each []bpf.SyscallsSyscallCounts
		if err := s.program.collection.Maps[bpf.SyscallsMapCounts].Lookup(number, &each); err != nil {
			return nil, explain(err)
		}
		total := sum(each)
		c := difference(total, s.before[number])
		s.before[number] = total
		if c.Count > 0 {
			out = append(out, SyscallCounts{number, syscallName(number), c.Count, c.Errors, c.TotalNs, buckets(c.Latency[:])})
		}
	}
	slices.SortStableFunc(out, func(a, b SyscallCounts) int { return cmp.Compare(b.TotalNS, a.TotalNS) })
	return out, nil
}

func (s *Syscalls) inFlight() ([]SyscallInFlight, error) {
	var found []bpf.SyscallsInflightRecord
	err := records(s.list, func(r *bpf.SyscallsInflightRecord) { found = append(found, *r) })
	if err != nil {
		return nil, err
	}
	now := stamp(time.Now(), 0).MonotonicNS
	out := []SyscallInFlight{}
	for _, r := range found {
		one := SyscallInFlight{Thread: r.Thread, AgeNS: now - int64(r.StartNs)}
		number := r.Number
		if number == calledBefore {
			one.Before, one.AgeNS = true, now-s.begin
			var in bool
			if number, in = s.process.syscall(r.Thread); !in {
				continue
			}
		}
		one.Name = syscallName(number)
		out = append(out, one)
	}
	slices.SortStableFunc(out, func(a, b SyscallInFlight) int { return cmp.Compare(b.AgeNS, a.AgeNS) })
	return out, nil
}

// syscall returns the number of the call that a thread sleeps in, from /proc. It reports false if
// the thread runs, has ended, or this process may not trace it.
func (p *process) syscall(thread uint32) (number uint32, in bool) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/syscall", p.pid, thread))
	if err != nil {
		return 0, false
	}
	word, _, _ := strings.Cut(string(text), " ") // "running", or -1 outside of a call
	n, err := strconv.ParseUint(word, 10, 32)
	return uint32(n), err == nil
}

// lost sets out to the losses since the last snapshot.
func (s *Syscalls) lost(out *SyscallLosses) error {
	total := SyscallLosses{}
	variables := s.program.collection.Variables
	for name, into := range map[string]*uint64{
		bpf.SyscallsVarUnseenStart: &total.UnseenStart,
		bpf.SyscallsVarOtherAbi:    &total.OtherABI,
		bpf.SyscallsVarNoRoom:      &total.NoRoom,
	} {
		if err := variables[name].Get(into); err != nil {
			return explain(err)
		}
	}
	var err error
	if total.Missed, err = s.program.missed(); err != nil {
		return err
	}
	*out = difference(total, s.losses)
	s.losses = total
	return nil
}

// syscallName returns the name as in the manual, or syscall_N if this library does not know the
// number.
func syscallName(number uint32) string {
	if name, ok := syscallNames[number]; ok {
		return name
	}
	if number == otherABI {
		return "other_abi"
	}
	return fmt.Sprintf("syscall_%d", number)
}
