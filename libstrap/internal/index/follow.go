// Reads the rows that were added to an index since it was read.

package index

import (
	"errors"
	"os"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Continue reads the rows that were added to the index at path since f was read from it. The result has the
// rows of f from row first on, and the new rows. f does not change.
//
// Continue reads only the last message of f and the bytes behind it.
//
// Errors: those of Open. NotFound also if the last message of f is not in the file: then it is another file,
// or was cut back.
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
	source, last := &opened{f: file, length: info.Size(), budget: &budget}, f.lastMessage()
	crc, bad := checksum(source, last)
	if bad != nil && bad.system != nil {
		return nil, status.FromOS(bad.system, "cannot read the index %q", path)
	}
	if bad != nil || crc != f.lastCRC {
		return nil, status.New(status.NotFound,
			"the index %q is no longer what was read of it: byte %d on was written anew", path, last.at)
	}
	more := &File{md: f.md, version: f.version, schema: f.schema, messages: []byteRange{last}}
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

// Size returns the length of the file when it was read.
func (f *File) Size() int64 { return f.size }

// lastMessage returns the range of the last whole message.
func (f *File) lastMessage() byteRange { return f.messages[len(f.messages)-1] }

// checksum returns the CRC-32C of a message.
func checksum(file source, e byteRange) (crc uint32, bad *fault) {
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
