// The collector of requests to block devices.

package probe

import (
	"cmp"
	"errors"
	"os"
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

// BlockOptions choose the requests that a Block follows.
type BlockOptions struct {
	// Devices lists block devices by kernel name, as in /proc/partitions, or by path. Each is a
	// whole disk or a partition. For a partition, only the requests to that partition are followed.
	// Empty: all whole disks.
	Devices []string `json:"devices"`
	// PID is the process that issues the requests, numbered as in the PID namespace of this
	// process. 0: this process. nil: all processes.
	PID *int `json:"pid"`
	// Cgroup is the path of a cgroup's directory. Requests of this cgroup and of those below it are
	// followed. nil: all.
	Cgroup *string `json:"cgroup"`
	// Requests is how many requests can be under way at a time and be followed: a power of two from
	// 64 to 2^20. 0: 8192.
	Requests int `json:"requests"`
	// ExpireS is how many seconds a request may take. After that it is given up and counted in
	// Losses.Expired. 0: 600.
	ExpireS float64 `json:"expire_s"`
}

// Operations names the operations of block devices, in the order of enum op in block.bpf.c.
var Operations = [...]string{"read", "write", "flush", "discard", "other"}

const (
	opWrite        = 1
	opOther        = 4
	diskOperations = 4 // the first four: /proc/diskstats counts these

	passedOver = 0xffff // stands for the device of a request that is not followed (PASSED_OVER)
)

// Block follows requests to block devices.
type Block struct {
	options BlockOptions
	program *loaded
	entries []bpf.BlockRequestEntry // shared with the kernel
	memory  []byte                  // the mapping that entries lies in
	list    *link.Iter              // lists entries whose request has ended; nil with raw tracepoints

	mu     sync.Mutex
	before map[countKey]bpf.BlockRequestCounts
	losses Losses
	read   time.Time
	expire uint64              // requests given up so far for their age
	unseen map[countKey]uint64 // requests given up because they had ended unseen
	disks  *reconciler         // nil: /proc/diskstats is missing, or counts requests that are not chosen

	suspects map[bpf.BlockEndedEntry]bool // entries that had ended at the last snapshot
}

type countKey struct{ device, op uint32 }

// StartBlock loads the programs and begins to follow requests.
//
// Errors: InvalidArgument names the option; NotFound if a device, the process or the cgroup does
// not exist; Permission; Unsupported if the kernel cannot run the programs.
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
	devices, err := resolveDevices(system, o.Devices)
	if err != nil {
		return nil, err
	}
	process, err := chosenProcess(o.PID)
	if err != nil {
		return nil, err
	}
	group, err := openCgroup(o.Cgroup)
	if err != nil {
		return nil, err
	}
	defer group.close()
	prepare := func(spec *ebpf.CollectionSpec) error {
		spec.Maps[bpf.BlockMapRequests].MaxEntries = uint32(o.Requests)
		return errors.Join(
			spec.Variables[bpf.BlockVarRequestMask].Set(uint32(o.Requests-1)),
			spec.Variables[bpf.BlockVarOnlyDevices].Set(devices.only()),
			process.set(spec, 0),
			spec.Variables[bpf.BlockVarOnlyCgroup].Set(group.by),
			spec.Variables[bpf.BlockVarCgroupId].Set(group.id),
		)
	}
	// Attach these first. Otherwise a request could be seen to begin whose next events are missed.
	program, err := load(bpf.LoadBlock, bpf.LoadBlockRaw, prepare,
		bpf.BlockProgComplete, bpf.BlockProgMerge, bpf.BlockProgRequeue)
	if err != nil {
		return nil, err
	}
	b := &Block{
		options: o, program: program, read: time.Now(),
		before: map[countKey]bpf.BlockRequestCounts{}, unseen: map[countKey]uint64{},
	}
	if err := b.begin(devices, group); err != nil {
		b.Close()
		return nil, err
	}
	return b, nil
}

