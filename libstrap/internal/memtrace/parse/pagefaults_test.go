package parse

import (
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

func TestPageFaults(t *testing.T) {
	got, c := show(t, PageFaults, strings.Join([]string{
		// perf script
		"         python3 18500 [001] 15706.421477: exceptions:page_fault_user: address=0x5612ecb01040 ip=0x7fad4e8416a8 error_code=0x4",
		"         python3 18500 [001] 15706.421485: exceptions:page_fault_user: address=0x5612ecb0ceb0 ip=0x7fad4e843620 error_code=0x7 ffffffff821f31c0 exc_page_fault+0x2f0 ([kernel.kallsyms])",
		"         python3 18500/18501 15706.421486:          1                page-faults:     7ffcadf4d408 [unknown] ([stack])     7fad4e843620 dl_main+0x2660 (/usr/lib/ld-linux-x86-64.so.2)",
		"         python3 18500 [001] 15706.421487:       1000                  cpu-clock:     7fad4e843620 main+0x2660 (/x)",
		"	    7fad4e843620 main+0x2660 (/x)",
		// tracefs
		"# tracer: nop",
		"            bash-18494   [001] d..1. 15707.640661: page_fault_user: address=0x556566d7debc ip=0x55653df462c3 error_code=0x7",
		"   web-server-18595   (  18590) [001]  15708.148043: page_fault_kernel: address=0x7f1485b6aa10 ip=__put_user_4 error_code=0x3",
		"          <idle>-0     (-------) [000] 15708.2: sched_switch: prev_comm=swapper",
		"CPU:1 [LOST 55 EVENTS]",
	}, "\n"), Options{})
	same(t, got,
		"15706421477000 load 5612ecb01040 0x7fad4e8416a8  cpu=1 thread=18500",
		"15706421485000 store 5612ecb0ceb0 0x7fad4e843620  cpu=1 thread=18500",
		"15706421486000 load 7ffcadf4d408 dl_main /usr/lib/ld-linux-x86-64.so.2 thread=18501",
		"15707640661000 store 556566d7debc 0x55653df462c3  cpu=1 thread=18494",
		"15708148043000 store 7f1485b6aa10 __put_user_4  cpu=1 thread=18595",
	)
	sameCounts(t, c, 5, 5, 0)
}

func TestMalformedPageFaults(t *testing.T) {
	_, c := show(t, PageFaults, strings.Join([]string{
		"a 1 [0] 1.0: page_fault_user: address=0x55 ip=0x1",
		"a 1 [0] 1.0: page_fault_user: address=0x55 ip=0x1 error_code=0x",
		"a 1 [0] 1.0: page_fault_user: address=0x55 ip=0x1 error_code=0x7z",
		"a 1 [0] 1.0: page_fault_user: address=0x11112222333344445 ip=0x1 error_code=0x7",
		"a 1 [0] 1.0: page_fault_user: address=main ip=0x1 error_code=0x7",
		"a 1 [0] 1.0: page_fault_user: ad", // torn
		"a 1 [0] 1.0: exceptions:page_fault_kernel:",
		"a-1 [0] 1.0 page_fault_user: address=0x55 ip=0x1 error_code=0x7",
		"a-1 (1 [0] 1.0: page_fault_user: address=0x55 ip=0x1 error_code=0x7",
	}, "\n"), Options{})
	sameCounts(t, c, 0, 0, 9)
}

func TestPageFaultsAreFirstTouches(t *testing.T) {
	for format, want := range map[Format]trace.Kind{PerfScript: trace.Accesses, Lackey: trace.Accesses, PageFaults: trace.FirstTouches} {
		s, err := OpenReader(format, strings.NewReader(""), Options{})
		if err != nil {
			t.Fatal(err)
		}
		if kind, err := trace.KindOf(s.Schema()); kind != want || err != nil {
			t.Errorf("%s: kind %s, %v", format, kind, err)
		}
		s.Release()
	}
}
