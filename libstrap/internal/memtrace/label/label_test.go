package label

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"regexp"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

type row struct {
	time        int64
	address     uint64
	op          string
	symbol, dso string
	phase, kind string // "" is null
	id          int64
	length      int64
}

var rowSchema = arrow.NewSchema([]arrow.Field{
	{Name: "timestamp_ns", Type: arrow.PrimitiveTypes.Int64},
	{Name: "address", Type: arrow.PrimitiveTypes.Uint64},
	{Name: "address_page", Type: arrow.PrimitiveTypes.Uint64},
	{Name: "op_type", Type: arrow.BinaryTypes.String},
	{Name: "symbol", Type: trace.Text},
	{Name: "dso", Type: trace.Text},
	{Name: "phase", Type: trace.Text, Nullable: true},
	{Name: "region_type", Type: arrow.BinaryTypes.String, Nullable: true},
	{Name: "region_id", Type: arrow.PrimitiveTypes.Int64},
	{Name: "length_bytes", Type: arrow.PrimitiveTypes.Int64},
}, nil)

func recordOf(rows []row) arrow.Record {
	b := array.NewRecordBuilder(memory.DefaultAllocator, rowSchema)
	defer b.Release()
	text := func(i int, v string) {
		d := b.Field(i).(*array.BinaryDictionaryBuilder)
		if v == "" {
			d.AppendNull()
		} else if err := d.AppendString(v); err != nil {
			panic(err)
		}
	}
	for _, r := range rows {
		b.Field(0).(*array.Int64Builder).Append(r.time)
		b.Field(1).(*array.Uint64Builder).Append(r.address)
		b.Field(2).(*array.Uint64Builder).Append(r.address >> trace.PageShift)
		b.Field(3).(*array.StringBuilder).Append(r.op)
		text(4, r.symbol)
		text(5, r.dso)
		text(6, r.phase)
		if r.kind == "" {
			b.Field(7).AppendNull()
		} else {
			b.Field(7).(*array.StringBuilder).Append(r.kind)
		}
		b.Field(8).(*array.Int64Builder).Append(r.id)
		b.Field(9).(*array.Int64Builder).Append(r.length)
	}
	return b.NewRecord()
}

type labelled struct {
	kind string
	id   int64
	time int64
}

func labels(t testing.TB, r arrow.Record) (out []labelled) {
	t.Helper()
	b, err := trace.Open(r)
	if err != nil {
		t.Fatal(err)
	}
	for i := range b.Rows {
		out = append(out, labelled{b.Type.Values[b.Type.Codes[i]], b.Region[i], b.Time[i]})
	}
	return out
}

// run labels rows in batches of uneven sizes.
func run(t testing.TB, o Options, rows []row) (*Labeller, []labelled) {
	t.Helper()
	n := 0
	l, out, err := runBatches(t, o, rows, func() int { n = n%7 + 1; return n })
	if err != nil {
		t.Fatal(err)
	}
	return l, out
}

// runBatches labels rows in batches of these sizes.
func runBatches(t testing.TB, o Options, rows []row, size func() int) (l *Labeller, out []labelled, err error) {
	t.Helper()
	if l, err = New(o); err != nil {
		t.Fatal(err)
	}
	for len(rows) > 0 {
		n := min(size(), len(rows))
		in := recordOf(rows[:n])
		r, err := l.Label(in)
		in.Release()
		if err != nil {
			return l, out, err
		}
		out = append(out, labels(t, r)...)
		r.Release()
		rows = rows[n:]
	}
	return l, out, nil
}

// told returns the counts and the tables of a labeller as text.
func told(l *Labeller) string {
	regions := l.RegionMap()
	defer regions.Release()
	kv, err := l.KVLifecycle()
	if err != nil {
		return err.Error()
	}
	return fmt.Sprint(l.Counts(), regions.Columns(), columns(kv))
}

