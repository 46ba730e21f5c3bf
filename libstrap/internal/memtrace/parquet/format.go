package parquet

import (
	"io"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/compress"
	"github.com/apache/arrow/go/v17/parquet/file"
	"github.com/apache/arrow/go/v17/parquet/metadata"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// format is a Parquet file on its way into a stream.
type format interface {
	// write adds rows to the open row group, or to a new one.
	write(rows []arrow.Record) error
	endGroup() error
	// close ends the row group, if one is open, and the file.
	close() error
}

// batchSize is how many values are encoded between two looks at a page's size.
const batchSize = 8192

// checkSchema refuses columns that have no Parquet form.
func checkSchema(schema *arrow.Schema) error {
	if _, err := pqarrow.ToParquet(schema, nil, pqarrow.DefaultWriterProps()); err != nil {
		return status.Wrap(status.InvalidArgument, err, "these columns have no Parquet form")
	}
	return nil
}

// newFormat begins a file of rows that look like those given.
func newFormat(out io.Writer, schema *arrow.Schema, codec compress.Compression, workers int, rows []arrow.Record) (format, error) {
	options := []parquet.WriterProperty{
		parquet.WithCompression(codec), parquet.WithDictionaryDefault(true),
		parquet.WithBatchSize(batchSize), parquet.WithCreatedBy("libstrap"),
	}
	isNested := false
	for i, field := range schema.Fields() {
		isNested = isNested || arrow.IsNested(field.Type.ID())
		if encoding := encodingOf(rows, i); encoding != parquet.Encodings.PlainDict {
			options = append(options, parquet.WithDictionaryFor(field.Name, false), parquet.WithEncodingFor(field.Name, encoding))
		}
		if field.Nullable && arrow.IsUnsignedInteger(field.Type.ID()) {
			// arrow v17 compares their least as signed numbers, and looks at the places
			// of nulls too. Readers leave out row groups by it.
			options = append(options, parquet.WithStatsFor(field.Name, false))
		}
	}
	// Without the Arrow schema in the footer, which would bring the dictionaries back.
	arrowProperties := pqarrow.DefaultWriterProps()
	out = struct{ io.Writer }{out} // nothing that could be closed
	if isNested {
		return newNestedFile(out, schema, parquet.NewWriterProperties(append(options, parquet.WithStats(false))...), arrowProperties)
	}
	properties := parquet.NewWriterProperties(options...)
	columns, err := pqarrow.ToParquet(schema, properties, arrowProperties)
	if err != nil {
		return nil, err
	}
	keys, values := schema.Metadata().Keys(), schema.Metadata().Values()
	meta := make(metadata.KeyValueMetadata, 0, len(keys))
	for i := range keys {
		if err := meta.Append(keys[i], values[i]); err != nil {
			return nil, err
		}
	}
	return &flatFile{
		schema: schema, workers: workers,
		file: file.NewParquetWriter(out, columns.Root(), file.WithWriterProps(properties), file.WithWriteMetadata(meta)),
	}, nil
}
