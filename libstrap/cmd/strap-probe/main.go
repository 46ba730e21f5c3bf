//go:build linux

// strap-probe watches this machine with programs in the kernel. It writes a line of JSON for each
// interval, serves metrics to Prometheus, or prints a table of what the machine can do.
package main

import (
	"errors"
	"flag"
	"fmt"
	"io"
	"os"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// version is set when a release is built.
var version = "devel"

func main() {
	if err := run(os.Args[1:], os.Stdout); err != nil {
		fmt.Fprintln(os.Stderr, "strap-probe:", err)
		os.Exit(exitCode(err))
	}
}

func run(arguments []string, out io.Writer) error {
	if len(arguments) == 0 {
		return status.New(status.InvalidArgument, "say what to watch: strap-probe help lists it")
	}
	var err error
	switch name, rest := arguments[0], arguments[1:]; name {
	case "help", "--help", "-h":
		help(out)
	case "version", "--version":
		fmt.Fprintln(out, "strap-probe", version)
	case "check":
		err = check(rest, out)
	default:
		err = watchKind(name, rest, out)
	}
	if errors.Is(err, flag.ErrHelp) {
		return nil // the help has been written
	}
	return err
}

func watchKind(name string, arguments []string, out io.Writer) error {
	for _, k := range kinds {
		if k.name == name {
			g, err := k.parse(arguments, out)
			if err != nil {
				return err
			}
			return watch(g, out)
		}
	}
	return status.New(status.InvalidArgument, "there is no %q: strap-probe help lists what there is", name)
}

// exitCode maps an error to an exit code, so that scripts can tell what is missing.
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
