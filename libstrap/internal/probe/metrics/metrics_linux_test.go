package metrics

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/prometheus/client_golang/prometheus/testutil/promlint"

	"github.com/libstrap/strap/libstrap/internal/probe"
	"github.com/libstrap/strap/libstrap/internal/status"
)

var sda = probe.Device{ID: 8 << 20, Name: "sda"}

// reads returns a snapshot of n reads of 4 KiB that took 6 us each, and one that took a minute.
func reads(n uint64) *probe.BlockSnapshot {
	return &probe.BlockSnapshot{
		Operations: []probe.OperationCounts{{
			Device: sda, Operation: "read", Completed: n + 1, InFlight: 3, Bytes: 4096 * (n + 1), Errors: 1,
			LatencyNS: 6000*n + 60e9, WasQueued: 1, QueuedNS: 500,
			Latency: []probe.Bucket{{Slot: 2, Count: n, Low: 4, High: 7}, {Slot: 25, Count: 1, Low: 1 << 25, High: 1<<26 - 1}},
			Queue:   []probe.Bucket{{Slot: 0, Count: 1, Low: 0, High: 1}},
		}},
		Diskstats: []probe.DiskCounts{{Device: sda, Operation: "read", Completed: n + 4, Difference: 3}},
		Losses:    probe.Losses{UnseenEnd: 2},
	}
}

func processes(of ...*probe.Process) *probe.SystemSnapshot {
	s := &probe.SystemSnapshot{
		Processes: map[string]*probe.Process{},
		Pressure:  map[string]map[string]probe.Stall{"io": {"some": {Total: 2500000}}},
	}
	for i, p := range of {
		s.Processes[fmt.Sprint(i)] = p
	}
	return s
}

func compare(t *testing.T, e *Exporter, want string, names ...string) {
	t.Helper()
	if err := testutil.CollectAndCompare(e, strings.NewReader(want), names...); err != nil {
		t.Error(err)
	}
}

func TestIntervalsAddUp(t *testing.T) {
	e := New()
	e.Add(reads(10))
	e.Add(reads(5))
	compare(t, e, `
# HELP strap_block_bytes_total Bytes of the requests that completed.
# TYPE strap_block_bytes_total counter
strap_block_bytes_total{device="sda",operation="read"} 69632
# HELP strap_block_errors_total Requests that completed with an error.
# TYPE strap_block_errors_total counter
strap_block_errors_total{device="sda",operation="read"} 2
# HELP strap_block_requests_in_flight Requests that were issued and have not completed, at the last snapshot.
# TYPE strap_block_requests_in_flight gauge
strap_block_requests_in_flight{device="sda",operation="read"} 3
# HELP strap_snapshots_total Snapshots that were taken.
# TYPE strap_snapshots_total counter
strap_snapshots_total 2
`, "strap_block_bytes_total", "strap_block_errors_total", "strap_block_requests_in_flight", "strap_snapshots_total")
	text := scrape(t, e)
	for _, line := range []string{
		`strap_block_request_duration_seconds_bucket{device="sda",operation="read",le="4e-06"} 0`,
		`strap_block_request_duration_seconds_bucket{device="sda",operation="read",le="8e-06"} 15`,
		`strap_block_request_duration_seconds_bucket{device="sda",operation="read",le="33.554432"} 15`,
		`strap_block_request_duration_seconds_bucket{device="sda",operation="read",le="+Inf"} 17`,
		`strap_block_request_duration_seconds_sum{device="sda",operation="read"} 120.00009`,
		`strap_block_request_duration_seconds_count{device="sda",operation="read"} 17`,
		`strap_block_queue_duration_seconds_count{device="sda",operation="read"} 2`,
		`strap_block_losses_total{reason="unseen_end"} 4`,
		`strap_block_losses_total{reason="no_room"} 0`,
		`strap_block_diskstats_requests_total{device="sda",operation="read"} 23`,
		`strap_block_diskstats_difference{device="sda",operation="read"} 3`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("%s is not in\n%s", line, text)
		}
	}
	// An operation that a snapshot lacks has nothing in flight.
	e.Add(&probe.BlockSnapshot{})
	if text := scrape(t, e); !strings.Contains(text, `strap_block_requests_in_flight{device="sda",operation="read"} 0`) {
		t.Error(text)
	}
}

func TestProcessesOfANameAreOne(t *testing.T) {
	e := New()
	e.Add(processes(
		&probe.Process{Name: "fio", OnCPUNS: 1e9, OffCPUNS: 2e9, RunQueueNS: 5e8, MinorFaults: 4, MajorFaults: 1, Switches: 7},
		&probe.Process{Name: "fio", OnCPUNS: 1e9},
	))
	text := scrape(t, e)
	for _, line := range []string{
		`strap_process_on_cpu_seconds_total{name="fio"} 2`,
		`strap_process_off_cpu_seconds_total{name="fio"} 2`,
		`strap_process_run_queue_seconds_total{name="fio"} 0.5`,
		`strap_process_page_faults_total{kind="major",name="fio"} 1`,
		`strap_process_page_faults_total{kind="minor",name="fio"} 4`,
		`strap_process_context_switches_total{name="fio"} 7`,
		`strap_pressure_stalled_seconds_total{resource="io",share="some"} 2.5`,
		`strap_system_losses_total{reason="ended"} 0`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("%s is not in\n%s", line, text)
		}
	}
}

