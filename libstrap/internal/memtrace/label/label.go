// Package label gives each row of a trace a region_type, which says what the row's memory holds, and
// a region_id, which says which piece of memory it is.
//
// The type of a row is the first of these that there is:
//
//  1. the type that the row comes with;
//  2. the type of the known range that the row falls into;
//  3. the type that an earlier row gave to the page;
//  4. the type of the first rule that matches;
//  5. "unknown".
//
// A row gives its type to its page if the page has none yet. Rows that a known range labels, and
// rows that come with a type and an id, do not.
//
// A row that comes with a type and an id keeps both. A known range labels the rows that come without
// a type, or with the range's type and without an id. They get the id of the range. A range without
// an id has the id 1 if its type is weight, else an id of its own. Other rows get these ids:
//
//   - weights: 1, all together;
//   - KV cache: one id for each distinct address;
//   - activations and runtime: one id for each page;
//   - unknown: 0.
//
// New ids are counted from 2 in the order of first sight. The count passes over the ids that ranges
// have or that rows brought before.
//
// An id stands for one region of one type. A trace is a stream: a row may bring an id that was
// counted here before, or that belongs to a region of another type. The row's region then gets a
// counted id for the rest of the trace, and Counts.Renumbered counts it.
package label

import (
	"fmt"
	"slices"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	weight     = "weight"
	kvCache    = "kv_cache"
	activation = "activation"
	runtime    = "runtime"
	unknown    = "unknown"
	weightID   = 1
)

var types = []string{weight, kvCache, activation, runtime}

func checkType(name string) error {
	for _, t := range types {
		if name == t {
			return nil
		}
	}
	return status.New(status.InvalidArgument, "region_type %q: one of %s", name, strings.Join(types, ", "))
}

// Policy says what happens to rows that nothing classifies.
type Policy string

const (
	Keep      Policy = "keep"    // they stay unknown, with id 0
	Skip      Policy = "skip"    // they are left out and counted
	Fail      Policy = "error"   // Label returns InvalidArgument
	AsRuntime Policy = "runtime" // they become runtime
)

// Options say how to label.
type Options struct {
	Rules  []Rule // nil means DefaultRules
	Policy Policy // "" means Keep
	Ranges []Range
}

// Counts says how many rows and regions were handled so far.
type Counts struct {
	Rows    int64 // rows that Label returned
	Skipped int64 // rows that Skip left out
	Ranged  int64 // rows that a known range labelled
	// Renumbered counts the regions that got a new id, because another region has theirs.
	Renumbered int64
}

// Labeller labels the records of one trace in their order. It is not safe for concurrent use. Its
// memory grows with the number of distinct pages, KV addresses and regions.
type Labeller struct {
	rules  []compiledRule
	policy Policy
	ranges *rangeIndex
	counts Counts

	typeNames   []string
	typeNumbers map[string]int32
	pageTypes   map[uint64]int32
	rangeIDs    []int64 // ids of the ranges; 0 until a row falls into the range
	// counted holds the ids counted here, by type, and then by address (KV cache) or page.
	counted []map[uint64]int64
	next    int64 // all ids from 2 up to the one before next are in use
	// own holds the type of each id that rows or ranges brought and kept.
	own        map[int64]int32
	renumbered map[ownID]int64

	found      []amount      // for each type, by its number
	regions    map[int64]int // id to place in seen
	seen       []region
	blocks     map[uint64]int // page to place in kv
	kv         []kvBlock      // pages that were met one by one
	longKV     spans.Map[kvSpan]
	longest    kvRow
	sights     int64 // single pages and long rows of the KV cache met so far
	classified map[evidence]int32
	lastRegion int64 // id of the last row's region, as runs of rows share one; 0 at first
	lastPlace  int   // place of this region in seen
}

// evidence is the part of a row that the rules look at.
type evidence struct {
	symbol, dso, phase string
	op                 trace.Op
}

// ownID is the id that a row or a range states for its region, with the region's type.
type ownID struct {
	id   int64
	kind int32
}

type region struct {
	id                int64
	kind              int32
	pageMin, pageMax  uint64
	firstNS, latestNS int64
	accesses          int64
}

