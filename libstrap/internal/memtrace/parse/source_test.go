package parse

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/iotest"
	"time"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// long returns a text with samples, call chains, comments and broken lines.
func long(lines int) string {
	var b strings.Builder
	for i := range lines {
		switch i % 7 {
		case 0:
			fmt.Fprintf(&b, "a 1 [000] %d.0: mem-loads: %x\n\t  7f0000001000 f%d+0x1 (/x)\n\t  7f0000001001 g (/x)\n\n", i, i, i%50)
		case 3:
			b.WriteString("# comment\n")
		case 5:
			fmt.Fprintf(&b, "broken %d\n", i)
		default:
			fmt.Fprintf(&b, "a %d [001] %d.0: mem-stores: %x h%d (/y)\n", i%9, i, i, i%1000)
		}
	}
	return b.String()
}

// blocks is a text of several blocks. In short mode its comments are longer, so that it has fewer lines.
var blocks = sync.OnceValue(func() string {
	if testing.Short() {
		return strings.ReplaceAll(long(15_000), "# comment", "#"+strings.Repeat(" comment", 400))
	}
	return long(150_000)
})

func TestWorkersKeepTheOrder(t *testing.T) {
	text := blocks()
	if len(text) < 3*blockSize {
		t.Fatal("the text is too short")
	}
	want, wantCounts := show(t, PerfScript, text, Options{Workers: 1})
	for _, o := range []Options{{Workers: 2}, {Workers: 5, BatchRows: 1000}} {
		got, counts := show(t, PerfScript, text, o)
		if !slices.Equal(got, want) {
			t.Errorf("%+v: other rows than one worker's", o)
		}
		if fmt.Sprint(counts) != fmt.Sprint(wantCounts) {
			t.Errorf("%+v: %+v, want %+v", o, counts, wantCounts)
		}
	}
	for i := 0; i < len(want); i += 5 { // the samples with chains
		n := i / 5 * 7
		if w := fmt.Sprintf("%d load %x f%d /x cpu=0 thread=1", int64(n)*1e9, n, n%50); want[i] != w {
			t.Fatalf("row %d is %q, want %q", i, want[i], w)
		}
	}
	if c := wantCounts; c.Bytes != int64(len(text)) || c.Lines != c.Rows+c.Skipped+c.Malformed || c.Samples[1].Line != 5+3+7+3+1 {
		t.Errorf("%+v", c)
	}
}

// A block that ends within a call chain leaves the sample to the next block, so that the sample keeps its symbol.
func TestBlocksEndBeforeASampleWithItsChain(t *testing.T) {
	const head, chain = "a 1 [000] 1.0: mem-loads: ff\n", "\t  7f0000001000 f+0x1 (/x)\n\t  7f0000001001 g (/x)\n\n"
	for within := len(head); within < len(head+chain); within++ {
		text := "#" + strings.Repeat(" ", blockSize-within-2) + "\n" + head + chain + strings.Repeat(head+chain, 3)
		got, _ := show(t, PerfScript, text, Options{Workers: 2})
		want := "1000000000 load ff f /x cpu=0 thread=1"
		same(t, got, want, want, want, want)
	}
}

func TestBatchesHaveAtMostSoManyRows(t *testing.T) {
	s, err := OpenReader(PerfScript, strings.NewReader(long(100)), Options{BatchRows: 30})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release()
	var sizes []int64
	for s.Next() {
		sizes = append(sizes, s.Record().NumRows())
		if sum := s.Counts().Rows; sum != int64(len(sizes)-1)*30+sizes[len(sizes)-1] {
			t.Errorf("%d rows counted after %v", sum, sizes)
		}
	}
	if fmt.Sprint(sizes) != "[30 30 12]" {
		t.Errorf("batches of %v rows", sizes)
	}
}

func TestSampleEvery(t *testing.T) {
	text := blocks()
	all, c := show(t, PerfScript, text, Options{})
	for _, every := range []int{2, 7, 100_000} {
		var want []string
		for i := 0; i < len(all); i += every {
			want = append(want, all[i])
		}
		got, sampled := show(t, PerfScript, text, Options{SampleEvery: every})
		if !slices.Equal(got, want) {
			t.Errorf("every %d: %d rows, want %d", every, len(got), len(want))
		}
		if sampled.Rows+sampled.Skipped != c.Rows+c.Skipped {
			t.Errorf("every %d: %+v", every, sampled)
		}
	}
	got, _ := show(t, Lackey, " L 1,1\n L 2,1\n L 3,1\n", Options{SampleEvery: 2})
	same(t, got, "0 load 1   length=1", "2 load 3   length=1")
}

