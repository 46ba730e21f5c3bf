package probe

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// hostOf returns a host that look reads from files of a machine that can do everything. `changed`
// replaces some files; an empty text removes one. The text of proc/self is the process that the
// link leads to; if it is empty, all files below proc/self are missing.
func hostOf(t *testing.T, changed map[string]string) host {
	t.Helper()
	files := map[string]string{
		"proc/sys/kernel/osrelease":                 "6.1.0-28-amd64\n",
		"proc/sys/kernel/unprivileged_bpf_disabled": "2\n",
		"proc/self":         strconv.Itoa(os.Getpid()),
		"proc/self/status":  "Name:\tx\nCapEff:\t000001ffffffffff\nCapBnd:\t0000000000000000\n",
		"proc/self/uid_map": "         0          0 4294967295\n",
		"proc/self/mounts":  "proc /proc proc rw 0 0\ntracefs /sys/kernel/tracing tracefs rw 0 0\n",
		"proc/pressure/io":  "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
		lockdownFile:        "[none] integrity confidentiality\n",
		btfFile:             "btf",
	}
	maps.Copy(files, changed)
	root := t.TempDir()
	if self := files["proc/self"]; self == "" {
		maps.DeleteFunc(files, func(path, _ string) bool { return strings.HasPrefix(path, "proc/self/") })
	} else if err := errors.Join(os.MkdirAll(filepath.Join(root, "proc", self), 0o700), os.Symlink(self, filepath.Join(root, "proc/self"))); err != nil {
		t.Fatal(err)
	}
	delete(files, "proc/self")
	for path, text := range files {
		path = filepath.Join(root, path)
		if text == "" {
			continue
		}
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	h := look(root)
	h.memlock = 64 << 10
	return h
}

var (
	noCapabilities = map[string]string{"proc/self/status": "CapEff:\t0000000000000000\n"}
	onlyBPF        = map[string]string{"proc/self/status": "CapEff:\t0000008000000000\n"}
	inContainer    = map[string]string{"proc/self/uid_map": "0 100000 65536\n"}
	lockedDown     = map[string]string{lockdownFile: "none integrity [confidentiality]\n"}
	old            = map[string]string{"proc/sys/kernel/osrelease": "5.10.0\n"}
	withoutBTF     = map[string]string{btfFile: ""}
	outerProc      = map[string]string{"proc/self": "4711"}
	withoutSelf    = map[string]string{"proc/self": ""}
	withoutPSI     = map[string]string{"proc/pressure/io": ""}
)

func TestErrorsOfTheKernelSayTheWayOut(t *testing.T) {
	refused := fmt.Errorf("load program: %w", unix.EPERM)
	for _, c := range []struct {
		machine map[string]string
		err     error
		code    status.Code
		says    string
	}{
		{noCapabilities, refused, status.Permission, "CAP_BPF and CAP_PERFMON: run it as root, or strap-probe after once: sudo setcap cap_bpf,cap_perfmon+ep"},
		{onlyBPF, refused, status.Permission, "who lacks CAP_PERFMON:"},
		{inContainer, refused, status.Permission, "--userns=host"},
		{lockedDown, fmt.Errorf("unknown func: %w", unix.EINVAL), status.Unsupported, "lockdown=integrity"},
		{lockedDown, refused, status.Unsupported, "lockdown=integrity"},
		{old, refused, status.Permission, "64 KiB of RLIMIT_MEMLOCK: ulimit -l unlimited"},
		{nil, refused, status.Permission, "seccomp"},
		{withoutBTF, ebpf.ErrNotSupported, status.Unsupported, "CONFIG_DEBUG_INFO_BTF"},
		{old, ebpf.ErrNotSupported, status.Unsupported, "Linux 5.10.0 cannot run the programs: 5.12"},
		{nil, fmt.Errorf("bpf: %w", unix.ENOSYS), status.Unsupported, "the kernel cannot run the programs"},
		{nil, &ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"invalid bpf_context access off=24 size=8"}}, status.Unsupported, "cannot run the programs: "},
		{nil, unix.E2BIG, status.Internal, "were not loaded"},
	} {
		err := hostOf(t, c.machine).explain(c.err)
		if !errors.Is(err, c.code) || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%v on %v: %v", c.err, c.machine, err)
		}
	}
}

func TestFindings(t *testing.T) {
	for _, c := range []struct {
		machine map[string]string
		no      string // the name of the only finding with the verdict No; "": none
		says    string
	}{
		{nil, "", ""},
		{noCapabilities, "capabilities", "setcap cap_bpf,cap_perfmon+ep"},
		{onlyBPF, "capabilities", "setcap"},
		{inContainer, "capabilities", "--userns=host"},
		{lockedDown, "lockdown", "lockdown=integrity"},
		{old, "kernel", "5.12"},
		{withoutBTF, "BTF", "CONFIG_DEBUG_INFO_BTF"},
		{outerProc, "PID namespace", "mount -t proc"},
		{withoutSelf, "PID namespace", "mount -t proc"},
		{withoutPSI, "pressure (PSI)", "psi=1"},
		{map[string]string{"proc/pressure/io": "some avg10=x\n"}, "pressure (PSI)", "fails"},
		{map[string]string{lockdownFile: ""}, "", ""},
		{map[string]string{"proc/self/mounts": ""}, "", ""},
	} {
		for _, one := range hostOf(t, c.machine).findings() {
			switch {
			case (one.Verdict == No) != (one.Name == c.no):
				t.Errorf("%v: %+v", c.machine, one)
			case one.Found == "" || (one.Verdict == No) != (one.WayOut != ""):
				t.Errorf("%v says nothing: %+v", c.machine, one)
			case !strings.Contains(one.WayOut, c.says) && one.Verdict == No:
				t.Errorf("%v: the way out is %q", c.machine, one.WayOut)
			}
		}
	}
}

func TestOlderThan(t *testing.T) {
	for release, want := range map[string]bool{
		"5.11.22": true, "4.18.0-553.el8": true, "5.12.0": false, "6.0": false, "6.18.44-fc": false, "": false,
	} {
		if got := (host{release: release}).olderThan(5, 12); got != want {
			t.Errorf("%q: %v", release, got)
		}
	}
}

func TestCheckTriesEachCollector(t *testing.T) {
	r := Check()
	var kinds []string
	for _, one := range r.Collectors {
		kinds = append(kinds, one.Name)
		if one.Found == "" || r.Works(one.Name) != (one.Verdict == Yes) {
			t.Errorf("%+v", one)
		}
	}
	slices.Sort(kinds)
	if all := slices.Sorted(maps.Keys(collectors)); !slices.Equal(kinds, all) {
		t.Errorf("%v were tried, of %v", kinds, all)
	}
	if r.Works("nosuch") {
		t.Error("a collector that is not there works")
	}
}
