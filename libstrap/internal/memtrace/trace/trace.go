// Package trace defines the shape of a memory trace: its columns, its kinds, and typed views of the
// columns of a batch. It reads and writes no files.
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

// Kind says what the rows of a trace stand for. It decides which results the trace can give.
type Kind string

const (
	// Accesses: each row is a load or store that happened at its time. The trace has all of
	// them or a sample.
	Accesses Kind = "accesses"
	// FirstTouches: each row is the first access to a page, as page faults show it.
	FirstTouches Kind = "first_touches"
	// WriteSets: each row is a page written within an interval. Its time is the interval's end.
	WriteSets Kind = "write_sets"
	// Allocations: each allocation is a store, each release is a load.
	Allocations Kind = "allocations"
)

// KindKey is the key of the kind in the schema's metadata. A trace without it holds Accesses.
const KindKey = "mrm_trace_kind"

// VersionKey is the key of the schema's version in the metadata. Version is its value.
const (
	VersionKey = "mrm_trace_schema_version"
	Version    = "1.0"
)

// KindOf returns the kind that a schema's metadata states. It returns InvalidArgument if that kind
// is unknown.
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

// Text is the type of the text columns. Texts repeat, so a batch keeps each distinct text once.
var Text = &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}

// Fields returns the columns in their documented order, and length_bytes behind them.
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

// Schema returns the schema of the traces that this library writes. A trace that it reads may have
// other column types (see Open), lack optional columns, and have further ones.
func Schema(kind Kind) *arrow.Schema {
	meta := arrow.NewMetadata([]string{VersionKey, KindKey}, []string{Version, string(kind)})
	return arrow.NewSchema(Fields(), &meta)
}
