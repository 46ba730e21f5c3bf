package probe

import (
	"cmp"
	"errors"
	"slices"
	"sync"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/bpf"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// BlockOptions say which requests to follow.
type BlockOptions struct {
	// Devices by name, as in /proc/partitions: whole disks. None: all.
	Devices []string `json:"devices"`
	// Requests that can be followed at a time, a power of two; 0: 8192.
	Requests int `json:"requests"`
	// ExpireS is after how many seconds a request that has not completed is given up; 0: 600.
	ExpireS float64 `json:"expire_s"`
}

// Operations of block devices, in the order of the kernel's program.
var Operations = [...]string{"read", "write", "flush", "discard", "other"}

// Block follows requests to block devices.
type Block struct {
	options BlockOptions
	program *loaded
	entries []bpf.BlockRequestEntry // shared with the kernel
	memory  []byte
	list    *link.Iter // of entries whose request has ended; nil: this kernel has no such

	mu     sync.Mutex
	before map[countKey]bpf.BlockRequestCounts
	losses Losses
	read   time.Time
	expire uint64 // requests given up so far
	unseen uint64 // and those that had ended

	suspects map[bpf.BlockEndedEntry]bool // of the snapshot before
}

type countKey struct{ device, op uint32 }

// StartBlock begins to follow requests.
//
// Errors: InvalidArgument, naming the option; NotFound for a device; Permission;
// Unsupported where the kernel cannot do it.
func StartBlock(o BlockOptions) (*Block, error) {
	if o.Requests == 0 {
		o.Requests = 8192
	}
	if o.Requests < 64 || o.Requests > 1<<20 || o.Requests&(o.Requests-1) != 0 {
		return nil, status.New(status.InvalidArgument, "requests = %d: give a power of two from 64 to 2^20", o.Requests)
	}
	if o.ExpireS == 0 {
		o.ExpireS = 600
	}
	if !(o.ExpireS > 0 && o.ExpireS < 1e9) {
		return nil, status.New(status.InvalidArgument, "expire_s = %v: give seconds from 0 to 10^9", o.ExpireS)
	}
	wanted, err := deviceNumbers(o.Devices)
	if err != nil {
		return nil, err
	}
	prepare := func(spec *ebpf.CollectionSpec) error {
		spec.Maps[bpf.BlockMapRequests].MaxEntries = uint32(o.Requests)
		return errors.Join(
			spec.Variables[bpf.BlockVarRequestMask].Set(uint32(o.Requests-1)),
			spec.Variables[bpf.BlockVarOnlyDevices].Set(uint32(min(len(wanted), 1))),
		)
	}
	program, err := load(bpf.LoadBlock, bpf.LoadBlockRaw, prepare)
	if err != nil {
		return nil, err
	}
	b := &Block{options: o, program: program, before: map[countKey]bpf.BlockRequestCounts{}, read: time.Now()}
	if err := b.begin(wanted); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

func (b *Block) begin(wanted []uint64) error {
	maps := b.program.collection.Maps
	for _, id := range wanted {
		if err := maps[bpf.BlockMapWanted].Put(id, uint8(1)); err != nil {
			return explain(err)
		}
	}
	var one bpf.BlockRequestEntry
	if program := b.program.collection.Programs[bpf.BlockProgListEnded]; program != nil {
		var err error
		b.list, err = link.AttachIter(link.IterOptions{Program: program, Map: maps[bpf.BlockMapRequests]})
		if err != nil {
			return explain(err)
		}
	}
	size := b.options.Requests * int(unsafe.Sizeof(one))
	memory, err := unix.Mmap(maps[bpf.BlockMapRequests].FD(), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return status.Wrap(status.NoMemory, err, "the requests under way cannot be mapped")
	}
	b.memory = memory
	b.entries = unsafe.Slice((*bpf.BlockRequestEntry)(unsafe.Pointer(unsafe.SliceData(memory))), b.options.Requests)
	return nil
}

// Close ends the watching. Calling it again does nothing.
func (b *Block) Close() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.program == nil {
		return
	}
	if b.list != nil {
		b.list.Close()
	}
	b.program.close()
	b.program, b.entries = nil, nil
	if b.memory != nil {
		unix.Munmap(b.memory)
		b.memory = nil
	}
}

// Snapshot is Read, as a Collector.
func (b *Block) Snapshot() (any, error) { return b.Read() }

// Read gives what happened since the last call, or since the start.
func (b *Block) Read() (*BlockSnapshot, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.program == nil {
		return nil, status.New(status.InvalidState, "the collector is closed")
	}
	now := time.Now()
	s := &BlockSnapshot{
		Stamp:            stamp(now, now.Sub(b.read)),
		LatencyHistogram: []DeviceHistogram{},
		InFlight:         []DeviceCount{},
		Operations:       []OperationCounts{},
	}
	b.read = now
	devices, err := b.devices()
	if err != nil {
		return nil, err
	}
	inFlight, err := b.scan(s.MonotonicNS)
	if err != nil {
		return nil, err
	}
	for _, d := range devices {
		whole := DeviceHistogram{Device: d.Device}
		for op := range Operations {
			one, err := b.operation(d, uint32(op))
			if err != nil {
				return nil, err
			}
			one.InFlight = inFlight[countKey{d.slot, uint32(op)}]
			if one.Completed+one.Requeues+one.Merges+one.InFlight == 0 {
				continue
			}
			whole.add(one.Latency)
			s.Operations = append(s.Operations, *one)
		}
		if whole.Total > 0 {
			s.LatencyHistogram = append(s.LatencyHistogram, whole)
		}
		count := DeviceCount{Device: d.Device}
		for op := range Operations {
			count.Count += inFlight[countKey{d.slot, uint32(op)}]
		}
		s.InFlight = append(s.InFlight, count)
	}
	if err := b.lost(&s.Losses); err != nil {
		return nil, err
	}
	return s, nil
}

type tableDevice struct {
	Device
	slot uint32
}

// devices are those that have been seen, by their ids.
func (b *Block) devices() ([]tableDevice, error) {
	var out []tableDevice
	table := b.program.collection.Maps[bpf.BlockMapDevices]
	for slot := range table.MaxEntries() {
		var d bpf.BlockDeviceEntry
		if err := table.Lookup(slot, &d); err != nil {
			return nil, explain(err)
		}
		if d.Id != 0 {
			out = append(out, tableDevice{Device{d.Id - 1, text(d.Name[:])}, slot})
		}
	}
	slices.SortFunc(out, func(a, b tableDevice) int { return cmp.Compare(a.ID, b.ID) })
	return out, nil
}

// scan counts the requests under way, and gives up those that are too old, or had ended at
// the snapshot before already. What has ended for no longer may be on its way to the program.
func (b *Block) scan(now int64) (map[countKey]uint64, error) {
	ended, err := b.ended()
	if err != nil {
		return nil, err
	}
	found := map[countKey]uint64{}
	for i := range b.entries {
		e := &b.entries[i]
		request := atomic.LoadUint64(&e.Request)
		if request == 0 {
			continue
		}
		issued := atomic.LoadUint64(&e.IssuedNs)
		since := max(issued, atomic.LoadUint64(&e.QueuedNs))
		if since == 0 {
			continue // just begun
		}
		self := bpf.BlockEndedEntry{Request: request, IssuedNs: issued, At: uint32(i)}
		switch {
		case ended[self]:
			if b.suspects[self] && atomic.CompareAndSwapUint64(&e.Request, request, 0) {
				b.unseen++
			}
		case now-int64(since) > int64(b.options.ExpireS*1e9):
			if atomic.CompareAndSwapUint64(&e.Request, request, 0) {
				b.expire++
			}
		case issued != 0:
			found[countKey{uint32(e.Device), uint32(e.Op)}]++
		}
	}
	b.suspects = ended
	return found, nil
}

// ended are the entries whose request is not in flight, as the kernel has it.
func (b *Block) ended() (map[bpf.BlockEndedEntry]bool, error) {
	out := map[bpf.BlockEndedEntry]bool{}
	if b.list == nil {
		return out, nil
	}
	err := records(b.list, func(e *bpf.BlockEndedEntry) { out[*e] = true })
	return out, err
}

// operation is what the device did of an operation since the last snapshot.
func (b *Block) operation(d tableDevice, op uint32) (*OperationCounts, error) {
	table := b.program.collection.Maps[bpf.BlockMapCounts]
	var each []bpf.BlockRequestCounts
	if err := table.Lookup(d.slot*uint32(len(Operations))+op, &each); err != nil {
		return nil, explain(err)
	}
	key := countKey{d.slot, op}
	before := b.before[key]
	total := sum(each)
	b.before[key] = total
	c := difference(total, before)
	return &OperationCounts{
		Device: d.Device, Operation: Operations[op],
		Completed: c.Completed, Bytes: c.Bytes, Errors: c.Errors, Requeues: c.Requeues,
		Merges: c.Merges, WasQueued: c.WasQueued, LatencyNS: c.LatencyNs, QueuedNS: c.QueuedNs,
		Latency: buckets(c.Latency[:]), Queue: buckets(c.Queued[:]), Size: buckets(c.Size[:]),
	}, nil
}

// lost fills in what was lost since the last snapshot.
func (b *Block) lost(out *Losses) error {
	var each []bpf.BlockLossCounts
	if err := b.program.collection.Maps[bpf.BlockMapLosses].Lookup(uint32(0), &each); err != nil {
		return explain(err)
	}
	total := Losses{Expired: b.expire, UnseenEnd: b.unseen}
	for _, one := range each {
		total.NoRoom += one.NoRoom
		total.NoDevice += one.NoDevice
		total.UnseenEnd += one.UnseenEnd
		total.UnseenStart += one.UnseenStart
	}
	missed, err := b.program.missed()
	if err != nil {
		return err
	}
	total.Missed = missed
	*out = total.since(b.losses)
	b.losses = total
	return nil
}

// words sees counters as the 64-bit numbers that they are made of.
func words[T any](c *T) []uint64 {
	return unsafe.Slice((*uint64)(unsafe.Pointer(c)), unsafe.Sizeof(*c)/8)
}

func sum[T any](each []T) T {
	var total T
	t := words(&total)
	for i := range each {
		for k, v := range words(&each[i]) {
			t[k] += v
		}
	}
	return total
}

func difference[T any](now, before T) T {
	n := words(&now)
	for k, v := range words(&before) {
		n[k] -= v
	}
	return now
}

func text(name []int8) string {
	out := make([]byte, 0, len(name))
	for _, c := range name {
		if c == 0 {
			break
		}
		out = append(out, byte(c))
	}
	return string(out)
}
