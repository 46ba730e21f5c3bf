// Tests that run the command, and its loop with a made-up collector.

//go:build linux

package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/probe"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// asProgram is an environment variable. If it is set, the test binary runs as strap-probe.
const asProgram = "STRAP_PROBE_PROGRAM"

func TestMain(m *testing.M) {
	if os.Getenv(asProgram) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// program returns a command that runs the test binary at `path` as strap-probe.
func program(path string, arguments ...string) *exec.Cmd {
	c := exec.Command(path, arguments...)
	c.Env = append(os.Environ(), asProgram+"=1")
	return c
}

// ended runs a command to its end. It returns its standard output, standard error and exit code.
func ended(t *testing.T, c *exec.Cmd) (out, complaint string, code int) {
	t.Helper()
	var stdout, stderr bytes.Buffer
	c.Stdout, c.Stderr = &stdout, &stderr
	err := c.Run()
	if exit := (*exec.ExitError)(nil); err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return stdout.String(), stderr.String(), c.ProcessState.ExitCode()
}

var machine = sync.OnceValue(probe.Check)

// works skips the test if this machine cannot run the collector.
func works(t *testing.T, kind string) {
	t.Helper()
	if !machine().Works(kind) {
		t.Skip("this machine does not let collectors run: strap-probe check says why")
	}
}

func kindOf(t *testing.T, name string) kind {
	t.Helper()
	for _, k := range kinds {
		if k.name == name {
			return k
		}
	}
	t.Fatalf("there is no kind %q", name)
	return kind{}
}

func TestFlags(t *testing.T) {
	options := `{"devices":null,"requests":0,"expire_s":0}`
	for line, want := range map[string]given{
		"":                             {options: []byte(options), interval: 5 * time.Second, print: true, flushEvery: 12},
		"--output a --output b":        {options: []byte(options), interval: 5 * time.Second, output: "b", flushEvery: 12},
		"--output a --no-output":       {options: []byte(options), interval: 5 * time.Second, print: true, flushEvery: 12},
		"--no-output --output a":       {options: []byte(options), interval: 5 * time.Second, print: true, flushEvery: 12},
		"--listen 9435":                {options: []byte(options), interval: 5 * time.Second, listen: "9435", flushEvery: 12},
		"--listen 9435 --output a":     {options: []byte(options), interval: 5 * time.Second, listen: "9435", output: "a", flushEvery: 12},
		"--listen 9435 --no-output":    {options: []byte(options), interval: 5 * time.Second, listen: "9435", print: true, flushEvery: 12},
		"--interval 9 --interval=0.25": {options: []byte(options), interval: 250 * time.Millisecond, print: true, flushEvery: 12},
		"--fsync --flush-every 1":      {options: []byte(options), interval: 5 * time.Second, print: true, flushEvery: 1, fsync: true},
		"--pid 3 --pid 4 --cgroup a --cgroup b": {
			options:  []byte(`{"pid":4,"cgroup":"b"}`),
			interval: 5 * time.Second, print: true, flushEvery: 12,
		},
		"--device a --device b": {
			options:  []byte(strings.Replace(options, "null", `["a","b"]`, 1)),
			interval: 5 * time.Second, print: true, flushEvery: 12,
		},
	} {
		want.collector = "block"
		got, err := kindOf(t, "block").parse(strings.Fields(line), io.Discard)
		if err != nil {
			t.Errorf("%s: %v", line, err)
			continue
		}
		// BlockOptions has more fields than the test names; those keep their defaults.
		var all, some map[string]any
		if json.Unmarshal(got.options, &all) != nil || json.Unmarshal(want.options, &some) != nil {
			t.Errorf("%s: %s is no JSON", line, got.options)
		}
		for name, value := range some {
			if !reflect.DeepEqual(all[name], value) {
				t.Errorf("%s: %s = %v", line, name, all[name])
			}
		}
		got.options, want.options = nil, nil
		if !reflect.DeepEqual(*got, want) {
			t.Errorf("%s: %+v, want %+v", line, *got, want)
		}
	}
}

func TestHelp(t *testing.T) {
	for line, says := range map[string]string{
		"help": "block ", "--help": "check ", "block --help": "--flush-every LINES", "system -h": "--interval SECONDS",
		"check --help": "--json", "block --output a -h": ", here a\n", "--version": "strap-probe " + version, "version": version,
	} {
		var out bytes.Buffer
		if err := run(strings.Fields(line), &out); err != nil || !strings.Contains(out.String(), says) {
			t.Errorf("%s: %v, %s", line, err, out.String())
		}
	}
	if _, err := kindOf(t, "block").parse([]string{"-h"}, io.Discard); err != flag.ErrHelp {
		t.Error(err)
	}
}

func TestBadArgumentsAreOneLineAndACode(t *testing.T) {
	folder := t.TempDir()
	for _, c := range []struct {
		line string
		code int
		says string
	}{
		{"", 2, "strap-probe help"},
		{"disk", 2, `"disk"`},
		{"block --interval 0", 2, "--interval 0: give seconds above 0"},
		{"block --interval -1", 2, "--interval -1: give"},
		{"block --interval NaN", 2, "--interval NaN: give"},
		{"block --interval 1e-12", 2, "--interval 1e-12: give"},
		{"block --interval 1e9", 2, "below 10^9"},
		{"block --interval soon", 2, `"soon" for flag --interval`},
		{"block --sometimes", 2, "strap-probe block --help lists the flags"},
		{"block sda", 2, `"sda" is no flag`},
		{"block --pid me", 2, `"me" for flag --pid`},
		{"system --device sda", 2, "--device"},
		{"syscalls", 2, "syscalls needs --pid"},
		{"off-cpu --pid me", 2, `"me" for flag --pid`},
		{"check --yaml", 2, "strap-probe check --help"},
		{"block --flush-every 0", 2, "--flush-every 0: give 1 or more"},
		{"block --listen nowhere", 2, "--listen"},
		{"block --output " + folder + "/missing/x", 1, "no such file or directory"},
		{"block --output " + os.Args[0], 1, "text file busy"},
	} {
		var out bytes.Buffer
		err := run(strings.Fields(c.line), &out)
		if err == nil || exitCode(err) != c.code || !strings.Contains(err.Error(), c.says) || strings.Contains(err.Error(), "\n") || out.Len() > 0 {
			t.Errorf("%s: %v, %s", c.line, err, out.String())
		}
	}
	out, complaint, code := ended(t, program(os.Args[0], "block", "--interval", "0"))
	if code != 2 || !strings.HasPrefix(complaint, "strap-probe: --interval 0: ") || strings.Count(complaint, "\n") != 1 || out != "" {
		t.Errorf("%d, %q, %q", code, complaint, out)
	}
}

// collector takes snapshots that only have a number. Each Snapshot returns `fails` too.
type collector struct {
	n     int
	fails error
}

func (c *collector) Snapshot() (any, error) {
	c.n++
	return map[string]int{"timestamp": c.n}, c.fails
}

func (c *collector) Close() {}

func TestLoop(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	to, err := open(&given{output: path, flushEvery: 2}, nil)
	if err != nil {
		t.Fatal(err)
	}
	ticks, stop, rotated := make(chan time.Time), make(chan os.Signal), make(chan os.Signal)
	over := make(chan error)
	go func() {
		over <- loop(&collector{}, to, controls{ticks, stop, rotated, func() bool { return false }})
	}()
	for range 3 {
		ticks <- time.Time{}
	}
	stop <- os.Interrupt
	if err := errors.Join(<-over, to.close()); err != nil {
		t.Fatal(err)
	}
	want := "{\"timestamp\":1}\n{\"timestamp\":2}\n{\"timestamp\":3}\n{\"timestamp\":4}\n"
	if got, err := os.ReadFile(path); err != nil || string(got) != want {
		t.Errorf("%s, %v", got, err)
	}
}

func TestClosedTerminalEndsIt(t *testing.T) {
	var out bytes.Buffer
	rotated := make(chan os.Signal, 1)
	rotated <- syscall.SIGHUP
	if err := loop(&collector{}, &outputs{print: &out}, controls{rotated: rotated, closed: func() bool { return true }}); err != nil {
		t.Error(err)
	}
	if out.String() != "{\"timestamp\":1}\n" {
		t.Error(out.String())
	}
}

func TestFailingCollectorEndsIt(t *testing.T) {
	ticks := make(chan time.Time, 1)
	ticks <- time.Time{}
	gone := status.New(status.NotFound, "process 1 has ended")
	if err := loop(&collector{fails: gone}, &outputs{}, controls{ticks: ticks}); err != gone || exitCode(err) != 5 {
		t.Error(err)
	}
}

// If the watched process ends, strap-probe ends too, without an error.
func TestEndsWithItsProcess(t *testing.T) {
	works(t, "syscalls")
	works(t, "off_cpu")
	for _, kind := range []string{"syscalls", "off-cpu"} {
		watched := exec.Command("sleep", "1")
		if err := watched.Start(); err != nil {
			t.Fatal(err)
		}
		c := program(os.Args[0], kind, "--pid", fmt.Sprint(watched.Process.Pid), "--interval", "0.1")
		var out, complaint bytes.Buffer
		c.Stdout, c.Stderr = &out, &complaint
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		watched.Wait()
		if err := c.Wait(); err != nil && c.ProcessState.ExitCode() != 5 { // 5: it ended before the watching began
			t.Errorf("%s: %v: %s", kind, err, complaint.String())
		} else if err == nil && !strings.Contains(out.String(), `"ended":true`) {
			t.Errorf("%s: %s", kind, out.String())
		}
	}
}

// eventually waits until `is` returns true, for at most 5 minutes.
func eventually(t *testing.T, what string, is func() bool) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Minute); !is(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("never: ", what)
		}
	}
}

