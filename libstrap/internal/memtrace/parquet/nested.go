package parquet

import (
	"context"
	"io"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/compute"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// nestedFile has lists or structs, which no table of ours has: pqarrow does it all,
// column by column, and there are no statistics.
type nestedFile struct {
	schema *arrow.Schema // without dictionaries
	writer *pqarrow.FileWriter
	open   bool // a row group is
}

func newNestedFile(out io.Writer, schema *arrow.Schema, properties *parquet.WriterProperties, arrowProperties pqarrow.ArrowWriterProperties) (*nestedFile, error) {
	fields := schema.Fields()
	for i := range fields {
		if d, ok := fields[i].Type.(*arrow.DictionaryType); ok {
			fields[i].Type = d.ValueType
		}
	}
	meta := schema.Metadata()
	f := &nestedFile{schema: arrow.NewSchema(fields, &meta)}
	var err error
	if f.writer, err = pqarrow.NewFileWriter(f.schema, out, properties, arrowProperties); err != nil {
		return nil, status.Wrap(status.InvalidArgument, err, "its columns")
	}
	return f, nil
}

func (f *nestedFile) write(rows []arrow.Record) error {
	if !f.open {
		f.writer.NewBufferedRowGroup()
		f.open = true
	}
	for _, record := range rows {
		if err := f.writeRecord(record); err != nil {
			return err
		}
	}
	return nil
}

func (f *nestedFile) writeRecord(record arrow.Record) error {
	columns := make([]arrow.Array, 0, record.NumCols())
	defer func() {
		for _, column := range columns {
			column.Release()
		}
	}()
	for i, column := range record.Columns() {
		dense, err := withoutDictionary(column)
		if err != nil {
			return status.Wrap(status.InvalidArgument, err, "column %s", record.ColumnName(i))
		}
		columns = append(columns, dense)
	}
	whole := array.NewRecord(f.schema, columns, record.NumRows())
	defer whole.Release()
	if err := f.writer.WriteBuffered(whole); err != nil {
		return status.Wrap(status.InvalidArgument, err, "a record")
	}
	return nil
}

func (f *nestedFile) endGroup() error {
	f.open = false
	return nil
}

func (f *nestedFile) close() error { return f.writer.Close() }

// withoutDictionary gives the values of a dictionary array, and any other array as
// it is. The caller releases it.
func withoutDictionary(a arrow.Array) (arrow.Array, error) {
	rows, ok := a.(*array.Dictionary)
	if !ok {
		a.Retain()
		return a, nil
	}
	values := rows.Dictionary()
	if !arrow.IsBaseBinary(values.DataType().ID()) {
		return compute.CastArray(context.Background(), a, compute.SafeCastOptions(values.DataType()))
	}
	// The cast of texts is quadratic in arrow v17.
	out := array.NewBuilder(memory.DefaultAllocator, values.DataType())
	defer out.Release()
	for i := range rows.Len() {
		if rows.IsNull(i) || values.IsNull(rows.GetValueIndex(i)) {
			out.AppendNull()
			continue
		}
		text := textsOf(values)(rows.GetValueIndex(i))
		switch out := out.(type) {
		case array.StringLikeBuilder:
			out.Append(text)
		case *array.BinaryBuilder:
			out.AppendString(text)
		}
	}
	return out.NewArray(), nil
}
