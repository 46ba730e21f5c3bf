// The collector of core time, page faults and stalls of all processes. tasks.bpf.c reads the
// counts.

package probe

import (
	"errors"
	"os"
	"strconv"
	"sync"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/cilium/ebpf/ringbuf"
	"github.com/cilium/ebpf/rlimit"

	"github.com/libstrap/strap/bpf"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// System reads the counts that the kernel keeps for each thread: time on and off a core, time in
// the run queue, page faults. It also reads /proc/pressure. It covers the threads of this process's
// PID namespace, numbered as there.
type System struct {
	collection *ebpf.Collection
	end        link.Link
	list       *link.Iter
	ended      *ringbuf.Reader

	mu      sync.Mutex
	closed  bool
	before  map[threadKey]bpf.TasksTaskRecord
	leaving map[threadKey]bool // threads in before that are no longer listed, and whose end was not read yet
	lost    uint64
	scope   Scope
	stalled map[string]map[string]Stall
	read    time.Time
	readNS  int64 // read, on the clock of the records (CLOCK_MONOTONIC)
}

// threadKey identifies a thread. A number may be used again, so the key has the start time too.
type threadKey struct {
	thread uint32
	start  uint64
}

// SystemOptions is empty: every process of this PID namespace is watched.
type SystemOptions struct{}

// StartSystem loads the programs and begins to watch.
//
// Errors: Permission; Unsupported if the kernel cannot run the programs.
func StartSystem(SystemOptions) (*System, error) {
	spec, err := bpf.LoadTasks()
	if err != nil {
		return nil, explain(err)
	}
	_ = rlimit.RemoveMemlock() // if this fails and matters, loading fails with an explanation
	s := &System{before: map[threadKey]bpf.TasksTaskRecord{}}
	if s.collection, err = ebpf.NewCollection(spec); err != nil {
		return nil, explain(err)
	}
	if err := s.begin(); err != nil {
		s.Close()
		return nil, explain(err)
	}
	// The first interval begins now: drop what was counted before.
	if _, err := s.Read(); err != nil {
		s.Close()
		return nil, err
	}
	return s, nil
}

func (s *System) begin() (err error) {
	programs := s.collection.Programs
	if s.ended, err = ringbuf.NewReader(s.collection.Maps[bpf.TasksMapEnded]); err != nil {
		return err
	}
	s.ended.SetDeadline(time.Unix(1, 0)) // a deadline in the past: reads never wait
	s.list, err = link.AttachIter(link.IterOptions{Program: programs[bpf.TasksProgList]})
	if err != nil {
		return err
	}
	// Running the iterator sets the PID namespace. The program `end` needs it.
	if err := records(s.list, func(*bpf.TasksTaskRecord) {}); err != nil {
		return err
	}
	var level uint32
	if err := s.collection.Variables[bpf.TasksVarLevel].Get(&level); err != nil {
		return err
	}
	if s.scope = Machine; level > 0 {
		s.scope = PIDNamespace
	}
	s.end, err = link.AttachTracing(link.TracingOptions{Program: programs[bpf.TasksProgEnd]})
	return err
}

// Close stops the programs and frees the maps. Calling it again does nothing.
func (s *System) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return
	}
	s.closed = true
	if s.list != nil {
		s.list.Close()
	}
	if s.end != nil {
		s.end.Close()
	}
	if s.ended != nil {
		s.ended.Close()
	}
	s.collection.Close()
}

// Snapshot calls Read, for the interface Collector.
func (s *System) Snapshot() (any, error) { return s.Read() }

// Read returns what happened since the last call, or since the start.
func (s *System) Read() (*SystemSnapshot, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, status.New(status.InvalidState, "the collector is closed")
	}
	now := time.Now()
	out := &SystemSnapshot{Stamp: stamp(now, now.Sub(s.read)), Scope: s.scope, Processes: map[string]*Process{}}
	living, exiting, err := s.threads()
	if err != nil {
		return nil, err
	}
	ended, err := s.drain()
	if err != nil {
		return nil, err
	}
	for _, r := range ended {
		s.count(out, r, int64(r.EndedNs))
	}
	next := make(map[threadKey]bpf.TasksTaskRecord, len(living))
	for key, r := range living {
		if _, over := ended[key]; over {
			continue
		}
		s.count(out, r, out.MonotonicNS)
		next[key] = r
	}
	s.before, s.leaving = s.leave(next, exiting, ended)
	s.read, s.readNS = now, out.MonotonicNS
	out.finish()
	if out.Losses.Ended, err = s.lostEnds(); err != nil {
		return nil, err
	}
	if out.Pressure, err = pressure("/proc/pressure"); err != nil {
		return nil, err
	}
	out.StalledUS = grown(out.Pressure, s.stalled)
	s.stalled = out.Pressure
	return out, nil
}