func size(path string) int64 {
	info, err := os.Stat(path)
	if err != nil {
		return 0
	}
	return info.Size()
}

func TestRotationBySignal(t *testing.T) {
	works(t, "system")
	path := filepath.Join(t.TempDir(), "x.jsonl")
	c := program(os.Args[0], "system", "--interval", "0.05", "--output", path, "--flush-every", "1")
	c.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // without a terminal, like a service
	var complaint bytes.Buffer
	c.Stderr = &complaint
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a first line", func() bool { return size(path) > 0 })
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	if err := c.Process.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	eventually(t, "a line in a new file", func() bool { return size(path) > 0 })
	if err := c.Process.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := c.Wait(); err != nil {
		t.Fatalf("%v: %s", err, complaint.String())
	}
	for _, file := range []string{path + ".1", path} {
		text, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(string(text)) {
			if !json.Valid([]byte(line)) || !strings.HasSuffix(line, "}\n") {
				t.Errorf("%s: %q", file, line)
			}
		}
	}
}

func TestScrape(t *testing.T) {
	works(t, "block")
	works(t, "system")
	for kind, metric := range map[string]string{"block": "strap_block_losses_total{", "system": "strap_process_on_cpu_seconds_total{"} {
		c := program(os.Args[0], kind, "--interval", "0.05", "--listen", "0")
		var out bytes.Buffer
		c.Stdout = &out
		stderr, err := c.StderrPipe()
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Start(); err != nil {
			t.Fatal(err)
		}
		said, err := bufio.NewReader(stderr).ReadString('\n')
		if err != nil {
			t.Fatal(err)
		}
		_, address, _ := strings.Cut(strings.TrimSpace(said), "metrics are at ")
		eventually(t, metric, func() bool {
			answer, err := http.Get(address)
			if err != nil {
				t.Fatal(err)
			}
			defer answer.Body.Close()
			text, err := io.ReadAll(answer.Body)
			return err == nil && answer.StatusCode == http.StatusOK && strings.Contains(string(text), metric)
		})
		if err := c.Process.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := c.Wait(); err != nil || out.Len() > 0 {
			t.Errorf("%s: %v, and %s", kind, err, out.String())
		}
	}
}

