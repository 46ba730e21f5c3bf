// Package trace is the shape of a memory trace: its columns, its kinds, and typed
// views of the columns of a batch. It reads and writes nothing.
package trace

import (
	"github.com/apache/arrow/go/v17/arrow"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// PageSize is the unit of the working set, in bytes; address_page = address >> PageShift.
const (
	PageShift = 12
	PageSize  = 1 << PageShift
)

// Kind is what the rows of a trace are, which decides what it can tell.
type Kind string

const (
	// Accesses: every row is a load or store that happened at its time, all of
	// them or a sample.
	Accesses Kind = "accesses"
	// FirstTouches: the first access to each page, as page faults show it.
	FirstTouches Kind = "first_touches"
	// WriteSets: the pages written within an interval, at the interval's end.
	WriteSets Kind = "write_sets"
	// Allocations: a store for each allocation, a load for each release.
	Allocations Kind = "allocations"
)

// KindKey is the key of the kind in the schema's metadata; without it a trace
// holds Accesses.
const KindKey = "mrm_trace_kind"

// VersionKey and Version are the schema's version in the metadata.
const (
	VersionKey = "mrm_trace_schema_version"
	Version    = "1.0"
)

// KindOf is the kind that a schema's metadata states. InvalidArgument where it
// states an unknown one.
func KindOf(schema *arrow.Schema) (Kind, error) {
	meta := schema.Metadata()
	i := meta.FindKey(KindKey)
	if i < 0 {
		return Accesses, nil
	}
	switch kind := Kind(meta.Values()[i]); kind {
	case Accesses, FirstTouches, WriteSets, Allocations:
		return kind, nil
	default:
		return "", status.New(status.InvalidArgument, "%s = %q: one of %s, %s, %s, %s", KindKey, kind,
			Accesses, FirstTouches, WriteSets, Allocations)
	}
}

// Text is the type of the text columns: values repeat, so they are kept once a batch.
var Text = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}

// Fields are the columns in their documented order, length_bytes behind them.
func Fields() []arrow.Field {
	i64, u64 := arrow.PrimitiveTypes.Int64, arrow.PrimitiveTypes.Uint64
	return []arrow.Field{
		{Name: "run_id", Type: Text},
		{Name: "sample_id", Type: i64},
		{Name: "timestamp_ns", Type: i64},
		{Name: "phase", Type: Text, Nullable: true},
		{Name: "address", Type: u64},
		{Name: "address_page", Type: u64},
		{Name: "op_type", Type: Text},
		{Name: "symbol", Type: Text},
		{Name: "dso", Type: Text},
		{Name: "region_type", Type: Text},
		{Name: "region_id", Type: i64},
		{Name: "access_latency_ns", Type: i64, Nullable: true},
		{Name: "cache_level", Type: Text, Nullable: true},
		{Name: "numa_node", Type: i64, Nullable: true},
		{Name: "cpu_id", Type: i64, Nullable: true},
		{Name: "thread_id", Type: i64, Nullable: true},
		{Name: "token_index", Type: i64, Nullable: true},
		{Name: "context_tokens", Type: i64, Nullable: true},
		{Name: "length_bytes", Type: i64, Nullable: true},
	}
}

// Schema is that of the traces written here. A trace read may have other column
// types (see Open), lack optional columns and have further ones.
func Schema(kind Kind) *arrow.Schema {
	meta := arrow.NewMetadata([]string{VersionKey, KindKey}, []string{Version, string(kind)})
	return arrow.NewSchema(Fields(), &meta)
}