// kvBlock is a page of the KV cache that was met by itself, and the first address met in it.
type kvBlock struct {
	address, page uint64
	kvSpan
}

// kvSpan is the history of a page of the KV cache, or of each of several pages.
type kvSpan struct {
	sight, id                int64 // sight counts from 1
	stored, evicted          bool
	writeNS, readNS, evictNS int64
	reads                    int64
}

// kvRow is a long row of the KV cache: its number in the trace, its address and its bytes.
type kvRow struct {
	row             int64
	address, length uint64
}

// longRow is the largest number of pages of a row that are kept one by one. If a row has more, all
// its pages but the first are kept as a span. Fewer pages cost less one by one.
const longRow = 64

// New returns a Labeller, or InvalidArgument if the options are invalid.
func New(o Options) (*Labeller, error) {
	if o.Rules == nil {
		o.Rules = DefaultRules()
	}
	switch o.Policy {
	case "":
		o.Policy = Keep
	case Keep, Skip, Fail, AsRuntime:
	default:
		return nil, status.New(status.InvalidArgument, "policy %q: one of %s, %s, %s, %s", o.Policy, Keep, Skip, Fail, AsRuntime)
	}
	rules, err := compile(o.Rules)
	if err != nil {
		return nil, err
	}
	ranges, err := newRangeIndex(o.Ranges)
	if err != nil {
		return nil, err
	}
	l := &Labeller{
		rules: rules, policy: o.Policy, ranges: ranges,
		typeNumbers: map[string]int32{}, pageTypes: map[uint64]int32{},
		rangeIDs: make([]int64, len(o.Ranges)), next: weightID + 1,
		own: map[int64]int32{}, renumbered: map[ownID]int64{},
		regions: map[int64]int{}, blocks: map[uint64]int{},
		classified: map[evidence]int32{},
	}
	l.typeOf(unknown) // number 0
	l.own[weightID] = l.typeOf(weight)
	for _, r := range ranges.ranges {
		if _, ok := l.own[r.ID]; !ok && r.ID != 0 {
			l.own[r.ID] = l.typeOf(r.Type)
		}
	}
	return l, nil
}

// typeOf returns the number of a type, and numbers a new one.
func (l *Labeller) typeOf(name string) int32 {
	number, ok := l.typeNumbers[name]
	if !ok {
		number = int32(len(l.typeNames))
		l.typeNames = append(l.typeNames, name)
		l.counted = append(l.counted, map[uint64]int64{})
		l.typeNumbers[name] = number
		l.found = append(l.found, amount{})
	}
	return number
}

// Schema returns the schema of the labelled records. It is the given one with region_type and
// region_id in their places, or behind the other columns if the given one lacks them.
func (l *Labeller) Schema(in *arrow.Schema) (*arrow.Schema, error) {
	if err := trace.Check(in); err != nil {
		return nil, err
	}
	fields := append([]arrow.Field(nil), in.Fields()...)
	set := func(f arrow.Field) {
		for i := range fields {
			if fields[i].Name == f.Name {
				fields[i] = f
				return
			}
		}
		fields = append(fields, f)
	}
	set(arrow.Field{Name: "region_type", Type: trace.Text})
	set(arrow.Field{Name: "region_id", Type: arrow.PrimitiveTypes.Int64})
	meta := in.Metadata()
	return arrow.NewSchema(fields, &meta), nil
}

