// Package label says of every row of a trace what its memory holds (region_type) and
// which piece of memory it is (region_id).
//
// A row's type is the first of these that says one:
//
//   - the row itself, where it comes with a type and an id, as a tracer gives them;
//   - the known range that its first byte falls into;
//   - the row itself, where it comes with a type alone;
//   - the first row that gave its page a type, a range aside;
//   - the first rule that matches.
//
// Else the row is unknown, and its id 0.
//
// Weights have the id 1, together. The KV cache has an id for each distinct address,
// activations and runtime one for each page, a range one of its own; those are counted
// from 2 in the order of first sight. A row that comes with a type and an id keeps the
// id, and so does a range that is given one: counting passes over the ids met so far.
// Where a row comes with an id that has been counted out already, or with the weights' 1
// though it is none, its region gets a new one instead, in all its rows alike. So two
// regions never share an id, and labels do not depend on how rows are cut into batches.
//
// A row with a length is labelled by its first byte; its length widens the pages of its
// region.
package label

import (
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	unknown    = "unknown"
	weight     = "weight"
	kvCache    = "kv_cache"
	activation = "activation"
	runtime    = "runtime"
)

// The numbers of the documented types; others follow in the order of first sight.
const (
	unknownKind = int32(iota)
	weightKind
	kvKind
	activationKind
	runtimeKind
)

var kindNames = []string{unknown, weight, kvCache, activation, runtime}

// kindOf is the number of a type that a rule or range may give.
func kindOf(name string) (int32, error) {
	for kind, known := range kindNames {
		if name == known && name != unknown {
			return int32(kind), nil
		}
	}
	return 0, status.New(status.InvalidArgument, "region_type %q: one of %s", name, strings.Join(kindNames[1:], ", "))
}

// Policy is what happens to rows that nothing classifies.
type Policy string

const (
	Keep      Policy = "keep"    // as unknown, with id 0
	Skip      Policy = "skip"    // left out, and counted
	Fail      Policy = "error"   // InvalidArgument
	AsRuntime Policy = "runtime" // runtime; their pages stay unclassified
)

// Options say how to label.
type Options struct {
	Rules  []Rule // nil: DefaultRules
	Policy Policy // "": Keep
	Ranges []Range
}

// Counts is what was done so far.
type Counts struct {
	Rows       int64            // given out
	Skipped    int64            // left out by Skip
	Renumbered int64            // regions that came with an id that was taken
	ByType     map[string]int64 // of the rows given out
	ByRange    []int64          // of those, the rows that each range has labelled
}

// Labeller labels the records of one trace in their order. It is not for concurrent
// use. It remembers distinct pages, KV addresses, regions and symbols, no rows. After
// an error it is of no further use but for its tables.
type Labeller struct {
	rules    *ruleBook
	policy   Policy
	ranges   *rangeIndex
	types    []string // by number
	numbers  map[string]int32
	regions  regions
	pages    table[page]
	counts   Counts
	byType   []int64
	typeText arrow.Array // types as a dictionary, nil when one has come in
}

// page is what is known of a page; 0 is nothing.
type page struct {
	kind   int32 // of the first row that gave it one
	region int32 // its activations' or runtime's place in regions.all + 1
	block  int32 // its place in regions.blocks + 1
}

// New checks the options.
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
	rules, err := newRuleBook(o.Rules)
	if err != nil {
		return nil, err
	}
	ranges, err := newRangeIndex(o.Ranges)
	if err != nil {
		return nil, err
	}
	l := &Labeller{
		rules: rules, policy: o.Policy, ranges: ranges,
		numbers: map[string]int32{}, regions: newRegions(ranges.ranges),
		counts: Counts{ByRange: make([]int64, len(o.Ranges))},
	}
	for _, name := range kindNames {
		l.number(name)
	}
	return l, nil
}

// number gives a type its number. Rows may come with types of their own.
func (l *Labeller) number(name string) int32 {
	n, ok := l.numbers[name]
	if !ok {
		n = int32(len(l.types))
		l.types = append(l.types, name)
		l.numbers[name] = n
		l.byType = append(l.byType, 0)
		if l.typeText != nil {
			l.typeText.Release()
			l.typeText = nil
		}
	}
	return n
}

