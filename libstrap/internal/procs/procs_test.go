package procs_test

import (
	"runtime"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/procs"
)

func TestMoreThreadsAreNotMoreProcessors(t *testing.T) {
	count := procs.Count
	defer runtime.GOMAXPROCS(count)
	for _, need := range []struct{ n, threads int }{{1, count}, {count + 3, count + 3}, {count + 1, count + 3}} {
		procs.Need(need.n)
		if threads := runtime.GOMAXPROCS(0); threads != need.threads || procs.Count != count {
			t.Errorf("Need(%d): %d threads, not %d; %d processors, not %d", need.n, threads, need.threads, procs.Count, count)
		}
	}
}
