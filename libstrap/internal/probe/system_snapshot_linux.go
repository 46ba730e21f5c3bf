// The snapshot of all processes, and the reader of /proc/pressure.

package probe

import (
	"bufio"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Process sums what the threads of a process did in an interval.
type Process struct {
	Name        string `json:"name"`
	OnCPUNS     uint64 `json:"on_cpu_ns"`
	OffCPUNS    uint64 `json:"off_cpu_ns"`  // only of threads that ran or ended
	RunQueueNS  uint64 `json:"runqueue_ns"` // part of off_cpu_ns: ready, in the run queue
	MinorFaults uint64 `json:"minor_faults"`
	MajorFaults uint64 `json:"major_faults"` // faults that read from a disk
	Switches    uint64 `json:"switches"`
}

func (p *Process) add(o Process) {
	p.OnCPUNS += o.OnCPUNS
	p.OffCPUNS += o.OffCPUNS
	p.RunQueueNS += o.RunQueueNS
	p.MinorFaults += o.MinorFaults
	p.MajorFaults += o.MajorFaults
	p.Switches += o.Switches
}

// Stall is one line of a file in /proc/pressure. Avg10, Avg60 and Avg300 are the share of time, in
// percent, in which some or all tasks stood still over the last 10, 60 and 300 s. Total is the time
// since the boot, in us.
type Stall struct {
	Avg10  float64 `json:"avg10"`
	Avg60  float64 `json:"avg60"`
	Avg300 float64 `json:"avg300"`
	Total  uint64  `json:"total"`
}

// Scope says which processes a snapshot covers.
type Scope string

const (
	Machine      Scope = "machine"       // all, numbered as on the machine
	PIDNamespace Scope = "pid_namespace" // those of the collector's PID namespace, numbered as there
)

// SystemLosses counts what a snapshot lacks.
type SystemLosses struct {
	Ended uint64 `json:"ended"` // ends of threads that the ring buffer had no room for
}

// SystemSnapshot holds what a System saw in an interval. It marshals to the documented line of
// JSON.
type SystemSnapshot struct {
	Stamp
	Scope      Scope                        `json:"scope"`
	OffCPUNS   map[string]uint64            `json:"off_cpu_ns"`  // by process
	PageFaults map[string]uint64            `json:"page_faults"` // by process
	Pressure   map[string]map[string]Stall  `json:"pressure"`    // cpu, io, memory: some, full
	StalledUS  map[string]map[string]uint64 `json:"stalled_us"`  // growth of Stall.Total, with the same keys
	Processes  map[string]*Process          `json:"processes"`
	Losses     SystemLosses                 `json:"losses"`
}

// finish sets OffCPUNS and PageFaults from Processes.
func (s *SystemSnapshot) finish() {
	s.OffCPUNS, s.PageFaults = map[string]uint64{}, map[string]uint64{}
	for id, p := range s.Processes {
		s.OffCPUNS[id] = p.OffCPUNS
		if faults := p.MinorFaults + p.MajorFaults; faults > 0 {
			s.PageFaults[id] = faults
		}
	}
}

// grown returns how much each total grew. A total without an earlier value is left out.
func grown(now, before map[string]map[string]Stall) map[string]map[string]uint64 {
	out := map[string]map[string]uint64{}
	for resource, kinds := range now {
		out[resource] = map[string]uint64{}
		for kind, stall := range kinds {
			if b, known := before[resource][kind]; known {
				out[resource][kind] = stall.Total - b.Total
			}
		}
	}
	return out
}

// pressure reads the files of a folder like /proc/pressure. The result is empty if the kernel was
// built or started without them.
func pressure(folder string) (map[string]map[string]Stall, error) {
	out := map[string]map[string]Stall{}
	for _, resource := range []string{"cpu", "io", "memory"} {
		file, err := os.ReadFile(filepath.Join(folder, resource))
		// A kernel with psi=0 has the files, but reading them fails.
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, errors.ErrUnsupported) {
			continue
		}
		if err != nil {
			return nil, status.FromOS(err, "the pressure on %s cannot be read", resource)
		}
		if out[resource], err = stalls(string(file)); err != nil {
			return nil, err
		}
	}
	return out, nil
}

// stalls reads lines like "some avg10=0.00 avg60=0.00 avg300=0.00 total=0".
func stalls(text string) (map[string]Stall, error) {
	out := map[string]Stall{}
	lines := bufio.NewScanner(strings.NewReader(text))
	for lines.Scan() {
		words := strings.Fields(lines.Text())
		if len(words) == 0 {
			continue
		}
		var s Stall
		for _, word := range words[1:] {
			name, value, _ := strings.Cut(word, "=")
			var err error
			switch name {
			case "avg10":
				s.Avg10, err = strconv.ParseFloat(value, 64)
			case "avg60":
				s.Avg60, err = strconv.ParseFloat(value, 64)
			case "avg300":
				s.Avg300, err = strconv.ParseFloat(value, 64)
			case "total":
				s.Total, err = strconv.ParseUint(value, 10, 64)
			}
			if err != nil {
				return nil, status.Wrap(status.Corrupt, err, "%q is no line of pressure", lines.Text())
			}
		}
		out[words[0]] = s
	}
	return out, nil
}
