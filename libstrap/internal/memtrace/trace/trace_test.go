package trace

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// columns holds the columns of a record by name; nil leaves a column out.
type columns map[string]arrow.Array

// of makes a column of this type from values in Arrow's JSON.
func of(kind arrow.DataType, values string) arrow.Array {
	a, _, err := array.FromJSON(memory.DefaultAllocator, kind, strings.NewReader(values))
	if err != nil {
		panic(fmt.Sprintf("%v %s: %v", kind, values, err))
	}
	return a
}

// addresses makes a column of exact addresses. Numbers in JSON are not exact.
func addresses(values ...uint64) arrow.Array {
	b := array.NewUint64Builder(memory.DefaultAllocator)
	b.AppendValues(values, nil)
	return b.NewArray()
}

// floats makes a column of floats. JSON has no NaN.
func floats(values ...float64) arrow.Array {
	b := array.NewFloat64Builder(memory.DefaultAllocator)
	b.AppendValues(values, nil)
	return b.NewArray()
}

func dictionary(index, value arrow.DataType, indices, values string) arrow.Array {
	kind := &arrow.DictionaryType{IndexType: index, ValueType: value}
	return array.NewDictionaryArray(kind, of(index, indices), of(value, values))
}

var (
	i8, i64   = arrow.PrimitiveTypes.Int8, arrow.PrimitiveTypes.Int64
	u64       = arrow.PrimitiveTypes.Uint64
	f32, f64  = arrow.PrimitiveTypes.Float32, arrow.PrimitiveTypes.Float64
	utf8      = arrow.BinaryTypes.String
	largeUTF8 = arrow.BinaryTypes.LargeString
)

// record makes a record of three rows, a store and two loads, each at its own address. changes
// replaces, adds or removes columns.
func record(changes columns) arrow.Record {
	all := columns{
		"timestamp_ns": of(i64, `[10, 20, 30]`),
		"address":      of(u64, `[4096, 8192, 8200]`),
		"address_page": of(u64, `[1, 2, 2]`),
		"op_type":      of(utf8, `["store", "load", "load"]`),
	}
	for name, a := range changes {
		if all[name] = a; a == nil {
			delete(all, name)
		}
	}
	var fields []arrow.Field
	var arrays []arrow.Array
	for name, a := range all {
		fields = append(fields, arrow.Field{Name: name, Type: a.DataType(), Nullable: true})
		arrays = append(arrays, a)
	}
	return array.NewRecord(arrow.NewSchema(fields, nil), arrays, int64(arrays[0].Len()))
}