func TestNamesAreBounded(t *testing.T) {
	e := New()
	now := time.Now()
	var many []*probe.Process
	for i := range 3 * maxNames {
		many = append(many, &probe.Process{Name: fmt.Sprint("p", i), OnCPUNS: uint64(i+1) * 1e9})
	}
	e.system.add(processes(many...), now)
	e.system.add(processes(many...), now)
	if n := len(e.system.names); n != maxNames+1 {
		t.Errorf("%d names", n)
	}
	// The busiest have series of their own; the others are summed, and none is lost.
	last := e.system.names[fmt.Sprint("p", 3*maxNames-1)]
	if last == nil || last.OnCPUNS != 2*3*maxNames*1e9 {
		t.Errorf("%+v", last)
	}
	if got, want := e.system.names[others].OnCPUNS, uint64(2*maxNames*(2*maxNames+1))*1e9; got != want {
		t.Errorf("%d of the others, want %d", got, want)
	}
	// Names that have not appeared for long make room.
	later := now.Add(forgetAfter + time.Second)
	e.system.add(processes(&probe.Process{Name: "new", Switches: 1}), later)
	if n := len(e.system.names); n != 2 || e.system.names["new"] == nil {
		t.Errorf("%d names", n)
	}
}

func TestOneProcess(t *testing.T) {
	e := New()
	for range 2 {
		e.Add(&probe.SyscallsSnapshot{Syscalls: []probe.SyscallCounts{{
			Name: "fsync", Count: 3, Errors: 1, TotalNS: 15000, Latency: []probe.Bucket{{Slot: 2, Count: 3}},
		}}})
		e.Add(&probe.OffCPUSnapshot{Waits: []probe.WaitCounts{{
			Reason: "io_wait", Count: 1, TotalNS: 5000, RunQueueNS: 1000,
			Latency: []probe.Bucket{{Slot: 2, Count: 1}}, RunQueue: []probe.Bucket{{Slot: 0, Count: 1}},
		}}})
	}
	text := scrape(t, e)
	for _, line := range []string{
		`strap_syscall_duration_seconds_count{syscall="fsync"} 6`,
		`strap_syscall_errors_total{syscall="fsync"} 2`,
		`strap_syscall_losses_total{reason="missed"} 0`,
		`strap_off_cpu_duration_seconds_sum{reason="io_wait"} 1e-05`,
		`strap_off_cpu_run_queue_duration_seconds_count{reason="io_wait"} 2`,
		`strap_off_cpu_losses_total{reason="unseen_end"} 0`,
	} {
		if !strings.Contains(text, line+"\n") {
			t.Errorf("%s is not in\n%s", line, text)
		}
	}
}

// A process may have any bytes as its name, and Prometheus takes only UTF-8.
func TestNamesThatAreNoText(t *testing.T) {
	e := New()
	e.Add(processes(&probe.Process{Name: "a\xff\n\"", Switches: 1}))
	if text := scrape(t, e); !strings.Contains(text, "{name=\"a\uFFFD\\n\\\"\"} 1\n") {
		t.Error(text)
	}
}

func TestNamesOfTheField(t *testing.T) {
	e := New()
	e.Add(reads(1))
	e.Add(processes(&probe.Process{Name: "fio"}))
	e.Add(&probe.SyscallsSnapshot{})
	e.Add(&probe.OffCPUSnapshot{})
	problems, err := promlint.New(strings.NewReader(scrape(t, e))).Lint()
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range problems {
		t.Errorf("%s: %s", one.Metric, one.Text)
	}
}

func TestDocumentsEachFamily(t *testing.T) {
	page, err := os.ReadFile("../../../../docs/PROBES.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, one := range families {
		_, name, _ := strings.Cut(one.String(), `"`)
		name, _, _ = strings.Cut(name, `"`)
		if !strings.HasPrefix(name, "strap_") || !bytes.Contains(page, []byte("`"+name+"`")) {
			t.Errorf("%s is not in the docs", name)
		}
	}
}

// scrape requests the metrics over loopback, as Prometheus does.
func scrape(t *testing.T, e *Exporter) string {
	t.Helper()
	l, err := Listen("0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go e.Serve(l)
	answer, err := http.Get("http://" + l.Addr().String() + "/metrics")
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil || answer.StatusCode != http.StatusOK {
		t.Fatalf("%s, %v: %s", answer.Status, err, bytes.TrimSpace(text))
	}
	return string(text)
}

func TestListensOnLoopbackUnlessTold(t *testing.T) {
	for address, host := range map[string]string{"0": "127.0.0.1", ":0": "127.0.0.1", "localhost:0": "", "0.0.0.0:0": "0.0.0.0"} {
		l, err := Listen(address)
		if err != nil {
			t.Error(err)
			continue
		}
		at := l.Addr().(*net.TCPAddr)
		if host == "" && !at.IP.IsLoopback() || host != "" && !at.IP.Equal(net.ParseIP(host)) {
			t.Errorf("%q is at %s", address, at)
		}
		l.Close()
	}
}

func TestListenRefuses(t *testing.T) {
	taken, err := Listen("0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	_, port, _ := net.SplitHostPort(taken.Addr().String())
	for _, c := range []struct {
		address string
		code    status.Code
		says    string
	}{
		{"", status.InvalidArgument, "--listen \"\""},
		{"x", status.InvalidArgument, "--listen \"x\": give a port"},
		{"*:9435", status.InvalidArgument, "0.0.0.0:9435"},
		{"localhost", status.InvalidArgument, "HOST:PORT"},
		{"1.2.3.4:65536", status.InvalidArgument, "HOST:PORT"},
		{"::1:9435", status.InvalidArgument, "HOST:PORT"},
		{"192.0.2.1:0", status.InvalidArgument, "ip addr"}, // an address reserved for documentation
		{port, status.Busy, "in use"},
	} {
		l, err := Listen(c.address)
		if err == nil {
			l.Close()
		}
		if !errors.Is(err, c.code) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%q: %v", c.address, err)
		}
	}
}
