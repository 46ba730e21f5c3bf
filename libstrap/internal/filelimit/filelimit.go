// Package filelimit lets a test write until the disk is full.
//
// A limit on the size of files acts as a full disk: a write beyond it fails with EFBIG. The limit
// holds for every file of the process. `go test` keeps a log of the files that a test opens, and a
// write to that log under a limit fails the whole run. So a test with a limit runs in its own
// process, which keeps no log.
package filelimit

import (
	"math"
	"os"
	"os/exec"
	"os/signal"
	"syscall"
	"testing"
)

// child is the environment variable that names the test which a process runs.
const child = "STRAP_FILELIMIT_TEST"

// Alone runs the calling test in a process of its own, and reports whether this is that process. In
// the other process the test is over when Alone returns, so the caller returns at once.
//
//	if !filelimit.Alone(t) {
//		return
//	}
func Alone(t *testing.T) bool {
	t.Helper()
	if os.Getenv(child) == t.Name() {
		signal.Ignore(syscall.SIGXFSZ)
		return true
	}
	c := exec.CommandContext(t.Context(), os.Args[0], "-test.run=^"+t.Name()+"$", "-test.v", "-test.timeout=5m")
	c.Env = append(os.Environ(), child+"="+t.Name())
	if out, err := c.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
	return false
}

// Set makes writes beyond the first n bytes of a file fail, until lift is called.
func Set(t *testing.T, n uint64) (lift func()) {
	t.Helper()
	if os.Getenv(child) == "" {
		t.Fatal("a limit on files needs a process of its own: call Alone first")
	}
	set(t, n)
	return func() { set(t, math.MaxInt64) }
}

// set changes the soft limit. It cannot exceed the hard limit.
func set(t *testing.T, n uint64) {
	t.Helper()
	var limit syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
	limit.Cur = min(n, limit.Max)
	if err := syscall.Setrlimit(syscall.RLIMIT_FSIZE, &limit); err != nil {
		t.Fatal(err)
	}
}