// Label returns a record with the rows of the given one, labelled. The caller releases it. Rows keep
// their order. Only the policy Skip leaves rows out.
//
// Errors: InvalidArgument if a column is missing or has values that a trace cannot have, or, with
// Fail, if nothing classifies a row; Unsupported if Skip cannot copy a column of this type.
func (l *Labeller) Label(in arrow.Record) (arrow.Record, error) {
	batch, err := trace.Open(in)
	if err != nil {
		return nil, err
	}
	clues := clues{memo: map[clue]int32{}}
	for i, name := range []string{"symbol", "dso", "phase"} {
		if clues.texts[i], err = batch.Text(name); err != nil {
			return nil, err
		}
	}
	own := make([]int32, len(batch.Type.Values))
	for i, name := range batch.Type.Values {
		own[i] = l.typeOf(name)
	}
	kinds, ids := make([]int32, batch.Rows), make([]int64, batch.Rows)
	skipped := 0
	for i := range kinds {
		kind, id := l.classify(batch, i, own[batch.Type.Codes[i]], &clues)
		l.count(kind, batch, i)
		if kind == 0 {
			switch l.policy {
			case Skip:
				kinds[i] = -1
				skipped++
				continue
			case Fail:
				return nil, status.New(status.InvalidArgument,
					"nothing classifies row %d: address_page=%#x, symbol=%q, dso=%q; add a rule or a range, or keep unknown rows",
					l.counts.Rows+l.counts.Skipped+int64(i), batch.Page[i], clues.value(0, i), clues.value(1, i))
			case AsRuntime:
				kind = l.typeOf(runtime)
			}
		}
		if kind != 0 {
			if id == 0 {
				id = l.idOf(kind, batch.Address[i], batch.Page[i])
			}
			l.touch(id, kind, batch, i)
		}
		kinds[i], ids[i] = kind, id
	}
	l.counts.Rows += int64(batch.Rows - skipped)
	l.counts.Skipped += int64(skipped)
	return l.assemble(in, kinds, ids, skipped)
}

// classify returns the type of a row. It returns the row's id too if a range or the row itself
// states it, else 0.
func (l *Labeller) classify(b *trace.Batch, i int, own int32, c *clues) (kind int32, id int64) {
	page := b.Page[i]
	if len(l.ranges.ranges) > 0 && (own == 0 || b.Region[i] == 0) {
		number := l.ranges.find(b.Address[i], b.Time[i])
		if number >= 0 && (own == 0 || l.typeNames[own] == l.ranges.ranges[number].Type) {
			l.counts.Ranged++
			r := &l.ranges.ranges[number]
			kind, of := l.typeOf(r.Type), &l.rangeIDs[number]
			switch {
			case *of != 0:
			case r.ID != 0:
				*of = l.ownID(r.ID, kind)
			case r.Type == weight:
				*of = weightID
			default:
				*of = l.newID()
			}
			return kind, *of
		}
	}
	if own != 0 {
		if id = b.Region[i]; id != 0 {
			return own, l.ownID(id, own)
		}
		kind = own
	} else if known, ok := l.pageTypes[page]; ok {
		return known, 0
	} else {
		kind = l.byRules(c, i, b.Op[i])
	}
	if kind != 0 {
		if _, ok := l.pageTypes[page]; !ok {
			l.pageTypes[page] = kind
		}
	}
	return kind, id
}

// clues holds the columns of a batch that the rules look at, and the results of the rules.
type clues struct {
	texts [3]trace.Texts // symbol, dso, phase
	memo  map[clue]int32
}

// clue is the codes of a row in these columns, and its operation.
type clue struct {
	codes [3]int32
	op    trace.Op
}

func (c *clues) value(column, row int) string {
	if code := c.texts[column].Codes[row]; code >= 0 {
		return c.texts[column].Values[code]
	}
	return ""
}

func (l *Labeller) byRules(c *clues, i int, op trace.Op) int32 {
	key := clue{[3]int32{c.texts[0].Codes[i], c.texts[1].Codes[i], c.texts[2].Codes[i]}, op}
	kind, ok := c.memo[key]
	if ok {
		return kind
	}
	e := evidence{c.value(0, i), c.value(1, i), c.value(2, i), op}
	if kind, ok = l.classified[e]; !ok {
		word := "load"
		if op == trace.Store {
			word = "store"
		}
		for r := range l.rules {
			if l.rules[r].matches(e.symbol, e.dso, e.phase, word) {
				kind = l.typeOf(l.rules[r].Type)
				break
			}
		}
		if len(l.classified) < maxMemo {
			l.classified[e] = kind
		}
	}
	c.memo[key] = kind
	return kind
}

// maxMemo bounds the evidence whose type is remembered. Real programs have thousands of symbols.
const maxMemo = 1 << 20

