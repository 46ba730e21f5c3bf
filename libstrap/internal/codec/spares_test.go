package codec

import (
	"testing"

	"github.com/libstrap/strap/libstrap/internal/procs"
)

func TestOneValueForEachProcessorIsKept(t *testing.T) {
	made := 0
	kept := newSpares(func() int { made++; return -made })
	if v := kept.Get(); v != -1 {
		t.Errorf("the first value is %d", v)
	}
	for v := range procs.Count + 3 {
		kept.Put(v)
	}
	for v := range procs.Count {
		if got := kept.Get(); got != v {
			t.Errorf("%d, not %d", got, v)
		}
	}
	if v := kept.Get(); v != -2 || made != 2 {
		t.Errorf("%d of %d, where no value was kept", v, made)
	}
}
