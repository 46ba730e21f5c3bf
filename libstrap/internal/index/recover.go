package index

import (
	"bytes"
	"fmt"
	"os"
	"slices"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// Recover reads the index at path as Open does, and where its bytes are wrong
// goes on with the next batch that can be read. Torn and Problem say that there
// was something. Rows of one batch stand together and in their order; others may
// be missing between. A file of which nothing can be read gives no rows.
//
// Errors: those of Open; Corrupt for an index of another version only.
func Recover(path string) (*File, error) {
	f, err := openRegular(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b, err := contents(f, path)
	if err != nil {
		return nil, err
	}
	file, bad := parseAll(b)
	if bad != nil {
		return nil, status.New(status.Corrupt, "%q is no index of a stream: %s", path, bad.reason)
	}
	return file, nil
}

// parseAll is parse, and goes on behind wrong bytes.
func parseAll(b []byte) (*File, *fault) {
	file, bad := parse(b)
	switch {
	case bad != nil && bad.foreign:
		return nil, bad
	case bad != nil: // its beginning is damaged
		file = &File{schema: Schema(Metadata{}), version: version}
		file.tear(0, bad)
	}
	if file.Torn {
		file.recover(b)
	}
	return file, nil
}

var continuationMark = []byte{0xff, 0xff, 0xff, 0xff}

// recover adds the batches behind the place where f is torn.
func (f *File) recover(b []byte) {
	at, rows := f.tornAt, f.NumRows()
	for {
		k := bytes.Index(b[at:], continuationMark)
		if k < 0 {
			break
		}
		at += int64(k)
		m, bad := next(b, at)
		if bad != nil || m.endMark || m.kind != batchType {
			at++
			continue
		}
		if at%8 != 0 { // values are read in place, and must be aligned for that
			if m, bad = next(slices.Clone(b[at:m.end]), 0); bad != nil {
				at++
				continue
			}
			m.at, m.end = at, at+m.end
		}
		rec, bad := m.batch(f.schema, f.version)
		if bad != nil {
			at++
			continue
		}
		f.records = append(f.records, rec)
		f.ends = append(f.ends, f.NumRows()+int(rec.NumRows()))
		f.extents = append(f.extents, extent{m.at, m.end})
		at = m.end
	}
	if n := f.NumRows() - rows; n > 0 {
		f.Problem += fmt.Sprintf("; %d rows behind that place can be read", n)
	}
}
