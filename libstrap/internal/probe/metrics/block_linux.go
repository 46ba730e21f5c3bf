// Sums the snapshots of block devices for Prometheus.

package metrics

import (
	"strings"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/libstrap/strap/libstrap/internal/probe"
)

var (
	requestDuration = family("block_request_duration_seconds", "Requests by the time from their first issue to the device to their completion.", "device", "operation")
	queueDuration   = family("block_queue_duration_seconds", "Requests of an I/O scheduler by the time from their insertion to their first issue.", "device", "operation")
	inFlight        = family("block_requests_in_flight", "Requests that were issued and have not completed, at the last snapshot.", "device", "operation")
	blockBytes      = family("block_bytes_total", "Bytes of the requests that completed.", "device", "operation")
	blockErrors     = family("block_errors_total", "Requests that completed with an error.", "device", "operation")
	requeues        = family("block_requeues_total", "Requests that were taken back from the device, to be issued again.", "device", "operation")
	merges          = family("block_merges_total", "Queued requests that became part of others.", "device", "operation")
	diskRequests    = family("block_diskstats_requests_total", "Requests that completed by /proc/diskstats.", "device", "operation")
	diskDifference  = family("block_diskstats_difference", "Requests of the last interval that completed by /proc/diskstats, and were neither followed nor lost.", "device", "operation")
	blockLosses     = family("block_losses_total", "Requests that were not followed, or not to their end.", "reason")
)

// bounds is the number of bounds of a histogram: 2 us, 4 us, ... 33.6 s, each twice the one before.
const bounds = 25

// histogram counts by the slots of probe.Bucket. Values beyond the last bound count only in total.
type histogram struct {
	slots [bounds]uint64
	total uint64
	sumNS uint64
}

func (h *histogram) add(buckets []probe.Bucket, sumNS uint64) {
	for _, b := range buckets {
		if b.Slot < bounds {
			h.slots[b.Slot] += b.Count
		}
		h.total += b.Count
	}
	h.sumNS += sumNS
}

func (h *histogram) collect(out chan<- prometheus.Metric, desc *prometheus.Desc, labels ...string) {
	below := make(map[float64]uint64, bounds)
	sum := uint64(0)
	for slot, n := range h.slots {
		sum += n
		below[float64(uint64(2)<<slot)/1e6] = sum
	}
	out <- prometheus.MustNewConstHistogram(desc, h.total, float64(h.sumNS)/1e9, below, labels...)
}

type operation struct{ device, name string }

type operationTotals struct {
	latency, queue                            histogram
	inFlight, bytes, errors, requeues, merges uint64
}

// diskTotals sums probe.DiskCounts. There are none if only some requests were chosen.
type diskTotals struct {
	requests   uint64
	difference int64
}

// block sums BlockSnapshots. It holds at most the 64 devices of the collector's table.
type block struct {
	operations map[operation]*operationTotals
	disks      map[operation]*diskTotals
	losses     losses
}

func (b *block) add(s *probe.BlockSnapshot) {
	for _, t := range b.operations {
		t.inFlight = 0 // an operation that the snapshot lacks has none in flight
	}
	for _, one := range s.Operations {
		key := operation{strings.ToValidUTF8(one.Name, "\uFFFD"), one.Operation}
		t := b.operations[key]
		if t == nil {
			t = &operationTotals{}
			b.operations[key] = t
		}
		t.latency.add(one.Latency, one.LatencyNS)
		t.queue.add(one.Queue, one.QueuedNS)
		t.inFlight += one.InFlight
		t.bytes += one.Bytes
		t.errors += one.Errors
		t.requeues += one.Requeues
		t.merges += one.Merges
	}
	for _, t := range b.disks {
		t.difference = 0
	}
	for _, one := range s.Diskstats {
		key := operation{strings.ToValidUTF8(one.Name, "\uFFFD"), one.Operation}
		t := b.disks[key]
		if t == nil {
			t = &diskTotals{}
			b.disks[key] = t
		}
		t.requests += one.Completed
		t.difference += one.Difference
	}
	b.losses.add(s.Losses)
}

func (b *block) collect(out chan<- prometheus.Metric) {
	for key, t := range b.operations {
		t.latency.collect(out, requestDuration, key.device, key.name)
		if t.queue.total > 0 { // most devices have no scheduler
			t.queue.collect(out, queueDuration, key.device, key.name)
		}
		gauge(out, inFlight, float64(t.inFlight), key.device, key.name)
		count(out, blockBytes, float64(t.bytes), key.device, key.name)
		count(out, blockErrors, float64(t.errors), key.device, key.name)
		count(out, requeues, float64(t.requeues), key.device, key.name)
		count(out, merges, float64(t.merges), key.device, key.name)
	}
	for key, t := range b.disks {
		count(out, diskRequests, float64(t.requests), key.device, key.name)
		gauge(out, diskDifference, float64(t.difference), key.device, key.name)
	}
	b.losses.collect(out, blockLosses)
}