func TestPrintsEachLineAtOnce(t *testing.T) {
	works(t, "block")
	c := program(os.Args[0], "block", "--interval", "0.05", "--output", "/nowhere/x", "--no-output")
	out, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewScanner(out)
	for range 3 {
		if !lines.Scan() || !json.Valid(lines.Bytes()) {
			t.Fatalf("%q, %v", lines.Text(), lines.Err())
		}
	}
	c.Process.Signal(syscall.SIGINT)
	for lines.Scan() { // read to the end, or the last line would block it
	}
	if err := c.Wait(); err != nil {
		t.Error(err)
	}
}

func TestFullStandardOutput(t *testing.T) {
	works(t, "block")
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip(err)
	}
	defer full.Close()
	c := program(os.Args[0], "block", "--interval", "0.05")
	var complaint bytes.Buffer
	c.Stdout, c.Stderr = full, &complaint
	if err := c.Run(); err == nil || c.ProcessState.ExitCode() != 1 || !strings.Contains(complaint.String(), "no space left") {
		t.Errorf("%v: %s", err, complaint.String())
	}
}

func TestCheck(t *testing.T) {
	r := machine()
	want := 0
	if !r.Works("block") || !r.Works("system") {
		want = 4
		if !r.Permitted() {
			want = 3
		}
	}
	out, complaint, code := ended(t, program(os.Args[0], "check", "--json"))
	var told probe.Report
	if err := json.Unmarshal([]byte(out), &told); err != nil || code != want {
		t.Fatalf("%v, %d, %s", err, code, complaint)
	}
	if !reflect.DeepEqual(&told, r) {
		t.Errorf("%+v, want %+v", told, r)
	}
	var shown bytes.Buffer
	table(r, &shown)
	for _, one := range append(r.Machine, r.Collectors...) {
		if !strings.Contains("\n"+shown.String(), "\n"+one.Name+" ") || !strings.Contains(shown.String(), one.Found) {
			t.Errorf("%+v is not in\n%s", one, shown.String())
		}
	}
}

