// The kinds of collectors, and their flags on the command line.

//go:build linux

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"strconv"
	"strings"
	"time"

	"github.com/libstrap/strap/libstrap/internal/probe"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// kind is a collector with its name and flags on the command line.
type kind struct {
	name      string
	collector string // the kind for probe.Start
	what      string
	needs     string // a flag that must be given; "": none
	// options adds the flags of the kind. It returns a pointer to the options that they set.
	options func(*flag.FlagSet) any
}

var kinds = []kind{
	{"block", "block", "requests to block devices: latency, size, what is in flight", "", func(f *flag.FlagSet) any {
		o := &probe.BlockOptions{}
		f.Func("device", "disk or partition to follow, by `name` or path; may be given again (default: all disks)", func(name string) error {
			o.Devices = append(o.Devices, name)
			return nil
		})
		f.Func("pid", "only requests of this `process`", func(text string) error {
			number, err := strconv.Atoi(text)
			o.PID = &number
			return err
		})
		f.Func("cgroup", "only requests of the cgroup with this `path`, and those below", func(path string) error {
			o.Cgroup = &path
			return nil
		})
		return o
	}},
	{"system", "system", "processes and pressure: time on and off the cores, page faults", "", func(*flag.FlagSet) any {
		return &probe.SystemOptions{}
	}},
	{"syscalls", "syscalls", "system calls of one process: counts, errors, latency", "pid", func(f *flag.FlagSet) any {
		o := &probe.SyscallsOptions{}
		f.IntVar(&o.PID, "pid", 0, "`process` to follow")
		return o
	}},
	{"off-cpu", "off_cpu", "waits of one process for a core, by reason", "pid", func(f *flag.FlagSet) any {
		o := &probe.OffCPUOptions{}
		f.IntVar(&o.PID, "pid", 0, "`process` to follow")
		f.BoolVar(&o.Stacks, "stacks", false, "tell where it waits, which costs more")
		return o
	}},
}

// given holds what a command line asks for.
type given struct {
	collector  string
	options    []byte // JSON
	interval   time.Duration
	output     string // a file; "": none
	print      bool   // write lines to the standard output
	flushEvery int
	fsync      bool
	listen     string // an address; "": none
}

// parse reads the flags of a kind. For --help it writes the help to out and returns flag.ErrHelp.
func (k kind) parse(arguments []string, out io.Writer) (*given, error) {
	g := &given{collector: k.collector}
	f := flag.NewFlagSet("strap-probe "+k.name, flag.ContinueOnError)
	interval := f.Float64("interval", 5, "`seconds` between snapshots")
	output := f.String("output", "", "`file` to append to (default: the standard output, or with --listen none)")
	noOutput := f.Bool("no-output", false, "write to the standard output, whatever --output says")
	f.IntVar(&g.flushEvery, "flush-every", 12, "`lines` written to the file together")
	f.BoolVar(&g.fsync, "fsync", false, "wait for the disk at each flush")
	f.StringVar(&g.listen, "listen", "", "`address` for Prometheus: a port, of 127.0.0.1, or HOST:PORT")
	options := k.options(f)
	if err := parse(f, arguments, out); err != nil {
		return nil, err
	}
	if k.needs != "" && !isGiven(f, k.needs) {
		return nil, status.New(status.InvalidArgument, "%s needs --%s; %s --help lists the flags", k.name, k.needs, f.Name())
	}
	g.interval = time.Duration(*interval * float64(time.Second))
	if !(*interval > 0 && *interval < 1e9) || g.interval <= 0 { // NaN fails both comparisons
		return nil, status.New(status.InvalidArgument, "--interval %v: give seconds above 0 and below 10^9", *interval)
	}
	if g.flushEvery < 1 {
		return nil, status.New(status.InvalidArgument, "--flush-every %d: give 1 or more lines", g.flushEvery)
	}
	if !*noOutput {
		g.output = *output
	}
	g.print = *noOutput || *output == "" && g.listen == ""
	var err error
	if g.options, err = json.Marshal(options); err != nil {
		return nil, status.Wrap(status.Internal, err, "the options are no JSON")
	}
	return g, nil
}

func isGiven(f *flag.FlagSet, name string) (is bool) {
	f.Visit(func(one *flag.Flag) { is = is || one.Name == name })
	return is
}

// parse reads flags. Arguments that are no flags are an error. For --help it writes the help to out
// and returns flag.ErrHelp.
func parse(f *flag.FlagSet, arguments []string, out io.Writer) error {
	f.SetOutput(io.Discard)
	f.Usage = func() {}
	err := f.Parse(arguments)
	if err == flag.ErrHelp {
		fmt.Fprintf(out, "usage: %s [flags]\n\n", f.Name())
		describe(f, out)
		return err
	}
	if err == nil && f.NArg() > 0 {
		err = fmt.Errorf("%q is no flag", f.Arg(0))
	}
	if err != nil {
		return status.New(status.InvalidArgument, "%s; %s --help lists the flags", strings.Replace(err.Error(), " -", " --", 1), f.Name())
	}
	return nil
}

// describe lists the flags. It also shows values given before --help: scripts pass --output first,
// and its value is their default.
func describe(f *flag.FlagSet, out io.Writer) {
	f.VisitAll(func(one *flag.Flag) {
		value, usage := flag.UnquoteUsage(one)
		if one.DefValue != "" && one.DefValue != "0" && one.DefValue != "false" {
			usage += " (default: " + one.DefValue + ")"
		}
		if now := one.Value.String(); now != one.DefValue {
			usage += ", here " + now
		}
		fmt.Fprintf(out, "  %-20s %s\n", strings.TrimSpace("--"+one.Name+" "+strings.ToUpper(value)), usage)
	})
}

func help(out io.Writer) {
	fmt.Fprint(out, "usage: strap-probe KIND [flags]\n\nA line of JSON for each interval, until SIGINT or SIGTERM. The kinds:\n\n")
	for _, k := range kinds {
		fmt.Fprintf(out, "  %-9s %s\n", k.name, k.what)
	}
	fmt.Fprint(out, `
strap-probe KIND --help lists the flags of a kind. Besides there are

  check     what this machine can do, and the way out of what it cannot; --json
  version   of strap-probe

It ends with 2 for a bad argument, 3 where the kernel takes no programs from this user, 4 where it
cannot run them, 5 for a device, process or cgroup that is not there, else with 1 or 0.
`)
}