func opened(t *testing.T, changes columns) *Batch {
	t.Helper()
	b, err := Open(record(changes))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// words returns the values of a text column, with "-" for a null.
func words(t Texts) string {
	var out []string
	for _, code := range t.Codes {
		if code < 0 {
			out = append(out, "-")
		} else {
			out = append(out, t.Values[code])
		}
	}
	return strings.Join(out, " ")
}

func same(t *testing.T, what string, got any, want string) {
	t.Helper()
	if s := fmt.Sprint(got); s != want {
		t.Errorf("%s: %s, want %s", what, s, want)
	}
}

func TestTheNeededColumnsAreEnough(t *testing.T) {
	b := opened(t, nil)
	same(t, "rows", b.Rows, "3")
	same(t, "times", b.Time, "[10 20 30]")
	same(t, "addresses", b.Address, "[4096 8192 8200]")
	same(t, "pages", b.Page, "[1 2 2]")
	same(t, "operations", b.Op, fmt.Sprint([]Op{Store, Load, Load}))
	same(t, "regions", b.Region, "[0 0 0]")
	same(t, "types", words(b.Type), "unknown unknown unknown")
	same(t, "lengths", b.Length == nil, "true")
	symbols, err := b.Text("symbol")
	same(t, "symbols", words(symbols), "- - -")
	same(t, "error", err, "<nil>")
}

func TestNoRows(t *testing.T) {
	none := columns{}
	for name, kind := range map[string]arrow.DataType{
		"timestamp_ns": arrow.Null, "address": u64, "address_page": i64, "op_type": Text, "region_type": arrow.Null,
		"region_id": f64, "length_bytes": i64,
	} {
		b := array.NewBuilder(memory.DefaultAllocator, kind)
		none[name] = b.NewArray()
	}
	same(t, "rows", opened(t, none).Rows, "0")
}

func TestIntegersOfAnyType(t *testing.T) {
	ns := &arrow.TimestampType{Unit: arrow.Nanosecond, TimeZone: "UTC"}
	for _, times := range []arrow.Array{
		of(i8, `[10, 20, 30]`), of(arrow.PrimitiveTypes.Int16, `[10, 20, 30]`), of(arrow.PrimitiveTypes.Int32, `[10, 20, 30]`),
		of(arrow.PrimitiveTypes.Uint8, `[10, 20, 30]`), of(arrow.PrimitiveTypes.Uint16, `[10, 20, 30]`),
		of(arrow.PrimitiveTypes.Uint32, `[10, 20, 30]`), of(u64, `[10, 20, 30]`),
		of(f32, `[10, 20, 30]`), of(f64, `[10, 20, 30]`), of(ns, `[10, 20, 30]`),
		array.NewSlice(of(i64, `[9, 10, 20, 30, 40]`), 1, 4),
	} {
		b := opened(t, columns{"timestamp_ns": times})
		same(t, times.DataType().String(), b.Time, "[10 20 30]")
	}
}

func TestTextsOfAnyType(t *testing.T) {
	ops := `["store", "load", "load"]`
	for _, given := range []arrow.Array{
		of(utf8, ops), of(largeUTF8, ops), of(arrow.BinaryTypes.StringView, ops),
		dictionary(arrow.PrimitiveTypes.Int32, utf8, `[1, 0, 0]`, `["load", "store"]`),
		dictionary(arrow.PrimitiveTypes.Uint8, largeUTF8, `[0, 1, 1]`, `["store", "load", "prefetch"]`), // one value is not used
		dictionary(i64, arrow.BinaryTypes.StringView, `[0, 2, 1]`, `["store", "load", "load"]`),         // one value is there twice
		array.NewSlice(of(utf8, `["load", "store", "load", "load"]`), 1, 4),
		array.NewSlice(dictionary(arrow.PrimitiveTypes.Int32, utf8, `[0, 1, 0, 0]`, `["load", "store"]`), 1, 4),
	} {
		b := opened(t, columns{"op_type": given})
		same(t, given.DataType().String(), b.Op, fmt.Sprint([]Op{Store, Load, Load}))
	}
}

func TestNulls(t *testing.T) {
	for _, types := range []arrow.Array{
		of(utf8, `["weight", null, "weight"]`),
		dictionary(arrow.PrimitiveTypes.Int32, utf8, `[0, null, 0]`, `["weight"]`),
		dictionary(arrow.PrimitiveTypes.Int32, utf8, `[1, 0, 1]`, `[null, "weight"]`),
	} {
		b := opened(t, columns{"region_type": types})
		same(t, types.DataType().String(), words(b.Type), "weight unknown weight")
	}
	b := opened(t, columns{
		"region_id":    of(i64, `[7, null, 9]`),
		"length_bytes": floats(64, math.NaN(), 0),
		"region_type":  dictionary(i8, arrow.Null, `[0, 0, 0]`, `[null]`),
	})
	same(t, "regions", b.Region, "[7 0 9]")
	same(t, "lengths", b.Length, "[64 0 0]")
	same(t, "types", words(b.Type), "unknown unknown unknown")
	for _, none := range []arrow.Array{
		array.NewNull(3), of(f64, `[null, null, null]`), of(utf8, `[null, null, null]`), of(i64, `[null, null, null]`),
		dictionary(i8, arrow.Null, `[0, 0, 0]`, `[null]`),
	} {
		b := opened(t, columns{"region_id": none, "region_type": none, "length_bytes": none})
		same(t, "regions", b.Region, "[0 0 0]")
		same(t, "types", words(b.Type), "unknown unknown unknown")
		same(t, "lengths", b.Length, "[0 0 0]")
	}
}

func TestTheWholeAddressSpace(t *testing.T) {
	b := opened(t, columns{
		"address":      addresses(9223372036854775808, 18446744073709551615, 0),
		"address_page": addresses(2251799813685248, 4503599627370495, 0),
	})
	same(t, "addresses", b.Address, "[9223372036854775808 18446744073709551615 0]")
	same(t, "pages", b.Page, "[2251799813685248 4503599627370495 0]")
}

// pagesOf lists the accesses of a batch to each page, as the comment of Batch defines them.
func pagesOf(b *Batch) (out []string) {
	for i, first := range b.Address {
		out = append(out, fmt.Sprintf("%d:%#x", b.Page[i], first))
		if b.Length == nil || b.Length[i] == 0 {
			continue
		}
		for page := first>>PageShift + 1; page <= (first+b.Length[i]-1)>>PageShift; page++ {
			out = append(out, fmt.Sprintf("%d:%#x", page, page<<PageShift))
		}
	}
	return out
}

func TestLengthsReachOverPages(t *testing.T) {
	b := opened(t, columns{
		"address":      addresses(4097, 8191, 18446744073709551615),
		"address_page": of(u64, `[1, 1, 4503599627370495]`),
		"length_bytes": of(i64, `[4095, 4098, 1]`), // up to the page's end; over a whole page; the last byte of the address space
	})
	same(t, "pages", pagesOf(b), "[1:0x1001 1:0x1fff 2:0x2000 3:0x3000 4503599627370495:0xffffffffffffffff]")
}

func TestWhatNoTraceHolds(t *testing.T) {
	for want, changes := range map[string]columns{
		"the trace lacks the columns address, op_type": {"address": nil, "op_type": nil},

		"column timestamp_ns, row 1 of the batch: -1 is negative":                                                             {"timestamp_ns": of(i64, `[0, -1, 2]`)},
		"column timestamp_ns, row 2 of the batch: no value":                                                                   {"timestamp_ns": of(i64, `[0, 1, null]`)},
		"column timestamp_ns, row 0 of the batch: no value":                                                                   {"timestamp_ns": array.NewNull(3)},
		"column timestamp_ns, row 1 of the batch: NaN is no whole number that a float holds exactly: give integers":           {"timestamp_ns": floats(0, math.NaN(), 2)},
		"column timestamp_ns, row 0 of the batch: 0.5 is no whole number that a float holds exactly: give integers":           {"timestamp_ns": floats(0.5, 1, 2)},
		"column timestamp_ns, row 2 of the batch: 1e+16 is no whole number that a float holds exactly: give integers":         {"timestamp_ns": floats(0, 1, 1e16)},
		"column timestamp_ns, row 2 of the batch: 3.3554432e+07 is no whole number that a float holds exactly: give integers": {"timestamp_ns": of(f32, `[0, 1, 33554432]`)},
		"column timestamp_ns, row 0 of the batch: 9223372036854775808 is too large":                                           {"timestamp_ns": of(u64, `[9223372036854775808, 0, 0]`)},
		"column timestamp_ns has unit us, not ns":                                                                             {"timestamp_ns": of(arrow.FixedWidthTypes.Timestamp_us, `[1, 2, 3]`)},
		"column timestamp_ns holds utf8, not integers":                                                                        {"timestamp_ns": of(utf8, `["1", "2", "3"]`)},
		"column timestamp_ns holds bool, not integers":                                                                        {"timestamp_ns": of(arrow.FixedWidthTypes.Boolean, `[true, true, true]`)},

		"column address, row 0 of the batch: -4096 is negative: addresses from 2^63 on need an unsigned column": {"address": of(i64, `[-4096, 1, 1]`)},
		"column address, row 1 of the batch: no value":                                                          {"address": of(u64, `[1, null, 1]`)},
		"column address_page, row 0 of the batch: no value":                                                     {"address_page": of(i64, `[null, 1, 1]`)},

		"column op_type, row 1 of the batch: no value":                             {"op_type": of(utf8, `["load", null, "load"]`)},
		`column op_type, row 2 of the batch: "prefetch" is neither load nor store`: {"op_type": of(utf8, `["load", "store", "prefetch"]`)},
		`column op_type, row 0 of the batch: "LOAD" is neither load nor store`:     {"op_type": of(utf8, `["LOAD", "store", "load"]`)},
		"column op_type holds int8, not text":                                      {"op_type": of(i8, `[0, 1, 0]`)},
		"column op_type holds int64, not text":                                     {"op_type": dictionary(i8, i64, `[0, 0, 0]`, `[1]`)},

		"column region_type holds bool, not text":   {"region_type": of(arrow.FixedWidthTypes.Boolean, `[true, true, true]`)},
		"column region_id holds utf8, not integers": {"region_id": of(utf8, `["a", "b", "c"]`)},

		"column length_bytes, row 0 of the batch: -4 bytes at 0x1000": {"length_bytes": of(i64, `[-4, 1, 1]`)},
		"column length_bytes, row 1 of the batch: 1099511627777 bytes in one access, of at most 1099511627776": {
			"length_bytes": of(i64, `[1099511627776, 1099511627777, 1]`)},
		"column length_bytes, row 2 of the batch: 2 bytes at 0xffffffffffffffff": {
			"address": addresses(0, 0, 18446744073709551615), "length_bytes": of(i64, `[1, 1, 2]`)},
	} {
		_, err := Open(record(changes))
		if err == nil || err.Error() != want || status.CodeOf(err) != status.InvalidArgument {
			t.Errorf("%v\nnot %s", err, want)
		}
	}
}

func TestAColumnTwice(t *testing.T) {
	fields := slices.Insert(record(nil).Schema().Fields(), 0, arrow.Field{Name: "address", Type: i64})
	err := Check(arrow.NewSchema(fields, nil))
	if !errors.Is(err, status.InvalidArgument) || err.Error() != "the trace has the column address more than once" {
		t.Error(err)
	}
}

func TestAfterCountsRowsOfTheTrace(t *testing.T) {
	_, err := Open(record(columns{"timestamp_ns": of(i64, `[0, -1, 2]`)}))
	err = After(1000, err)
	same(t, "error", err, "column timestamp_ns, row 1001 of the trace: -1 is negative")
	same(t, "code", status.CodeOf(err), status.InvalidArgument.Error())
	same(t, "twice", After(5, err) == err, "true")
	other := status.New(status.NoSpace, "the disk is full")
	same(t, "others", After(5, other) == other && After(5, nil) == nil, "true")
}

func TestSchemaAndKind(t *testing.T) {
	for _, kind := range []Kind{Accesses, FirstTouches, WriteSets, Allocations} {
		schema := Schema(kind)
		if got, err := KindOf(schema); got != kind || err != nil || Check(schema) != nil {
			t.Errorf("%s, %v", got, err)
		}
	}
	if kind, err := KindOf(record(nil).Schema()); kind != Accesses || err != nil {
		t.Errorf("without metadata: %s, %v", kind, err)
	}
	if _, err := KindOf(Schema("dreams")); !errors.Is(err, status.InvalidArgument) ||
		!strings.Contains(err.Error(), `mrm_trace_kind = "dreams": one of accesses, first_touches, write_sets, allocations`) {
		t.Error(err)
	}
}
