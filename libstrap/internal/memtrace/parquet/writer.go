// Package parquet writes records to a Parquet file. The file appears when it is complete.
//
// The writer collects rows into chunks, and encodes the columns of a chunk side by side. Memory is
// bounded by a chunk, a row group in its encoded form, and four bytes for each value in the row
// group's text columns.
package parquet

import (
	"bufio"
	"os"
	"runtime"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/parquet/compress"
	parquetschema "github.com/apache/arrow/go/v17/parquet/schema"

	"github.com/libstrap/strap/libstrap/internal/partial"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Options say how to write. A zero value means the default.
type Options struct {
	RowGroupRows int64  // rows of a row group; default: 1 Mi
	Compression  string // "zstd" (the default), "snappy", "gzip", "none"
	Workers      int    // goroutines that encode columns; default: one per processor, at most 8
}

const (
	defaultRowGroup = 1 << 20
	chunkRows       = 1 << 17 // rows that are encoded together
	maxWorkers      = 8
)

var codecs = map[string]compress.Compression{
	"": compress.Codecs.Zstd, "zstd": compress.Codecs.Zstd, "snappy": compress.Codecs.Snappy,
	"gzip": compress.Codecs.Gzip, "none": compress.Codecs.Uncompressed,
}

// Writer writes one file. It writes to a temporary file in the same folder. Close gives that file
// its name, Abort removes it. A Writer is not safe for concurrent use.
type Writer struct {
	path    string
	file    *partial.File
	buffer  *bufio.Writer
	schema  *arrow.Schema
	options Options
	codec   compress.Compression
	root    *parquetschema.GroupNode
	groups  *rowGroups     // nil until the first rows decide how to encode the columns
	chunk   []arrow.Record // rows that are not yet encoded
	rows    int64          // number of rows in the chunk
	grouped int64          // number of rows in the open row group
	err     error          // the first error; nothing is written after it
}

// NewWriter begins a file. Its columns may be bool, integers, float32, float64, text, binary,
// date32, timestamps in ms, us or ns, null, or dictionaries of these. A dictionary is written as
// its values, so that every reader gets plain columns. The schema's metadata becomes the file's.
//
// Errors: InvalidArgument for a bad option, a directory under that name or a column of another
// type; NotFound, Permission, NoSpace, IO.
func NewWriter(path string, schema *arrow.Schema, o Options) (*Writer, error) {
	codec, ok := codecs[o.Compression]
	if !ok {
		return nil, status.New(status.InvalidArgument, "compression %q: one of zstd, snappy, gzip, none", o.Compression)
	}
	if o.RowGroupRows == 0 {
		o.RowGroupRows = defaultRowGroup
	}
	if o.RowGroupRows < 1 {
		return nil, status.New(status.InvalidArgument, "row_group_rows = %d: must be at least 1", o.RowGroupRows)
	}
	if o.Workers == 0 {
		o.Workers = min(runtime.NumCPU(), maxWorkers)
	}
	if o.Workers < 1 {
		return nil, status.New(status.InvalidArgument, "workers = %d: must be at least 1", o.Workers)
	}
	root, err := schemaOf(schema)
	if err != nil {
		return nil, err
	}
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil, status.New(status.InvalidArgument, "%q is a directory", path)
	}
	file, err := partial.Create(path, 0o644)
	if err != nil {
		return nil, err
	}
	w := &Writer{path: path, file: file, schema: schema, root: root, options: o, codec: codec}
	w.buffer = bufio.NewWriterSize(sink{w}, 1<<20)
	return w, nil
}

// sink keeps an error of the disk for the Writer. The layers above wrap the error, so that its code
// is lost.
type sink struct{ w *Writer }

func (s sink) Write(p []byte) (int, error) {
	n, err := s.w.file.Write(p)
	if err != nil {
		s.w.err = status.FromOS(err, "cannot write %q", s.w.path)
	}
	return n, err
}

// Write adds the rows of a record. The record must have the schema of the file. After an error
// Write does nothing and returns that error again.
func (w *Writer) Write(record arrow.Record) error {
	if w.err == nil && !record.Schema().Equal(w.schema) {
		w.err = status.New(status.InvalidArgument, "the record has other columns than the file: %v, not %v", record.Schema(), w.schema)
	}
	for from := int64(0); from < record.NumRows() && w.err == nil; {
		limit := min(chunkRows, w.options.RowGroupRows-w.grouped)
		to := min(record.NumRows(), from+limit-w.rows)
		w.chunk = append(w.chunk, record.NewSlice(from, to))
		w.rows += to - from
		from = to
		if w.rows == limit {
			w.flush()
		}
	}
	return w.err
}

// flush encodes the collected rows, and ends the row group if it is full.
func (w *Writer) flush() {
	w.guard("rows to Parquet", func() (err error) {
		if w.groups == nil {
			if w.groups, err = newRowGroups(w.buffer, w.schema, w.root, w.codec, w.options.Workers, w.chunk); err != nil {
				return err
			}
		}
		if w.rows == 0 {
			return nil
		}
		w.grouped += w.rows
		if err := w.groups.write(w.chunk); err != nil || w.grouped < w.options.RowGroupRows {
			return err
		}
		w.grouped = 0
		return w.groups.endGroup()
	})
	w.drop()
}

// drop releases the collected rows.
func (w *Writer) drop() {
	for _, record := range w.chunk {
		record.Release()
	}
	w.chunk, w.rows = nil, 0
}

// guard calls f and keeps its error, unless there is an earlier one. A panic becomes Internal.
func (w *Writer) guard(what string, f func() error) {
	if err := guarded(f); err != nil && w.err == nil {
		w.err = status.Wrap(status.CodeOf(err), err, "%s", what)
	}
}

func guarded(f func() error) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = status.New(status.Internal, "it broke off: %v", p)
		}
	}()
	return f()
}

// Close completes the file, waits until it is on the disk, and gives it its name. If that fails,
// Close removes the file as Abort does, and returns the first error.
func (w *Writer) Close() error {
	if w.err == nil {
		w.flush()
	}
	if w.err == nil {
		w.guard("the end of a Parquet file", w.groups.close)
	}
	if w.err == nil {
		w.guard("the end of a Parquet file", w.buffer.Flush)
	}
	if w.err == nil {
		w.err = w.file.Place()
	}
	if w.err != nil {
		w.Abort()
		return w.err
	}
	if err := w.file.Close(); err != nil {
		return status.FromOS(err, "cannot close %q", w.path)
	}
	return nil
}

// Abort gives up the file and removes what was written.
func (w *Writer) Abort() {
	w.drop()
	w.file.Discard()
}
