package label

import (
	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
)

func tableSchema(fields ...arrow.Field) *arrow.Schema {
	meta := arrow.NewMetadata([]string{trace.VersionKey}, []string{trace.Version})
	return arrow.NewSchema(fields, &meta)
}

var (
	i64 = arrow.PrimitiveTypes.Int64
	u64 = arrow.PrimitiveTypes.Uint64

	regionMapSchema = tableSchema(
		arrow.Field{Name: "region_id", Type: i64},
		arrow.Field{Name: "region_type", Type: arrow.BinaryTypes.String},
		arrow.Field{Name: "page_min", Type: u64},
		arrow.Field{Name: "page_max", Type: u64},
		arrow.Field{Name: "first_seen_ns", Type: i64},
		arrow.Field{Name: "last_seen_ns", Type: i64},
		arrow.Field{Name: "access_count", Type: i64},
	)
	lifecycleSchema = tableSchema(
		arrow.Field{Name: "block_id", Type: i64},
		arrow.Field{Name: "address", Type: u64},
		arrow.Field{Name: "address_page", Type: u64},
		arrow.Field{Name: "write_ns", Type: i64},
		arrow.Field{Name: "last_read_ns", Type: i64},
		arrow.Field{Name: "evict_ns", Type: i64, Nullable: true},
		arrow.Field{Name: "total_reads", Type: i64},
		arrow.Field{Name: "lifetime_ns", Type: i64},
	)
	coverageSchema = tableSchema(
		arrow.Field{Name: "region_type", Type: arrow.BinaryTypes.String},
		arrow.Field{Name: "n_rows", Type: u64},
		arrow.Field{Name: "n_bytes", Type: u64},
	)
)

// amount is how much of a trace has a type.
type amount struct{ rows, bytes uint64 }

// count adds a row to its type. A row without a length stands for its page.
func (l *Labeller) count(kind int32, b *trace.Batch, i int) {
	bytes := uint64(1) << trace.PageShift
	if b.Length != nil && b.Length[i] > 0 {
		bytes = b.Length[i]
	}
	l.found[kind].rows++
	l.found[kind].bytes += bytes
}

// Coverage has a row for each type, and for unknown: the rows that the labels found it
// for and their bytes, before the policy leaves unknown rows out or renames them.
func (l *Labeller) Coverage() arrow.Record {
	b := array.NewRecordBuilder(memory.DefaultAllocator, coverageSchema)
	defer b.Release()
	for kind, found := range l.found {
		if found.rows == 0 {
			continue
		}
		b.Field(0).(*array.StringBuilder).Append(l.typeNames[kind])
		b.Field(1).(*array.Uint64Builder).Append(found.rows)
		b.Field(2).(*array.Uint64Builder).Append(found.bytes)
	}
	return b.NewRecord()
}

// RegionMap has a row for each region in the order of first sight: its pages, the
// time of its first row, the latest time, and its accesses. A row with a length is an
// access to each of its pages, here and in KVLifecycle.
func (l *Labeller) RegionMap() arrow.Record {
	b := array.NewRecordBuilder(memory.DefaultAllocator, regionMapSchema)
	defer b.Release()
	for _, r := range l.seen {
		b.Field(0).(*array.Int64Builder).Append(r.id)
		b.Field(1).(*array.StringBuilder).Append(l.typeNames[r.kind])
		b.Field(2).(*array.Uint64Builder).Append(r.pageMin)
		b.Field(3).(*array.Uint64Builder).Append(r.pageMax)
		b.Field(4).(*array.Int64Builder).Append(r.firstNS)
		b.Field(5).(*array.Int64Builder).Append(r.latestNS)
		b.Field(6).(*array.Int64Builder).Append(r.accesses)
	}
	return b.NewRecord()
}

// KVLifecycle has a row for each page of the KV cache in the order of first sight:
// when it was first stored, last read, and stored again at another time.
func (l *Labeller) KVLifecycle() arrow.Record {
	b := array.NewRecordBuilder(memory.DefaultAllocator, lifecycleSchema)
	defer b.Release()
	for _, k := range l.kv {
		b.Field(0).(*array.Int64Builder).Append(k.id)
		b.Field(1).(*array.Uint64Builder).Append(k.address)
		b.Field(2).(*array.Uint64Builder).Append(k.page)
		b.Field(3).(*array.Int64Builder).Append(k.writeNS)
		b.Field(4).(*array.Int64Builder).Append(k.readNS)
		evicted := b.Field(5).(*array.Int64Builder)
		end := k.readNS
		if k.evicted {
			evicted.Append(k.evictNS)
			if k.evictNS != 0 { // at 0 nothing ends
				end = k.evictNS
			}
		} else {
			evicted.AppendNull()
		}
		b.Field(6).(*array.Int64Builder).Append(k.reads)
		b.Field(7).(*array.Int64Builder).Append(max(0, end-k.writeNS))
	}
	return b.NewRecord()
}
