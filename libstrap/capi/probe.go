// The functions of the C API that start, read and stop collectors in the kernel.

package main

/*
#include "strap.h"
*/
import "C"

import (
	"encoding/json"
	"sync"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/probe"
	"github.com/libstrap/strap/libstrap/internal/status"
)

var probes = handles[*openProbe]{what: "collector", last: 3 << 60, step: 1, open: map[uint64]*openProbe{}}

// openProbe is the object behind a strap_probe handle.
type openProbe struct {
	probe.Collector
	mu   sync.Mutex
	left []byte // the last snapshot, if it did not fit into the caller's memory
}

//export strapgoProbeStart
func strapgoProbeStart(kind, options *C.char, h *C.strap_probe, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		given := ""
		if options != nil {
			given = C.GoString(options)
		}
		collector, err := probe.Start(C.GoString(kind), []byte(given))
		if err != nil {
			return err
		}
		*h = C.strap_probe(probes.add(&openProbe{Collector: collector}))
		return nil
	})
}

//export strapgoProbeRead
func strapgoProbeRead(h C.strap_probe, out *C.char, size C.size_t, needed *C.size_t, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		p, err := probes.get(uint64(h))
		if err != nil {
			return err
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		if p.left == nil {
			snapshot, err := p.Snapshot()
			if err != nil {
				return err
			}
			if p.left, err = json.Marshal(snapshot); err != nil {
				return status.Wrap(status.Internal, err, "a snapshot is no JSON")
			}
		}
		*needed = C.size_t(len(p.left) + 1)
		if size < *needed {
			return status.New(status.InvalidArgument, "size = %d: the snapshot takes %d bytes; the next call gives it again", uint64(size), uint64(*needed))
		}
		room := unsafe.Slice((*byte)(unsafe.Pointer(out)), size)
		room[copy(room, p.left)] = 0
		p.left = nil
		return nil
	})
}

//export strapgoProbeStop
func strapgoProbeStop(h C.strap_probe, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		p, err := probes.remove(uint64(h))
		if err != nil {
			return err
		}
		p.Close()
		return nil
	})
}
