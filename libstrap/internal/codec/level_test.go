package codec

import (
	"testing"

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