// idOf returns the id of a row that neither states one nor falls into a range.
func (l *Labeller) idOf(kind int32, address, page uint64) int64 {
	key := page
	switch l.typeNames[kind] {
	case weight:
		return weightID
	case kvCache:
		key = address
	}
	id, ok := l.counted[kind][key]
	if !ok {
		id = l.newID()
		l.counted[kind][key] = id
	}
	return id
}

// ownID returns the id of a row or range that states one. It is the stated id, or a counted one if
// another region has the stated id.
func (l *Labeller) ownID(id int64, kind int32) int64 {
	of, ok := l.own[id]
	if !ok && (id < weightID || id >= l.next) {
		l.own[id] = kind
		return id
	}
	if ok && of == kind {
		return id
	}
	key := ownID{id, kind}
	number, ok := l.renumbered[key]
	if !ok {
		number = l.newID()
		l.renumbered[key] = number
		l.counts.Renumbered++
	}
	return number
}

// newID returns the next id. It passes over the ids that rows and ranges brought.
func (l *Labeller) newID() int64 {
	for {
		id := l.next
		l.next++
		if _, ok := l.own[id]; !ok {
			return id
		}
	}
}

// touch counts a row for its region. A row of the KV cache counts for each of its pages too.
func (l *Labeller) touch(id int64, kind int32, b *trace.Batch, i int) {
	ns, page, pages := b.Time[i], b.Page[i], uint64(1)
	first := b.Address[i] >> trace.PageShift
	if b.Length != nil && b.Length[i] > 0 {
		pages += (b.Address[i]+b.Length[i]-1)>>trace.PageShift - first
	}
	place := l.lastPlace
	if id != l.lastRegion {
		var ok bool
		if place, ok = l.regions[id]; !ok {
			place = len(l.seen)
			l.regions[id] = place
			l.seen = append(l.seen, region{id: id, kind: kind, pageMin: page, pageMax: page, firstNS: ns, latestNS: ns})
		}
		l.lastRegion, l.lastPlace = id, place
	}
	r := &l.seen[place]
	r.accesses += int64(pages)
	r.latestNS = max(r.latestNS, ns)
	r.pageMin, r.pageMax = min(r.pageMin, page), max(r.pageMax, page)
	if pages > 1 {
		r.pageMin, r.pageMax = min(r.pageMin, first+1), max(r.pageMax, first+pages-1)
	}
	if l.typeNames[kind] != kvCache {
		return
	}
	l.touchBlock(id, b.Address[i], page, b.Op[i], ns)
	switch {
	case pages == 1:
	case pages > longRow:
		if b.Length[i] > l.longest.length {
			l.longest = kvRow{l.counts.Rows + l.counts.Skipped + int64(i), b.Address[i], b.Length[i]}
		}
		l.touchBlocks(id, first+1, first+pages, b.Op[i], ns)
	default:
		for behind := first + 1; behind < first+pages; behind++ {
			l.touchBlock(id, behind<<trace.PageShift, behind, b.Op[i], ns)
		}
	}
}

// touchBlock counts a row for one page.
func (l *Labeller) touchBlock(id int64, address, page uint64, op trace.Op, ns int64) {
	place, ok := l.blocks[page]
	if !ok {
		if of := l.longKV.At(page); of.sight != 0 {
			of.touch(op, ns)
			l.longKV.Set(page, page+1, spans.Span[kvSpan]{Low: page, High: page + 1, Value: of})
			return
		}
		place = len(l.kv)
		l.blocks[page] = place
		l.kv = append(l.kv, kvBlock{address, page, l.sight(id)})
	}
	l.kv[place].touch(op, ns)
}

// sight returns the history of pages that are met now for the first time.
func (l *Labeller) sight(id int64) kvSpan {
	l.sights++
	return kvSpan{sight: l.sights, id: id}
}

// touchBlocks counts a row for the pages [low, high). Pages that were met one by one stay in kv.
func (l *Labeller) touchBlocks(id int64, low, high uint64, op trace.Op, ns int64) {
	var touched []spans.Span[kvSpan]
	fresh := l.sight(id)
	to := func(low, high uint64, of kvSpan) {
		of.touch(op, ns)
		touched = spans.Join(touched, spans.Span[kvSpan]{Low: low, High: high, Value: of})
	}
	l.longKV.Each(low, high, func(low, high uint64, of kvSpan) {
		if of.sight != 0 {
			to(low, high, of)
			return
		}
		for _, page := range l.singles(low, high) {
			l.kv[l.blocks[page]].touch(op, ns)
			to(low, page, fresh)
			low = page + 1
		}
		to(low, high, fresh)
	})
	l.longKV.Set(low, high, touched...)
}

