package access

import (
	"bytes"
	"debug/elf"
	"errors"
	"fmt"
	"maps"
	"math"
	"math/rand"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"slices"
	"sort"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/memtrace/label"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func TestThreadsAreMergedByTime(t *testing.T) {
	w := &fileWriter{}
	w.start()
	w.accesses(10, 100, 200, record{0x1000, 1, opLoad, 0, 4}, record{0x1004, 1, opStore, 50, 4})
	w.accesses(11, 120, 300, record{0x2000, 1, opLoad, 0, 16}, record{0x2000, 1, opStore, 30, 8})
	w.accesses(10, 200, 300, record{0x1008, 1, opBoth | 4, 5, 8})
	w.end()
	got := drain(t, w.open(t, Options{BatchRows: 2}))
	want := []string{
		"100 10 load 0x1000 4",
		"120 11 load 0x2000 16",
		"150 10 store 0x1004 4", // at the same time: first the thread with the earlier first block
		"150 11 store 0x2000 8",
		"205 10 load 0x1008 8", // an exchange is a load and a store
		"205 10 store 0x1008 8",
	}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("rows\n%s", strings.Join(got, "\n"))
	}
}

// The time of a tick is interpolated between the start and the end of its block.
func TestTimes(t *testing.T) {
	for _, v := range []struct {
		h    block
		tick uint32
		want int64
	}{
		{block{start: 1000, end: 2000, ticks: 3000}, 1500, 1500},
		{block{start: 1000, end: 2000, ticks: 3000}, 0, 1000},
		{block{start: 1000, end: 2000, ticks: 3000}, 4000, 2000}, // after the end
		{block{start: 1000, end: 1000, ticks: 0}, 7, 1000},
		{block{start: math.MaxInt64 - 10, end: math.MaxInt64, ticks: 10}, 9, math.MaxInt64 - 1},
		{block{start: 0, end: 1 << 62, ticks: 1 << 33}, 1 << 31, 1 << 60},
		{block{start: 5, end: 8, ticks: 3}, 1, 6},
		{block{start: 5, end: 8, ticks: 3}, 2, 7},
	} {
		if got := v.h.nanoseconds(v.tick); got != v.want {
			t.Errorf("tick %d of %+v is at %d, want %d", v.tick, v.h, got, v.want)
		}
	}
}

// Merging threads gives the same rows as sorting all rows by time, for any number of threads and
// any division into blocks.
func TestMergeIsASort(t *testing.T) {
	seeds := int64(300)
	if testing.Short() {
		seeds = 10
	}
	for seed := range seeds {
		random := rand.New(rand.NewSource(seed))
		w := &fileWriter{}
		w.start()
		type event struct {
			time   int64
			number int
			line   string
		}
		var events []event
		var threads [5]int64 // the time so far
		order := map[int]int{}
		for range random.Intn(40) {
			thread := random.Intn(len(threads))
			if _, ok := order[thread]; !ok {
				order[thread] = len(order)
			}
			start := threads[thread]
			now := start
			var records []record
			for range random.Intn(50) {
				now += random.Int63n(3)
				r := record{address: random.Uint64() >> 1, pc: 1, op: uint8(1 + random.Intn(2)), tick: uint32(now - start), size: 1}
				records = append(records, r)
				events = append(events, event{now, order[thread], fmt.Sprintf("%d %d %s %#x 1", now, thread+1, []string{"load", "store"}[r.op-1], r.address)})
			}
			threads[thread] = now + random.Int63n(3)
			w.accesses(uint32(thread+1), start, threads[thread], records...)
		}
		slices.SortStableFunc(events, func(a, b event) int {
			if a.time != b.time {
				return int(a.time - b.time)
			}
			return a.number - b.number
		})
		var want []string
		for _, e := range events {
			want = append(want, e.line)
		}
		in := w.open(t, Options{BatchRows: 1 + random.Intn(100)})
		if got := drain(t, in); !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d: %d rows of %d, or another order", seed, len(got), len(want))
		}
		if c := in.Counts(); !c.Done || c.Rows != int64(len(want)) || c.Records != c.Rows || c.Seen != uint64(c.Rows) {
			t.Fatalf("seed %d: counts %+v for %d rows", seed, c, len(want))
		}
	}
}

