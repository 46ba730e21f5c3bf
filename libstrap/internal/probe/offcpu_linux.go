// The collector of the waits of a process's threads for a core.

package probe

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/libstrap/strap/bpf"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// OffCPUOptions choose the process that an OffCPU follows.
type OffCPUOptions struct {
	// PID is the process, numbered as in the PID namespace of this process. 0: this process.
	PID int `json:"pid"`
	// Stacks records the stack of each wait. Each switch then costs more.
	Stacks bool `json:"stacks"`
}

const maxFrames = 127 // MAX_FRAMES in offcpu.bpf.c

// Reasons names the reasons of waits, in the order of enum reason in offcpu.bpf.c.
var Reasons = [...]string{"preempted", "sleeping", "io_wait", "uninterruptible", "other"}

// WaitCounts counts the waits for one reason that ended in the interval.
type WaitCounts struct {
	Reason     string   `json:"reason"`
	Count      uint64   `json:"count"`
	TotalNS    uint64   `json:"total_ns"`
	SleepNS    uint64   `json:"sleep_ns"`           // part of total_ns: until it was woken
	RunQueueNS uint64   `json:"runqueue_ns"`        // part of total_ns: ready, in the run queue
	Latency    []Bucket `json:"latency_histogram"`  // of the whole waits, us
	RunQueue   []Bucket `json:"runqueue_histogram"` // of their parts in the run queue, us
}

// WaitInFlight describes a thread that waits.
type WaitInFlight struct {
	Reason string `json:"reason"`
	Thread uint32 `json:"thread"`
	AgeNS  int64  `json:"age_ns"`
	Before bool   `json:"before_start"` // it waited before the start; age_ns counts from the start
	Ready  bool   `json:"ready"`        // in the run queue
	*Stack
}

// Stack holds the functions that a thread is in, innermost first. A function without a known name
// appears as its address.
type Stack struct {
	Kernel []string `json:"kernel"`
	User   []string `json:"user"`
}

// StackWaits counts the waits for one reason at one stack.
type StackWaits struct {
	Reason  string `json:"reason"`
	Count   uint64 `json:"count"`
	TotalNS uint64 `json:"total_ns"`
	Stack
}

// OffCPULosses counts what the other counts of the interval lack.
type OffCPULosses struct {
	UnseenStart  uint64 `json:"unseen_start"`  // waits that began before the start
	UnseenWakeup uint64 `json:"unseen_wakeup"` // waits whose wakeup was missed: counted as sleep as a whole
	UnseenEnd    uint64 `json:"unseen_end"`    // waits whose end was missed: not counted
	NoRoom       uint64 `json:"no_room"`       // waits not counted: too many threads
	NoStack      uint64 `json:"no_stack"`      // waits counted without their stack: too many stacks
	Missed       uint64 `json:"missed"`        // events skipped: they interrupted the handling of another
}

// OffCPUSnapshot holds what an OffCPU saw in an interval. It marshals to the documented line of
// JSON.
type OffCPUSnapshot struct {
	Stamp
	PID      int            `json:"pid"`
	Ended    bool           `json:"ended"`
	Waits    []WaitCounts   `json:"waits"`            // by total time, the longest first
	InFlight []WaitInFlight `json:"inflight"`         // the oldest first
	Stacks   []StackWaits   `json:"stacks,omitempty"` // sorted as Waits
	Losses   OffCPULosses   `json:"losses"`
}

// HasEnded reports whether the process has ended.
func (s *OffCPUSnapshot) HasEnded() bool { return s.Ended }

// OffCPU follows the waits of one process's threads for a core.
type OffCPU struct {
	process *process
	program *loaded
	list    *link.Iter
	begin   int64         // CLOCK_MONOTONIC
	symbols *stackSymbols // nil: no stacks

	mu     sync.Mutex
	closed bool
	before [len(Reasons)]bpf.OffCPUWaitCounts
	stacks map[bpf.OffCPUStackKey]bpf.OffCPUStackCounts
	losses OffCPULosses
	read   time.Time
}

