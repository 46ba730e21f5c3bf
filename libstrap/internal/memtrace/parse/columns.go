// Makes records from rows.

package parse

import (
	"sort"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/bitutil"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// columns makes records from rows.
type columns struct {
	schema   *arrow.Schema
	runID    arrow.ArrayData
	op       arrow.ArrayData
	unknown  arrow.ArrayData
	level    arrow.ArrayData
	noTexts  arrow.ArrayData
	phase    arrow.ArrayData
	timeline timeline
	zeros    *memory.Buffer // shared by the columns that have one value in every row
}

func newColumns(schema *arrow.Schema, runID string, phases []Phase) *columns {
	names := make([]string, len(phases))
	for i, p := range phases {
		names[i] = validUTF8(p.Name)
	}
	return &columns{
		schema: schema, runID: stringData([]string{validUTF8(runID)}), op: stringData([]string{"load", "store"}),
		unknown: stringData([]string{"unknown"}), level: stringData(levelNames), noTexts: stringData(nil),
		phase: stringData(names), timeline: newTimeline(phases),
		zeros: memory.NewBufferBytes(nil),
	}
}

// record returns the rows [start, end) as a record. firstID is the sample_id of the first row.
func (c *columns) record(r *rows, start, end int, firstID int64) arrow.Record {
	n := end - start
	if c.zeros.Len() < 8*n {
		c.zeros = memory.NewBufferBytes(make([]byte, 8*n))
	}
	times, addresses := r.time[start:end], r.address[start:end]
	ids, pages := make([]int64, n), make([]uint64, n)
	for i := range ids {
		ids[i] = firstID + int64(i)
		pages[i] = addresses[i] >> trace.PageShift
	}
	made := map[string]arrow.ArrayData{
		"run_id":       c.constant(c.runID, n),
		"sample_id":    int64Data(ids),
		"timestamp_ns": int64Data(times),
		"phase":        c.phases(times),
		"address":      uint64Data(addresses),
		"address_page": uint64Data(pages),
		"op_type":      dictionaryData(r.op[start:end], nil, 0, c.op),
		"symbol":       dictionaryData(r.symbol.codes[start:end], nil, 0, r.symbol.dictionary),
		"dso":          dictionaryData(r.dso.codes[start:end], nil, 0, r.dso.dictionary),
		"region_type":  c.constant(c.unknown, n),
		"region_id":    array.NewData(arrow.PrimitiveTypes.Int64, n, []*memory.Buffer{nil, c.zeros}, nil, 0, 0),

		"access_latency_ns": c.ints(&r.latency, start, end),
		"cache_level":       c.levels(&r.level, start, end),
		"cpu_id":            c.ints(&r.cpu, start, end),
		"thread_id":         c.ints(&r.thread, start, end),
		"length_bytes":      c.ints(&r.length, start, end),
	}
	fields := c.schema.Fields()
	arrays := make([]arrow.Array, len(fields))
	for i, field := range fields {
		data := made[field.Name]
		if data == nil {
			data = c.nulls(n)
		}
		arrays[i] = array.MakeFromData(data)
	}
	return array.NewRecord(c.schema, arrays, int64(n))
}

func (c *columns) constant(dictionary arrow.ArrayData, n int) arrow.ArrayData {
	return array.NewDataWithDictionary(trace.Text, n, []*memory.Buffer{nil, c.zeros}, 0, 0, dictionary.(*array.Data))
}

func (c *columns) nulls(n int) arrow.ArrayData {
	return array.NewData(arrow.PrimitiveTypes.Int64, n, []*memory.Buffer{c.zeros, c.zeros}, nil, n, 0)
}

func (c *columns) ints(column *optional[int64], start, end int) arrow.ArrayData {
	n := end - start
	if column.values == nil {
		return c.nulls(n)
	}
	values := column.values[start:end]
	valid, nulls := bitmap(values, column)
	return array.NewData(arrow.PrimitiveTypes.Int64, n, []*memory.Buffer{valid, int64Buffer(values)}, nil, nulls, 0)
}

func (c *columns) levels(column *optional[int32], start, end int) arrow.ArrayData {
	if column.values == nil {
		return c.nullTexts(end - start)
	}
	return c.texts(column.values[start:end], column, c.level)
}

func (c *columns) phases(times []int64) arrow.ArrayData {
	if c.phase.Len() == 0 {
		return c.nullTexts(len(times))
	}
	codes := optional[int32]{null: -1, nulls: true}
	return c.texts(c.timeline.codes(times), &codes, c.phase)
}

func (c *columns) texts(codes []int32, column *optional[int32], dictionary arrow.ArrayData) arrow.ArrayData {
	valid, nulls := bitmap(codes, column)
	return dictionaryData(codes, valid, nulls, dictionary)
}

func (c *columns) nullTexts(n int) arrow.ArrayData {
	return array.NewDataWithDictionary(trace.Text, n, []*memory.Buffer{c.zeros, c.zeros}, n, 0, c.noTexts.(*array.Data))
}

// bitmap returns a validity bitmap of values, and how many are null. The bitmap is nil if the
// column has no nulls.
func bitmap[T int32 | int64](values []T, column *optional[T]) (*memory.Buffer, int) {
	if !column.nulls {
		return nil, 0
	}
	bits := make([]byte, bitutil.BytesForBits(int64(len(values))))
	nulls := 0
	for i, v := range values {
		if v == column.null {
			nulls++
		} else {
			bitutil.SetBit(bits, i)
		}
	}
	return memory.NewBufferBytes(bits), nulls
}

func int64Buffer(v []int64) *memory.Buffer {
	return memory.NewBufferBytes(arrow.Int64Traits.CastToBytes(v))
}

func int64Data(v []int64) arrow.ArrayData {
	return array.NewData(arrow.PrimitiveTypes.Int64, len(v), []*memory.Buffer{nil, int64Buffer(v)}, nil, 0, 0)
}

func uint64Data(v []uint64) arrow.ArrayData {
	values := memory.NewBufferBytes(arrow.Uint64Traits.CastToBytes(v))
	return array.NewData(arrow.PrimitiveTypes.Uint64, len(v), []*memory.Buffer{nil, values}, nil, 0, 0)
}

func dictionaryData(codes []int32, valid *memory.Buffer, nulls int, dictionary arrow.ArrayData) arrow.ArrayData {
	indices := memory.NewBufferBytes(arrow.Int32Traits.CastToBytes(codes))
	return array.NewDataWithDictionary(trace.Text, len(codes), []*memory.Buffer{valid, indices}, nulls, 0, dictionary.(*array.Data))
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

// timeline holds the phases without their overlaps. From starts[i] up to the next start, the phase
// has the number code[i]; -1 means none.
type timeline struct {
	starts []int64
	code   []int32
}

func newTimeline(phases []Phase) timeline {
	var t timeline
	for _, p := range phases {
		t.starts = append(t.starts, p.StartNS, p.EndNS)
	}
	sort.Slice(t.starts, func(i, j int) bool { return t.starts[i] < t.starts[j] })
	for _, start := range t.starts {
		code := int32(-1)
		for i, p := range phases {
			if p.StartNS <= start && start < p.EndNS {
				code = int32(i)
				break
			}
		}
		t.code = append(t.code, code)
	}
	return t
}

func (t *timeline) codes(times []int64) []int32 {
	codes := make([]int32, len(times))
	at := -1 // starts[at] <= the previous time < starts[at+1]
	for i, now := range times {
		if at >= 0 && now < t.starts[at] || at+1 < len(t.starts) && now >= t.starts[at+1] {
			at = sort.Search(len(t.starts), func(i int) bool { return t.starts[i] > now }) - 1
		}
		codes[i] = -1
		if at >= 0 {
			codes[i] = t.code[at]
		}
	}
	return codes
}
