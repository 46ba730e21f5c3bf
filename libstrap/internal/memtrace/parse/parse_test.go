package parse

import (
	"fmt"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

// show parses a text and writes each row as
//
//	time op address symbol dso [cpu=N] [thread=N] [level=X] [latency=N] [length=N] [phase=X]
func show(t *testing.T, format Format, text string, o Options) ([]string, Counts) {
	t.Helper()
	s, err := OpenReader(format, strings.NewReader(text), o)
	if err != nil {
		t.Fatal(err)
	}
	defer s.Release()
	lines, c := drain(t, s)
	if err := s.Err(); err != nil {
		t.Fatal(err)
	}
	return lines, c
}

// drain reads a source to its end or error.
func drain(t *testing.T, s *Source) ([]string, Counts) {
	t.Helper()
	var lines []string
	for s.Next() {
		record := s.Record()
		if err := checkRecord(record, s.options.RunID, int64(len(lines))); err != nil {
			t.Fatal(err)
		}
		for i := range int(record.NumRows()) {
			lines = append(lines, showRow(record, i))
		}
	}
	return lines, s.Counts()
}

func showRow(record arrow.Record, i int) string {
	at := func(name string) string {
		column := record.Column(record.Schema().FieldIndices(name)[0])
		if column.IsNull(i) {
			return ""
		}
		return column.ValueStr(i)
	}
	address := record.Column(4).(*array.Uint64).Value(i)
	line := fmt.Sprintf("%s %s %x %s %s", at("timestamp_ns"), at("op_type"), address, at("symbol"), at("dso"))
	for _, c := range [][2]string{
		{"cpu", "cpu_id"}, {"thread", "thread_id"}, {"level", "cache_level"},
		{"latency", "access_latency_ns"}, {"length", "length_bytes"}, {"phase", "phase"},
	} {
		if v := at(c[1]); v != "" {
			line += " " + c[0] + "=" + v
		}
	}
	return line
}

// checkRecord checks the columns that have one value in every row or follow from other columns.
func checkRecord(record arrow.Record, runID string, firstID int64) error {
	b, err := trace.Open(record)
	if err != nil {
		return err
	}
	runs, _ := b.Text("run_id")
	ids := record.Column(record.Schema().FieldIndices("sample_id")[0]).(*array.Int64)
	for i := range b.Rows {
		if runs.Values[runs.Codes[i]] != runID || ids.Value(i) != firstID+int64(i) || b.Page[i] != b.Address[i]>>12 ||
			b.Region[i] != 0 || b.Type.Values[b.Type.Codes[i]] != "unknown" {
			return fmt.Errorf("row %d: %v", i, showRow(record, i))
		}
	}
	for _, name := range []string{"numa_node", "token_index", "context_tokens"} {
		if column := record.Column(record.Schema().FieldIndices(name)[0]); column.NullN() != column.Len() {
			return fmt.Errorf("%s has values", name)
		}
	}
	return nil
}

func same(t *testing.T, got []string, want ...string) {
	t.Helper()
	for i := range max(len(got), len(want)) {
		g, w := "(no row)", "(no row)"
		if i < len(got) {
			g = got[i]
		}
		if i < len(want) {
			w = want[i]
		}
		if g != w {
			t.Errorf("row %d:\n got %s\nwant %s", i, g, w)
		}
	}
}

func sameCounts(t *testing.T, c Counts, rows, skipped, malformed int64) {
	t.Helper()
	if c.Rows != rows || c.Skipped != skipped || c.Malformed != malformed || !c.Done {
		t.Errorf("%+v, want %d rows, %d skipped, %d malformed", c, rows, skipped, malformed)
	}
}
