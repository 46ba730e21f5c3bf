// Makes files like those of libstrap-access, and reads the columns of records, for tests.

package access

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// fileWriter makes files like those of libstrap-access.
type fileWriter struct{ bytes.Buffer }

func (w *fileWriter) block(kind uint16, h block, payload []byte) {
	le := binary.LittleEndian
	b := le.AppendUint32(nil, blockMagic)
	b = le.AppendUint16(b, blockVersion)
	b = le.AppendUint16(b, kind)
	b = le.AppendUint64(b, uint64(len(payload)))
	b = le.AppendUint32(b, h.thread)
	b = le.AppendUint32(b, h.maps)
	b = le.AppendUint64(b, uint64(h.start))
	b = le.AppendUint64(b, uint64(h.end))
	b = le.AppendUint64(b, h.ticks)
	b = le.AppendUint64(b, h.seen)
	b = le.AppendUint64(b, h.lost)
	w.Write(b)
	w.Write(payload)
}

func (w *fileWriter) text(kind uint16, maps uint32, text string) {
	w.block(kind, block{maps: maps, start: 1, end: 1}, []byte(text))
}

func (w *fileWriter) start() {
	w.text(kindStart, 0, "pid 7\nclock tsc\nsample_every 1\nexe /bin/x y\n")
}
func (w *fileWriter) end() { w.text(kindEnd, 0, "seen 0\nlost 0\n") }

// accesses writes a block of accesses. One tick is one nanosecond.
func (w *fileWriter) accesses(thread uint32, start, end int64, records ...record) {
	var b []byte
	for _, r := range records {
		le := binary.LittleEndian
		b = le.AppendUint64(b, r.address)
		b = le.AppendUint64(b, r.pc|uint64(r.op)<<48)
		b = le.AppendUint32(b, r.tick)
		b = le.AppendUint32(b, r.size)
	}
	w.block(kindAccesses, block{
		thread: thread, maps: 1, start: start, end: end, ticks: uint64(end - start), seen: uint64(len(records)),
	}, b)
}

func (w *fileWriter) rangeEvent(now int64, id, start, length uint64, kind, added uint32, name string) {
	le := binary.LittleEndian
	b := le.AppendUint64(nil, id)
	b = le.AppendUint64(b, start)
	b = le.AppendUint64(b, length)
	b = le.AppendUint32(b, kind)
	b = le.AppendUint32(b, added)
	w.block(kindRange, block{start: now, end: now}, append(b, name...))
}

func (w *fileWriter) open(t testing.TB, o Options) *Trace {
	t.Helper()
	out, err := newTrace(bytes.NewReader(w.Bytes()), int64(w.Len()), o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(out.Release)
	return out
}

func intsOf(record arrow.Record, name string) []int64 {
	return record.Column(record.Schema().FieldIndices(name)[0]).(*array.Int64).Int64Values()
}

// drain returns all rows as text, "TIME THREAD load|store ADDRESS LENGTH". It checks that sample_id
// counts up, that pages fit to addresses, and that no time is before the last one.
func drain(t testing.TB, in *Trace) []string {
	t.Helper()
	var out []string
	last := int64(0)
	for in.Next() {
		b, err := trace.Open(in.Record())
		if err != nil {
			t.Fatal(err)
		}
		ids, threads := intsOf(in.Record(), "sample_id"), intsOf(in.Record(), "thread_id")
		for i := range b.Rows {
			if ids[i] != int64(len(out)) || b.Page[i] != b.Address[i]>>trace.PageShift || b.Time[i] < last {
				t.Fatalf("row %d: sample_id %d, page %#x of %#x, time %d after %d", len(out), ids[i], b.Page[i], b.Address[i], b.Time[i], last)
			}
			last = b.Time[i]
			out = append(out, fmt.Sprintf("%d %d %s %#x %d", b.Time[i], threads[i], []string{"load", "store"}[b.Op[i]], b.Address[i], b.Length[i]))
		}
	}
	if err := in.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

// column returns a text column of all rows, with "-" for nulls.
func column(t testing.TB, in *Trace, name string) []string {
	t.Helper()
	var out []string
	for in.Next() {
		r := in.Record()
		c := r.Column(r.Schema().FieldIndices(name)[0]).(*array.Dictionary)
		for i := range c.Len() {
			if c.IsNull(i) {
				out = append(out, "-")
				continue
			}
			out = append(out, c.Dictionary().(*array.String).Value(c.GetValueIndex(i)))
		}
	}
	if err := in.Err(); err != nil {
		t.Fatal(err)
	}
	return out
}

var _ array.RecordReader = (*Trace)(nil)
