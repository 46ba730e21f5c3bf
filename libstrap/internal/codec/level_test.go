package codec

import (
	"math/rand/v2"
	"testing"
	"unsafe"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
)

// atEveryLevel runs a test with the loops of each level that this processor has.
func atEveryLevel(t *testing.T, test func(t *testing.T)) {
	for _, level := range Levels() {
		t.Run(level, func(t *testing.T) {
			defer UseLevel(UseLevel(level))
			test(t)
		})
	}
}

func TestALevelIsUsedByAllLoops(t *testing.T) {
	before := UseLevel(levelPortable)
	defer UseLevel(before)
	if before != Levels()[0] {
		t.Errorf("a process begins with %q of %q", before, Levels())
	}
	if h := newHuffman(); h.kernel || h.wide || usesWide() || crc32c.Function() != nil {
		t.Error("portable loops use kernels")
	}
	for i, level := range Levels() {
		UseLevel(level)
		if kernel, ok := kernelInUse(); kernel != i || ok != (level != levelPortable) {
			t.Errorf("%s: kernel %d, %v", level, kernel, ok)
		}
		if h := newHuffman(); h.kernel != (level != levelPortable) || h.wide != (level == levelWide) {
			t.Errorf("%s: Huffman codes by kernels %v, wide %v", level, h.kernel, h.wide)
		}
	}
}

// Converted values, rounded values and payloads are the same at each level. Frames of literals are
// too. Zstd payloads are an exception: the portable level encodes them with match finding. The test
// prints the checksum of all, which tests/packaging/test_arm64.py compares with that of another
// processor.
func TestEveryLevelWritesTheSameBytes(t *testing.T) {
	rng := rand.New(rand.NewPCG(21, 22))
	values := make([]float32, 300_001)
	if testing.Short() {
		values = values[:20_001]
	}
	for i := range values { // package math is avoided: its last bits differ between processors
		for range 4 {
			values[i] += float32(int32(rng.Uint32())>>16) / (1 << 14)
		}
	}
	var first uint32
	for i, level := range Levels() {
		before := UseLevel(level)
		got := checksumOfAll(t, values)
		UseLevel(before)
		if i == 0 {
			first = got
		} else if got != first {
			t.Errorf("%s writes other bytes than %s", level, Levels()[0])
		}
	}
	t.Logf("checksum %08x of %q", first, Levels())
}

// checksumOfAll returns the checksum of everything that the loops make of values.
func checksumOfAll(t *testing.T, values []float32) (crc uint32) {
	t.Helper()
	add := func(b []byte) { crc = crc32c.Update(crc, b) }
	n := len(values)
	var st Stats
	half := make([]byte, 2*n)
	for _, bits := range []int{int(Float16), 6} {
		Float32ToFloat16(unsafe.Pointer(&half[0]), unsafe.Pointer(&values[0]), n, bits, &st)
		add(half)
	}
	Float32ToFloat16(unsafe.Pointer(&half[0]), unsafe.Pointer(&values[0]), n, int(Float16), &st)
	for i, dt := range archived {
		rounded := make([]byte, 2*n)
		[]Mantissa{Float16, BFloat16}[i].Round(unsafe.Pointer(&rounded[0]), unsafe.Pointer(&half[0]), n, 4, &st)
		add(rounded)
		add(encodeInPlace(t, newEncoder(t, LZ4, 0), rounded))
		add(encodeLiterals(t, rounded))
		add(encodeArchive(t, NewArchiveEncoder(5e-4), half, dt))
	}
	return crc
}
