package index

import (
	"bytes"
	"errors"
	"io"
	"os"

	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Continue reads what the index at path, which was f when it was opened, has got since. The result
// has the rows of f from row first on, and the new ones. f stays as it is.
//
// Only the last message of f and what stands behind it are read.
//
// Errors: those of Open; NotFound too where the file does not have the last message of f at its
// place: it is another file, or was cut back.
func (f *File) Continue(path string, first int) (*File, error) {
	file, err := openRegular(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	info, err := file.Stat()
	if err != nil {
		return nil, status.FromOS(err, "cannot stat the index %q", path)
	}
	end := f.extents[len(f.extents)-1].end
	base := end - int64(len(f.last))
	var budget memory.Budget
	if err := budget.Take(max(0, info.Size()-base)); err != nil {
		return nil, status.Wrap(status.NoMemory, err, "cannot read the index %q from byte %d on", path, base)
	}
	b := make([]byte, max(0, info.Size()-base))
	n, err := file.ReadAt(b, base)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, status.FromOS(err, "cannot read the index %q", path)
	}
	if b = b[:n]; !bytes.HasPrefix(b, f.last) {
		return nil, status.New(status.NotFound,
			"the index %q is no longer what was read of it: byte %d on was written anew", path, base)
	}
	more := &File{
		md: f.md, version: f.version, schema: f.schema,
		base: base, last: b[:len(f.last)], extents: []extent{{base, end}},
	}
	for _, rec := range f.Slice(first, f.NumRows()) {
		more.records = append(more.records, rec)
		more.ends = append(more.ends, more.NumRows()+int(rec.NumRows()))
	}
	if bad := more.batches(b, int64(len(f.last)), &budget); bad != nil {
		return nil, status.Wrap(status.NoMemory, bad.memory, "cannot read the index %q from byte %d on", path, base)
	}
	return more, nil
}

// Size is the length of the file when it was read.
func (f *File) Size() int64 { return f.size }
