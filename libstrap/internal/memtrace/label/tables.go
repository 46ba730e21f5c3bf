// The tables of the labeller: coverage, regions, and the life of the KV cache.

package label

import (
	"cmp"
	"slices"
	"sync/atomic"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/memtrace/spans"
	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
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

// amount is how many rows and bytes of a trace have a type.
type amount struct{ rows, bytes uint64 }

// count adds a row to the amount of its type. A row without a length counts with the bytes of a
// page.
func (l *Labeller) count(kind int32, b *trace.Batch, i int) {
	bytes := uint64(1) << trace.PageShift
	if b.Length != nil && b.Length[i] > 0 {
		bytes = b.Length[i]
	}
	l.found[kind].rows++
	l.found[kind].bytes += bytes
}

// Coverage returns a table with a row for each type that the trace has, also for unknown: how many
// rows have the type, and their bytes. Unknown rows count as unknown, even if the policy leaves them
// out or makes them runtime.
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

// RegionMap returns a table with a row for each region in the order of first sight: its lowest and
// highest page, the time of its first row, its latest time, and its accesses. A row with a length
// counts as an access to each of its pages, here and in KVLifecycle.
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

// MostKVPages bounds the pages of long rows in KVLifecycle. It is enough for a cache of 64 GiB.
const MostKVPages = 1 << 24

// batchRows bounds the rows of a batch of KVLifecycle, to 8 MiB.
const batchRows = 1 << 17

// KVLifecycle returns a table with a row for each page of the KV cache in the order of first sight:
// when it was first stored, last read, and stored again at another time, which counts as its
// eviction. Times are in ns. The rows show the pages at the time of the call. They are made batch by
// batch, so that memory grows with the number of spans and not with that of their pages.
//
// Errors: InvalidArgument if long rows have more than MostKVPages pages; it names the longest row.
func (l *Labeller) KVLifecycle() (array.RecordReader, error) {
	pages, _ := l.longKV.From(0)
	if pages > MostKVPages {
		return nil, status.New(status.InvalidArgument,
			"kv_block_lifecycle has a row for each page: long rows give the KV cache %d pages, of at most %d; "+
				"the longest is row %d with length_bytes %d at %#x: correct it, or do without this table",
			pages, MostKVPages, l.longest.row, l.longest.length, l.longest.address)
	}
	all := make([]spans.Span[kvSpan], 0, len(l.kv)+l.longKV.Len())
	for i, k := range l.kv {
		// For a single page, Low is its place in kv and High is 0. Low cannot be the page itself,
		// because no span can hold the page 2^64-1.
		all = append(all, spans.Span[kvSpan]{Low: uint64(i), Value: k.kvSpan})
	}
	l.longKV.All(func(s *spans.Span[kvSpan]) { all = append(all, *s) })
	// The sort is stable, so the pages that one row met stay in the order of their addresses.
	slices.SortStableFunc(all, func(a, b spans.Span[kvSpan]) int { return cmp.Compare(a.Value.sight, b.Value.sight) })
	r := &lifecycle{singles: l.kv, spans: all, rows: uint64(len(l.kv)) + pages}
	r.refs.Store(1)
	return r, nil
}

// lifecycle is an array.RecordReader. The labeller keeps changing the singles. So lifecycle reads
// only their addresses and pages, which never change.
type lifecycle struct {
	refs    atomic.Int64
	singles []kvBlock
	spans   []spans.Span[kvSpan] // without the rows that Next gave out
	rows    uint64               // number of rows that are left
	record  arrow.Record
}

func (r *lifecycle) Schema() *arrow.Schema { return lifecycleSchema }
func (r *lifecycle) Record() arrow.Record  { return r.record }
func (r *lifecycle) Err() error            { return nil }
func (r *lifecycle) Retain()               { r.refs.Add(1) }

func (r *lifecycle) Release() {
	if r.refs.Add(-1) == 0 {
		r.drop()
	}
}

func (r *lifecycle) drop() {
	if r.record != nil {
		r.record.Release()
		r.record = nil
	}
}

func (r *lifecycle) Next() bool {
	r.drop()
	n := min(r.rows, batchRows)
	if n == 0 {
		return false
	}
	r.rows -= n
	b := array.NewRecordBuilder(memory.DefaultAllocator, lifecycleSchema)
	defer b.Release()
	b.Reserve(int(n))
	for ; n > 0; n-- {
		s := &r.spans[0]
		if s.High == 0 {
			one := &r.singles[s.Low]
			appendBlock(b, one.address, one.page, &s.Value)
		} else {
			appendBlock(b, s.Low<<trace.PageShift, s.Low, &s.Value)
			s.Low++
		}
		if s.Low >= s.High {
			r.spans = r.spans[1:]
		}
	}
	r.record = b.NewRecord()
	return true
}

func appendBlock(b *array.RecordBuilder, address, page uint64, k *kvSpan) {
	b.Field(0).(*array.Int64Builder).Append(k.id)
	b.Field(1).(*array.Uint64Builder).Append(address)
	b.Field(2).(*array.Uint64Builder).Append(page)
	b.Field(3).(*array.Int64Builder).Append(k.writeNS)
	b.Field(4).(*array.Int64Builder).Append(k.readNS)
	evicted := b.Field(5).(*array.Int64Builder)
	end := k.readNS
	if k.evicted {
		evicted.Append(k.evictNS)
		if k.evictNS != 0 { // an eviction at time 0 does not end the lifetime
			end = k.evictNS
		}
	} else {
		evicted.AppendNull()
	}
	b.Field(6).(*array.Int64Builder).Append(k.reads)
	b.Field(7).(*array.Int64Builder).Append(max(0, end-k.writeNS))
}
