// Prints what this machine can do, for `strap-probe check`.

//go:build linux

package main

import (
	"encoding/json"
	"flag"
	"fmt"
	"io"

	"github.com/libstrap/strap/libstrap/internal/probe"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// check prints what this machine can do. It returns an error if block or system does not work.
func check(arguments []string, out io.Writer) error {
	f := flag.NewFlagSet("strap-probe check", flag.ContinueOnError)
	asJSON := f.Bool("json", false, "as JSON")
	if err := parse(f, arguments, out); err != nil {
		return err
	}
	r := probe.Check()
	if *asJSON {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		if err := encoder.Encode(r); err != nil {
			return status.Wrap(status.IO, err, "the report was not written")
		}
	} else {
		table(r, out)
	}
	if r.Works("block") && r.Works("system") {
		return nil
	}
	if !r.Permitted() {
		return status.New(status.Permission, "not all works here for this user: the noes say the way out")
	}
	return status.New(status.Unsupported, "not all works here: the noes say the way out")
}

func table(r *probe.Report, out io.Writer) {
	for _, list := range [][]probe.Finding{r.Machine, r.Collectors} {
		for _, one := range list {
			fmt.Fprintf(out, "%-17s %-5s %s\n", one.Name, one.Verdict, one.Found)
			if one.WayOut != "" {
				fmt.Fprintf(out, "%-24s%s\n", "", one.WayOut)
			}
		}
		fmt.Fprintln(out)
	}
}
