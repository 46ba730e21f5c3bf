// Package probe watches the machine through programs in the kernel (cilium/ebpf over
// package bpf): requests to block devices, and
// what the kernel counts of each process.
//
// A collector is started, read at intervals and closed. What it counts only grows in the
// kernel; a snapshot holds the differences to the one before it.
package probe

import (
	"bytes"
	"encoding/json"
	"time"

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

// Options of a collector, as JSON. Those of another kind are unknown to it.
type Options struct {
	// Devices, Requests and ExpireS are those of BlockOptions.
	Devices  []string `json:"devices"`
	Requests int      `json:"requests"`
	ExpireS  float64  `json:"expire_s"`
}

// Start starts the collector of a kind: "block" or "system".
//
// Errors: InvalidArgument, naming the kind or option; NotFound, Permission, Unsupported as
// the collectors give them.
func Start(kind string, options []byte) (Collector, error) {
	var o Options
	if len(bytes.TrimSpace(options)) > 0 {
		decoder := json.NewDecoder(bytes.NewReader(options))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&o); err != nil {
			return nil, status.Wrap(status.InvalidArgument, err, "the options of the collector %q", kind)
		}
	}
	if kind == "system" {
		if len(o.Devices) > 0 || o.Requests != 0 || o.ExpireS != 0 {
			return nil, status.New(status.InvalidArgument, "the collector %q has no options", kind)
		}
		return startSystem()
	}
	if kind != "block" {
		return nil, status.New(status.InvalidArgument, "there is no collector %q: there are block and system", kind)
	}
	if !(o.ExpireS >= 0 && o.ExpireS < 1e9) {
		return nil, status.New(status.InvalidArgument, "expire_s = %v: give seconds from 0 to 10^9", o.ExpireS)
	}
	return startBlock(o.Devices, o.Requests, time.Duration(o.ExpireS*float64(time.Second)))
}
