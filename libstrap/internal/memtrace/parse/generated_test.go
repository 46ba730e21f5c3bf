// Compares the parsers with their twins on lines that are made from pieces.

package parse

import (
	"math/rand/v2"
	"strings"
	"testing"
)

// Lines made from pieces reach code that random bytes do not reach.
func TestGeneratedLinesGiveTheTwinsRows(t *testing.T) {
	slots := [][]string{
		{"", "   ", "\t"},
		{"", "llama", "llama cpp 12", ":-1", "a-1", "kworker/0:1-ev", "[1]", "1.5:"},
		{" ", "     ", ""},
		{"12", "12/13", "-1", "-1/-1", "x", "1234567890123456789", "12/"},
		{" ", "   (   12)", " (-------)"},
		{" [000]", " [12]   ", "", " [x]", " [0] d..1."},
		{" 15333.704933:", " 1.123456789012:", "   0.0:", " 9223372036.9:", " 12:"},
		{" ", "          4000 ", ""},
		{"cpu/mem-loads,ldlat=30/P:", "cpu/MEM-STORES/P:", "cpu-clock:", "cycles:P:", "ibs_op//:", "exceptions:page_fault_user:", "page-faults:", "4 minor-faults:u:", "PERF_RECORD_MMAP2 1/1: [0x5]:", ":", "a b:"},
		{" ", "     ", "", "      ", "  ", strings.Repeat(" ", 28), strings.Repeat(" ", 30)},
		{"7f3c5a2b1040", "0", "FFFFFFFFFFFFFFFF", "10000000000000000", "00000000000000001", "address=0x7f ip=0x40 error_code=0x6", "address=0x7f ip=main error_code=0x4 ", "zz"},
		{"", " data+0x1 (/dev/x)", " [unknown] ([heap])", " a (b)"},
		{"", "", "        68100142 |OP LOAD|LVL L1 hit|SNP None|TLB L1 or L2 hit|LCK No|BLK  N/A", " 5080184 L1 miss|SNP N/A|TLB N/A|LCK N/A",
			" 1e05080021 |OP N/A|LVL N/A|SNP N/A|TLB N/A|LCK N/A|BLK Data Add", " 3600800044 |OP STORE|LVL Remote RAM (1 hop) hit|SNP HitM|TLB", "|OP 1|SNP "},
		{"", "               27", " 27", "               27              12", " fade"},
		{"", "     55d0c0a01a3f", " 401136", " dead", "  ffffffff8175336a"},
		{"", " main", " main+0x1f", " f(int, char)+0xA", " (anonymous namespace)::f()", " operator+", " add+10", " \xff\xfe"},
		{"", " (/usr/lib/x.so)", " /usr/lib/x.so", " ([kernel.kallsyms])", " (/x (deleted))", " (inlined)", " ((", " )"},
		{"", "        1a2b3c040", " 4K N/A", " trailing", "  "},
	}
	r := rand.New(rand.NewPCG(7, 8))
	accepted, draws := 0, 20_000
	if testing.Short() {
		draws = 300
	}
	for range draws {
		var line strings.Builder
		usual := r.IntN(4) != 0 // mostly take one of the first two pieces of the head
		for i, pieces := range slots {
			n := len(pieces)
			if usual && i < 11 {
				n = 2
			}
			line.WriteString(pieces[r.IntN(n)])
		}
		accepted += compareLine(t, &perfScript{cyclesPerNS: 2.5}, line.String(), twinPerfScript)
		compareLine(t, &pageFaults{perfScript{cyclesPerNS: 2.5}}, line.String(), twinPageFaults)
		if t.Failed() {
			return
		}
	}
	if accepted < draws/5 {
		t.Errorf("%d rows only", accepted)
	}
}
