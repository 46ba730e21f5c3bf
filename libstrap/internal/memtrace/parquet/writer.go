// Package parquet writes records to a Parquet file that appears when it is whole.
package parquet

import (
	"bufio"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/parquet"
	"github.com/apache/arrow/go/v17/parquet/compress"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Options have defaults for their zero values.
type Options struct {
	RowGroupRows int64  // 1 Mi
	Compression  string // "zstd" (the default), "snappy", "gzip", "none"
}

const defaultRowGroup = 1 << 20

var codecs = map[string]compress.Compression{
	"": compress.Codecs.Zstd, "zstd": compress.Codecs.Zstd, "snappy": compress.Codecs.Snappy,
	"gzip": compress.Codecs.Gzip, "none": compress.Codecs.Uncompressed,
}

// Writer writes one file. Its records collect in PATH.partial-PID; Close gives that
// its name, Abort removes it. It is not for concurrent use.
type Writer struct {
	path    string
	file    *os.File
	buffer  *bufio.Writer
	parquet *pqarrow.FileWriter
	schema  *arrow.Schema
	group   int64 // rows a row group has
	rows    int64 // rows in the open one
	err     error // of the disk: nothing more is written
}

// NewWriter begins a file. Text dictionaries are written as the text they stand for,
// so that every reader gets plain columns; the schema's metadata becomes the file's.
//
// Errors: InvalidArgument (an option, a directory under that name, a type that
// Parquet does not have), NotFound, Permission, NoSpace, IO.
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
	if info, err := os.Stat(path); err == nil && info.IsDir() {
		return nil, status.New(status.InvalidArgument, "%q is a directory", path)
	}
	file, err := os.OpenFile(path+".partial-"+strconv.Itoa(os.Getpid()), os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o644)
	if err != nil {
		return nil, status.FromOS(err, "cannot write %q", path)
	}
	w := &Writer{path: path, file: file, group: o.RowGroupRows}
	w.buffer = bufio.NewWriterSize(sink{w}, 1<<20)
	// The default of pqarrow: the footer has no Arrow schema, which would bring the
	// dictionaries back.
	w.parquet, err = pqarrow.NewFileWriter(schema, struct{ io.Writer }{w.buffer},
		parquet.NewWriterProperties(
			parquet.WithCompression(codec),
			parquet.WithDictionaryDefault(true),
			parquet.WithMaxRowGroupLength(o.RowGroupRows),
			parquet.WithCreatedBy("libstrap"),
		), pqarrow.DefaultWriterProps())
	if err != nil {
		w.Abort()
		return nil, status.Wrap(status.InvalidArgument, err, "these columns have no Parquet form")
	}
	return w, nil
}

// sink keeps the disk's error, which the layers above wrap beyond recognition.
type sink struct{ w *Writer }

func (s sink) Write(p []byte) (int, error) {
	n, err := s.w.file.Write(p)
	if err != nil {
		s.w.err = status.FromOS(err, "cannot write %q", s.w.path)
	}
	return n, err
}

// Write adds the rows of a record, which must have the schema of the file.
func (w *Writer) Write(record arrow.Record) error {
	for from := int64(0); from < record.NumRows(); {
		if w.rows == w.group {
			w.parquet.NewBufferedRowGroup()
			w.rows = 0
		}
		to := min(record.NumRows(), from+w.group-w.rows)
		part := record.NewSlice(from, to)
		err := w.parquet.WriteBuffered(part)
		part.Release()
		if err := w.failure(err, "rows to Parquet"); err != nil {
			return err
		}
		w.rows += to - from
		from = to
	}
	return nil
}

func (w *Writer) failure(err error, what string) error {
	if w.err != nil {
		return w.err
	}
	if err != nil {
		return status.Wrap(status.InvalidArgument, err, "%s", what)
	}
	return nil
}

// Close finishes the file, waits until it is on the disk, and gives it its name.
func (w *Writer) Close() error {
	err := w.failure(w.parquet.Close(), "the end of a Parquet file")
	if err == nil {
		err = w.failure(w.buffer.Flush(), "the end of a Parquet file")
	}
	if err == nil {
		if failed := w.file.Sync(); failed != nil {
			err = status.FromOS(failed, "cannot sync %q", w.path)
		}
	}
	if err == nil {
		if failed := os.Rename(w.file.Name(), w.path); failed != nil {
			err = status.FromOS(failed, "cannot give %q its name", w.path)
		}
	}
	if err != nil {
		w.Abort()
		return err
	}
	if failed := w.file.Close(); failed != nil {
		return status.FromOS(failed, "cannot close %q", w.path)
	}
	return syncFolder(filepath.Dir(w.path))
}

// syncFolder makes a rename last.
func syncFolder(path string) error {
	folder, err := os.Open(path)
	if err != nil {
		return status.FromOS(err, "cannot sync %q", path)
	}
	defer folder.Close()
	if err := folder.Sync(); err != nil {
		return status.FromOS(err, "cannot sync %q", path)
	}
	return nil
}

// Abort removes what was written.
func (w *Writer) Abort() {
	// Both fail only where nothing is left to give up.
	_ = w.file.Close()
	_ = os.Remove(w.file.Name())
}