// Label gives a record with its rows labelled, which the caller releases. Rows keep
// their order; only Skip leaves some out. The columns but region_type and region_id are
// those of the record, not copies, where no row is left out.
//
// Errors: InvalidArgument where a column is missing or holds what no trace holds,
// or, with Fail, where nothing classifies a row.
func (l *Labeller) Label(in arrow.Record) (arrow.Record, error) {
	b, err := trace.Open(in)
	if err != nil {
		return nil, err
	}
	evidence, err := l.rules.open(b)
	if err != nil {
		return nil, err
	}
	own := make([]int32, len(b.Type.Values))
	for i, name := range b.Type.Values {
		own[i] = l.number(name)
	}
	out := newLabels(b.Rows)
	defer out.release()
	var kept []int32 // rows, with Skip alone
	for i := range b.Rows {
		kind, place := l.classify(b, i, own[b.Type.Codes[i]], evidence)
		if kind == unknownKind {
			switch l.policy {
			case Skip:
				continue
			case Fail:
				return nil, status.New(status.InvalidArgument,
					"nothing classifies row %d: address_page=%#x, symbol=%q, dso=%q; add a rule or a range, or keep unknown rows",
					l.counts.Rows+l.counts.Skipped+int64(i), b.Page[i], evidence.text(symbolColumn, i), evidence.text(dsoColumn, i))
			case AsRuntime:
				kind = runtimeKind
				place = l.regions.ofPage(l.pages.at(b.Page[i]), kind, b, i)
			}
		}
		if l.policy == Skip {
			kept = append(kept, int32(i))
		}
		l.byType[kind]++
		var id int64
		if kind != unknownKind {
			id = l.regions.touch(place, b, i)
			if kind == kvKind {
				l.regions.touchBlock(l.pages.at(b.Page[i]), id, b, i)
			}
		}
		out.add(kind, id)
	}
	l.counts.Rows += int64(out.n)
	l.counts.Skipped += int64(b.Rows - out.n)
	return l.assemble(in, out, kept)
}

// classify gives a row's type and the place of its region.
func (l *Labeller) classify(b *trace.Batch, i int, own int32, e *evidence) (kind, place int32) {
	id := b.Region[i]
	mine := own != unknownKind && id != 0
	if !mine && len(l.ranges.ranges) > 0 {
		if number := l.ranges.find(b.Address[i], b.Time[i]); number >= 0 {
			l.counts.ByRange[number]++
			kind = l.ranges.kinds[number]
			return kind, l.regions.ofRange(number, kind, b, i)
		}
	}
	p := l.pages.at(b.Page[i])
	switch {
	case own != unknownKind:
		kind = own
	case p.kind != unknownKind:
		kind = p.kind
	default:
		if kind = l.rules.classify(e, i, b.Op[i]); kind == unknownKind {
			return kind, 0
		}
	}
	if p.kind == unknownKind {
		p.kind = kind
	}
	switch {
	case mine:
		return kind, l.regions.ofID(id, kind, b, i)
	case kind == weightKind:
		return kind, l.regions.ofWeights(b, i)
	case kind == kvKind:
		return kind, l.regions.ofAddress(b, i)
	default:
		return kind, l.regions.ofPage(p, kind, b, i)
	}
}

// Counts of the rows so far.
func (l *Labeller) Counts() Counts {
	c := l.counts
	c.Renumbered = l.regions.renumbered
	c.ByRange = append([]int64(nil), c.ByRange...)
	c.ByType = map[string]int64{}
	for kind, n := range l.byType {
		if n > 0 {
			c.ByType[l.types[kind]] = n
		}
	}
	return c
}

// labels are the two columns of a batch as they are made.
type labels struct {
	n          int
	kinds      []int32
	ids        []int64
	kindBuffer *memory.Buffer
	idBuffer   *memory.Buffer
}

func newLabels(rows int) *labels {
	o := &labels{
		kindBuffer: memory.NewResizableBuffer(memory.DefaultAllocator),
		idBuffer:   memory.NewResizableBuffer(memory.DefaultAllocator),
	}
	o.kindBuffer.Resize(rows * arrow.Int32SizeBytes)
	o.idBuffer.Resize(rows * arrow.Int64SizeBytes)
	o.kinds = arrow.Int32Traits.CastFromBytes(o.kindBuffer.Bytes())
	o.ids = arrow.Int64Traits.CastFromBytes(o.idBuffer.Bytes())
	return o
}

func (o *labels) add(kind int32, id int64) {
	o.kinds[o.n], o.ids[o.n] = kind, id
	o.n++
}

func (o *labels) release() {
	o.kindBuffer.Release()
	o.idBuffer.Release()
}