// StartOffCPU loads the programs and begins to follow a process's waits.
//
// Errors: InvalidArgument; NotFound if there is no such process; Permission; Unsupported if the
// kernel cannot run the programs.
func StartOffCPU(o OffCPUOptions) (*OffCPU, error) {
	if o.Stacks {
		if err := needProc(); err != nil {
			return nil, err
		}
	}
	p, err := openProcess(o.PID)
	if err != nil {
		return nil, err
	}
	now := time.Now()
	c := &OffCPU{process: p, stacks: map[bpf.OffCPUStackKey]bpf.OffCPUStackCounts{}, read: now, begin: stamp(now, 0).MonotonicNS}
	if o.Stacks {
		c.symbols = newStackSymbols(p.pid)
	}
	if err := c.start(); err != nil {
		c.Close()
		return nil, explain(err)
	}
	return c, nil
}

func (c *OffCPU) start() error {
	spec, err := bpf.LoadOffCPU()
	if err != nil {
		return err
	}
	take := uint32(1)
	if c.symbols == nil {
		take = 0
		for _, name := range []string{bpf.OffCPUMapFrames, bpf.OffCPUMapMoreFrames, bpf.OffCPUMapStacks} {
			spec.Maps[name].MaxEntries = 1 // not used
		}
	}
	err = errors.Join(c.process.set(spec, c.begin), spec.Variables[bpf.OffCPUVarTakeStacks].Set(take))
	if err != nil {
		return err
	}
	// Attach this first. Otherwise a wait could be seen to begin whose wakeup is missed.
	if c.program, err = start(spec, bpf.OffCPUProgWoken); err != nil {
		return err
	}
	c.list, err = link.AttachIter(link.IterOptions{Program: c.program.collection.Programs[bpf.OffCPUProgListWaits]})
	return err
}

// Close stops the programs and frees the maps. Calling it again does nothing.
func (c *OffCPU) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return
	}
	c.closed = true
	if c.list != nil {
		c.list.Close()
	}
	if c.program != nil {
		c.program.close()
	}
	c.process.close()
}

// Snapshot calls Read, for the interface Collector.
func (c *OffCPU) Snapshot() (any, error) { return c.Read() }

// Read returns what happened since the last call, or since the start.
func (c *OffCPU) Read() (*OffCPUSnapshot, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closed {
		return nil, status.New(status.InvalidState, "the collector is closed")
	}
	ended, err := c.process.ended() // asked before the counts are read, so that those are final
	if err != nil {
		return nil, err
	}
	if ended {
		c.program.detach()
	}
	now := time.Now()
	out := &OffCPUSnapshot{Stamp: stamp(now, now.Sub(c.read)), PID: c.process.pid, Ended: ended}
	c.read = now
	if out.Waits, err = c.waits(); err != nil {
		return nil, err
	}
	if c.symbols != nil {
		c.symbols.refresh()
		if out.Stacks, err = c.stackWaits(); err != nil {
			return nil, err
		}
	}
	if out.InFlight, err = c.inFlight(); err != nil {
		return nil, err
	}
	if err := c.lost(&out.Losses); err != nil {
		return nil, err
	}
	return out, nil
}

// waits returns the waits that ended since the last snapshot.
func (c *OffCPU) waits() ([]WaitCounts, error) {
	out := []WaitCounts{}
	for reason, name := range Reasons {
		var each []bpf.OffCPUWaitCounts
		if err := c.program.collection.Maps[bpf.OffCPUMapCounts].Lookup(uint32(reason), &each); err != nil {
			return nil, explain(err)
		}
		total := sum(each)
		w := difference(total, c.before[reason])
		c.before[reason] = total
		if w.Count == 0 {
			continue
		}
		// A core may add to its counts while they are read. runqueue_ns may then exceed total_ns.
		sleep := w.TotalNs - min(w.TotalNs, w.RunqueueNs)
		out = append(out, WaitCounts{
			Reason: name, Count: w.Count, TotalNS: w.TotalNs, SleepNS: sleep, RunQueueNS: w.RunqueueNs,
			Latency: buckets(w.Latency[:]), RunQueue: buckets(w.Runqueue[:]),
		})
	}
	slices.SortStableFunc(out, func(a, b WaitCounts) int { return cmp.Compare(b.TotalNS, a.TotalNS) })
	return out, nil
}