// An ordinary user is told which capability is missing. With both, everything works.
func TestOrdinaryUser(t *testing.T) {
	if os.Getuid() != 0 {
		t.Skip("only root becomes another user")
	}
	works(t, "block")
	works(t, "system")
	folder, err := os.MkdirTemp("", "strap-probe-")
	if err != nil {
		t.Fatal(err)
	}
	defer os.RemoveAll(folder)
	if err := os.Chmod(folder, 0o755); err != nil {
		t.Fatal(err)
	}
	binary, err := os.ReadFile(os.Args[0])
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(folder, "strap-probe")
	if err := os.WriteFile(path, binary, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		line         string
		capabilities []uintptr
		code         int
		says         string
	}{
		{"block", nil, 3, "lacks CAP_BPF and CAP_PERFMON"},
		{"system", []uintptr{unix.CAP_BPF}, 3, "lacks CAP_PERFMON"},
		{"check", nil, 3, "setcap cap_bpf,cap_perfmon+ep"},
		{"check", []uintptr{unix.CAP_BPF, unix.CAP_PERFMON}, 0, "loads and counts"},
	} {
		p := program(path, strings.Fields(c.line)...)
		p.SysProcAttr = &syscall.SysProcAttr{
			Credential:  &syscall.Credential{Uid: 65534, Gid: 65534},
			AmbientCaps: c.capabilities,
		}
		out, complaint, code := ended(t, p)
		if code != c.code || !strings.Contains(out+complaint, c.says) {
			t.Errorf("%s with %v: %d\n%s%s", c.line, c.capabilities, code, out, complaint)
		}
	}
}

func TestExitCodes(t *testing.T) {
	for code, want := range map[status.Code]int{
		status.InvalidArgument: 2, status.Permission: 3, status.Unsupported: 4, status.NotFound: 5,
		status.IO: 1, status.Busy: 1,
	} {
		if got := exitCode(fmt.Errorf("x: %w", status.New(code, "y"))); got != want {
			t.Errorf("%v: %d", code, got)
		}
	}
}
