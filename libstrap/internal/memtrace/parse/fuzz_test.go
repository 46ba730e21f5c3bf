package parse

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// FuzzPerfScript and FuzzPageFaults compare the parsers with their twins, line by line.
func FuzzPerfScript(f *testing.F) {
	for _, seed := range perfSeeds() {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		compare(t, &perfScript{cyclesPerNS: 2.5}, text, twinPerfScript)
	})
}

func FuzzPageFaults(f *testing.F) {
	for _, seed := range append(perfSeeds(),
		"python3 18500 [001] 15706.421477: exceptions:page_fault_user: address=0x5612ecb01040 ip=0x7fad4e8416a8 error_code=0x4",
		"  web-server-18595   (  18590) [001]  15708.148043: page_fault_kernel: address=0x7f1485b6aa10 ip=__put_user_4 error_code=0x3 more",
		"bash-18494   [001] d..1. 15707.640661: page_fault_user: address=0x556566d7debc ip=0x55653df462c3 error_code=0x7",
		"a-1 (-------) [000] 15708.2: sched_switch: prev_comm=swapper\nCPU:1 [LOST 55 EVENTS]",
	) {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		compare(t, &pageFaults{perfScript{cyclesPerNS: 2.5}}, text, twinPageFaults)
	})
}

func perfSeeds() []string {
	var b bytes.Buffer
	r := rand.New(rand.NewPCG(5, 6))
	documented(&b, r, 1)
	memRecord(&b, r, 2)
	return append(strings.Split(b.String(), "\n"), long(8),
		"llama cli 12 1234 [000] 100.123456789987: 1 MEM-STORES: 7F00 operator+(A, B)+0x1f (/tmp/a (deleted)) 1a2b 4K N/A\r\n",
		"a 1/2 1.5: page-faults:     7efe468c3a60 f+0x0 (/x)     7efe468c3a61 g(int, char)+0x1 /y\n",
		"a -1/-1 [1] 1.5: x:     7efe468c3a60   12   34 dead (inlined)",
		"a 1 1.5:   x:y:     0   1e05080021 |OP N/A|LVL N/A|SNP N/A|TLB N/A|LCK N/A|BLK  N/A   0",
		"a 1 1.5:   x:y:     1   5080144 L1 or L2 hit|SNP N/A|TLB N/A|LCK N/A    7    7f0000001000",
		"w 1 1.5:   3 cpu-clock:                0 ffffffff821f5127 f+0xd7 ([k])\nw 1 1.5:   3 cycles:P: 1 f\nw 1 1.5: x:      560c9823e143 f (/x)\nw 1 1.5: x: \n\t 1143 f (/x)",
		"w 1 1.5:   3 page-faults:     7f4fae785010 [unknown] (//anon)\n\t            1143 touch+0xa (/tmp/w)\n",
		"a 1 [0] 1.0: PERF_RECORD_EXIT(1:1)\n# x\n\n\t 7f00 f (/x)\n\xff\x00",
		"0 0.0: 0: 0 ()0\n0 0.0: PERF_RECORD\n00 [0] 0.0: fault: address=0x00ip=error_code=0x0",
	)
}

// compare parses each line of a text alone and compares it with the twin. Then it parses the text as
// a whole and compares the numbers of rows.
func compare(t *testing.T, p parser, text []byte, twin func(string, float64) (string, verdict)) {
	rows := 0
	for _, line := range lines(text) {
		rows += compareLine(t, p, line, twin)
	}
	if whole := checkLines(t, p, text); whole.rows.len() != rows {
		t.Fatalf("%d rows, %d of the lines alone", whole.rows.len(), rows)
	}
}

// compareLine compares one line with the twin, and returns the number of its rows.
func compareLine(t *testing.T, p parser, line string, twin func(string, float64) (string, verdict)) int {
	t.Helper()
	want, what := twin(line, 2.5)
	b := checkLines(t, p, []byte(line+"\r\n"))
	got, rows := "", b.rows.len()
	if rows == 1 {
		got = showParsed(b.rows, 0)
	}
	if got != want || (what == accepted) != (rows == 1) || (what == skipped) != (b.skipped == 1) || (what == unaddressed) != (b.unaddressed == 1) {
		t.Fatalf("%q:\n got %d rows, %d skipped: %s\nwant verdict %d: %s", line, rows, b.skipped, got, what, want)
	}
	return rows
}

func FuzzLackey(f *testing.F) {
	for _, seed := range []string{lackeyText, " L 1ffe,8\r\n M 2,18446744073709551615", "I  04016b70,3\n S ffffffffffffffff,1"} {
		f.Add([]byte(seed), true)
		f.Add([]byte(seed), false)
	}
	f.Fuzz(func(t *testing.T, text []byte, instructions bool) {
		b := checkLines(t, &lackey{instructions: instructions}, text)
		for i := range b.rows.len() {
			if n := b.rows.length.values[i]; n < 1 || uint64(n-1) > ^b.rows.address[i] {
				t.Fatalf("row %d: %d bytes at %#x", i, n, b.rows.address[i])
			}
		}
	})
}

// checkLines parses a text as one block, checks the counts and the samples, and checks the record
// made from the rows.
func checkLines(t *testing.T, p parser, text []byte) *block {
	t.Helper()
	b := &block{text: text}
	b.parse(p, 1)
	taken := int64(len(lines(text))) - b.skipped - b.malformed - b.unaddressed
	rows := int64(b.rows.len())
	if _, twice := p.(*lackey); b.lines != int64(len(lines(text))) || rows < taken || rows > taken && (!twice || rows > 2*taken) {
		t.Fatalf("%d lines of %d, %d rows, %d skipped, %d malformed", b.lines, len(lines(text)), rows, b.skipped, b.malformed)
	}
	c := newColumns(trace.Schema(trace.Accesses), "r", nil)
	record := c.record(b.rows, 0, b.rows.len(), 0)
	defer record.Release()
	if err := checkRecord(record, "r", 0); err != nil {
		t.Fatal(err)
	}
	for _, s := range b.samples {
		if s.Line < 1 || s.Line > b.lines || len(s.Text) > maxSampleText {
			t.Fatalf("sample %+v", s)
		}
	}
	return b
}

// lines splits a text into lines as the parsers do.
func lines(text []byte) []string {
	if len(text) == 0 {
		return nil
	}
	all := strings.Split(strings.TrimSuffix(string(text), "\n"), "\n")
	for i := range all {
		all[i] = strings.TrimSuffix(all[i], "\r")
	}
	return all
}

func showParsed(r *rows, i int) string {
	at := func(c *optional[int64]) int64 {
		if c.values == nil {
			return none
		}
		return c.values[i]
	}
	level := noLevel
	if r.level.values != nil {
		level = r.level.values[i]
	}
	return fmt.Sprintf("time %d op %d address %x symbol %q dso %q level %d latency %d cpu %d thread %d",
		r.time[i], r.op[i], r.address[i], valueAt(&r.symbol, i), valueAt(&r.dso, i), level,
		at(&r.latency), at(&r.cpu), at(&r.thread))
}

func valueAt(c *texts, i int) string {
	values := array.MakeFromData(c.dictionary).(*array.String)
	defer values.Release()
	return values.Value(int(c.codes[i]))
}