// singles returns, in order, the pages of [low, high) that were met one by one. It looks up each
// page of [low, high), or goes through all pages of kv, whichever are fewer.
func (l *Labeller) singles(low, high uint64) (pages []uint64) {
	if high-low < uint64(len(l.kv)) {
		for page := low; page < high; page++ {
			if _, ok := l.blocks[page]; ok {
				pages = append(pages, page)
			}
		}
		return pages
	}
	for i := range l.kv {
		if page := l.kv[i].page; low <= page && page < high {
			pages = append(pages, page)
		}
	}
	slices.Sort(pages)
	return pages
}

// touch adds an access to the history of a page. The first store at a time other than that of the
// first write counts as the eviction.
func (b *kvSpan) touch(op trace.Op, ns int64) {
	switch {
	case op == trace.Load:
		b.reads++
		b.readNS = max(b.readNS, ns)
	case !b.stored:
		b.stored, b.writeNS = true, ns
	case !b.evicted && ns != b.writeNS:
		b.evicted, b.evictNS = true, ns
	}
}

// assemble puts the two columns into the record, and leaves out the rows of kind -1.
func (l *Labeller) assemble(in arrow.Record, kinds []int32, ids []int64, skipped int) (arrow.Record, error) {
	schema, err := l.Schema(in.Schema())
	if err != nil {
		return nil, err
	}
	keep := make([]int, 0, len(kinds)-skipped)
	typed := array.NewInt32Builder(memory.DefaultAllocator)
	defer typed.Release()
	numbered := array.NewInt64Builder(memory.DefaultAllocator)
	defer numbered.Release()
	for i, kind := range kinds {
		if kind >= 0 {
			keep = append(keep, i)
			typed.Append(kind)
			numbered.Append(ids[i])
		}
	}
	names := array.NewStringBuilder(memory.DefaultAllocator)
	defer names.Release()
	names.AppendValues(l.typeNames, nil)
	values, indices := names.NewArray(), typed.NewArray()
	defer values.Release()
	defer indices.Release()
	column := array.NewDictionaryArray(trace.Text, indices, values)
	defer column.Release()
	id := numbered.NewArray()
	defer id.Release()

	columns := make([]arrow.Array, schema.NumFields())
	for i, f := range schema.Fields() {
		switch f.Name {
		case "region_type":
			columns[i] = column
		case "region_id":
			columns[i] = id
		default:
			from := in.Column(in.Schema().FieldIndices(f.Name)[0])
			if skipped == 0 {
				columns[i] = from
				continue
			}
			if columns[i], err = pick(from, keep); err != nil {
				return nil, status.Wrap(status.Unsupported, err, "column %s", f.Name)
			}
			defer columns[i].Release()
		}
	}
	return array.NewRecord(schema, columns, int64(len(keep))), nil
}

// pick copies rows of a column. It copies runs of rows, because Skip mostly leaves long runs.
func pick(from arrow.Array, rows []int) (arrow.Array, error) {
	var parts []arrow.Array
	defer func() {
		for _, p := range parts {
			p.Release()
		}
	}()
	for start := 0; start < len(rows); {
		end := start + 1
		for end < len(rows) && rows[end] == rows[end-1]+1 {
			end++
		}
		parts = append(parts, array.NewSlice(from, int64(rows[start]), int64(rows[end-1]+1)))
		start = end
	}
	if len(parts) == 0 {
		return array.NewSlice(from, 0, 0), nil
	}
	whole, err := array.Concatenate(parts, memory.DefaultAllocator)
	if err != nil {
		return nil, fmt.Errorf("%d runs of rows: %w", len(parts), err)
	}
	return whole, nil
}

// Counts returns the counts so far.
func (l *Labeller) Counts() Counts { return l.counts }
