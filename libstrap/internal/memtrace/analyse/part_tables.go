// The tables in the file of a partial analysis, their writer and their reader.

package analyse

import (
	"io"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"
	"github.com/apache/arrow/go/v17/arrow/memory"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// partTable is one of the tables of a partial analysis. Its columns are uint64, except region_id, which
// is int64, and the text of types.
type partTable struct{ columns []string }

// The tables stand in the file in this order. Regions are numbered by the rows of the table of regions,
// types by the rows of the table of types.
var (
	partTypes = partTable{[]string{"region_type"}}
	// partRegions has a row for each region, in the order of first rows. The columns from earliest_type on
	// are for the strides: the first and the last access in the order of time.
	partRegions = partTable{[]string{
		"region_id", "region_type", "loads", "stores",
		"first_load_ns", "last_load_ns", "first_store_ns", "last_store_ns",
		"earliest_type", "first_address", "first_page", "last_address", "last_page",
		"same_page_strides", "first_stride", "first_strides", "page_steps", "stride_sum_low", "stride_sum_high",
	}}
	// partPages has the pages of each region, partStores the addresses that were stored to: once (1) or
	// more often (2). An address with several pages stands for the starts of as many adjacent pages.
	partPages  = partTable{[]string{"region", "page", "pages"}}
	partStores = partTable{[]string{"region", "address", "pages", "stores"}}
	// partStrides and partGaps say where the records of the strides of each region and of the gaps of each
	// type are (record.go): the last record, its values and groups, and the number and the bits of all values.
	// Of the strides those of the length first_stride, and the steps of a page within rows, are only counted.
	// A gap counts 1 << power times.
	partStrides = partTable{[]string{"region", "width", "at", "record_values", "record_groups", "values", "bits"}}
	partGaps    = partTable{[]string{"type", "power", "width", "at", "record_values", "record_groups", "values", "bits"}}
	// partGapSums has the sum of all gaps of a type, partGapLengths the number of gaps by bit length less one.
	partGapSums    = partTable{[]string{"type", "sum_low", "sum_high"}}
	partGapLengths = partTable{[]string{"type", "log2", "gaps"}}
	// partFirsts and partLasts have the time of the first and of the last access to each address, by type.
	partFirsts = partTable{[]string{"type", "address", "pages", "time_ns"}}
	partLasts  = partTable{[]string{"type", "address", "pages", "time_ns"}}
	// partRows has the rows of the part, if Part.RowsKept.
	partRows = partTable{[]string{"time_ns", "address", "page", "pages", "region", "type", "store"}}
)

// partBatch is the number of rows of a record batch in the file.
const partBatch = 1 << 15

func (t partTable) schema(metadata *arrow.Metadata) *arrow.Schema {
	fields := make([]arrow.Field, len(t.columns))
	for i, name := range t.columns {
		fields[i] = arrow.Field{Name: name, Type: arrow.PrimitiveTypes.Uint64}
		switch {
		case name == "region_id":
			fields[i].Type = arrow.PrimitiveTypes.Int64
		case len(t.columns) == 1:
			fields[i].Type = arrow.BinaryTypes.String
		}
	}
	return arrow.NewSchema(fields, metadata)
}

// writeTypes writes the table of types, whose schema has the metadata of the file.
func writeTypes(w io.Writer, types []string, metadata arrow.Metadata) error {
	schema := partTypes.schema(&metadata)
	b := array.NewRecordBuilder(memory.DefaultAllocator, schema)
	defer b.Release()
	b.Field(0).(*array.StringBuilder).AppendValues(types, nil)
	record := b.NewRecord()
	defer record.Release()
	stream := ipc.NewWriter(w, ipc.WithSchema(schema), ipc.WithLZ4())
	if err := stream.Write(record); err != nil {
		return err
	}
	return stream.Close()
}

// write writes a table. rows calls add for each row, with the values of its columns.
func (t partTable) write(w io.Writer, rows func(add func(values ...uint64)) error) error {
	schema := t.schema(nil)
	stream := ipc.NewWriter(w, ipc.WithSchema(schema), ipc.WithLZ4())
	columns := make([][]uint64, len(t.columns))
	for i := range columns {
		columns[i] = make([]uint64, partBatch)
	}
	n := 0
	var failed error
	flush := func() {
		arrays := make([]arrow.Array, len(columns))
		for i, values := range columns {
			// The writer is done with the values when Write returns.
			buffer := memory.NewBufferBytes(arrow.Uint64Traits.CastToBytes(values[:n]))
			data := array.NewData(schema.Field(i).Type, n, []*memory.Buffer{nil, buffer}, nil, 0, 0)
			arrays[i] = array.MakeFromData(data)
			defer arrays[i].Release()
			data.Release()
		}
		record := array.NewRecord(schema, arrays, int64(n))
		defer record.Release()
		failed = stream.Write(record)
		n = 0
	}
	err := rows(func(values ...uint64) {
		if failed != nil {
			return
		}
		for i, v := range values {
			columns[i][n] = v
		}
		if n++; n == partBatch {
			flush()
		}
	})
	if n > 0 && failed == nil {
		flush()
	}
	if failed != nil {
		return failed
	}
	if err != nil {
		return err
	}
	return stream.Close()
}

// partReader reads the tables of a file, whose checksum is right.
type partReader struct {
	path    string
	from    io.Reader
	records records // of the file
}

func (r *partReader) open(t partTable) (*ipc.Reader, error) {
	stream, err := ipc.NewReader(r.from)
	if err != nil {
		return nil, r.corrupt("%v", err)
	}
	if want := t.schema(nil); len(want.Fields()) != len(stream.Schema().Fields()) {
		return nil, r.corrupt("its columns are %v, not %v", stream.Schema().Fields(), want.Fields())
	} else {
		for i, f := range stream.Schema().Fields() {
			if f.Name != want.Field(i).Name || !arrow.TypeEqual(f.Type, want.Field(i).Type) {
				return nil, r.corrupt("its column %d is %v, not %v", i, f, want.Field(i))
			}
		}
	}
	return stream, nil
}

func (r *partReader) corrupt(format string, args ...any) error {
	return status.Wrap(status.Corrupt, status.New(status.Corrupt, format, args...), "%q is no whole partial analysis", r.path)
}

// types reads the table of types.
func (r *partReader) types() (types []string, metadata arrow.Metadata, err error) {
	stream, err := r.open(partTypes)
	if err != nil {
		return nil, metadata, err
	}
	defer stream.Release()
	for stream.Next() {
		column := stream.Record().Column(0).(*array.String)
		for i := range column.Len() {
			types = append(types, string([]byte(column.Value(i))))
		}
	}
	return types, stream.Schema().Metadata(), r.end(stream)
}

// end returns an error if a stream broke off.
func (r *partReader) end(stream *ipc.Reader) error {
	if err := stream.Err(); err != nil {
		return r.corrupt("%v", err)
	}
	return nil
}

// read calls each with the columns of each batch of a table. An int64 becomes the uint64 of the same bits.
// Another goroutine decodes the next batches meanwhile. It has ended when read returns.
func (r *partReader) read(t partTable, each func(columns [][]uint64) error) error {
	stream, err := r.open(t)
	if err != nil {
		return err
	}
	defer stream.Release()
	batches, failed := make(chan arrow.Record, 2), error(nil)
	go func() {
		defer close(batches)
		failed = guarded(func() error {
			for stream.Next() {
				record := stream.Record()
				record.Retain()
				batches <- record
			}
			return r.end(stream)
		})
	}()
	columns := make([][]uint64, len(t.columns))
	for record := range batches {
		for i := range columns {
			switch column := record.Column(i).(type) {
			case *array.Uint64:
				columns[i] = column.Uint64Values()
			case *array.Int64:
				columns[i] = arrow.Uint64Traits.CastFromBytes(arrow.Int64Traits.CastToBytes(column.Int64Values()))
			}
		}
		if err == nil { // after an error the rest is decoded in vain, because the file is damaged or the disk full
			err = guarded(func() error { return each(columns) })
		}
		record.Release()
	}
	if err != nil {
		return err
	}
	return failed
}
