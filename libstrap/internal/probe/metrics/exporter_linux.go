// Package metrics exports snapshots to Prometheus. The counters are sums over all snapshots since
// the start. A scrape reads the sums and never the kernel.
package metrics

import (
	"encoding/json"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/libstrap/strap/libstrap/internal/probe"
)

// families lists the descriptions of all metrics.
var families []*prometheus.Desc

func family(name, help string, labels ...string) *prometheus.Desc {
	desc := prometheus.NewDesc("strap_"+name, help, labels, nil)
	families = append(families, desc)
	return desc
}

var (
	snapshots    = family("snapshots_total", "Snapshots that were taken.")
	lastSnapshot = family("last_snapshot_timestamp_seconds", "When the last snapshot was taken, since 1970.")
)

// Exporter sums snapshots. It is a prometheus.Collector.
type Exporter struct {
	mu     sync.Mutex
	taken  uint64
	last   time.Time
	block  block
	system system
	calls  calls
	waits  waits
}

// New returns an Exporter without snapshots.
func New() *Exporter {
	return &Exporter{
		block:  block{operations: map[operation]*operationTotals{}, disks: map[operation]*diskTotals{}, losses: losses{}},
		system: system{names: map[string]*processTotals{}, losses: losses{}},
		calls:  calls{names: map[string]*callTotals{}, losses: losses{}},
		waits:  waits{reasons: map[string]*waitTotals{}, losses: losses{}},
	}
}

// Add adds a snapshot of any collector to the sums.
func (e *Exporter) Add(snapshot any) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.taken++
	e.last = time.Now()
	switch s := snapshot.(type) {
	case *probe.BlockSnapshot:
		e.block.add(s)
	case *probe.SystemSnapshot:
		e.system.add(s, e.last)
	case *probe.SyscallsSnapshot:
		e.calls.add(s)
	case *probe.OffCPUSnapshot:
		e.waits.add(s)
	}
}

// Describe implements prometheus.Collector.
func (e *Exporter) Describe(out chan<- *prometheus.Desc) {
	for _, one := range families {
		out <- one
	}
}

// Collect implements prometheus.Collector.
func (e *Exporter) Collect(out chan<- prometheus.Metric) {
	e.mu.Lock()
	defer e.mu.Unlock()
	count(out, snapshots, float64(e.taken))
	if e.taken > 0 {
		gauge(out, lastSnapshot, float64(e.last.UnixNano())/1e9)
	}
	e.block.collect(out)
	e.system.collect(out)
	e.calls.collect(out)
	e.waits.collect(out)
}

func count(out chan<- prometheus.Metric, desc *prometheus.Desc, value float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(desc, prometheus.CounterValue, value, labels...)
}

func gauge(out chan<- prometheus.Metric, desc *prometheus.Desc, value float64, labels ...string) {
	out <- prometheus.MustNewConstMetric(desc, prometheus.GaugeValue, value, labels...)
}

// losses sums losses by their names in JSON.
type losses map[string]uint64

// add adds the counts of a structure that marshals to numbers.
func (l losses) add(counts any) {
	line, err := json.Marshal(counts)
	if err != nil {
		panic(err) // cannot happen: the structure holds only numbers
	}
	var each map[string]uint64
	if err := json.Unmarshal(line, &each); err != nil {
		panic(err)
	}
	for name, n := range each {
		l[name] += n
	}
}

func (l losses) collect(out chan<- prometheus.Metric, desc *prometheus.Desc) {
	for name, n := range l {
		count(out, desc, float64(n), name)
	}
}
