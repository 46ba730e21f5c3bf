// Writes the row groups of a file, and encodes their columns side by side.

package parquet

import (
	"io"
	"sync"
	"sync/atomic"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/compress"
	"github.com/apache/arrow/go/v17/parquet/file"
	"github.com/apache/arrow/go/v17/parquet/metadata"
	"github.com/apache/arrow/go/v17/parquet/schema"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// batchSize is how many values Arrow encodes before it checks the size of the page.
const batchSize = 8192

// rowGroups writes a Parquet file to an io.Writer. It encodes the columns of a row group in memory,
// side by side.
type rowGroups struct {
	schema  *arrow.Schema
	workers int
	file    *file.Writer
	group   file.BufferedRowGroupWriter // nil if none is open
	columns []column                    // of the group
}

// newRowGroups begins a file. rows are its first rows: they decide how each column is encoded.
func newRowGroups(out io.Writer, columns *arrow.Schema, root *schema.GroupNode, codec compress.Compression, workers int, rows []arrow.Record) (*rowGroups, error) {
	options := []parquet.WriterProperty{
		parquet.WithCompression(codec), parquet.WithDictionaryDefault(true),
		parquet.WithBatchSize(batchSize), parquet.WithCreatedBy("libstrap"),
	}
	for i, field := range columns.Fields() {
		if encoding := encodingOf(rows, i); encoding != parquet.Encodings.PlainDict {
			options = append(options, parquet.WithDictionaryFor(field.Name, false), parquet.WithEncodingFor(field.Name, encoding))
		}
	}
	// The footer gets no Arrow schema, because readers would restore the dictionaries from it.
	keys, values := columns.Metadata().Keys(), columns.Metadata().Values()
	meta := make(metadata.KeyValueMetadata, 0, len(keys))
	for i := range keys {
		if err := meta.Append(keys[i], values[i]); err != nil {
			return nil, err
		}
	}
	out = struct{ io.Writer }{out} // Arrow would call a Close
	return &rowGroups{
		schema: columns, workers: workers,
		file: file.NewParquetWriter(out, root, file.WithWriterProps(parquet.NewWriterProperties(options...)), file.WithWriteMetadata(meta)),
	}, nil
}

// write adds rows to the open row group, or to a new one.
func (g *rowGroups) write(rows []arrow.Record) error {
	if g.group == nil {
		g.group = g.file.AppendBufferedRowGroup()
		g.columns = make([]column, g.schema.NumFields())
		for i, field := range g.schema.Fields() {
			out, err := g.group.Column(i)
			if err != nil {
				return err
			}
			g.columns[i] = newColumn(field, out)
		}
	}
	return g.each(func(i int) error {
		for _, record := range rows {
			if err := g.columns[i].add(record.Column(i)); err != nil {
				return err
			}
		}
		return nil
	})
}

// endGroup ends the open row group and writes it.
func (g *rowGroups) endGroup() error {
	if err := g.each(func(i int) error { return g.columns[i].end() }); err != nil {
		return err
	}
	group := g.group
	g.group, g.columns = nil, nil
	return group.Close()
}

// close ends the row group, if one is open, and the file.
func (g *rowGroups) close() error {
	if g.group != nil {
		if err := g.endGroup(); err != nil {
			return err
		}
	}
	return g.file.Close()
}

// each calls work for every column, side by side, and returns one of the errors. A panic becomes
// Internal.
func (g *rowGroups) each(work func(column int) error) error {
	var (
		next    atomic.Int64
		running sync.WaitGroup
		first   sync.Once
		failure error
	)
	for range g.workers {
		running.Go(func() {
			for i := int(next.Add(1)) - 1; i < g.schema.NumFields(); i = int(next.Add(1)) - 1 {
				if err := guarded(func() error { return work(i) }); err != nil {
					first.Do(func() {
						failure = status.Wrap(status.CodeOf(err), err, "column %s", g.schema.Field(i).Name)
					})
				}
			}
		})
	}
	running.Wait()
	return failure
}