func TestPhases(t *testing.T) {
	var text strings.Builder
	for i := range 10 {
		fmt.Fprintf(&text, "a 1 [0] %d.0: x: ff f\n", (i*7)%10) // the times are out of order
	}
	o := Options{Phases: []Phase{{"inner", 3e9, 5e9}, {"outer", 2e9, 7e9}, {"empty", 1e9, 1e9}, {"late", 7e9, 8e9}}}
	rows, _ := show(t, PerfScript, text.String(), o)
	got := map[byte]string{}
	for _, row := range rows {
		_, phase, _ := strings.Cut(row, "phase=")
		got[row[0]] = phase
	}
	if s := fmt.Sprint(got); s != "map[48: 49: 50:outer 51:inner 52:inner 53:outer 54:outer 55:late 56: 57:]" {
		t.Error(s)
	}
}

func TestLinesOfAnyLength(t *testing.T) {
	line := func(n int) string {
		const head = "a 1 [0] 1.0: x: ff "
		return head + strings.Repeat("f", n-len(head)) + "\n"
	}
	text := line(maxLine) + line(maxLine+1) + line(30) + line(blockSize+5) + line(5*blockSize) + line(40) + line(3 * blockSize)[:3*blockSize]
	got, c := show(t, PerfScript, text, Options{Workers: 2})
	if len(got) != 3 || len(got[0]) < maxLine-100 {
		t.Errorf("%d rows", len(got))
	}
	sameCounts(t, c, 3, 0, 4)
	if c.Bytes != int64(len(text)) || c.Lines != 7 {
		t.Errorf("%d bytes of %d, %d lines", c.Bytes, len(text), c.Lines)
	}
	for i, want := range []int64{2, 4, 5, 7} {
		if s := c.Samples[i]; s.Line != want || len(s.Text) != maxSampleText {
			t.Errorf("sample %d: line %d of %d bytes", i, s.Line, len(s.Text))
		}
	}
}

// A line that looks like a sample again and again is parsed in linear time. In quadratic time, one
// of these lines would take longer than the test may run.
func TestHostileLines(t *testing.T) {
	for _, piece := range []string{
		"a-1 (", "a-1 [0] ", "1 [0] 1.0 ", "1/1 ", "-1 ", "a-1 [0] 1.0: x: 1 ", "1 ", ":", ") ", ") 1", "(", "()", "+0x1 ",
		"|OP ", "1 |OP 1 |SNP ", "|SNP |LCK ", "f ", "+", "\t", " ", "\x00", "\xff",
	} {
		for _, head := range []string{"", "a 1 [0] 1.0: page-faults: ff "} {
			text := []byte(head + strings.Repeat(piece, (maxLine-len(head))/len(piece)) + "\n")
			for _, format := range []Format{PerfScript, PageFaults, Lackey} {
				if testing.Short() && (format != PageFaults || head == "") {
					continue
				}
				b := &block{text: text}
				b.parse(format.parser(&Options{}), 1)
				if b.lines != 1 || int64(b.rows.len())+b.skipped+b.malformed+b.unaddressed != 1 {
					t.Errorf("%s: %q again and again after %q: %d rows", format, piece, head, b.rows.len())
				}
			}
		}
	}
}

func TestSamplesOfMalformedLinesAreFew(t *testing.T) {
	_, c := show(t, PerfScript, strings.Repeat("bad "+strings.Repeat("ä", 150)+"\n", 30), Options{})
	sameCounts(t, c, 0, 0, 30)
	if len(c.Samples) != 20 || c.Samples[19].Line != 20 || c.Samples[0].Text != "bad "+strings.Repeat("ä", 98) {
		t.Errorf("%d samples, %q", len(c.Samples), c.Samples[0].Text)
	}
}

func TestNothingToRead(t *testing.T) {
	for _, text := range []string{"", "\n", "\r\n\r\n", "# only a comment"} {
		rows, c := show(t, PerfScript, text, Options{})
		same(t, rows)
		sameCounts(t, c, 0, int64(strings.Count(text+"\n", "\n")-map[bool]int{true: 1}[text == "" || strings.HasSuffix(text, "\n")]), 0)
	}
}