func (b *Block) begin(devices wantedDevices, group cgroup) error {
	if err := b.choose(devices, group); err != nil {
		return err
	}
	maps := b.program.collection.Maps
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
	if b.options.PID != nil || b.options.Cgroup != nil {
		return nil // /proc/diskstats counts the requests of every process and cgroup
	}
	if _, err := os.Stat(system.diskstats()); err != nil {
		return nil
	}
	b.disks = newReconciler(len(devices) == 0)
	_, err = b.look(0)
	return err
}

// choose writes the chosen devices and the cgroup into the maps. The programs run already. If
// devices were chosen, they follow none that is not in `wanted` yet.
func (b *Block) choose(devices wantedDevices, group cgroup) error {
	maps := b.program.collection.Maps
	for slot, d := range devices {
		entry := bpf.BlockDeviceEntry{Id: d.ID + 1}
		for i := range min(len(d.Name), len(entry.Name)-1) {
			entry.Name[i] = int8(d.Name[i])
		}
		if err := maps[bpf.BlockMapDevices].Put(uint32(slot), entry); err != nil {
			return explain(err)
		}
		if err := maps[bpf.BlockMapWanted].Put(d.ID, uint32(slot)); err != nil {
			return explain(err)
		}
	}
	if group.by == byTask {
		if err := maps[bpf.BlockMapCgroup].Put(uint32(0), uint32(group.directory.Fd())); err != nil {
			return explain(err)
		}
	}
	return nil
}

// Close stops the programs and frees the maps. Calling it again does nothing.
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

// Snapshot calls Read, for the interface Collector.
func (b *Block) Snapshot() (any, error) { return b.Read() }

// Read returns what happened since the last call, or since the start.
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
	seen, err := b.look(s.MonotonicNS)
	if err != nil {
		return nil, err
	}
	b.read = now
	s.Diskstats = seen.diskstats
	for _, d := range seen.devices {
		whole, count := DeviceHistogram{Device: d.Device}, DeviceCount{Device: d.Device}
		for op := range uint32(len(Operations)) {
			key := countKey{d.slot, op}
			one := operation(d.Device, op, difference(seen.totals[key], b.before[key]))
			one.InFlight = seen.inFlight[key]
			count.Count += one.InFlight
			if one.Completed+one.Requeues+one.Merges+one.InFlight == 0 {
				continue
			}
			whole.add(one.Latency)
			s.Operations = append(s.Operations, one)
		}
		if whole.Total > 0 {
			s.LatencyHistogram = append(s.LatencyHistogram, whole)
		}
		s.InFlight = append(s.InFlight, count)
	}
	b.before = seen.totals
	if err := b.lost(seen.totals, &s.Losses); err != nil {
		return nil, err
	}
	return s, nil
}

// seen holds what the programs have counted at one moment.
type seen struct {
	devices  []tableDevice
	totals   map[countKey]bpf.BlockRequestCounts // since the start
	inFlight map[countKey]uint64
	// diskstats has what /proc/diskstats counted since the last look.
	diskstats []DiskCounts
}

// look reads the programs' counts between two readings of /proc/diskstats. now is a time on
// CLOCK_MONOTONIC in ns.
func (b *Block) look(now int64) (*seen, error) {
	var early, late map[uint64]diskCounts
	var err error
	if b.disks != nil {
		if early, err = readDiskstats(system.diskstats()); err != nil {
			return nil, err
		}
	}
	out := &seen{totals: map[countKey]bpf.BlockRequestCounts{}}
	var ended map[countKey]uint64
	if out.inFlight, ended, err = b.scan(now); err != nil {
		return nil, err
	}
	if out.devices, err = b.devices(); err != nil {
		return nil, err
	}
	for _, d := range out.devices {
		for op := range uint32(len(Operations)) {
			key := countKey{d.slot, op}
			if out.totals[key], err = b.total(key); err != nil {
				return nil, err
			}
		}
	}
	if b.disks == nil {
		return out, nil
	}
	if late, err = readDiskstats(system.diskstats()); err != nil {
		return nil, err
	}
	out.diskstats = b.disks.next(early, late, b.tallies(out, ended))
	return out, nil
}

