// Reads the settings that decide whether this process may load programs.

package probe

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

const (
	btfFile      = "sys/kernel/btf/vmlinux"
	lockdownFile = "sys/kernel/security/lockdown"
)

// host holds the settings that decide whether this process may load programs.
type host struct {
	release       string // of the kernel
	hasBTF        bool
	missing       []string // capabilities that this process lacks
	userNamespace bool     // not the first one: its capabilities do not count for BPF
	unprivileged  string   // kernel.unprivileged_bpf_disabled
	lockdown      string   // none, integrity, confidentiality; "" if unknown
	memlock       uint64   // RLIMIT_MEMLOCK in bytes
	tracefs       string   // where it is mounted; "" if it is not
	psi           []string // the resources that have a file in /proc/pressure
	psiError      error
	pidNamespace  string // the link /proc/self/ns/pid; "" if unknown
	self          bool   // /proc/self leads to this process
	ownProc       bool   // /proc numbers processes as this process's PID namespace does
}

// look reads the files of /proc and /sys below a root.
func look(root string) host {
	text := func(path string) string {
		content, _ := os.ReadFile(filepath.Join(root, path)) // a missing file reads as ""
		return strings.TrimSpace(string(content))
	}
	_, err := os.Stat(filepath.Join(root, btfFile))
	h := host{
		release:       text("proc/sys/kernel/osrelease"),
		hasBTF:        err == nil,
		missing:       missingCapabilities(text("proc/self/status")),
		userNamespace: !wholeNamespace(text("proc/self/uid_map")),
		unprivileged:  text("proc/sys/kernel/unprivileged_bpf_disabled"),
		lockdown:      chosen(text(lockdownFile)),
		tracefs:       mountOf("tracefs", text("proc/self/mounts")),
		self:          hasSelf(filepath.Join(root, "proc")),
		ownProc:       ownProc(filepath.Join(root, "proc")),
	}
	h.pidNamespace, _ = os.Readlink(filepath.Join(root, "proc/self/ns/pid"))
	stalls, err := pressure(filepath.Join(root, "proc/pressure"))
	h.psi, h.psiError = slices.Sorted(maps.Keys(stalls)), err
	var limit unix.Rlimit
	if unix.Getrlimit(unix.RLIMIT_MEMLOCK, &limit) == nil {
		h.memlock = limit.Cur
	}
	return h
}

// missingCapabilities returns the capabilities that loading programs needs and the text of
// /proc/self/status does not list as effective.
func missingCapabilities(status string) []string {
	effective := uint64(0)
	for line := range strings.Lines(status) {
		if mask, ok := strings.CutPrefix(line, "CapEff:"); ok {
			effective, _ = strconv.ParseUint(strings.TrimSpace(mask), 16, 64)
		}
	}
	if effective&(1<<unix.CAP_SYS_ADMIN) != 0 {
		return nil // it includes them
	}
	var out []string
	for _, c := range []struct {
		name string
		bit  int
	}{{"CAP_BPF", unix.CAP_BPF}, {"CAP_PERFMON", unix.CAP_PERFMON}} {
		if effective&(1<<c.bit) == 0 {
			out = append(out, c.name)
		}
	}
	return out
}

// wholeNamespace reports whether a uid_map is that of the first user namespace. The kernel accepts
// programs only with capabilities in that namespace.
func wholeNamespace(uids string) bool {
	words := strings.Fields(uids)
	return len(words) == 0 || len(words) == 3 && words[0] == "0" && words[1] == "0" && words[2] == "4294967295"
}

// chosen returns the word in brackets, as in "none [integrity] confidentiality".
func chosen(words string) string {
	_, after, _ := strings.Cut(words, "[")
	word, _, _ := strings.Cut(after, "]")
	return word
}

// mountOf returns the first mount point of a type of file system.
func mountOf(kind, mounts string) string {
	for line := range strings.Lines(mounts) {
		if words := strings.Fields(line); len(words) > 2 && words[2] == kind {
			return words[1]
		}
	}
	return ""
}

// hasSelf reports whether a folder like /proc lists this process, by any number. The /proc of a PID
// namespace does not list processes outside of it. A process sees such a /proc after nsenter
// --mount.
func hasSelf(folder string) bool {
	_, err := os.Stat(filepath.Join(folder, "self"))
	return err == nil
}

// ownProc reports whether a folder like /proc belongs to this process's PID namespace. In a /proc
// that was mounted outside of the namespace, the same numbers mean other processes.
func ownProc(folder string) bool {
	self, err := os.Readlink(filepath.Join(folder, "self"))
	return err == nil && self == strconv.Itoa(os.Getpid())
}

// olderThan reports whether the kernel's release, as "5.10.0-28-amd64", is below major.minor. It is
// false if the release cannot be parsed.
func (h host) olderThan(major, minor int) bool {
	var a, b int
	if _, err := fmt.Sscanf(h.release, "%d.%d", &a, &b); err != nil {
		return false
	}
	return a < major || a == major && b < minor
}

// memlockCounts reports whether RLIMIT_MEMLOCK bounds the memory of programs and their maps. Since
// Linux 5.11 the kernel charges it to the memory cgroup instead.
func (h host) memlockCounts() bool {
	return h.olderThan(5, 11) && h.memlock != unix.RLIM_INFINITY
}