func TestBlocksLargerThanTheBuffers(t *testing.T) {
	w := &fileWriter{}
	w.start()
	for thread := range uint32(3) {
		records := make([]record, 3*maxRecords+1)
		for i := range records {
			records[i] = record{address: uint64(i), pc: 1, op: opLoad, tick: uint32(i), size: 1}
		}
		w.accesses(thread, 0, int64(len(records)), records...)
	}
	if n := len(drain(t, w.open(t, Options{}))); n != 3*(3*maxRecords+1) {
		t.Errorf("%d rows", n)
	}
}

func TestPhases(t *testing.T) {
	w := &fileWriter{}
	w.start()
	var records []record
	for tick := range uint32(8) {
		records = append(records, record{address: 1, pc: 1, op: opLoad, tick: tick, size: 1})
	}
	w.accesses(1, 0, 100, records...)
	phases := []Phase{{"weight_load", 1, 3}, {"generation", 2, 6}, {"generation", 4, 4}}
	got := column(t, w.open(t, Options{Phases: phases, BatchRows: 3}), "phase")
	want := []string{"-", "weight_load", "weight_load", "generation", "generation", "generation", "-", "-"}
	if !reflect.DeepEqual(got, want) {
		t.Errorf("phases %q", got)
	}
	if got := column(t, w.open(t, Options{}), "phase"); got[0] != "-" {
		t.Errorf("phase %q without phases", got[0])
	}
}

func TestRanges(t *testing.T) {
	w := &fileWriter{}
	w.start()
	w.rangeEvent(10, 1, 0x1000, 0x100, 1, 1, "model.embed")
	w.rangeEvent(20, 2, 0x2000, 0x100, 2, 1, "k\xff")
	w.rangeEvent(30, 1, 0, 0, 1, 0, "")
	w.rangeEvent(30, 2, 0x2000, 0x100, 2, 0, "") // ends
	w.rangeEvent(40, 3, 0x1000, 0x10, 3, 1, "")
	w.rangeEvent(40, 3, 0x1000, 0x10, 3, 0, "")
	w.rangeEvent(50, 4, 0x3000, 0, 1, 1, "")              // empty
	w.rangeEvent(50, 5, math.MaxUint64, 2, 1, 1, "")      // beyond the address space
	w.rangeEvent(50, 6, 0x3000, 1, 9, 1, "")              // unknown type
	w.rangeEvent(50, 77, 0x3000, 1, 1, 0, "")             // never began
	w.rangeEvent(60, 7, math.MaxUint64-1, 1, 4, 1, "all") // at the last address that a range can have
	w.end()
	in := w.open(t, Options{})
	want := []label.Range{
		{Start: 0x1000, End: 0x1100, FromNS: 10, ToNS: math.MaxInt64, Type: "weight", Name: "model.embed"},
		{Start: 0x2000, End: 0x2100, FromNS: 20, ToNS: 30, Type: "kv_cache", Name: "k\uFFFD"},
		{Start: 0x1000, End: 0x1010, FromNS: 40, ToNS: 41, Type: "activation"},
		{Start: math.MaxUint64 - 1, End: math.MaxUint64, FromNS: 60, ToNS: math.MaxInt64, Type: "runtime", Name: "all"},
	}
	// The first event that ends a range has length 0, so it is damaged. Range 1 never ends.
	if got := in.Ranges(); !reflect.DeepEqual(got, want) {
		t.Errorf("ranges %+v", got)
	}
	if n := len(in.Problems()); n != 5 {
		t.Errorf("problems %q", in.Problems())
	}
	if _, err := label.New(label.Options{Ranges: in.Ranges()}); err != nil {
		t.Error(err)
	}
}