// columns returns the columns of each batch of a table, and releases the table.
func columns(table array.RecordReader) (all [][]arrow.Array) {
	defer table.Release()
	for table.Next() {
		record := table.Record()
		record.Retain()
		all = append(all, record.Columns())
	}
	return all
}

func TestDocumentedLabels(t *testing.T) {
	l, got := run(t, Options{}, []row{
		{time: 1, address: 0x1000, op: "store", phase: "weight_load"},
		{time: 2, address: 0x2010, op: "load", symbol: "ggml_vec_dot_q4_0"},
		{time: 3, address: 0x3000, op: "store", symbol: "llama_kv_cache_update"},
		{time: 4, address: 0x3100, op: "load", symbol: "memcpy"},   // its page belongs to the KV cache
		{time: 5, address: 0x4000, op: "load", symbol: "GGML_ADD"}, // without regard to case
		{time: 6, address: 0x4fff, op: "load"},                     // the same page
		{time: 7, address: 0x5000, op: "load", symbol: "malloc"},
		{time: 8, address: 0x6000, op: "load", symbol: "my_malloc"}, // not malloc
		{time: 9, address: 0x3000, op: "store", symbol: "whatever"}, // the block again
	})
	want := []labelled{
		{weight, 1, 1}, {weight, 1, 2}, {kvCache, 2, 3}, {kvCache, 3, 4}, {activation, 4, 5},
		{activation, 4, 6}, {runtime, 5, 7}, {unknown, 0, 8}, {kvCache, 2, 9},
	}
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Errorf("%v\nnot\n%v", got, want)
	}
	regions := l.RegionMap()
	defer regions.Release()
	if n := regions.NumRows(); n != 5 {
		t.Errorf("%d regions, not 5", n)
	}
	kv, err := l.KVLifecycle()
	if err != nil {
		t.Fatal(err)
	}
	if got := fmt.Sprint(columns(kv)); got != "[[[2] [12288] [3] [3] [4] [9] [1] [6]]]" {
		t.Errorf("the block of the cache: %s", got)
	}
}

func TestPolicies(t *testing.T) {
	rows := []row{{time: 1, address: 1, op: "load"}, {time: 2, address: 0x9000, op: "load", symbol: "free"}, {time: 3, address: 2, op: "load"}}
	for policy, want := range map[Policy]string{
		Keep:      "[{unknown 0 1} {runtime 2 2} {unknown 0 3}]",
		Skip:      "[{runtime 2 2}]",
		AsRuntime: "[{runtime 2 1} {runtime 3 2} {runtime 2 3}]",
	} {
		l, got := run(t, Options{Policy: policy}, rows)
		if fmt.Sprint(got) != want {
			t.Errorf("%s: %v, not %s", policy, got, want)
		}
		if c := l.Counts(); c.Rows != int64(len(got)) || c.Rows+c.Skipped != 3 {
			t.Errorf("%s: %+v", policy, c)
		}
		// Coverage does not depend on the policy: rows that the policy names count as unknown.
		found := l.Coverage()
		if got := fmt.Sprint(found.Columns()); got != `[["unknown" "runtime"] [2 1] [8192 4096]]` {
			t.Errorf("%s: found %s", policy, got)
		}
		found.Release()
	}
	l, err := New(Options{Policy: Fail})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := l.Label(recordOf(rows)); !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "row 0") {
		t.Errorf("an unknown row: %v", err)
	}
}

