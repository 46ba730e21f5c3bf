// A test that the sets of loops are those of the processor.

//go:build cgo

package codec

import (
	"runtime"
	"slices"
	"testing"

	"golang.org/x/sys/cpu"
)

// On a processor with AVX-512, the tests must not run with AVX2 alone by mistake.
func TestLevelsAreThoseOfTheProcessor(t *testing.T) {
	want := []string{levelPortable}
	switch runtime.GOARCH {
	case "arm64":
		want = []string{"neon", levelPortable}
	case "amd64":
		if cpu.X86.HasAVX2 && cpu.X86.HasFMA {
			want = slices.Insert(want, 0, "avx2")
		}
		if x := cpu.X86; x.HasAVX512F && x.HasAVX512BW && x.HasAVX512DQ && x.HasBMI2 {
			want = slices.Insert(want, 0, levelWide)
		}
	}
	if got := Levels(); !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}