func TestTornFiles(t *testing.T) {
	w := &fileWriter{}
	w.start()
	w.accesses(1, 0, 10, record{1, 1, opLoad, 0, 1}, record{2, 1, opLoad, 1, 1})
	whole := w.Len()
	w.accesses(1, 10, 20, record{3, 1, opLoad, 0, 1}, record{4, 1, opLoad, 1, 1})
	for cut := headerBytes; cut <= w.Len(); cut++ {
		in, err := newTrace(bytes.NewReader(w.Bytes()[:cut]), int64(cut), Options{})
		if err != nil {
			t.Fatal(err)
		}
		rows := drain(t, in)
		want := max(0, min(2, (cut-(whole-2*recordBytes))/recordBytes))
		want += max(0, min(2, (cut-(w.Len()-2*recordBytes))/recordBytes))
		if len(rows) != want || len(in.Problems()) == 0 {
			t.Fatalf("cut at %d of %d: %d rows, want %d; %q", cut, w.Len(), len(rows), want, in.Problems())
		}
		in.Release()
	}
}

func TestDamageIsReported(t *testing.T) {
	ok := record{1, 1, opLoad, 0, 1}
	for name, v := range map[string]struct {
		write func(*fileWriter)
		rows  int
		want  string
	}{
		"bytes behind a block": {func(w *fileWriter) { w.Write(make([]byte, 100)) }, 1, "100 bytes from offset"},
		"a newer version":      {func(w *fileWriter) { w.Write([]byte("SACB\x02\x00")); w.Write(make([]byte, 58)) }, 1, "version 2"},
		"no operation":         {func(w *fileWriter) { w.accesses(1, 5, 6, record{1, 1, 0, 0, 1}) }, 1, "1 records are damaged"},
		"no bytes":             {func(w *fileWriter) { w.accesses(1, 5, 6, record{1, 1, opLoad, 0, 0}) }, 1, "1 records are damaged"},
		"beyond the addresses": {func(w *fileWriter) { w.accesses(1, 5, 6, record{math.MaxUint64, 1, opLoad, 0, 2}) }, 1, "1 records are damaged"},
		"an unknown kind":      {func(w *fileWriter) { w.block(77, block{}, []byte("x")) }, 1, "kind 77"},
		"time backwards":       {func(w *fileWriter) { w.accesses(1, 9, 8, ok) }, 1, "times 9 to 8"},
		"half a record":        {func(w *fileWriter) { w.block(kindAccesses, block{thread: 1}, make([]byte, 30)) }, 1, "no whole records"},
		"a second start":       {func(w *fileWriter) { w.start() }, 1, "a second recording"},
		"a large text":         {func(w *fileWriter) { w.text(kindMaps, 1, strings.Repeat(" ", maxText+1)) }, 1, "more than its kind allows"},
		"maps out of order":    {func(w *fileWriter) { w.text(kindMaps, 2, ""); w.text(kindMaps, 1, "") }, 1, "out of order"},
		"lost accesses":        {func(w *fileWriter) { w.block(kindAccesses, block{lost: 3}, nil) }, 1, "3 accesses were lost"},
		"no end":               {func(*fileWriter) {}, 1, "did not end the recording"},
	} {
		t.Run(name, func(t *testing.T) {
			w := &fileWriter{}
			w.start()
			w.accesses(1, 0, 1, ok)
			v.write(w)
			in := w.open(t, Options{})
			if rows := drain(t, in); len(rows) != v.rows {
				t.Errorf("%d rows, want %d", len(rows), v.rows)
			}
			if all := strings.Join(in.Problems(), "\n"); !strings.Contains(all, v.want) {
				t.Errorf("problems %q lack %q", all, v.want)
			}
		})
	}
}

func TestManyProblemsAreCounted(t *testing.T) {
	w := &fileWriter{}
	w.start()
	for range 3 * maxProblems {
		w.block(77, block{}, nil)
	}
	got := w.open(t, Options{}).Problems()
	// The missing end of the recording is one problem more.
	if len(got) != maxProblems+1 || got[maxProblems] != fmt.Sprintf("and %d further problems", 2*maxProblems+1) {
		t.Errorf("%d problems, the last %q", len(got), got[len(got)-1])
	}
}