// Only the type that a row comes with has priority over a known range.
func TestKnownRanges(t *testing.T) {
	_, got := run(t, Options{Ranges: []Range{
		{Start: 0x1000, End: 0x9000, Type: activation, ID: 70},
		{Start: 0x2000, End: 0x3000, Type: kvCache, FromNS: 10, ToNS: 20},
		{Start: 0x2000, End: 0x3000, Type: weight, FromNS: 20, ToNS: 30},
	}}, []row{
		{time: 5, address: 0x2000, op: "load", kind: "runtime", id: 9},
		{time: 10, address: 0x2fff, op: "load", symbol: "malloc"},
		{time: 19, address: 0x2000, op: "load"},
		{time: 20, address: 0x2000, op: "load"},
		{time: 30, address: 0x8fff, op: "load"},
		{time: 30, address: 0x9000, op: "load"},
		{time: 30, address: 0x7000, op: "load", kind: "runtime"},
		{time: 30, address: 0x7010, op: "load", kind: "activation"},
		{time: 30, address: 0x7020, op: "load"},
	})
	want := "[{runtime 9 5} {kv_cache 2 10} {kv_cache 2 19} {weight 1 20} {activation 70 30} {unknown 0 30} " +
		"{runtime 3 30} {activation 70 30} {activation 70 30}]"
	if fmt.Sprint(got) != want {
		t.Errorf("%v, not %s", got, want)
	}
}

func TestIDsOfATracerSurvive(t *testing.T) {
	_, got := run(t, Options{}, []row{
		{time: 1, address: 0x1000, op: "load", kind: kvCache, id: 3},
		{time: 2, address: 0x2000, op: "load", symbol: "malloc"},
		{time: 3, address: 0x3000, op: "load", symbol: "malloc"}, // 3 is taken
		{time: 4, address: 0x1000, op: "load", kind: kvCache, id: 3},
	})
	if want := "[{kv_cache 3 1} {runtime 2 2} {runtime 4 3} {kv_cache 3 4}]"; fmt.Sprint(got) != want {
		t.Errorf("%v, not %s", got, want)
	}
}

// An id that the trace gives belongs to another region if it was counted before, or given to another
// type. Then it is renumbered, to the same id in the whole trace.
func TestOwnIDsThatCollideAreRenumbered(t *testing.T) {
	l, got := run(t, Options{Ranges: []Range{
		{Start: 0x8000, End: 0x9000, Type: runtime, ID: 5},
		{Start: 0x9000, End: 0xa000, Type: activation, ID: 5},
	}}, []row{
		{time: 1, address: 0x1000, op: "load", symbol: "malloc"},               // counted: 2
		{time: 2, address: 0x2000, op: "load", kind: kvCache, id: 2},           // another 2
		{time: 3, address: 0x3000, op: "load", kind: activation, id: weightID}, // 1 is the weights'
		{time: 4, address: 0x4000, op: "load", kind: activation, id: 9},
		{time: 5, address: 0x5000, op: "load", kind: weight, id: 9}, // of another type
		{time: 6, address: 0x8000, op: "load"},
		{time: 7, address: 0x9000, op: "load"}, // of another type
		{time: 8, address: 0x6000, op: "load", kind: runtime, id: 5},
		{time: 9, address: 0x2000, op: "load", kind: kvCache, id: 2},
		{time: 10, address: 0x7000, op: "load", kind: runtime, id: -3},
		{time: 11, address: 0x1000, op: "load", kind: activation}, // the page of region 2
	})
	want := "[{runtime 2 1} {kv_cache 3 2} {activation 4 3} {activation 9 4} {weight 6 5} {runtime 5 6} " +
		"{activation 7 7} {runtime 5 8} {kv_cache 3 9} {runtime -3 10} {activation 8 11}]"
	if fmt.Sprint(got) != want {
		t.Errorf("%v, not %s", got, want)
	}
	if n := l.Counts().Renumbered; n != 4 {
		t.Errorf("%d ids renumbered, not 4", n)
	}
}