func TestWhatCannotBeOpened(t *testing.T) {
	dir := t.TempDir()
	locked := filepath.Join(dir, "locked")
	if err := os.WriteFile(locked, nil, 0); err != nil {
		t.Fatal(err)
	}
	for _, v := range []struct {
		format Format
		path   string
		o      Options
		code   status.Code
		names  string
	}{
		{PerfScript, filepath.Join(dir, "none"), Options{}, status.NotFound, "none"},
		{Lackey, dir, Options{}, status.InvalidArgument, "is a directory"},
		{PageFaults, locked, Options{}, status.Permission, "locked"},
		{"perf", locked, Options{}, status.InvalidArgument, `format "perf": one of perf_script, lackey, page_faults`},
		{PerfScript, locked, Options{Workers: -1}, status.InvalidArgument, "workers = -1"},
		{PerfScript, locked, Options{Workers: 257}, status.InvalidArgument, "workers = 257: must be 0 to 256"},
		{PerfScript, locked, Options{BatchRows: -5}, status.InvalidArgument, "batch_rows = -5"},
		{PerfScript, locked, Options{SampleEvery: -5}, status.InvalidArgument, "sample_every = -5"},
		{PerfScript, locked, Options{CyclesPerNS: -2}, status.InvalidArgument, "cycles_per_ns = -2"},
		{PerfScript, locked, Options{Phases: []Phase{{"p", 2, 1}}}, status.InvalidArgument, `phase "p" ends at 1, before its start at 2`},
	} {
		if v.code == status.Permission && os.Geteuid() == 0 {
			continue // root may read everything
		}
		s, err := Open(v.format, v.path, v.o)
		if s != nil || !errors.Is(err, v.code) || !strings.Contains(err.Error(), v.names) {
			t.Errorf("%s %s: %v", v.format, v.path, err)
		}
	}
}

func TestFile(t *testing.T) {
	text := long(1000)
	path := filepath.Join(t.TempDir(), "-") // no name is special
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	s, err := Open(PerfScript, path, Options{RunID: "run-1"})
	if err != nil {
		t.Fatal(err)
	}
	if c := s.Counts(); c.TotalBytes != int64(len(text)) || c.Bytes != 0 || c.Done {
		t.Errorf("before: %+v", c)
	}
	rows, _ := drain(t, s)
	s.Release()
	if c := s.Counts(); c.Bytes != c.TotalBytes || !c.Done || c.Rows != int64(len(rows)) || s.Err() != nil || s.Next() {
		t.Errorf("after: %+v, %v", c, s.Err())
	}
}

func TestReadErrorEndsTheTrace(t *testing.T) {
	text := blocks()
	s, err := OpenReader(PerfScript, io.MultiReader(strings.NewReader(text), iotest.ErrReader(syscall.EIO)), Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release()
	rows, c := drain(t, s)
	if !errors.Is(s.Err(), status.IO) || c.Done || len(rows) == 0 || s.Next() {
		t.Errorf("%d rows, %+v, %v", len(rows), c, s.Err())
	}
}

func TestPanicIsAnError(t *testing.T) {
	s, err := OpenReader(PerfScript, panicking{}, Options{})
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release()
	if s.Next() || !errors.Is(s.Err(), status.Internal) {
		t.Errorf("error %v", s.Err())
	}
}

type panicking struct{}

func (panicking) Read([]byte) (int, error) { panic("broken reader") }

func TestReleaseStopsEverything(t *testing.T) {
	before := runtime.NumGoroutine()
	text := bytes.NewReader(bytes.Repeat([]byte(" L ff,8\n"), 4<<20))
	s, err := OpenReader(Lackey, text, Options{Workers: 3})
	if err != nil {
		t.Fatal(err)
	}
	s.Retain()
	if !s.Next() {
		t.Fatal(s.Err())
	}
	s.Release()
	if !s.Next() {
		t.Fatal("stopped while still referred to")
	}
	s.Release()
	if s.Next() || text.Len() == 0 {
		t.Errorf("%d bytes left", text.Len())
	}
	noMoreGoroutines(t, before)
}

func TestReleaseOfAPipeThatSaysNothing(t *testing.T) {
	before := runtime.NumGoroutine()
	path := filepath.Join(t.TempDir(), "pipe")
	if err := syscall.Mkfifo(path, 0o600); err != nil {
		t.Fatal(err)
	}
	writer, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer writer.Close()
	wrote := make(chan error, 1)
	go func() {
		_, err := writer.WriteString(long(60_000))
		wrote <- err
	}()
	s, err := Open(PerfScript, path, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if !s.Next() {
		t.Fatal(s.Err())
	}
	if err := <-wrote; err != nil {
		t.Fatal(err)
	}
	s.Release()
	noMoreGoroutines(t, before)
}

func noMoreGoroutines(t *testing.T, before int) {
	t.Helper()
	for end := time.Now().Add(time.Minute); runtime.NumGoroutine() > before; time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("%d goroutines, %d before", runtime.NumGoroutine(), before)
		}
	}
}