// tallies counts the followed and lost requests, by the operations that /proc/diskstats uses.
func (b *Block) tallies(s *seen, ended map[countKey]uint64) map[diskKey]tally {
	out := map[diskKey]tally{}
	for _, d := range s.devices {
		for op := range uint32(diskOperations) {
			key := countKey{d.slot, op}
			c := s.totals[key]
			out[diskKey{d.ID, op}] = tally{
				followed: c.Completed,
				lost:     c.UnseenStart + c.UnseenEnd + b.unseen[key],
				ended:    ended[key],
			}
		}
		write := out[diskKey{d.ID, opWrite}]
		write.followed += s.totals[countKey{d.slot, opOther}].OtherWrites
		out[diskKey{d.ID, opWrite}] = write
	}
	return out
}

type tableDevice struct {
	Device
	slot uint32
}

// devices returns the devices in the programs' table, sorted by id.
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

// scan counts the requests in flight, and the entries whose request has ended. An entry that has
// ended may still be on its way to the program, so scan gives it up only if it had also ended at
// the last snapshot. It also gives up requests older than ExpireS.
func (b *Block) scan(now int64) (inFlight, ended map[countKey]uint64, err error) {
	suspects, err := b.ended()
	if err != nil {
		return nil, nil, err
	}
	inFlight, ended = map[countKey]uint64{}, map[countKey]uint64{}
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
		old := now-int64(since) > int64(b.options.ExpireS*1e9)
		if e.Device == passedOver {
			if old {
				atomic.CompareAndSwapUint64(&e.Request, request, 0)
			}
			continue
		}
		key := countKey{uint32(e.Device), uint32(e.Op)}
		self := bpf.BlockEndedEntry{Request: request, IssuedNs: issued, At: uint32(i)}
		switch {
		case suspects[self]:
			if !b.suspects[self] {
				ended[key]++
			} else if atomic.CompareAndSwapUint64(&e.Request, request, 0) {
				b.unseen[key]++
			}
		case old:
			if atomic.CompareAndSwapUint64(&e.Request, request, 0) {
				b.expire++
			}
		case issued != 0:
			inFlight[key]++
		}
	}
	b.suspects = suspects
	return inFlight, ended, nil
}

// ended returns the entries whose request is no longer in flight according to the kernel.
func (b *Block) ended() (map[bpf.BlockEndedEntry]bool, error) {
	out := map[bpf.BlockEndedEntry]bool{}
	if b.list == nil {
		return out, nil
	}
	err := records(b.list, func(e *bpf.BlockEndedEntry) { out[*e] = true })
	return out, err
}

// total returns the counts of one device and operation since the start, summed over all cores.
func (b *Block) total(key countKey) (bpf.BlockRequestCounts, error) {
	var each []bpf.BlockRequestCounts
	at := key.device*uint32(len(Operations)) + key.op
	if err := b.program.collection.Maps[bpf.BlockMapCounts].Lookup(at, &each); err != nil {
		return bpf.BlockRequestCounts{}, explain(err)
	}
	return sum(each), nil
}

func operation(d Device, op uint32, c bpf.BlockRequestCounts) OperationCounts {
	return OperationCounts{
		Device: d, Operation: Operations[op],
		Completed: c.Completed, Bytes: c.Bytes, Errors: c.Errors, Requeues: c.Requeues,
		Merges: c.Merges, WasQueued: c.WasQueued, LatencyNS: c.LatencyNs, QueuedNS: c.QueuedNs,
		Latency: buckets(c.Latency[:]), Queue: buckets(c.Queued[:]), Size: buckets(c.Size[:]),
	}
}

// lost sets out to the losses since the last snapshot.
func (b *Block) lost(totals map[countKey]bpf.BlockRequestCounts, out *Losses) error {
	var each []bpf.BlockLossCounts
	if err := b.program.collection.Maps[bpf.BlockMapLosses].Lookup(uint32(0), &each); err != nil {
		return explain(err)
	}
	total := Losses{Expired: b.expire}
	for _, one := range each {
		total.NoDevice += one.NoDevice
	}
	for key, c := range totals {
		total.NoRoom += c.NoRoom
		total.UnseenStart += c.UnseenStart
		total.UnseenEnd += c.UnseenEnd + b.unseen[key]
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

// words returns a view of the 64-bit counters that a structure consists of.
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