// leave adds the old record of each thread that is ending to the records for the next snapshot,
// because the record of its end comes later. A thread with much memory to free may be listed as
// exiting over many snapshots. For a thread that is no longer listed, leave keeps the record for
// one more snapshot only: the record of its end may have been lost.
func (s *System) leave(next map[threadKey]bpf.TasksTaskRecord, exiting map[threadKey]bool, ended map[threadKey]bpf.TasksTaskRecord) (before map[threadKey]bpf.TasksTaskRecord, leaving map[threadKey]bool) {
	leaving = map[threadKey]bool{}
	for key, r := range s.before {
		_, over := ended[key]
		_, lives := next[key]
		if over || lives || s.leaving[key] {
			continue
		}
		next[key] = r
		if !exiting[key] {
			leaving[key] = true
		}
	}
	return next, leaving
}

// count adds what a thread did since the last snapshot to its process in out. The interval ends at
// `until`, on CLOCK_MONOTONIC in ns.
func (s *System) count(out *SystemSnapshot, r bpf.TasksTaskRecord, until int64) {
	b, known := s.before[threadKey{r.Thread, r.StartNs}]
	if known && r.RunNs < b.RunNs {
		// Another thread of the process called execve. It took over this number and start time but
		// has its own counts. What it did is counted under its old number.
		return
	}
	since := s.readNS
	if !known {
		since = max(since, int64(r.StartNs))
	}
	p := Process{
		OnCPUNS:     r.RunNs - b.RunNs,
		RunQueueNS:  r.WaitNs - b.WaitNs,
		MinorFaults: r.MinorFaults - b.MinorFaults,
		MajorFaults: r.MajorFaults - b.MajorFaults,
		Switches:    r.Switches - b.Switches,
	}
	if p == (Process{}) {
		return // it slept
	}
	// The scheduler's counts and the snapshot's time are read one after the other, so a thread may
	// have run a little longer than the interval.
	if life := uint64(max(until-since, 0)); life > p.OnCPUNS {
		p.OffCPUNS = life - p.OnCPUNS
	}
	key := strconv.FormatUint(uint64(r.Process), 10)
	total := out.Processes[key]
	if total == nil {
		total = &Process{}
		out.Processes[key] = total
	}
	if total.Name == "" || r.Thread == r.Process {
		total.Name = text(r.Name[:])
	}
	total.add(p)
}

// threads returns the records of the living threads, and the keys of those that are exiting.
func (s *System) threads() (living map[threadKey]bpf.TasksTaskRecord, exiting map[threadKey]bool, err error) {
	living, exiting = make(map[threadKey]bpf.TasksTaskRecord, len(s.before)), map[threadKey]bool{}
	err = records(s.list, func(r *bpf.TasksTaskRecord) {
		key := threadKey{r.Thread, r.StartNs}
		if r.EndedNs != 0 {
			exiting[key] = true
		} else {
			living[key] = *r
		}
	})
	return living, exiting, err
}

// drain returns the records of the threads that have ended since its last call.
func (s *System) drain() (map[threadKey]bpf.TasksTaskRecord, error) {
	out := map[threadKey]bpf.TasksTaskRecord{}
	var raw ringbuf.Record
	for {
		err := s.ended.ReadInto(&raw)
		if errors.Is(err, os.ErrDeadlineExceeded) {
			return out, nil
		}
		if err != nil {
			return nil, status.Wrap(status.IO, err, "the ends of threads cannot be read")
		}
		var r bpf.TasksTaskRecord
		if len(raw.RawSample) < int(unsafe.Sizeof(r)) {
			return nil, status.New(status.Internal, "a record of %d bytes", len(raw.RawSample))
		}
		r = *(*bpf.TasksTaskRecord)(unsafe.Pointer(&raw.RawSample[0]))
		out[threadKey{r.Thread, r.StartNs}] = r
	}
}

// lostEnds returns how many ends of threads were lost since its last call.
func (s *System) lostEnds() (uint64, error) {
	var total uint64
	if err := s.collection.Variables[bpf.TasksVarLost].Get(&total); err != nil {
		return 0, explain(err)
	}
	n := total - s.lost
	s.lost = total
	return n, nil
}
