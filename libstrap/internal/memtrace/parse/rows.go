// Holds the rows of a block, column by column.

package parse

import (
	"bytes"
	"math"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// none marks a null in the integer columns, noLevel a null in the column of levels.
const (
	none    int64 = math.MinInt64
	noLevel int32 = -1
)

// row holds the values of one row.
type row struct {
	time    int64
	address uint64
	op      trace.Op
	symbol  []byte
	dso     []byte
	level   int32 // place in levelNames, or noLevel
	latency int64
	cpu     int64
	thread  int64
	length  int64
}

// rows holds the rows of a block, column by column.
type rows struct {
	time    []int64
	address []uint64
	op      []int32 // a trace.Op
	symbol  texts
	dso     texts
	level   optional[int32]
	latency optional[int64]
	cpu     optional[int64]
	thread  optional[int64]
	length  optional[int64]
}

// newRows returns rows with room for n of them. It grows if more are added.
func newRows(n int) *rows {
	texts := func() texts { return texts{codes: make([]int32, 0, n), byText: map[string]int32{}} }
	ints := optional[int64]{null: none}
	return &rows{
		time: make([]int64, 0, n), address: make([]uint64, 0, n), op: make([]int32, 0, n),
		symbol: texts(), dso: texts(), level: optional[int32]{null: noLevel},
		latency: ints, cpu: ints, thread: ints, length: ints,
	}
}

func (r *rows) len() int { return len(r.time) }

func (r *rows) add(w *row) {
	n, room := len(r.time), cap(r.time)
	r.level.add(w.level, n, room)
	r.latency.add(w.latency, n, room)
	r.cpu.add(w.cpu, n, room)
	r.thread.add(w.thread, n, room)
	r.length.add(w.length, n, room)
	r.time = append(r.time, w.time)
	r.address = append(r.address, w.address)
	r.op = append(r.op, int32(w.op))
	r.symbol.codes = append(r.symbol.codes, r.symbol.code(w.symbol))
	r.dso.codes = append(r.dso.codes, r.dso.code(w.dso))
}

// keep keeps the rows first, first + every, first + 2 every, ..., and drops the others.
func (r *rows) keep(first, every int) {
	if every == 1 {
		return
	}
	keep(&r.time, first, every)
	keep(&r.address, first, every)
	keep(&r.op, first, every)
	keep(&r.symbol.codes, first, every)
	keep(&r.dso.codes, first, every)
	keep(&r.level.values, first, every)
	for _, c := range []*optional[int64]{&r.latency, &r.cpu, &r.thread, &r.length} {
		keep(&c.values, first, every)
	}
}

func keep[T any](v *[]T, first, every int) {
	n := 0
	for i := first; i < len(*v); i += every {
		(*v)[n] = (*v)[i]
		n++
	}
	*v = (*v)[:n]
}

// optional is a column that may have nulls. It takes no memory before its first value.
type optional[T int32 | int64] struct {
	null   T
	values []T  // nil while all are null
	nulls  bool // whether values may contain nulls
}

// add appends v to a column of n values. The first v that is not null allocates memory for room
// values.
func (c *optional[T]) add(v T, n, room int) {
	if c.values == nil {
		if v == c.null {
			return
		}
		c.values = make([]T, n, max(room, n+1))
		for i := range c.values {
			c.values[i] = c.null
		}
		c.nulls = n > 0
	}
	c.nulls = c.nulls || v == c.null
	c.values = append(c.values, v)
}

// texts is a text column. It stores each distinct text once and a code for each row.
type texts struct {
	codes      []int32
	values     []string
	byText     map[string]int32
	last       []byte // the text of the last call of code, in the block's memory
	lastCode   int32
	dictionary arrow.ArrayData // the values; seal sets it
}

func (t *texts) code(text []byte) int32 {
	if len(t.values) > 0 && bytes.Equal(text, t.last) {
		return t.lastCode
	}
	code, ok := t.byText[string(text)]
	if !ok {
		code = t.insert(string(text))
	}
	t.last, t.lastCode = text, code
	return code
}

// insert gives a new text its code. Texts that differ only in bytes that are not valid UTF-8 may
// share a code.
func (t *texts) insert(text string) int32 {
	valid := validUTF8(text)
	code, ok := t.byText[valid]
	if !ok {
		code = int32(len(t.values))
		t.values = append(t.values, valid)
		t.byText[valid] = code
	}
	t.byText[text] = code
	return code
}

// seal makes the dictionary from the values. No text may be added after it.
func (t *texts) seal() {
	t.dictionary = stringData(t.values)
	t.values, t.byText, t.last = nil, nil, nil
}
