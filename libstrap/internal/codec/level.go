// Chooses the set of loops in use: those in C for an instruction set, or their twins in Go.

package codec

import (
	"fmt"
	"slices"
	"sync/atomic"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
)

const (
	levelWide     = "avx512"
	levelPortable = "portable"
)

// level is the index of the kernel in use, or len(kernels) for the twins in Go.
var level atomic.Int32

// Levels returns the sets of loops that this processor can run, by name, the fastest first: "avx512",
// "avx2" or "neon", and "portable", which is Go alone. A set has the loops that convert, round,
// quantise, code and take checksums.
func Levels() []string { return append(slices.Clone(kernels), levelPortable) }

// UseLevel makes the whole process use one of Levels, and returns the level that was in use. It is for
// tests: they check each level on each machine that can run it. A process begins with the fastest
// level. An encoder keeps the level that it was made with.
func UseLevel(name string) (before string) {
	i := slices.Index(Levels(), name)
	if i < 0 {
		panic(fmt.Sprintf("codec: level %q: this processor has %q", name, Levels()))
	}
	crc32c.UseKernel(name == levelWide)
	return Levels()[level.Swap(int32(i))]
}

// kernelInUse returns the index of the kernel in use. ok is false if the twins in Go are in use.
func kernelInUse() (kernel int, ok bool) {
	kernel = int(level.Load())
	return kernel, kernel < len(kernels)
}

// usesWide reports whether the loops with AVX-512 are in use.
func usesWide() bool {
	kernel, ok := kernelInUse()
	return ok && kernels[kernel] == levelWide
}
