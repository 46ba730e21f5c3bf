// The functions of the C API that copy the intact packets of a damaged capture, and those of a ring file.

package main

/*
#include <stdlib.h>
#include "strap.h"

// In entry.c: Go cannot call the pointers of options.
int32_t call_progress(const strap_salvage_options *options, uint64_t done, uint64_t total);
void call_lost(const strap_salvage_options *options, const strap_lost *lost);
int32_t call_ring_progress(const strap_salvage_ring_options *options, uint64_t done, uint64_t total);
void call_ring_step(const strap_salvage_ring_options *options, const strap_ring_step *step);
*/
import "C"

import (
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/salvage"
	"github.com/libstrap/strap/libstrap/internal/status"
)

//export strapgoSalvage
func strapgoSalvage(path, out *C.char, o *C.strap_salvage_options, report *C.strap_salvage_report, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		src := C.GoString(path)
		options, err := salvageOptions(src, o.force, func(done, total int64) C.int32_t {
			return C.call_progress(o, C.uint64_t(done), C.uint64_t(total))
		})
		if err != nil {
			return err
		}
		found, err := salvage.Salvage(src, C.GoString(out), options)
		if err != nil {
			return err
		}
		report.packets = C.uint64_t(found.Packets)
		report.bytes = C.uint64_t(found.Bytes)
		report.verified = C.uint64_t(found.Verified)
		report.repaired = C.uint64_t(found.Repaired)
		report.unlisted = C.uint64_t(found.Unlisted)
		report.lost_packets = C.uint64_t(len(found.Lost))
		report.lost_ranges = C.uint64_t(len(found.Ranges))
		report.lost_bytes = C.uint64_t(found.LostBytes)
		putString(unsafe.Slice((*byte)(unsafe.Pointer(&report.problem)), len(report.problem)), found.Problem)
		if o.lost != nil {
			tellLost(o, found)
		}
		return nil
	})
}

// salvageOptions checks force, and makes an error of a progress that is not 0.
func salvageOptions(src string, force C.int32_t, progress func(done, total int64) C.int32_t) (salvage.Options, error) {
	if force != 0 && force != 1 {
		return salvage.Options{}, status.New(status.InvalidArgument, "force = %d: give 0 or 1", force)
	}
	return salvage.Options{Force: force != 0, Progress: func(done, total int64) error {
		if progress(done, total) != 0 {
			return status.New(status.InvalidState, "the salvage of %q was given up", src)
		}
		return nil
	}}, nil
}

// tellLost calls o.lost for every lost packet, then for every lost range of bytes.
func tellLost(o *C.strap_salvage_options, found salvage.Report) {
	lost := (*C.strap_lost)(C.calloc(1, C.sizeof_strap_lost)) // C reads it, so not in the Go heap
	defer C.free(unsafe.Pointer(lost))
	for _, p := range found.Lost {
		name, reason := C.CString(p.Name), C.CString(p.Reason)
		*lost = C.strap_lost{
			offset: C.uint64_t(p.Offset), length: C.uint64_t(p.Length),
			name: name, name_bytes: C.size_t(len(p.Name)), reason: reason,
		}
		C.call_lost(o, lost)
		C.free(unsafe.Pointer(name))
		C.free(unsafe.Pointer(reason))
	}
	for _, r := range found.Ranges {
		*lost = C.strap_lost{offset: C.uint64_t(r.Offset), length: C.uint64_t(r.Length)}
		C.call_lost(o, lost)
	}
}

//export strapgoSalvageRing
func strapgoSalvageRing(path, out *C.char, o *C.strap_salvage_ring_options, report *C.strap_salvage_ring_report, e *C.strap_error) C.strap_status {
	return guarded(e, func() error {
		src := C.GoString(path)
		options, err := salvageOptions(src, o.force, func(done, total int64) C.int32_t {
			return C.call_ring_progress(o, C.uint64_t(done), C.uint64_t(total))
		})
		if err != nil {
			return err
		}
		found, err := salvage.Ring(src, C.GoString(out), options)
		if err != nil {
			return err
		}
		report.pid = C.int32_t(found.PID)
		report.packets, report.bytes = C.uint64_t(found.Packets), C.uint64_t(found.Bytes)
		report.steps, report.damaged = C.uint64_t(len(found.Steps)), C.uint64_t(found.Damaged)
		putString(unsafe.Slice((*byte)(unsafe.Pointer(&report.problem)), len(report.problem)), found.Problem)
		step := (*C.strap_ring_step)(C.calloc(1, C.sizeof_strap_ring_step)) // C reads it, so not in the Go heap
		defer C.free(unsafe.Pointer(step))
		for i := range found.Steps {
			s := &found.Steps[i]
			*step = C.strap_ring_step{
				step: C.int64_t(s.Step), packets: C.uint64_t(s.Packets), ended: boolInt(s.Ended), whole: boolInt(s.Whole()),
				missing: C.uint64_t(s.Missing), not_captured: C.uint64_t(s.NotCaptured),
			}
			report.whole_steps += C.uint64_t(step.whole)
			C.call_ring_step(o, step)
		}
		return nil
	})
}
