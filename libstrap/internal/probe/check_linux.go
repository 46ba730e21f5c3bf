// Tells what a machine has, and which collectors work on it.

package probe

import (
	"cmp"
	"fmt"
	"strings"
)

// Verdict says whether a machine has what a Finding names.
type Verdict string

const (
	Yes  Verdict = "yes"
	No   Verdict = "no"
	Info Verdict = "info" // for information: the collectors do not need it
)

const capabilities = "capabilities"

// Finding says whether a machine has one of the things that the collectors need.
type Finding struct {
	Name    string  `json:"name"`
	Verdict Verdict `json:"verdict"`
	Found   string  `json:"found"`
	WayOut  string  `json:"way_out,omitempty"` // how to get it; only with No
}

// Report lists what a machine has, and which collectors work on it.
type Report struct {
	Machine    []Finding `json:"machine"`
	Collectors []Finding `json:"collectors"` // Name is the kind, as for Start
}

// Works reports whether the collector of this kind works.
func (r *Report) Works(kind string) bool { return verdictOn(kind, r.Collectors) == Yes }

// Permitted reports whether this process has the capabilities to load programs. It is true if the
// capabilities are not known.
func (r *Report) Permitted() bool { return verdictOn(capabilities, r.Machine) != No }

func verdictOn(name string, findings []Finding) Verdict {
	for _, one := range findings {
		if one.Name == name {
			return one.Verdict
		}
	}
	return No
}

// checked lists the collectors in the order of a report, with the options to try each with.
var checked = []struct{ kind, options string }{
	{"block", ""},
	{"system", ""},
	{"syscalls", ""}, // of this process
	{"off_cpu", ""},
}

// Check reads the machine's settings and starts each collector for a moment. It changes nothing.
func Check() *Report {
	r := &Report{Machine: look("/").findings()}
	for _, one := range checked {
		r.Collectors = append(r.Collectors, try(one.kind, one.options))
	}
	return r
}

// try starts a collector, takes one snapshot and closes it.
func try(kind, options string) Finding {
	c, err := Start(kind, []byte(options))
	if err == nil {
		_, err = c.Snapshot()
		c.Close()
	}
	if err != nil {
		return Finding{Name: kind, Verdict: No, Found: err.Error()}
	}
	return Finding{Name: kind, Verdict: Yes, Found: "loads and counts"}
}

func (h host) findings() []Finding {
	return []Finding{
		verdict("kernel", !h.olderThan(5, 12), "Linux "+h.release, "5.12 or newer is needed"),
		verdict("BTF", h.hasBTF, "/"+btfFile, "boot a kernel with CONFIG_DEBUG_INFO_BTF=y, as the distributions' are"),
		h.capabilities(),
		{Name: "unprivileged BPF", Verdict: Info, Found: unprivileged(h.unprivileged)},
		h.lockedDown(),
		h.memory(),
		h.tracing(),
		h.processes(),
		h.stalls(),
	}
}

func verdict(name string, ok bool, found, wayOut string) Finding {
	if ok {
		return Finding{Name: name, Verdict: Yes, Found: found}
	}
	return Finding{Name: name, Verdict: No, Found: found, WayOut: wayOut}
}

func (h host) capabilities() Finding {
	switch {
	case !h.self:
		return Finding{Name: capabilities, Verdict: Info, Found: "not known: " + noSelf}
	case len(h.missing) > 0:
		return verdict(capabilities, false, "without "+strings.Join(h.missing, " and "), "run it as root, or once: "+setcap)
	case h.userNamespace:
		return verdict(capabilities, false, "those of a user namespace, which do not count", "run it outside of the container, or in one with --privileged --userns=host")
	}
	return verdict(capabilities, true, "CAP_BPF, CAP_PERFMON", "")
}

// unprivileged describes kernel.unprivileged_bpf_disabled. Users often blame this setting when a
// collector does not start, but the collectors need the capabilities whatever its value.
func unprivileged(setting string) string {
	if setting == "" {
		return "the kernel has no such setting"
	}
	return "kernel.unprivileged_bpf_disabled = " + setting + "; the collectors need the capabilities in any case"
}

func (h host) lockedDown() Finding {
	if h.lockdown == "" {
		return Finding{Name: "lockdown", Verdict: Info, Found: "not known: there is no /" + lockdownFile}
	}
	return verdict("lockdown", h.lockdown != "confidentiality", h.lockdown,
		"boot with lockdown=integrity, or without Secure Boot")
}

func (h host) memory() Finding {
	if !h.olderThan(5, 11) {
		return verdict("locked memory", true, "no limit: since Linux 5.11 RLIMIT_MEMLOCK does not bound programs", "")
	}
	// A process with CAP_SYS_RESOURCE lifts its own limit. Whether that works shows when a
	// collector loads.
	if h.memlockCounts() {
		return Finding{Name: "locked memory", Verdict: Info, Found: fmt.Sprintf("RLIMIT_MEMLOCK is %d KiB; root lifts it for itself, others need: ulimit -l unlimited (as root)", h.memlock>>10)}
	}
	return verdict("locked memory", true, "no limit", "")
}

func (h host) tracing() Finding {
	if !h.self {
		return Finding{Name: "tracefs", Verdict: Info, Found: "not known: " + noSelf + "; not needed here"}
	}
	if h.tracefs == "" {
		return Finding{Name: "tracefs", Verdict: Info, Found: "not mounted, nor needed here; for other tools: sudo mount -t tracefs tracefs /sys/kernel/tracing"}
	}
	return Finding{Name: "tracefs", Verdict: Info, Found: h.tracefs + "; not needed here"}
}

// firstPIDNamespace is the link of the machine's own PID namespace. The kernel fixes its number.
const firstPIDNamespace = "pid:[4026531836]"

func (h host) processes() Finding {
	found := "this one's own; system has the processes within, as it numbers them"
	if h.pidNamespace == firstPIDNamespace {
		found = "the machine's"
	}
	if !h.self {
		found = noSelf
	}
	return verdict("PID namespace", h.ownProc, found, foreignProc)
}

func (h host) stalls() Finding {
	if h.psiError != nil {
		return verdict("pressure (PSI)", false, h.psiError.Error(), "the collector system fails by it")
	}
	return verdict("pressure (PSI)", len(h.psi) > 0, cmp.Or(strings.Join(h.psi, ", "), "/proc/pressure has none"),
		"boot with psi=1; without, the collector system leaves it out")
}
