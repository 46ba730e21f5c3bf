package parquet

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/parquet/file"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// flatFile has a column of the file for each of the schema, as traces do. The
// columns of a row group are encoded in memory, side by side.
type flatFile struct {
	schema  *arrow.Schema
	workers int
	file    *file.Writer
	group   file.BufferedRowGroupWriter // nil where none is open
	columns []column                    // of the group
}

// column is a column of a row group.
type column interface {
	add(chunk arrow.Array) error
	// end encodes what is left to be.
	end() error
}

func (f *flatFile) write(rows []arrow.Record) error {
	if f.group == nil {
		f.group = f.file.AppendBufferedRowGroup()
		f.columns = make([]column, f.schema.NumFields())
		for i, field := range f.schema.Fields() {
			out, err := f.group.Column(i)
			if err != nil {
				return err
			}
			plain := plainColumn{field: field, out: out, ctx: pqarrow.NewArrowWriteContext(context.Background(), nil)}
			f.columns[i] = &plain
			if d, ok := field.Type.(*arrow.DictionaryType); ok && arrow.IsBaseBinary(d.ValueType.ID()) {
				f.columns[i] = &textColumn{plainColumn: plain}
			}
		}
	}
	return f.each(func(i int) error {
		for _, record := range rows {
			if err := f.columns[i].add(record.Column(i)); err != nil {
				return err
			}
		}
		return nil
	})
}

func (f *flatFile) endGroup() error {
	if err := f.each(func(i int) error { return f.columns[i].end() }); err != nil {
		return err
	}
	group := f.group
	f.group, f.columns = nil, nil
	return group.Close()
}

func (f *flatFile) close() error {
	if f.group != nil {
		if err := f.endGroup(); err != nil {
			return err
		}
	}
	return f.file.Close()
}

// each runs the work on every column, and gives one of its errors.
func (f *flatFile) each(work func(column int) error) error {
	var (
		next    atomic.Int64
		running sync.WaitGroup
		first   sync.Once
		failure error
	)
	for range f.workers {
		running.Go(func() {
			for i := int(next.Add(1)) - 1; i < f.schema.NumFields(); i = int(next.Add(1)) - 1 {
				if err := guarded(func() error { return work(i) }); err != nil {
					first.Do(func() {
						failure = status.Wrap(status.CodeOf(err), err, "column %s", f.schema.Field(i).Name)
					})
				}
			}
		})
	}
	running.Wait()
	return failure
}

// plainColumn encodes values as they come.
type plainColumn struct {
	field  arrow.Field
	out    file.ColumnChunkWriter
	ctx    context.Context
	levels []int16
}

func (c *plainColumn) add(chunk arrow.Array) error {
	dense, err := withoutDictionary(chunk)
	if err != nil {
		return status.Wrap(status.InvalidArgument, err, "its dictionary")
	}
	defer dense.Release()
	if !c.field.Nullable && dense.NullN() > 0 {
		return errNulls(dense.NullN())
	}
	if err := pqarrow.WriteArrowToColumn(c.ctx, c.out, dense, c.definitionLevels(dense), nil, c.field.Nullable); err != nil {
		return status.Wrap(status.InvalidArgument, err, "its values")
	}
	return nil
}

func errNulls(n int) error {
	return status.New(status.InvalidArgument, "%d rows have no value, though the column's type is not nullable", n)
}

// definitionLevels are 1 for a value and 0 for a null; nil where the column cannot
// be null.
func (c *plainColumn) definitionLevels(chunk arrow.Array) []int16 {
	if !c.field.Nullable {
		return nil
	}
	n := chunk.Len()
	if cap(c.levels) < n {
		c.levels = make([]int16, n)
	}
	levels, nulls := c.levels[:n], chunk.NullN()
	for i := range levels {
		levels[i] = 0
		if nulls == 0 || nulls < n && chunk.IsValid(i) {
			levels[i] = 1
		}
	}
	return levels
}

// end compresses the last page here, side by side with those of other columns.
func (c *plainColumn) end() error {
	if page, ok := c.out.(interface{ FlushCurrentPage() error }); ok {
		return page.FlushCurrentPage()
	}
	return nil
}