// stackWaits returns the waits that ended since the last snapshot, by stack.
func (c *OffCPU) stackWaits() ([]StackWaits, error) {
	out := []StackWaits{}
	var key bpf.OffCPUStackKey
	var total bpf.OffCPUStackCounts
	all := c.program.collection.Maps[bpf.OffCPUMapStacks].Iterate()
	for all.Next(&key, &total) {
		w := difference(total, c.stacks[key])
		c.stacks[key] = total
		if w.Count == 0 {
			continue
		}
		stack, err := c.stack(key.Kernel, key.User)
		if err != nil {
			return nil, err
		}
		out = append(out, StackWaits{Reasons[key.Reason], w.Count, w.TotalNs, *stack})
	}
	if err := all.Err(); err != nil {
		return nil, explain(err)
	}
	slices.SortStableFunc(out, func(a, b StackWaits) int { return cmp.Compare(b.TotalNS, a.TotalNS) })
	return out, nil
}

func (c *OffCPU) stack(kernel, user int32) (*Stack, error) {
	inner, err := c.frames(kernel)
	if err != nil {
		return nil, err
	}
	outer, err := c.frames(user)
	if err != nil {
		return nil, err
	}
	return &Stack{Kernel: c.symbols.kernel(inner), User: c.symbols.user(outer)}, nil
}

// frames returns the addresses of the stack with this number, innermost first. A negative number
// means no stack.
func (c *OffCPU) frames(id int32) ([]uint64, error) {
	if id < 0 {
		return nil, nil
	}
	table := c.program.collection.Maps[bpf.OffCPUMapFrames]
	if size := int32(table.MaxEntries()); id >= size {
		table, id = c.program.collection.Maps[bpf.OffCPUMapMoreFrames], id-size
	}
	var frames [maxFrames]uint64
	if err := table.Lookup(uint32(id), &frames); err != nil {
		if errors.Is(err, ebpf.ErrKeyNotExist) {
			return nil, nil
		}
		return nil, explain(err)
	}
	n := slices.Index(frames[:], 0)
	if n < 0 {
		n = maxFrames
	}
	return frames[:n], nil
}

func (c *OffCPU) inFlight() ([]WaitInFlight, error) {
	var found []bpf.OffCPUWaitRecord
	err := records(c.list, func(r *bpf.OffCPUWaitRecord) { found = append(found, *r) })
	if err != nil {
		return nil, err
	}
	now := stamp(time.Now(), 0).MonotonicNS
	out := []WaitInFlight{}
	for _, r := range found {
		w := WaitInFlight{Reason: Reasons[r.Wait.Reason], Thread: r.Thread, AgeNS: now - int64(r.Wait.OutNs), Ready: r.Wait.ReadyNs != 0}
		if r.Wait.OutNs == 0 {
			w.Before, w.AgeNS = true, now-c.begin
		}
		if c.symbols != nil {
			if w.Stack, err = c.stack(r.Wait.Kernel, r.Wait.User); err != nil {
				return nil, err
			}
		}
		out = append(out, w)
	}
	slices.SortStableFunc(out, func(a, b WaitInFlight) int { return cmp.Compare(b.AgeNS, a.AgeNS) })
	return out, nil
}

// lost sets out to the losses since the last snapshot.
func (c *OffCPU) lost(out *OffCPULosses) error {
	total := OffCPULosses{}
	variables := c.program.collection.Variables
	for name, into := range map[string]*uint64{
		bpf.OffCPUVarUnseenStart:  &total.UnseenStart,
		bpf.OffCPUVarUnseenWakeup: &total.UnseenWakeup,
		bpf.OffCPUVarUnseenEnd:    &total.UnseenEnd,
		bpf.OffCPUVarNoRoom:       &total.NoRoom,
		bpf.OffCPUVarNoStack:      &total.NoStack,
	} {
		if err := variables[name].Get(into); err != nil {
			return explain(err)
		}
	}
	var err error
	if total.Missed, err = c.program.missed(); err != nil {
		return err
	}
	*out = difference(total, c.losses)
	c.losses = total
	return nil
}