func TestBadOptions(t *testing.T) {
	for name, o := range map[string]Options{
		"policy":      {Policy: "maybe"},
		"region_type": {Rules: []Rule{{Type: "heap"}}},
		"op_type":     {Rules: []Rule{{Type: weight, Op: "read"}}},
		"symbol_re":   {Rules: []Rule{{Type: weight, Symbol: "(?=ahead)"}}},
		"range 0":     {Ranges: []Range{{Start: 2, End: 1, Type: weight}}},
		"range 1":     {Ranges: []Range{{End: 1, Type: weight}, {End: 1, Type: "stack"}}},
	} {
		if _, err := New(o); !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// symbolPatterns holds the compiled symbol patterns of DefaultRules.
var symbolPatterns = func() (all []*regexp.Regexp) {
	for _, rule := range DefaultRules() {
		all = append(all, regexp.MustCompile("(?i)"+rule.Symbol))
	}
	return all
}()

// memoryOf identifies the region of a row, as the documents define regions: by a range, by an id and
// type that the trace gives, or by a type and an address or page.
type memoryOf struct {
	ranged int // number of the range, from 1 on
	id     int64
	kind   string
	at     uint64
}

// reference labels rows one at a time, as the documents say. It also returns the region of each
// labelled row.
func reference(rows []row, ranges []Range, policy Policy) (out []labelled, of []memoryOf) {
	pages := map[uint64]string{}
	holders, ids, next := map[int64]memoryOf{1: {id: 1, kind: weight}}, map[memoryOf]int64{{id: 1, kind: weight}: 1}, int64(2)
	hold := func(id int64, m memoryOf) bool {
		if _, held := holders[id]; held || id == 0 {
			return false
		}
		holders[id], ids[m] = m, id
		return true
	}
	for _, r := range ranges {
		hold(r.ID, memoryOf{id: r.ID, kind: r.Type})
	}
	known, err := newRangeIndex(ranges)
	if err != nil {
		panic(err)
	}
	for _, r := range rows {
		page, given := r.address>>12, r.kind != "" && r.kind != unknown
		m := memoryOf{kind: r.kind, at: page}
		number := known.find(r.address, r.time)
		if number >= 0 && (!given || r.id == 0 && r.kind == ranges[number].Type) {
			of := ranges[number]
			m = memoryOf{id: of.ID, kind: of.Type}
			if of.ID == 0 {
				m.ranged = int(number) + 1
			}
		} else if given && r.id != 0 {
			m = memoryOf{id: r.id, kind: r.kind}
		} else {
			if !given {
				m.kind = unknown
				if known := pages[page]; known != "" {
					m.kind = known
				} else {
					for i, rule := range DefaultRules() {
						if (rule.Phase == "" || rule.Phase == r.phase) && (rule.Op == "" || rule.Op == r.op) &&
							(rule.Symbol == "" || symbolPatterns[i].MatchString(r.symbol)) {
							m.kind = rule.Type
							break
						}
					}
				}
			}
			if pages[page] == "" && m.kind != unknown {
				pages[page] = m.kind
			}
			if m.kind == unknown && policy == AsRuntime {
				m.kind = runtime
			}
			if m.kind == kvCache {
				m.at = r.address
			}
		}
		switch {
		case m.kind == unknown && policy == Skip:
			continue
		case m.kind == unknown:
			m = memoryOf{kind: unknown}
		case m.kind == weight && m.id == 0:
			m = memoryOf{id: 1, kind: weight}
		}
		if _, met := ids[m]; !met && m.kind != unknown && !hold(m.id, m) {
			for !hold(next, m) {
				next++
			}
		}
		out, of = append(out, labelled{m.kind, ids[m], r.time}), append(of, m)
	}
	return out, of
}

func randomRows(rnd *rand.Rand, n int) []row {
	pick := func(of ...string) string { return of[rnd.IntN(len(of))] }
	rows := make([]row, n)
	for i := range rows {
		rows[i] = row{
			time: rnd.Int64N(20), address: rnd.Uint64N(8)<<12 | rnd.Uint64N(3), op: pick("load", "store"),
			symbol: pick("", "kv_read", "ggml_mul_mat", "ggml_add", "malloc", "other"), dso: pick("", "lib.so"),
			phase: pick("", "generation", "weight_load"), kind: pick("", "", unknown, weight, kvCache, activation),
			length: rnd.Int64N(9000),
		}
		if rnd.IntN(4) == 0 {
			rows[i].address = rnd.Uint64N(300) << 12
			rows[i].length = rnd.Int64N(200 << 12) // up to 200 pages, which is more than longRow
		}
		if k := rows[i].kind; k != "" && k != unknown && rnd.IntN(3) == 0 {
			rows[i].id = rnd.Int64N(9) - 1
		}
	}
	return rows
}

func TestAgainstTheReference(t *testing.T) {
	rnd := rand.New(rand.NewPCG(7, 8))
	traces := 2000
	if testing.Short() {
		traces = 50
	}
	for n := range traces {
		rows := randomRows(rnd, rnd.IntN(40))
		o := Options{Ranges: randomRanges(rnd), Policy: []Policy{Keep, Skip, AsRuntime}[n%3]}
		_, got := run(t, o, rows)
		if want, _ := reference(rows, o.Ranges, o.Policy); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("trace %d, %+v: %+v\n%v\nnot\n%v", n, o, rows, got, want)
		}
	}
}

// Regions never merge: rows have the same id if, and only if, they belong to the same region.
func TestARegionHasOneIDAndAnIDOneRegion(t *testing.T) {
	rnd := rand.New(rand.NewPCG(13, 14))
	renumbered := int64(0)
	traces := 2000
	if testing.Short() {
		traces = 50
	}
	for n := range traces {
		rows := randomRows(rnd, rnd.IntN(60))
		o := Options{Ranges: randomRanges(rnd), Policy: []Policy{Keep, Skip, AsRuntime}[n%3]}
		l, got := run(t, o, rows)
		_, of := reference(rows, o.Ranges, o.Policy)
		ids, memories, moved := map[memoryOf]int64{}, map[int64]memoryOf{}, map[memoryOf]bool{}
		for i, g := range got {
			m := of[i]
			if id, met := ids[m]; met && id != g.id {
				t.Fatalf("trace %d, %+v: %+v\nrow %d: %+v is region %d and %d", n, o, rows, i, m, id, g.id)
			}
			if other, met := memories[g.id]; met && other != m {
				t.Fatalf("trace %d, %+v: %+v\nrow %d: region %d is %+v and %+v", n, o, rows, i, g.id, other, m)
			}
			ids[m], memories[g.id] = g.id, m
			if m.id != 0 && m.id != g.id {
				moved[m] = true
			}
		}
		if l.Counts().Renumbered != int64(len(moved)) {
			t.Fatalf("trace %d: %d ids renumbered, not %d", n, l.Counts().Renumbered, len(moved))
		}
		renumbered += l.Counts().Renumbered
	}
	if renumbered == 0 {
		t.Error("no trace has ids that collide")
	}
}

func randomRanges(rnd *rand.Rand) []Range {
	ranges := make([]Range, rnd.IntN(4))
	for i := range ranges {
		start, from := rnd.Uint64N(8)<<12, rnd.Int64N(15)
		ranges[i] = Range{
			Start: start, End: start + 1 + rnd.Uint64N(0x3000), Type: types[rnd.IntN(len(types))],
			FromNS: from, ToNS: from + 1 + rnd.Int64N(20), ID: rnd.Int64N(2) * rnd.Int64N(50),
		}
	}
	return ranges
}

// The batches that a stream is cut into do not change the labels, the tables, or the row that an
// error names.
func TestAnyBatchesGiveTheSame(t *testing.T) {
	rnd := rand.New(rand.NewPCG(9, 10))
	traces := 1000
	if testing.Short() {
		traces = 40
	}
	for n := range traces {
		rows := randomRows(rnd, 1+rnd.IntN(40))
		o := Options{Ranges: randomRanges(rnd), Policy: []Policy{Keep, Skip, AsRuntime, Fail}[n%4]}
		whole, want, wantErr := runBatches(t, o, rows, func() int { return len(rows) })
		most := 1 + rnd.IntN(12)
		cut, got, err := runBatches(t, o, rows, func() int { return 1 + rnd.IntN(most) })
		if fmt.Sprint(err) != fmt.Sprint(wantErr) {
			t.Fatalf("trace %d: %v, not %v", n, err, wantErr)
		}
		if err == nil && (fmt.Sprint(got) != fmt.Sprint(want) || told(cut) != told(whole)) {
			t.Fatalf("trace %d, %+v: %+v\n%v\n%s\nnot\n%v\n%s", n, o, rows, got, told(cut), want, told(whole))
		}
	}
}

// pagesOf returns a row without a length for each page of a row.
func pagesOf(r row) (out []row) {
	end := r.address + uint64(max(r.length, 1))
	for at := r.address; at < end; at = at>>trace.PageShift<<trace.PageShift + trace.PageSize {
		page := r
		page.address, page.length = at, 0
		out = append(out, page)
	}
	return out
}

func TestCoverageCountsTheBytesOfRows(t *testing.T) {
	l, _ := run(t, Options{Ranges: []Range{{Start: 0x1000, End: 0x9000, Type: weight}}}, []row{
		{time: 1, address: 0x1000, op: "store", length: 0x8000},
		{time: 2, address: 0x1010, op: "load", length: 16},
		{time: 3, address: 0xa000, op: "load"}, // counts with the bytes of its page
	})
	found := l.Coverage()
	defer found.Release()
	if got := fmt.Sprint(found.Columns()); got != `[["unknown" "weight"] [1 2] [4096 32784]]` {
		t.Errorf("found %s", got)
	}
}

// A row with a length gives the same tables as a row for each of its pages.
func TestLengthsAreAccessesToEachPage(t *testing.T) {
	rnd := rand.New(rand.NewPCG(11, 12))
	traces := 200
	if testing.Short() {
		traces = 8
	}
	for n := range traces {
		rows := randomRows(rnd, rnd.IntN(30))
		var pages []row
		for i := range rows {
			rows[i].kind = types[rnd.IntN(len(types))]
			rows[i].id = 1 + rnd.Int64N(6) // without an id of its own, a row's id depends on the address
			pages = append(pages, pagesOf(rows[i])...)
		}
		compact, _ := run(t, Options{}, rows)
		expanded, _ := run(t, Options{}, pages)
		compact.counts, expanded.counts = Counts{}, Counts{}
		if told(compact) != told(expanded) {
			t.Fatalf("trace %d: %+v\n%s\nnot\n%s", n, rows, told(compact), told(expanded))
		}
	}
}

// KVLifecycle gives the pages in batches, as they were when it was called.
func TestKVLifecycleIsThatOfNowInBatches(t *testing.T) {
	const pages = 2*batchRows + 5
	l, _ := run(t, Options{}, []row{
		{time: 1, address: 1<<44 + 8, op: "store", kind: kvCache, id: 2},
		{time: 2, address: 1 << 45, op: "store", kind: kvCache, id: 3, length: (pages - 1) << trace.PageShift},
	})
	table, err := l.KVLifecycle()
	if err != nil {
		t.Fatal(err)
	}
	defer table.Release()
	later := recordOf([]row{
		{time: 3, address: 1 << 44, op: "load", kind: kvCache, id: 2},
		{time: 4, address: 1 << 45, op: "load", kind: kvCache, id: 3, length: pages << trace.PageShift},
	})
	defer later.Release()
	labelled, err := l.Label(later)
	if err != nil {
		t.Fatal(err)
	}
	labelled.Release()

	var sizes []int64
	want := uint64(1<<44 + 8)
	for table.Next() {
		r := table.Record()
		sizes = append(sizes, r.NumRows())
		addresses, reads := r.Column(1).(*array.Uint64).Uint64Values(), r.Column(6).(*array.Int64).Int64Values()
		for i, address := range addresses {
			if address != want || reads[i] != 0 {
				t.Fatalf("a page at %#x with %d loads, not %#x with none", address, reads[i], want)
			}
			if want += 1 << trace.PageShift; i == 0 && len(sizes) == 1 {
				want = 1 << 45
			}
		}
	}
	if want := []int64{batchRows, batchRows, 5}; !slices.Equal(sizes, want) {
		t.Errorf("batches of %d rows, not %d", sizes, want)
	}
}

// A row of a terabyte takes memory only for its two ends. KVLifecycle, which has a row for each page,
// is refused for it.
func TestMemoryIsByRowsAndNotByPages(t *testing.T) {
	rows := []row{
		{time: 1, address: 1 << 44, op: "store", kind: weight, id: 1, length: trace.MostLength},
		{time: 2, address: 1 << 45, op: "store", kind: kvCache, id: 2, length: trace.MostLength},
		{time: 3, address: 1<<45 + 5<<12, op: "load", kind: kvCache, id: 2},
		{time: 4, address: 1<<45 + 9<<12, op: "load", kind: kvCache, id: 2, length: trace.MostLength / 2},
	}
	in := recordOf(rows)
	defer in.Release()
	l, err := New(Options{})
	if err != nil {
		t.Fatal(err)
	}
	var before, after goruntime.MemStats
	goruntime.ReadMemStats(&before)
	out, err := l.Label(in)
	goruntime.ReadMemStats(&after)
	if err != nil {
		t.Fatal(err)
	}
	out.Release()
	if allocated := after.TotalAlloc - before.TotalAlloc; allocated > 1<<20 {
		t.Errorf("%d KB for four rows", allocated>>10)
	}
	if _, err := l.KVLifecycle(); !errors.Is(err, status.InvalidArgument) ||
		!strings.Contains(err.Error(), "268435455 pages, of at most 16777216; the longest is row 1 with length_bytes 1099511627776 at 0x200000000000") {
		t.Errorf("%v", err)
	}
	regions := l.RegionMap()
	defer regions.Release()
	if got, want := fmt.Sprint(regions.Column(6)), fmt.Sprintf("[%d %d]", 1<<28, 3<<27+1); got != want {
		t.Errorf("the regions have %s accesses, not %s", got, want)
	}
}

// FuzzLabel compares the labels of random traces with the reference.
//
// It is slow, because each input makes a labeller, which compiles its rules.
func FuzzLabel(f *testing.F) {
	f.Add(uint64(1), 10)
	f.Add(uint64(99), 30)
	f.Fuzz(func(t *testing.T, seed uint64, n int) {
		rows := randomRows(rand.New(rand.NewPCG(seed, 1)), min(max(n, 0), 30))
		l, got := run(t, Options{}, rows)
		if want, _ := reference(rows, nil, Keep); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Fatalf("%+v", rows)
		}
		accesses := int64(0)
		for _, r := range l.seen {
			accesses += r.accesses
		}
		pages := int64(0)
		for i, g := range got {
			if g.kind != unknown {
				pages += int64(len(pagesOf(rows[i])))
			}
		}
		if accesses != pages {
			t.Fatalf("the regions have %d accesses of %d", accesses, pages)
		}
	})
}

func BenchmarkLabel(b *testing.B) {
	rnd := rand.New(rand.NewPCG(1, 1))
	rows := make([]row, 1<<17)
	symbols := []string{"ggml_vec_dot_q4_K", "llama_kv_cache_find", "ggml_compute_forward_add", "memcpy", "malloc"}
	for i := range rows {
		rows[i] = row{time: int64(i), address: rnd.Uint64N(1<<14) << 12, op: "load", symbol: symbols[rnd.IntN(5)], dso: "libggml.so", phase: "generation"}
	}
	in := recordOf(rows)
	b.SetBytes(int64(len(rows)))
	for range b.N {
		l, err := New(Options{})
		if err != nil {
			b.Fatal(err)
		}
		out, err := l.Label(in)
		if err != nil {
			b.Fatal(err)
		}
		out.Release()
	}
}
