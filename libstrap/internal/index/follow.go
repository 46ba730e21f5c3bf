package index

import (
	"errors"
	"os"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
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
	var budget memory.Budget
	source, last := &opened{f: file, length: info.Size(), budget: &budget}, f.lastExtent()
	crc, bad := checksum(source, last)
	if bad != nil && bad.system != nil {
		return nil, status.FromOS(bad.system, "cannot read the index %q", path)
	}
	if bad != nil || crc != f.lastCRC {
		return nil, status.New(status.NotFound,
			"the index %q is no longer what was read of it: byte %d on was written anew", path, last.at)
	}
	more := &File{md: f.md, version: f.version, schema: f.schema, extents: []extent{last}}
	for _, rows := range f.Slice(first, f.NumRows()) {
		b := rows.batch.slice(rows.from, rows.to)
		more.batches = append(more.batches, b)
		more.ends = append(more.ends, more.NumRows()+b.rows)
	}
	bad = more.readBatches(source, last.end, &budget)
	switch {
	case bad == nil:
		return more, nil
	case errors.Is(bad.system, status.NoMemory):
		return nil, status.Wrap(status.NoMemory, bad.system, "cannot read the index %q from byte %d on", path, last.end)
	case bad.system != nil:
		return nil, status.FromOS(bad.system, "cannot read the index %q", path)
	}
	return nil, status.New(status.NotFound, "the index %q was cut back while it was read: %s", path, bad.reason)
}

// Size is the length of the file when it was read.
func (f *File) Size() int64 { return f.size }

// lastExtent is the place of the last whole message.
func (f *File) lastExtent() extent { return f.extents[len(f.extents)-1] }

// checksum is the CRC-32C of a message.
func checksum(file source, e extent) (crc uint32, bad *fault) {
	if e.end > file.size() {
		return 0, &fault{cut: true, reason: "the file is shorter than it was"}
	}
	for at := e.at; at < e.end; {
		b, bad := file.bytes(inBody, at, min(64<<10, e.end-at))
		if bad != nil {
			return 0, bad
		}
		crc = crc32c.Update(crc, b)
		at += int64(len(b))
	}
	return crc, nil
}
