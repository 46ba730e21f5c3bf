package parse

import (
	"bytes"
	"math"

	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// none is the null of the integer columns, noLevel that of the levels.
const (
	none    int64 = math.MinInt64
	noLevel int32 = -1
)

// row is what a line says.
type row struct {
	time    int64
	address uint64
	op      trace.Op
	symbol  []byte
	dso     []byte
	level   int32 // of levelNames
	latency int64
	cpu     int64
	thread  int64
	length  int64
}

// rows are the rows of a block, column by column.
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

// newRows has room for n rows, and grows where they are more.
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

// keep leaves the rows first, first + every, first + 2 every, ...
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

// optional is a column in which values may be missing; without any value it has
// no memory.
type optional[T int32 | int64] struct {
	null   T
	values []T  // nil while all are null
	nulls  bool // there are some among the values
}

// add appends v to the n values there, and takes room for so many at the first
// that is no null.
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

// texts is a text column: a code for each different text.
type texts struct {
	codes      []int32
	values     []string
	byText     map[string]int32
	last       []byte // asked for, in the block
	lastCode   int32
	dictionary arrow.ArrayData // the values, once all are there
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

// insert gives a new text its code. Texts that differ only where they are no
// UTF-8 may share one.
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

// seal ends the adding.
func (t *texts) seal() {
	t.dictionary = stringData(t.values)
	t.values, t.byText, t.last = nil, nil, nil
}
