package memory

import (
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// A control group of version 2 whose parent has the lower limit.
func TestEachControlGroupLimits(t *testing.T) {
	root := t.TempDir()
	write := func(name, text string) {
		t.Helper()
		path := filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o777); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
	}
	write("membership", "0::/job/step\n")
	write("job/memory.max", "1000\n")
	write("job/memory.current", "900\n")
	write("job/step/memory.max", "max\n")
	write("job/step/memory.current", "900\n")
	var rooms []string
	for _, group := range memoryGroups(filepath.Join(root, "membership"), root) {
		room, limited := group.room()
		rooms = append(rooms, fmt.Sprint(room, limited))
	}
	if want := "[0 false 100 true 0 false]"; fmt.Sprint(rooms) != want {
		t.Errorf("%v, want %s", rooms, want)
	}
}

// RLIMIT_AS is ulimit -v in a shell.
func TestTheAddressSpaceLimits(t *testing.T) {
	var old syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_AS, &old); err != nil {
		t.Fatal(err)
	}
	if _, limited := addressSpace("/proc/self/statm"); limited {
		t.Skip("the tests run with a limit of their own")
	}
	limit := old
	limit.Cur = 1 << 61
	if err := syscall.Setrlimit(syscall.RLIMIT_AS, &limit); err != nil {
		t.Fatal(err)
	}
	defer syscall.Setrlimit(syscall.RLIMIT_AS, &old)
	room, limited := addressSpace("/proc/self/statm")
	if !limited || room <= 0 || room >= 1<<61 {
		t.Errorf("%d bytes, limited %v", room, limited)
	}
}
