package probe

import (
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"
)

func TestNamesOfAddresses(t *testing.T) {
	path := filepath.Join(t.TempDir(), "names")
	read := func(text string, parse func(string) (named, bool)) *nameList {
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return readNames(path, parse)
	}
	check := func(l *nameList, want map[uint64]string) {
		for address, name := range want {
			if got := l.find(address); got != name {
				t.Errorf("%#x is %q, want %q", address, got, name)
			}
		}
	}
	kernel := "2000 t second\t[module]\n1000 T first\n1800 d data\n3000 W third\nnonsense\n"
	check(read(kernel, parseKernelSymbol), map[uint64]string{
		0xfff: "", 0x1000: "first", 0x1fff: "first", 0x2000: "second", 0x4000: "third",
	})
	hidden := "0000000000000000 T first\n0000000000000000 T second\n"
	check(read(hidden, parseKernelSymbol), map[uint64]string{0x1000: ""})
	jit := "7f10 20 py::two words:/a.py\n7f00 0x10 first\nnonsense\n7f40 xyz bad\n"
	check(read(jit, parsePerfMap), map[uint64]string{
		0x7eff: "", 0x7f00: "first", 0x7f0f: "first", 0x7f10: "py::two words:/a.py", 0x7f30: "",
	})
	check(readNames(filepath.Join(path, "nowhere"), parsePerfMap), map[uint64]string{1: ""})
	pipe := filepath.Join(t.TempDir(), "pipe")
	if err := unix.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	check(readNames(pipe, parsePerfMap), map[uint64]string{1: ""})
}
