// Sums the snapshots of all processes for Prometheus.

package metrics

import (
	"cmp"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/libstrap/strap/libstrap/internal/probe"
)

var (
	onCPU        = family("process_on_cpu_seconds_total", "Time that threads ran on a core, by the name of their process.", "name")
	offCPU       = family("process_off_cpu_seconds_total", "Time that threads which ran or ended in the interval were on no core.", "name")
	runQueue     = family("process_run_queue_seconds_total", "Of the time off the cores, that in which threads were ready to run.", "name")
	pageFaults   = family("process_page_faults_total", "Page faults; major ones read from a disk.", "name", "kind")
	switches     = family("process_context_switches_total", "Times that threads left a core.", "name")
	stalled      = family("pressure_stalled_seconds_total", "Time in which some or all tasks waited for a resource, from /proc/pressure.", "resource", "share")
	systemLosses = family("system_losses_total", "Ends of threads that were not seen.", "reason")
)

const (
	// maxNames is how many names of processes get a series of their own. All others share the
	// series `others`.
	maxNames = 100
	others   = "other"
	// forgetAfter is how long a name stays without a snapshot that has it. Then its series ends and
	// another name can take the place.
	forgetAfter = 10 * time.Minute
)

type processTotals struct {
	probe.Process
	seen time.Time
}

// system sums SystemSnapshots.
type system struct {
	names    map[string]*processTotals
	pressure map[string]map[string]probe.Stall // of the last snapshot; its totals are sums already
	losses   losses
}

func (s *system) add(snapshot *probe.SystemSnapshot, now time.Time) {
	maps.DeleteFunc(s.names, func(name string, t *processTotals) bool {
		return name != others && now.Sub(t.seen) > forgetAfter
	})
	// If there is no room for all new names, the busiest processes get a series.
	busiest := slices.SortedFunc(maps.Values(snapshot.Processes), func(a, b *probe.Process) int {
		return cmp.Or(cmp.Compare(b.OnCPUNS, a.OnCPUNS), cmp.Compare(a.Name, b.Name))
	})
	for _, p := range busiest {
		t := s.totals(strings.ToValidUTF8(p.Name, "\uFFFD"))
		t.seen = now
		t.OnCPUNS += p.OnCPUNS
		t.OffCPUNS += p.OffCPUNS
		t.RunQueueNS += p.RunQueueNS
		t.MinorFaults += p.MinorFaults
		t.MajorFaults += p.MajorFaults
		t.Switches += p.Switches
	}
	s.pressure = snapshot.Pressure
	s.losses.add(snapshot.Losses)
}

// totals returns the sums of a name, or those of `others` if there is no room for the name.
func (s *system) totals(name string) *processTotals {
	if s.names[name] == nil {
		if len(s.names) >= maxNames {
			name = others
		}
		if s.names[name] == nil {
			s.names[name] = &processTotals{}
		}
	}
	return s.names[name]
}

func (s *system) collect(out chan<- prometheus.Metric) {
	for name, t := range s.names {
		count(out, onCPU, seconds(t.OnCPUNS), name)
		count(out, offCPU, seconds(t.OffCPUNS), name)
		count(out, runQueue, seconds(t.RunQueueNS), name)
		count(out, pageFaults, float64(t.MinorFaults), name, "minor")
		count(out, pageFaults, float64(t.MajorFaults), name, "major")
		count(out, switches, float64(t.Switches), name)
	}
	for resource, stalls := range s.pressure {
		for share, stall := range stalls {
			count(out, stalled, float64(stall.Total)/1e6, resource, share)
		}
	}
	s.losses.collect(out, systemLosses)
}

func seconds(ns uint64) float64 { return float64(ns) / 1e9 }