func TestForeignFiles(t *testing.T) {
	folder := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(folder, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	pipe := filepath.Join(folder, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	newer := "SACB\x02\x00\x01\x00" + strings.Repeat("\x00", 56)
	w := &fileWriter{}
	w.accesses(1, 0, 1)
	for _, v := range []struct {
		path string
		want status.Code
	}{
		{filepath.Join(folder, "none"), status.NotFound},
		{folder, status.InvalidArgument},
		{pipe, status.InvalidArgument},
		{write("empty", ""), status.Corrupt},
		{write("text", strings.Repeat("perf 1 2 3\n", 100)), status.Corrupt},
		{write("short", "SACB"), status.Corrupt},
		{write("newer", newer), status.Unsupported},
		{write("no start", w.String()), status.Corrupt},
	} {
		if _, err := Open(v.path, Options{}); !errors.Is(err, v.want) {
			t.Errorf("%s: %v, want %v", v.path, err, v.want)
		}
	}
}

func TestBadOptions(t *testing.T) {
	w := &fileWriter{}
	w.start()
	for _, o := range []Options{{BatchRows: -1}, {BatchRows: maxBatchRows + 1}, {Phases: []Phase{{"x", 2, 1}}}} {
		if _, err := newTrace(bytes.NewReader(w.Bytes()), int64(w.Len()), o); !errors.Is(err, status.InvalidArgument) {
			t.Errorf("%+v: %v", o, err)
		}
	}
}

func TestTooManyThreads(t *testing.T) {
	if testing.Short() {
		t.Skip("writes 70 MB")
	}
	w := &fileWriter{}
	w.start()
	for thread := range uint32(maxThreads + 1) {
		w.accesses(thread, 0, 0)
	}
	if _, err := newTrace(bytes.NewReader(w.Bytes()), int64(w.Len()), Options{}); !errors.Is(err, status.Unsupported) {
		t.Errorf("error %v", err)
	}
}

func TestTooManyThreadsAtATime(t *testing.T) {
	w := &fileWriter{}
	w.start()
	for thread := range uint32(maxOpen + 1) {
		w.accesses(thread, 0, 10, record{1, 1, opLoad, 5, 1})
	}
	in := w.open(t, Options{})
	for in.Next() {
	}
	if !errors.Is(in.Err(), status.Unsupported) {
		t.Errorf("error %v", in.Err())
	}
}

const cSource = `int shared_value;
static int __attribute__((noinline)) hidden(int *p) {
  return *p + 1;
}
int visible(int *p) {
  *p = 3;
  return hidden(p) + shared_value;
}
`

// build compiles cSource to a shared library and returns the addresses of its functions.
func build(t *testing.T, flags ...string) (path string, functions map[string]uint64) {
	t.Helper()
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	source := filepath.Join(t.TempDir(), "code.c")
	if err := os.WriteFile(source, []byte(cSource), 0o600); err != nil {
		t.Fatal(err)
	}
	path = strings.TrimSuffix(source, ".c") + ".so"
	for _, more := range [][]string{nil, flags} { // the first build has all symbols
		args := append([]string{"-shared", "-fPIC", "-O1", "-o", path, source}, more...)
		if out, err := exec.Command(cc, args...).CombinedOutput(); err != nil {
			t.Fatalf("cc %v: %v\n%s", args, err, out)
		}
		if functions != nil {
			break
		}
		f, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		symbols, err := f.Symbols()
		if err != nil {
			t.Fatal(err)
		}
		functions = map[string]uint64{}
		for _, s := range symbols {
			functions[s.Name] = s.Value
		}
	}
	return path, functions
}

func TestSymbolsAndLines(t *testing.T) {
	for _, v := range []struct {
		flags           []string
		symbols, source []string
	}{
		{[]string{"-g"}, []string{"hidden", "visible"}, []string{"code.c:3", "code.c:6"}},
		{nil, []string{"hidden", "visible"}, []string{"", ""}},
		{[]string{"-s"}, []string{"", "visible"}, []string{"", ""}}, // stripped: dynamic symbols only
	} {
		path, functions := build(t, v.flags...)
		f, err := elf.Open(path)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var code *elf.Prog
		for _, p := range f.Progs {
			if p.Type == elf.PT_LOAD && p.Flags&elf.PF_X != 0 {
				code = p
			}
		}
		const base = 0x7f0000000000
		w := &fileWriter{}
		w.start()
		w.text(kindMaps, 1, fmt.Sprintf("%x-%x r-xp %08x 08:01 0    %s\n", base, base+code.Filesz, code.Off, path))
		at := func(name string) record {
			return record{1, base + functions[name] - code.Vaddr + 1, opLoad, 0, 1}
		}
		w.accesses(1, 0, 10, at("hidden"), at("visible"))
		w.accesses(1, 20, 30, record{1, 0, opLoad, 0, 1}, record{1, base, opLoad, 0, 1}, record{1, 12345, opLoad, 0, 1})
		w.end()
		want := append(v.symbols, "", "", "")
		if got := column(t, w.open(t, Options{}), "symbol"); !reflect.DeepEqual(got, want) {
			t.Errorf("%v: symbols %q, want %q", v.flags, got, want)
		}
		if got, want := column(t, w.open(t, Options{}), "dso"), []string{path, path, "", "", ""}; !reflect.DeepEqual(got, want) {
			t.Errorf("%v: dso %q", v.flags, got)
		}
		in := w.open(t, Options{Source: true})
		if in.Schema().NumFields() != len(trace.Fields())+1 {
			t.Errorf("%d columns", in.Schema().NumFields())
		}
		got := column(t, in, "source")
		for i, source := range got[:2] {
			// The first instruction may have the line of the function's head, which is one less.
			name, line, _ := strings.Cut(filepath.Base(source), ":")
			wantName, wantLine, _ := strings.Cut(v.source[i], ":")
			if source == "" && v.source[i] == "" {
				continue
			}
			n, _ := strconv.Atoi(line)
			m, _ := strconv.Atoi(wantLine)
			if name != wantName || n != m && n != m-1 {
				t.Errorf("%v: source %q, want %q", v.flags, source, v.source[i])
			}
		}
		if problems := in.Problems(); len(problems) != 0 {
			t.Errorf("%v: problems %q", v.flags, problems)
		}
	}
}

// Code from a header of the system has the line of the program that called it. If the calling
// function is expanded in another one, that is the line of the innermost call.
func TestLinesOfInlinedHeaders(t *testing.T) {
	cc, err := exec.LookPath("cc")
	if err != nil {
		t.Skip("no C compiler")
	}
	folder := t.TempDir()
	header := filepath.Join(folder, "usr", "include", "inlined.h")
	if err := os.MkdirAll(filepath.Dir(header), 0o700); err != nil {
		t.Fatal(err)
	}
	for name, text := range map[string]string{
		header: `#define INLINE static inline __attribute__((always_inline))
INLINE int load(const int *p) { return *p; }
INLINE int twice(const int *p) { return load(p) + load(p + 9); }
`,
		filepath.Join(folder, "code.c"): `#include <inlined.h>
INLINE int own(const int *p) {
  return
    twice(p);
}
int direct(const int *p) {
  return
    twice(p);
}
int through(const int *p) {
  return
    own(p);
}
`,
	} {
		if err := os.WriteFile(name, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, version := range []string{"-gdwarf-4", "-gdwarf-5"} {
		path := filepath.Join(folder, "code"+version+".so")
		command := exec.Command(cc, "-shared", "-fPIC", "-O1", version, "-I", filepath.Dir(header), "-o", path, "code.c")
		command.Dir = folder
		if out, err := command.CombinedOutput(); err != nil {
			t.Fatalf("cc: %v\n%s", err, out)
		}
		for name, want := range map[string]string{"direct": "code.c:8", "through": "code.c:4"} {
			lines, begin, end := linesOf(t, path, name)
			ofHeader := func(source string) bool { return strings.Contains(source, "inlined.h:") }
			plain, found := 0, map[string]bool{}
			for address := begin; address < end; address++ {
				found[filepath.Base(lines.find(address))] = true
				for _, unit := range lines.read {
					i := sort.Search(len(unit.starts), func(i int) bool { return unit.starts[i].address > address }) - 1
					if ofHeader(unit.starts[i].source) {
						plain++
					}
				}
			}
			if plain == 0 {
				t.Fatalf("%s %s: %v: the compiler gives the header no code", version, name, found)
			}
			if !found[want] || slices.ContainsFunc(slices.Collect(maps.Keys(found)), ofHeader) {
				t.Errorf("%s %s: %v, want %s and nothing of the header", version, name, found, want)
			}
		}
		damageLines(t, path)
	}
}

// linesOf returns the line table of a file, and the first and last address of a function.
func linesOf(t *testing.T, path, function string) (lines *lineTable, begin, end uint64) {
	t.Helper()
	file, err := elf.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { file.Close() })
	if lines, err = newLineTable(file); err != nil || lines == nil {
		t.Fatalf("no lines: %v", err)
	}
	symbols, err := file.Symbols()
	if err != nil {
		t.Fatal(err)
	}
	for _, s := range symbols {
		if s.Name == function {
			return lines, s.Value, s.Value + s.Size
		}
	}
	t.Fatalf("%s has no %s", path, function)
	return nil, 0, 0
}

// damageLines changes each byte of the DWARF sections in turn and looks up lines. Lines may be
// missing, but nothing may panic or hang.
func damageLines(t *testing.T, path string) {
	t.Helper()
	_, begin, end := linesOf(t, path, "direct")
	whole, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	file, err := elf.NewFile(bytes.NewReader(whole))
	if err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{".debug_info", ".debug_abbrev", ".debug_line"} {
		section := file.Section(name)
		for i := range section.Size {
			data := bytes.Clone(whole)
			data[section.Offset+i] ^= 0xff
			damaged, err := elf.NewFile(bytes.NewReader(data))
			if err != nil {
				t.Fatal(err)
			}
			lines := readDamaged(damaged)
			for address := begin; lines != nil && address < end; address++ {
				lines.find(address)
			}
		}
	}
}

// readDamaged returns nil if newLineTable panics; symbolizer.read catches panics too.
func readDamaged(file *elf.File) (lines *lineTable) {
	defer func() { _ = recover() }()
	lines, _ = newLineTable(file)
	return lines
}

func TestNamesOfSourceFiles(t *testing.T) {
	for _, v := range []struct{ file, folder, unit, want string }{
		{"src/a.c", "/home/x", "src/a.c", "/home/x/src/a.c"},
		{"../a.c", "/home/x", "../a.c", "/home/a.c"},
		{"/usr/include/a.h", "/home/x", "a.c", "/usr/include/a.h"},
		{"/home/x/a.c", "/home/x", "a.c", "/home/x/a.c"},
		{"/home/x/src/a.c", "/home/x", "/src/a.c", "/src/a.c"},
		{"/home/x/home/x/a.c", "/home/x", "/home/x/b.c", "/home/x/a.c"},
		{"a.c", "", "a.c", "a.c"},
	} {
		if got := absolute(v.file, v.folder, v.unit); got != v.want {
			t.Errorf("%+v: %q", v, got)
		}
	}
}

func TestModulesThatAreNotTheOnesThatRan(t *testing.T) {
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(exe)
	if err != nil {
		t.Fatal(err)
	}
	inode := info.Sys().(*syscall.Stat_t).Ino
	garbage := filepath.Join(t.TempDir(), "garbage.so")
	if err := os.WriteFile(garbage, []byte("\x7fELF and no more"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, v := range []struct{ path, inode, start, want string }{
		{exe, fmt.Sprint(inode + 1), "", "replaced since"},
		{exe, fmt.Sprint(inode), "realtime_ns 1\n", "changed since"},
		{exe + " (deleted)", "0", "", "deleted"},
		{garbage, "0", "", "ELF"},
		{"/no/such/lib.so", "0", "", "no such file"},
		{"/dev/zero", "0", "", "invalid argument"},
		{filepath.Dir(garbage), "0", "", "is a directory"},
	} {
		w := &fileWriter{}
		w.text(kindStart, 0, v.start)
		w.text(kindMaps, 1, fmt.Sprintf("1000-2000 r-xp 00000000 08:01 %s   %s\ndamage\n", v.inode, v.path))
		w.accesses(1, 0, 10, record{1, 0x1801, opLoad, 0, 1})
		in := w.open(t, Options{Source: true})
		if got := column(t, in, "symbol"); got[0] != "" {
			t.Errorf("%s: symbol %q", v.path, got[0])
		}
		all := strings.Join(in.Problems(), "\n")
		if !strings.Contains(all, v.want) || !strings.Contains(all, "1 lines of module map 1 are damaged") {
			t.Errorf("%s: problems %q lack %q", v.path, all, v.want)
		}
	}
}

// A module that was unloaded before its accesses were written is found in an older module map. A
// module that was loaded later at the same addresses is not mistaken for it.
func TestUnloadedModules(t *testing.T) {
	w := &fileWriter{}
	w.start()
	w.text(kindMaps, 1, "1000-2000 r-xp 00000000 08:01 0 [old]\n")
	w.text(kindMaps, 1, "8000-9000 r-xp 00000000 08:01 0 [other]\n")
	at := func(pc uint64, maps uint32) {
		b := &fileWriter{}
		b.accesses(1, 0, 0, record{1, pc, opLoad, 0, 1})
		w.block(kindAccesses, block{thread: 1, maps: maps}, b.Bytes()[headerBytes:])
	}
	at(0x1800, 1)
	w.text(kindMaps, 2, "3000-4000 r-xp 00000000 08:01 0 [new]\n")
	at(0x1800, 2)
	at(0x3800, 2)
	w.text(kindMaps, 3, "1000-4000 r-xp 00000000 08:01 0 [newest]\n")
	at(0x1800, 3)
	at(0x8800, 3)
	at(0x7000, 3)
	got := column(t, w.open(t, Options{}), "dso")
	if want := []string{"[old]", "[old]", "[new]", "[newest]", "[other]", ""}; !reflect.DeepEqual(got, want) {
		t.Errorf("dso %q", got)
	}
}

func TestProgram(t *testing.T) {
	w := &fileWriter{}
	w.start()
	w.end()
	in := w.open(t, Options{})
	want := Program{PID: 7, Exe: "/bin/x y", Clock: "tsc", SampleEvery: 1, Ended: true}
	if in.Program() != want || len(in.Problems()) != 0 {
		t.Errorf("%+v, %q", in.Program(), in.Problems())
	}
	if in.Next() || in.Err() != nil || !in.Counts().Done {
		t.Error("a file without accesses has rows")
	}
}

func BenchmarkRead(b *testing.B) {
	w := &fileWriter{}
	w.start()
	records := make([]record, 40_000)
	for block := range int64(50) {
		for i := range records {
			records[i] = record{address: uint64(i) * 64, pc: uint64(i%500) + 1, op: uint8(1 + i%2), tick: uint32(i) * 3, size: 4}
		}
		w.accesses(uint32(block%2), block*60_000, block*60_000+120_000, records...)
	}
	b.SetBytes(int64(w.Len()))
	for b.Loop() {
		in := w.open(b, Options{})
		for in.Next() {
		}
		if in.Counts().Rows != 2_000_000 {
			b.Fatal(in.Counts())
		}
	}
	b.ReportMetric(float64(b.N)*2e6/b.Elapsed().Seconds(), "rows/s")
}
