// What all snapshots have, and the snapshot of block devices.

package probe

import (
	"math/bits"
	"time"

	"golang.org/x/sys/unix"
)

// Stamp holds the time of a snapshot.
type Stamp struct {
	Timestamp   float64 `json:"timestamp"` // s since 1970
	ISO         string  `json:"iso_timestamp"`
	IntervalS   float64 `json:"interval_s"`   // since the last snapshot
	MonotonicNS int64   `json:"monotonic_ns"` // CLOCK_MONOTONIC, as in a capture's index
}

func stamp(now time.Time, interval time.Duration) Stamp {
	var mono unix.Timespec
	// It cannot fail for a clock that exists.
	_ = unix.ClockGettime(unix.CLOCK_MONOTONIC, &mono)
	return Stamp{
		Timestamp:   float64(now.UnixNano()) / 1e9,
		ISO:         now.UTC().Format("2006-01-02T15:04:05.000000-07:00"),
		IntervalS:   interval.Seconds(),
		MonotonicNS: mono.Nano(),
	}
}

// Device is a block device.
type Device struct {
	ID   uint64 `json:"device_id"` // major << 20 | minor
	Name string `json:"device_name"`
}

// Bucket counts values from Low to High, both included: 2^Slot to 2^(Slot+1) - 1. Slot 0 also
// counts values of 0.
type Bucket struct {
	Slot  int    `json:"slot"`
	Count uint64 `json:"count"`
	Low   uint64 `json:"bucket_low"`
	High  uint64 `json:"bucket_high"`
}

// buckets returns the buckets that are not empty.
func buckets(counts []uint64) []Bucket {
	out := []Bucket{}
	for slot, n := range counts {
		if n > 0 {
			out = append(out, Bucket{slot, n, 1 << slot, 1<<(slot+1) - 1})
		}
	}
	return out
}

// DeviceHistogram holds the latencies of a device's requests, in us.
type DeviceHistogram struct {
	Device
	Total   uint64   `json:"total"`
	Buckets []Bucket `json:"buckets"`
}

func (d *DeviceHistogram) add(more []Bucket) {
	var counts [bits.UintSize]uint64
	for _, list := range [][]Bucket{d.Buckets, more} {
		for _, b := range list {
			counts[b.Slot] += b.Count
		}
	}
	d.Buckets = buckets(counts[:32])
	for _, b := range more {
		d.Total += b.Count
	}
}

// DeviceCount holds how many requests of a device are in flight.
type DeviceCount struct {
	Device
	Count uint64 `json:"count"`
}

// OperationCounts counts the requests of one device and operation that completed in the interval.
type OperationCounts struct {
	Device
	Operation string   `json:"operation"`
	Completed uint64   `json:"completed"`
	InFlight  uint64   `json:"inflight"` // at the time of the snapshot
	Bytes     uint64   `json:"bytes"`
	Errors    uint64   `json:"errors"`
	Requeues  uint64   `json:"requeues"`
	Merges    uint64   `json:"merges"` // queued requests that were merged into others
	LatencyNS uint64   `json:"latency_ns"`
	WasQueued uint64   `json:"was_queued"` // completed requests that an I/O scheduler had queued
	QueuedNS  uint64   `json:"queued_ns"`
	Latency   []Bucket `json:"latency_histogram"` // first issue to completion, us
	Queue     []Bucket `json:"queue_histogram"`   // insertion to first issue, us
	Size      []Bucket `json:"size_histogram"`    // bytes
}

// DiskCounts compares /proc/diskstats with what was followed: the requests of one device and
// operation that completed in the interval.
type DiskCounts struct {
	Device
	Operation string `json:"operation"` // read, write, flush or discard
	Completed uint64 `json:"completed"` // by /proc/diskstats
	Bytes     uint64 `json:"bytes"`     // by /proc/diskstats
	Followed  uint64 `json:"followed"`
	Lost      uint64 `json:"lost"`
	// Difference counts the requests that completed and were neither followed nor lost. Requests
	// that may have completed while the snapshot was taken do not count.
	Difference int64 `json:"difference"`
}

// Losses counts the requests of the interval that were not followed, or not to their end.
type Losses struct {
	NoRoom      uint64 `json:"no_room"`      // more were under way than BlockOptions.Requests
	NoDevice    uint64 `json:"no_device"`    // more devices than the table holds
	UnseenStart uint64 `json:"unseen_start"` // completed, but their start was not seen
	UnseenEnd   uint64 `json:"unseen_end"`   // their completion was not seen
	Expired     uint64 `json:"expired"`      // under way for longer than BlockOptions.ExpireS
	Missed      uint64 `json:"missed"`       // events skipped: they interrupted the handling of another
}

func (l Losses) since(before Losses) Losses {
	return Losses{
		NoRoom:      l.NoRoom - before.NoRoom,
		NoDevice:    l.NoDevice - before.NoDevice,
		UnseenStart: l.UnseenStart - before.UnseenStart,
		UnseenEnd:   l.UnseenEnd - before.UnseenEnd,
		Expired:     l.Expired - before.Expired,
		Missed:      l.Missed - before.Missed,
	}
}

// BlockSnapshot holds what a Block saw in an interval. It marshals to the documented line of JSON.
type BlockSnapshot struct {
	Stamp
	LatencyHistogram []DeviceHistogram `json:"latency_histogram"`
	InFlight         []DeviceCount     `json:"inflight"`
	Operations       []OperationCounts `json:"operations"`
	Diskstats        []DiskCounts      `json:"diskstats,omitzero"`
	Losses           Losses            `json:"losses"`
}
