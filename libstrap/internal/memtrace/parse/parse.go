// Package parse turns the text of tracing tools into batches of a memory trace.
//
// A line gives rows, or it is known to hold none (comments, headers, blank lines,
// call chains), or it is a sample without a data address, which is counted, or it is
// malformed: counted, the first few kept as samples, and never the end of the trace. Lines end in "\n" or "\r\n" and may have 1 MiB. Text
// that is no UTF-8 has U+FFFD where it breaks.
//
// The text is read in blocks that workers parse side by side; the rows keep the
// order of the lines. Memory is bounded by a few blocks.
package parse

import (
	"io"
	"math"
	"os"
	"runtime"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Format is what wrote the text.
type Format string

const (
	// PerfScript is `perf script` over samples with addresses, as `perf mem
	// record` takes them; see perfScript.
	PerfScript Format = "perf_script"
	// Lackey is `valgrind --tool=lackey --trace-mem=yes`; see lackey.
	Lackey Format = "lackey"
	// PageFaults is `perf script` over page faults, or the text of tracefs;
	// see pageFaults.
	PageFaults Format = "page_faults"
)

// Phase is a name for the times from StartNS up to, not including, EndNS.
type Phase struct {
	Name           string
	StartNS, EndNS int64
}

// Options say how to parse. The zero value is usable.
type Options struct {
	// RunID stands in every row.
	RunID string
	// Phases name the times of the rows; the first that fits a time names it.
	Phases []Phase
	// Workers parse side by side, at most 256; 0 is one per processor, at most 8.
	Workers int
	// BatchRows is the most rows of a batch; 0 is 65,536.
	BatchRows int
	// SampleEvery keeps the first of every so many rows; 0 keeps all. Those left
	// out count as skipped.
	SampleEvery int
	// CyclesPerNS is the clock of the cores in GHz. perf's weights are cycles, so
	// access_latency_ns is null without it.
	CyclesPerNS float64
	// Instructions keeps lackey's instruction fetches, as loads of the symbol
	// InstructionSymbol.
	Instructions bool
}

const (
	maxWorkers     = 256
	defaultWorkers = 8 // at most
)

func (o *Options) check() error {
	bad := func(name string, value any, want string) error {
		return status.New(status.InvalidArgument, "%s = %v: must be %s", name, value, want)
	}
	switch {
	case o.Workers < 0 || o.Workers > maxWorkers:
		return bad("workers", o.Workers, "0 to 256")
	case o.BatchRows < 0:
		return bad("batch_rows", o.BatchRows, "0 or more")
	case o.SampleEvery < 0:
		return bad("sample_every", o.SampleEvery, "0 or more")
	case !(o.CyclesPerNS >= 0) || math.IsInf(o.CyclesPerNS, 0):
		return bad("cycles_per_ns", o.CyclesPerNS, "a clock in GHz")
	}
	for _, p := range o.Phases {
		if p.StartNS > p.EndNS {
			return status.New(status.InvalidArgument, "phase %q ends at %d, before its start at %d", p.Name, p.EndNS, p.StartNS)
		}
	}
	if o.Workers == 0 {
		o.Workers = min(runtime.NumCPU(), defaultWorkers)
	}
	if o.BatchRows == 0 {
		o.BatchRows = 1 << 16
	}
	if o.SampleEvery == 0 {
		o.SampleEvery = 1
	}
	return nil
}

// parser takes the lines of a block, without their ends, in order.
type parser interface {
	line(text []byte, out *rows) verdict
	// begin is called before the first line of each block.
	begin()
}

// verdict is what became of a line.
type verdict uint8

const (
	accepted verdict = iota
	skipped
	malformed
	unaddressed // a sample that has no data address
)

// kind gives what the rows of a format are, and InvalidArgument for another name.
func (f Format) kind() (trace.Kind, error) {
	switch f {
	case PerfScript, Lackey:
		return trace.Accesses, nil
	case PageFaults:
		return trace.FirstTouches, nil
	default:
		return "", status.New(status.InvalidArgument, "format %q: one of %s, %s, %s", f, PerfScript, Lackey, PageFaults)
	}
}

func (f Format) parser(o *Options) parser {
	switch f {
	case Lackey:
		return &lackey{instructions: o.Instructions}
	case PageFaults:
		return &pageFaults{}
	default:
		return &perfScript{cyclesPerNS: o.CyclesPerNS}
	}
}

// Open begins to parse a file. The caller must Release the source.
//
// Errors: NotFound, Permission or IO where the file cannot be opened;
// InvalidArgument for a directory, an unknown format or bad options.
func Open(format Format, path string, o Options) (*Source, error) {
	s, err := newSource(format, o)
	if err != nil {
		return nil, err
	}
	file, err := os.Open(path)
	if err != nil {
		return nil, status.FromOS(err, "cannot read the %s text", format)
	}
	info, err := file.Stat()
	if err == nil && info.IsDir() {
		err = status.New(status.InvalidArgument, "%s is a directory: give the file that holds the %s text", path, format)
	}
	if err != nil {
		file.Close()
		return nil, err
	}
	if info.Mode().IsRegular() {
		s.counts.TotalBytes = info.Size()
	}
	s.in, s.file = file, file
	return s, nil
}

// OpenReader is Open over a reader, which stays the caller's: Release waits for
// a Read under way and does not close it.
func OpenReader(format Format, in io.Reader, o Options) (*Source, error) {
	s, err := newSource(format, o)
	if err != nil {
		return nil, err
	}
	s.in = in
	return s, nil
}
