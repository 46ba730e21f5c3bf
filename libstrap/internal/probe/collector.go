// Package probe watches the machine through programs in the kernel (cilium/ebpf over
// package bpf): requests to block devices, what the kernel counts of each process, and of one
// process the system calls and the waits for a core.
//
// A collector is started, read at intervals and closed. What it counts only grows in the
// kernel; a snapshot holds the differences to the one before it.
package probe

import (
	"maps"
	"slices"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Collector gives snapshots of what it watches. One goroutine reads at a time; Close may
// come from any.
type Collector interface {
	// Snapshot is what happened since the one before, or since the start; it becomes one
	// line of JSON.
	Snapshot() (any, error)
	Close()
}

// Start starts the collector of a kind, with its options as JSON: of "block" the fields of
// BlockOptions, of "syscalls" those of SyscallsOptions, of "off_cpu" those of OffCPUOptions;
// "system" has none.
//
// Errors: InvalidArgument, naming the kind or option; NotFound, Permission, Unsupported as
// the collectors give them.
func Start(kind string, options []byte) (Collector, error) {
	start, ok := collectors[kind]
	if !ok {
		kinds := slices.Sorted(maps.Keys(collectors))
		return nil, status.New(status.InvalidArgument, "there is no collector %q: there are %s", kind, strings.Join(kinds, ", "))
	}
	return start(options)
}
