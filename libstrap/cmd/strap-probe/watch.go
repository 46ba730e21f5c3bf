// The loop that takes snapshots, and the outputs that it writes them to.

//go:build linux

package main

import (
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/libstrap/strap/libstrap/internal/probe"
	"github.com/libstrap/strap/libstrap/internal/probe/jsonl"
	"github.com/libstrap/strap/libstrap/internal/probe/metrics"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// watch takes snapshots until a signal stops it.
func watch(g *given, out io.Writer) (err error) {
	to, err := open(g, out)
	if err != nil {
		return err
	}
	defer func() {
		if bad := to.close(); err == nil {
			err = bad
		} else if bad != nil {
			report(bad.Error())
		}
	}()
	collector, err := probe.Start(g.collector, g.options)
	if err != nil {
		return err
	}
	defer collector.Close()
	ticks := time.NewTicker(g.interval)
	defer ticks.Stop()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	c := controls{ticks: ticks.C, stop: stop, closed: terminalClosed()}
	if to.file != nil {
		rotated := make(chan os.Signal, 1)
		signal.Notify(rotated, syscall.SIGHUP)
		c.rotated = rotated
	}
	return loop(collector, to, c)
}

// controls are the events that drive loop. Channels may be nil.
type controls struct {
	ticks         <-chan time.Time
	stop, rotated <-chan os.Signal
	closed        func() bool // reports whether SIGHUP came because the terminal was closed
}

// loop takes a snapshot at each tick, and a last one when it is stopped.
func loop(collector probe.Collector, to *outputs, c controls) error {
	for stopped := false; !stopped; {
		select {
		case <-c.ticks:
		case <-c.stop:
			stopped = true
		case <-c.rotated:
			if stopped = c.closed(); !stopped {
				to.reopen()
				continue
			}
		}
		snapshot, err := collector.Snapshot()
		if err != nil {
			return err
		}
		if err := to.write(snapshot); err != nil {
			return err
		}
		// A process that has ended makes no more counts.
		if of, ok := snapshot.(interface{ HasEnded() bool }); ok && of.HasEnded() {
			report("the process has ended")
			stopped = true
		}
	}
	return nil
}

// terminalClosed returns a function that reports whether this program had a terminal and has lost
// it since. The function always returns false under nohup, or if there was no terminal.
func terminalClosed() func() bool {
	had := hasTerminal() && !signal.Ignored(syscall.SIGHUP)
	return func() bool { return had && !hasTerminal() }
}

func hasTerminal() bool {
	f, err := os.Open("/dev/tty")
	if err == nil {
		f.Close()
	}
	return err == nil
}

// outputs holds the destinations of snapshots.
type outputs struct {
	print    io.Writer         // receives each line at once; nil: not asked for
	file     *jsonl.Writer     // nil: not asked for
	metrics  *metrics.Exporter // nil: not asked for
	listener net.Listener      // for the metrics
}

// open opens the outputs that the command line asks for.
func open(g *given, out io.Writer) (o *outputs, err error) {
	o = &outputs{}
	if g.print {
		o.print = out
	}
	if g.listen != "" {
		if o.listener, err = metrics.Listen(g.listen); err != nil {
			return nil, err
		}
	}
	if g.output != "" {
		o.file, err = jsonl.Open(g.output, jsonl.Options{FlushEvery: g.flushEvery, Fsync: g.fsync, Report: report})
		if err != nil {
			_ = o.close()
			return nil, err
		}
	}
	if o.listener != nil {
		o.metrics = metrics.New()
		go o.metrics.Serve(o.listener)
		report("metrics are at http://" + o.listener.Addr().String() + "/metrics")
	}
	return o, nil
}

func report(message string) { fmt.Fprintln(os.Stderr, "strap-probe:", message) }

func (o *outputs) write(snapshot any) error {
	if o.metrics != nil {
		o.metrics.Add(snapshot)
	}
	if o.print == nil && o.file == nil {
		return nil
	}
	line, err := json.Marshal(snapshot)
	if err != nil {
		return status.Wrap(status.Internal, err, "a snapshot is no JSON")
	}
	if o.file != nil {
		o.file.Write(line)
	}
	if o.print != nil {
		if _, err := o.print.Write(append(line, '\n')); err != nil {
			return status.Wrap(status.IO, err, "the snapshot was not written")
		}
	}
	return nil
}

// reopen continues in the file that now has the path. If that fails it reports the error and keeps
// the old file.
func (o *outputs) reopen() {
	if err := o.file.Reopen(); err != nil {
		report(err.Error() + "; the file before is written on")
	}
}

func (o *outputs) close() error {
	if o.listener != nil {
		o.listener.Close()
	}
	if o.file != nil {
		return o.file.Close()
	}
	return nil
}
