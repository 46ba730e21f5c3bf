// Collects the rows of a batch in columns.

package access

import (
	"math"
	"strings"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// maxSites is how many sites are kept. If a batch begins with more, all are forgotten and looked up
// again.
const maxSites = 1 << 20

// rows collects the rows of a batch in columns.
type rows struct {
	schema   *arrow.Schema
	limit    int // rows of a batch
	sites    *symbolizer
	runID    arrow.ArrayData // dictionaries of text columns, as those below
	ops      arrow.ArrayData
	unknown  arrow.ArrayData
	none     arrow.ArrayData
	phases   []Phase
	names    arrow.ArrayData // of the phases
	zeros    *memory.Buffer  // the values of columns with one value in every row
	phase    int32           // index in phases of the times from <= t < to; -1: none
	from, to int64

	n       int // rows so far
	time    []int64
	address []uint64
	length  []int64
	thread  []int64
	op      []int32
	phased  []int32 // the phase of each row
	symbol  texts
	dso     texts
	source  texts

	known map[place]int32 // index in found
	found []site
	codes []siteCodes       // the codes of each found site
	last  [1 << 10]struct { // cache of recent places, by a hash of pc
		place place
		code  int32 // index in found plus one; 0: the slot is empty
	}
	batch int32 // number of this batch
}

// place identifies a site: the return address of the hook and the number of the module map.
type place struct {
	pc   uint64
	maps uint32
}

// siteCodes are a site's codes in the dictionaries of the batch of that number.
type siteCodes struct{ batch, symbol, dso, source int32 }

// texts collects a text column and its dictionary.
type texts struct {
	codes  []int32          // of each row
	values []string         // the dictionary
	place  map[string]int32 // code of each value
}

func (t *texts) begin(limit int) {
	t.codes = make([]int32, 0, limit)
	t.values = nil
	t.place = map[string]int32{}
}

func (t *texts) code(value string) int32 {
	code, ok := t.place[value]
	if !ok {
		code = int32(len(t.values))
		t.place[value] = code
		t.values = append(t.values, value)
	}
	return code
}

func newRows(schema *arrow.Schema, sites *symbolizer, o Options) *rows {
	names := make([]string, len(o.Phases))
	for i, p := range o.Phases {
		names[i] = strings.ToValidUTF8(p.Name, "\uFFFD")
	}
	return &rows{
		schema: schema, limit: o.BatchRows, sites: sites, phases: o.Phases,
		runID:   stringData([]string{strings.ToValidUTF8(o.RunID, "\uFFFD")}),
		ops:     stringData([]string{"load", "store"}),
		unknown: stringData([]string{"unknown"}), none: stringData(nil), names: stringData(names),
		zeros: memory.NewBufferBytes(make([]byte, 8*o.BatchRows)),
		known: map[place]int32{}, from: 1, // from > to: no phase is known yet
	}
}

// begin starts a batch. It allocates new columns, because the record of the last batch keeps its
// own.
func (r *rows) begin() {
	r.n = 0
	r.batch++
	r.time = make([]int64, 0, r.limit)
	r.address = make([]uint64, 0, r.limit)
	r.length = make([]int64, 0, r.limit)
	r.thread = make([]int64, 0, r.limit)
	r.op = make([]int32, 0, r.limit)
	if len(r.phases) > 0 {
		r.phased = make([]int32, 0, r.limit)
	}
	r.symbol.begin(r.limit)
	r.dso.begin(r.limit)
	r.source.begin(r.limit)
	if len(r.found) > maxSites {
		r.known, r.found, r.codes = map[place]int32{}, nil, nil
		clear(r.last[:])
	}
}

// add appends the one or two rows of an access. It returns false, and adds nothing, if the batch has
// no room for them.
func (r *rows) add(a *row) bool {
	both := a.op&opBoth == opBoth
	need := 1
	if both {
		need = 2
	}
	if r.n > 0 && r.n+need > r.limit {
		return false
	}
	s := r.site(place{a.pc, a.maps})
	if len(r.phases) > 0 && (a.time < r.from || a.time >= r.to) {
		r.findPhase(a.time)
	}
	if a.op&opLoad != 0 {
		r.put(a, 0, s)
	}
	if a.op&opStore != 0 {
		r.put(a, 1, s)
	}
	return true
}

func (r *rows) put(a *row, op int32, s *siteCodes) {
	r.n++
	r.time = append(r.time, a.time)
	r.address = append(r.address, a.address)
	r.length = append(r.length, int64(a.size))
	r.thread = append(r.thread, int64(a.thread))
	r.op = append(r.op, op)
	r.symbol.codes = append(r.symbol.codes, s.symbol)
	r.dso.codes = append(r.dso.codes, s.dso)
	if r.sites.sources {
		r.source.codes = append(r.source.codes, s.source)
	}
	if len(r.phases) > 0 {
		r.phased = append(r.phased, r.phase)
	}
}

// site returns the codes of a place in the dictionaries of this batch.
func (r *rows) site(p place) *siteCodes {
	slot := &r.last[(p.pc^p.pc>>10)%uint64(len(r.last))]
	if slot.place != p || slot.code == 0 {
		code, ok := r.known[p]
		if !ok {
			code = int32(len(r.found))
			r.known[p] = code
			r.found = append(r.found, r.sites.find(p.pc, p.maps))
			r.codes = append(r.codes, siteCodes{})
		}
		slot.place, slot.code = p, code+1
	}
	c := &r.codes[slot.code-1]
	if c.batch != r.batch {
		s := &r.found[slot.code-1]
		c.batch, c.symbol, c.dso = r.batch, r.symbol.code(s.symbol), r.dso.code(s.dso)
		if r.sites.sources {
			c.source = r.source.code(s.source)
		}
	}
	return c
}

// findPhase sets phase to the first phase that has this time, and from and to to an interval around
// the time in which the phase is the same.
func (r *rows) findPhase(now int64) {
	r.phase, r.from, r.to = -1, 0, math.MaxInt64
	for i, p := range r.phases {
		for _, edge := range []int64{p.StartNS, p.EndNS} {
			if edge <= now {
				r.from = max(r.from, edge)
			} else {
				r.to = min(r.to, edge)
			}
		}
		if r.phase < 0 && p.StartNS <= now && now < p.EndNS {
			r.phase = int32(i)
		}
	}
}

// record returns the batch. firstID is the sample_id of its first row.
func (r *rows) record(firstID int64) arrow.Record {
	n := r.n
	if r.zeros.Len() < 8*n { // the limit is one row, and the access gave two
		r.zeros = memory.NewBufferBytes(make([]byte, 8*n))
	}
	ids, pages := make([]int64, n), make([]uint64, n)
	for i := range ids {
		ids[i] = firstID + int64(i)
		pages[i] = r.address[i] >> trace.PageShift
	}
	made := map[string]arrow.ArrayData{
		"run_id":       r.constant(r.runID),
		"sample_id":    int64Data(ids),
		"timestamp_ns": int64Data(r.time),
		"address":      uint64Data(r.address),
		"address_page": uint64Data(pages),
		"op_type":      textData(r.op, r.ops, false),
		"symbol":       textData(r.symbol.codes, stringData(r.symbol.values), false),
		"dso":          textData(r.dso.codes, stringData(r.dso.values), false),
		"region_type":  r.constant(r.unknown),
		"region_id":    array.NewData(arrow.PrimitiveTypes.Int64, n, []*memory.Buffer{nil, r.zeros}, nil, 0, 0),
		"thread_id":    int64Data(r.thread),
		"length_bytes": int64Data(r.length),
	}
	if len(r.phases) > 0 {
		made["phase"] = textData(r.phased, r.names, true)
	}
	if r.sites.sources {
		made["source"] = textData(r.source.codes, stringData(r.source.values), false)
	}
	arrays := make([]arrow.Array, r.schema.NumFields())
	for i, field := range r.schema.Fields() {
		data := made[field.Name]
		switch {
		case data != nil:
		case field.Type == trace.Text:
			data = array.NewDataWithDictionary(trace.Text, n, []*memory.Buffer{r.zeros, r.zeros}, n, 0, r.none.(*array.Data))
		default:
			data = array.NewData(field.Type, n, []*memory.Buffer{r.zeros, r.zeros}, nil, n, 0)
		}
		arrays[i] = array.MakeFromData(data)
	}
	return array.NewRecord(r.schema, arrays, int64(n))
}

func (r *rows) constant(dictionary arrow.ArrayData) arrow.ArrayData {
	return array.NewDataWithDictionary(trace.Text, r.n, []*memory.Buffer{nil, r.zeros}, 0, 0, dictionary.(*array.Data))
}

func int64Data(v []int64) arrow.ArrayData {
	values := memory.NewBufferBytes(arrow.Int64Traits.CastToBytes(v))
	return array.NewData(arrow.PrimitiveTypes.Int64, len(v), []*memory.Buffer{nil, values}, nil, 0, 0)
}

func uint64Data(v []uint64) arrow.ArrayData {
	values := memory.NewBufferBytes(arrow.Uint64Traits.CastToBytes(v))
	return array.NewData(arrow.PrimitiveTypes.Uint64, len(v), []*memory.Buffer{nil, values}, nil, 0, 0)
}

// textData returns a column of codes into a dictionary. If nulls is set, the code -1 is a null.
func textData(codes []int32, dictionary arrow.ArrayData, nulls bool) arrow.ArrayData {
	var valid *memory.Buffer
	missing := 0
	if nulls {
		bits := make([]byte, (len(codes)+7)/8)
		for i, c := range codes {
			if c < 0 {
				missing++
			} else {
				bits[i/8] |= 1 << (i % 8)
			}
		}
		valid = memory.NewBufferBytes(bits)
	}
	indices := memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(codes))
	return array.NewDataWithDictionary(trace.Text, len(codes), []*memory.Buffer{valid, indices}, missing, 0, dictionary.(*array.Data))
}

func stringData(values []string) arrow.ArrayData {
	offsets := make([]int32, len(values)+1)
	var text []byte
	for i, v := range values {
		text = append(text, v...)
		offsets[i+1] = int32(len(text))
	}
	return array.NewData(arrow.BinaryTypes.String, len(values),
		[]*memory.Buffer{nil, memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(offsets)), memory.NewBufferBytes(text)}, nil, 0, 0)
}
