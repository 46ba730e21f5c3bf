// strap-probe watches block devices, and writes a line of JSON for each interval.
package main

import (
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/libstrap/strap/libstrap/internal/probe"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "strap-probe:", err)
		os.Exit(exitCode(err))
	}
}

func run(arguments []string) error {
	flags := flag.NewFlagSet("strap-probe", flag.ExitOnError)
	interval := flags.Float64("interval", 5, "seconds between snapshots")
	var devices []string
	flags.Func("device", "follow this block device; may be given again (default: all)", func(name string) error {
		devices = append(devices, name)
		return nil
	})
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if !(*interval > 0 && *interval < 1e9) { // NaN is neither
		return status.New(status.InvalidArgument, "--interval %v: give seconds above 0 and below 10^9", *interval)
	}
	options, err := json.Marshal(map[string]any{"devices": devices})
	if err != nil {
		return err
	}
	block, err := probe.Start("block", options)
	if err != nil {
		return err
	}
	defer block.Close()
	stop := make(chan os.Signal, 1)
	signal.Notify(stop, os.Interrupt, syscall.SIGTERM)
	ticks := time.NewTicker(time.Duration(*interval * float64(time.Second)))
	defer ticks.Stop()
	out := json.NewEncoder(os.Stdout)
	for stopped := false; !stopped; {
		select {
		case <-ticks.C:
		case <-stop:
			stopped = true
		}
		snapshot, err := block.Snapshot()
		if err != nil {
			return err
		}
		if err := out.Encode(snapshot); err != nil {
			return status.Wrap(status.IO, err, "the snapshot was not written")
		}
	}
	return nil
}

// exitCode differs by what is missing, so that scripts can tell.
func exitCode(err error) int {
	for code, number := range map[status.Code]int{
		status.InvalidArgument: 2, status.Permission: 3, status.Unsupported: 4, status.NotFound: 5,
	} {
		if errors.Is(err, code) {
			return number
		}
	}
	return 1
}
