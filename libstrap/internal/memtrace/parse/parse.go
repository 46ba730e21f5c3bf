// Package parse turns the text of tracing tools into batches of a memory trace.
//
// Each line is one of these:
//
//   - accepted: it gives rows;
//   - skipped: it holds no access, as comments, headers, blank lines and call chains;
//   - unaddressed: it is a sample without a data address;
//   - malformed: it fits no form. The first few are kept as samples, and parsing goes on.
//
// [Counts] counts the lines. Lines end in "\n" or "\r\n". A line of more than 1 MiB is malformed.
// Bytes that are not valid UTF-8 become U+FFFD.
//
// The text is read in blocks, and workers parse the blocks side by side. The rows keep the order
// of the lines. A few blocks at a time are in memory.
package parse

import (
	"io"
	"math"
	"os"
	"runtime"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Format names the tool that wrote the text.
type Format string

const (
	// PerfScript is the output of `perf script` for samples with addresses, as `perf mem
	// record` takes them; see perfScript.
	PerfScript Format = "perf_script"
	// Lackey is the output of `valgrind --tool=lackey --trace-mem=yes`; see lackey.
	Lackey Format = "lackey"
	// PageFaults is the output of `perf script` for page faults, or the text of tracefs;
	// see pageFaults.
	PageFaults Format = "page_faults"
)

// Phase names the times from StartNS up to, but not including, EndNS.
type Phase struct {
	Name           string
	StartNS, EndNS int64
}

// Options say how to parse. The zero value is usable.
type Options struct {
	// RunID is the run_id of every row.
	RunID string
	// Phases give rows their phase by time. If several phases hold a time, the first counts.
	Phases []Phase
	// Workers is how many goroutines parse, at most 256. 0 means one per processor, at most 8.
	Workers int
	// BatchRows is the largest number of rows in a batch; 0 means 65,536.
	BatchRows int
	// SampleEvery n keeps the first of every n rows; 0 keeps all. The rows left out count as
	// skipped.
	SampleEvery int
	// CyclesPerNS is the clock of the cores in GHz. perf's weights are in cycles, so
	// access_latency_ns is null if the clock is 0.
	CyclesPerNS float64
	// Instructions keeps lackey's instruction fetches, as loads with the symbol
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

// parser parses the lines of a block in order. The lines come without their line ends.
type parser interface {
	line(text []byte, out *rows) verdict
	// begin is called before the first line of each block.
	begin()
}

// verdict says how a line was read.
type verdict uint8

const (
	accepted verdict = iota
	skipped
	malformed
	unaddressed // a sample that has no data address
)

// kind returns the kind of the traces that a format gives, or InvalidArgument if f is unknown.
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

// Open returns a source that parses a file. The first Next starts the parsing. The caller must
// Release the source.
//
// Errors: NotFound, Permission or IO if the file cannot be opened; InvalidArgument for a
// directory, an unknown format or bad options.
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

// OpenReader is like Open, but parses what a reader gives. The reader stays the caller's:
// Release waits for a Read under way and does not close the reader.
func OpenReader(format Format, in io.Reader, o Options) (*Source, error) {
	s, err := newSource(format, o)
	if err != nil {
		return nil, err
	}
	s.in = in
	return s, nil
}
