package parquet

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/memory"
	"github.com/apache/arrow/go/v17/parquet/file"
	"github.com/apache/arrow/go/v17/parquet/pqarrow"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

var numbersAndWords = func() *arrow.Schema {
	meta := arrow.NewMetadata([]string{trace.VersionKey, trace.KindKey}, []string{trace.Version, "accesses"})
	return arrow.NewSchema([]arrow.Field{
		{Name: "n", Type: arrow.PrimitiveTypes.Uint64},
		{Name: "symbol", Type: trace.Text, Nullable: true},
	}, &meta)
}()

// batch returns a record with a dictionary of its own. Two batches give a word different codes.
func batch(from, n int) arrow.Record {
	b := array.NewRecordBuilder(memory.DefaultAllocator, numbersAndWords)
	defer b.Release()
	for i := from; i < from+n; i++ {
		b.Field(0).(*array.Uint64Builder).Append(uint64(i) | 1<<63)
		if words := b.Field(1).(*array.BinaryDictionaryBuilder); i%5 == 0 {
			words.AppendNull()
		} else if err := words.AppendString(fmt.Sprintf("f%d", i%13)); err != nil {
			panic(err)
		}
	}
	return b.NewRecord()
}

func TestWhatIsWrittenIsRead(t *testing.T) {
	for _, compression := range []string{"", "zstd", "snappy", "gzip", "none"} {
		path := filepath.Join(t.TempDir(), "trace.parquet")
		w, err := NewWriter(path, numbersAndWords, Options{RowGroupRows: 1000, Compression: compression})
		if err != nil {
			t.Fatal(err)
		}
		rows := 0
		for _, n := range []int{1, 0, 700, 3500, 13} {
			r := batch(rows, n)
			if err := w.Write(r); err != nil {
				t.Fatal(err)
			}
			r.Release()
			rows += n
			if _, err := os.Stat(path); !errors.Is(err, os.ErrNotExist) {
				t.Fatalf("the file is there before it is whole: %v", err)
			}
		}
		if err := w.Close(); err != nil {
			t.Fatal(err)
		}

		in, err := file.OpenParquetFile(path, false)
		if err != nil {
			t.Fatal(err)
		}
		if groups := in.NumRowGroups(); groups != 5 {
			t.Errorf("%d row groups of 1000 for %d rows", groups, rows)
		}
		if got := in.MetaData().KeyValueMetadata().FindValue(trace.KindKey); got == nil || *got != "accesses" {
			t.Errorf("the kind is %v", got)
		}
		reader, err := pqarrow.NewFileReader(in, pqarrow.ArrowReadProperties{}, memory.DefaultAllocator)
		if err != nil {
			t.Fatal(err)
		}
		table, err := reader.ReadTable(context.Background())
		if err != nil {
			t.Fatal(err)
		}
		records := array.NewTableReader(table, 0)
		i := 0
		for records.Next() {
			n := records.Record().Column(0).(*array.Uint64)
			words := records.Record().Column(1).(*array.String)
			for row := range n.Len() {
				want := fmt.Sprintf("f%d", i%13)
				if n.Value(row) != uint64(i)|1<<63 || words.IsNull(row) != (i%5 == 0) || words.IsValid(row) && words.Value(row) != want {
					t.Fatalf("row %d: %v %v", i, n.Value(row), words.ValueStr(row))
				}
				i++
			}
		}
		if i != rows {
			t.Errorf("%d rows of %d", i, rows)
		}
		records.Release()
		in.Close()
	}
}

func TestAbortLeavesNothing(t *testing.T) {
	folder := t.TempDir()
	w, err := NewWriter(filepath.Join(folder, "trace.parquet"), numbersAndWords, Options{})
	if err != nil {
		t.Fatal(err)
	}
	r := batch(0, 10)
	defer r.Release()
	if err := w.Write(r); err != nil {
		t.Fatal(err)
	}
	w.Abort()
	if left, err := os.ReadDir(folder); err != nil || len(left) > 0 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestRefusals(t *testing.T) {
	folder := t.TempDir()
	for name, c := range map[string]struct {
		path string
		o    Options
		want error
	}{
		"a folder":        {folder, Options{}, status.InvalidArgument},
		"nowhere":         {filepath.Join(folder, "no", "trace.parquet"), Options{}, status.NotFound},
		"an unknown name": {filepath.Join(folder, "t"), Options{Compression: "lzma"}, status.InvalidArgument},
		"no rows a group": {filepath.Join(folder, "t"), Options{RowGroupRows: -1}, status.InvalidArgument},
	} {
		if _, err := NewWriter(c.path, numbersAndWords, c.o); !errors.Is(err, c.want) {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// If other users may write to the folder, they may put links in the place of the file.
func TestLinksOfOthersAreNotFollowed(t *testing.T) {
	folder := t.TempDir()
	path, mine := filepath.Join(folder, "trace.parquet"), filepath.Join(folder, "mine")
	if err := os.WriteFile(mine, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, guess := range []string{".partial", ".tmp", fmt.Sprint(".partial-", os.Getpid())} {
		if err := os.Symlink(mine, path+guess); err != nil {
			t.Fatal(err)
		}
	}
	w, err := NewWriter(path, numbersAndWords, Options{})
	if err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(mine); string(b) != "kept" {
		t.Errorf("a file behind a link became %q, %v", b, err)
	}
}

// If the disk is full, the writer returns that error and leaves no part of the file.
func TestFullDisk(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "trace.parquet")
	w, err := NewWriter(path, numbersAndWords, Options{RowGroupRows: 1000, Compression: "none"})
	if err != nil {
		t.Fatal(err)
	}
	full, err := os.OpenFile("/dev/full", os.O_WRONLY, 0)
	if err != nil {
		t.Skip("no /dev/full")
	}
	partial := w.file.File
	w.file.File = full
	r := batch(0, 5000)
	defer r.Release()
	for err = nil; err == nil; {
		err = w.Write(r)
	}
	if !errors.Is(err, status.NoSpace) {
		t.Errorf("%v, not NoSpace", err)
	}
	w.file.File = partial
	full.Close()
	w.Abort()
	if left, _ := os.ReadDir(folder); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}
