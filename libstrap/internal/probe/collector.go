// Package probe watches the machine with programs that run in the kernel. It loads the programs of
// package bpf with cilium/ebpf. They follow requests to block devices, read what the kernel counts
// for each process, and follow the system calls of one process and its waits for a core.
//
// A collector is started, read at intervals and closed. Its counts in the kernel only grow. A
// snapshot holds the differences to the last one.
package probe

import (
	"maps"
	"slices"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Collector takes snapshots. Only one goroutine may call Snapshot at a time; any goroutine may call
// Close.
type Collector interface {
	// Snapshot returns what happened since the last snapshot, or since the start. The value
	// marshals to one line of JSON.
	Snapshot() (any, error)
	Close()
}

// Start starts the collector of a kind: "block", "system", "syscalls" or "off_cpu". options is a
// JSON object with the fields of BlockOptions, SyscallsOptions or OffCPUOptions; "system" has none.
// Empty options are the defaults.
//
// Errors: InvalidArgument names the unknown kind or the option; NotFound, Permission and
// Unsupported as StartBlock and its like return them.
func Start(kind string, options []byte) (Collector, error) {
	start, ok := collectors[kind]
	if !ok {
		kinds := slices.Sorted(maps.Keys(collectors))
		return nil, status.New(status.InvalidArgument, "there is no collector %q: there are %s", kind, strings.Join(kinds, ", "))
	}
	return start(options)
}
