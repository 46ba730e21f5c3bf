// Sums the snapshots of a process's system calls and waits for Prometheus.

package metrics

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/libstrap/strap/libstrap/internal/probe"
)

var (
	callDuration     = family("syscall_duration_seconds", "System calls of the process by their time.", "syscall")
	callErrors       = family("syscall_errors_total", "System calls of the process that returned an error.", "syscall")
	callLosses       = family("syscall_losses_total", "System calls of the process that are not counted, or not in whole.", "reason")
	waitDuration     = family("off_cpu_duration_seconds", "Waits of the process's threads for a core by their time.", "reason")
	waitQueueSeconds = family("off_cpu_run_queue_duration_seconds", "Waits of the process's threads by their part in the run queue, ready for a core.", "reason")
	waitLosses       = family("off_cpu_losses_total", "Waits of the process's threads that are not counted, or not in whole.", "reason")
)

type callTotals struct {
	latency histogram
	errors  uint64
}

// calls sums SyscallsSnapshots. It holds at most one name for each call of the kernel.
type calls struct {
	names  map[string]*callTotals
	losses losses
}

func (c *calls) add(s *probe.SyscallsSnapshot) {
	for _, one := range s.Syscalls {
		t := c.names[one.Name]
		if t == nil {
			t = &callTotals{}
			c.names[one.Name] = t
		}
		t.latency.add(one.Latency, one.TotalNS)
		t.errors += one.Errors
	}
	c.losses.add(s.Losses)
}

func (c *calls) collect(out chan<- prometheus.Metric) {
	for name, t := range c.names {
		t.latency.collect(out, callDuration, name)
		count(out, callErrors, float64(t.errors), name)
	}
	c.losses.collect(out, callLosses)
}

type waitTotals struct{ whole, runQueue histogram }

// waits sums OffCPUSnapshots.
type waits struct {
	reasons map[string]*waitTotals
	losses  losses
}

func (w *waits) add(s *probe.OffCPUSnapshot) {
	for _, one := range s.Waits {
		t := w.reasons[one.Reason]
		if t == nil {
			t = &waitTotals{}
			w.reasons[one.Reason] = t
		}
		t.whole.add(one.Latency, one.TotalNS)
		t.runQueue.add(one.RunQueue, one.RunQueueNS)
	}
	w.losses.add(s.Losses)
}

func (w *waits) collect(out chan<- prometheus.Metric) {
	for reason, t := range w.reasons {
		t.whole.collect(out, waitDuration, reason)
		t.runQueue.collect(out, waitQueueSeconds, reason)
	}
	w.losses.collect(out, waitLosses)
}
