package index

import (
	"bytes"
	"fmt"
	"os"

	"github.com/libstrap/strap/libstrap/internal/memory"
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
	return read(f, path, parseAll)
}

// parseAll is parse, and goes on behind wrong bytes. Then it takes memory for the whole file.
func parseAll(whole source, budget *memory.Budget) (*File, *fault) {
	file, bad := parse(whole, budget)
	switch {
	case bad != nil && (bad.foreign || bad.system != nil):
		return nil, bad
	case bad != nil: // its beginning is damaged
		file = &File{schema: Schema(Metadata{}), version: version}
		file.tear(0, bad)
	}
	if file.Torn {
		b, bad := whole.bytes(inBody, 0, whole.size())
		if bad == nil {
			bad = file.recover(b, &room{budget: budget})
		}
		if bad != nil {
			return nil, bad
		}
	}
	return file, nil
}

var continuationMark = []byte{0xff, 0xff, 0xff, 0xff}

// mostTries bounds the bytes of batches that were tried and are none, as a multiple of
// the file: each place of a file made for it can claim all that is behind.
const mostTries = 4

// recover adds the batches behind the place where f is torn.
func (f *File) recover(b []byte, r *room) *fault {
	at, rows, tries := f.tornAt, f.NumRows(), mostTries*len(b)
	for {
		k := bytes.Index(b[at:], continuationMark)
		if k < 0 {
			break
		}
		at += int64(k)
		m, bad := next(held(b), at)
		if bad != nil || m.endMark || m.kind != batchType {
			at++
			continue
		}
		if bad := f.add(m, r); bad == nil {
			at = m.end
			continue
		} else if bad.system != nil {
			return bad
		}
		at++
		if tries -= len(m.body); tries < 0 {
			f.Problem += fmt.Sprintf("; behind byte %d it was not looked for rows any more", at)
			break
		}
	}
	if n := f.NumRows() - rows; n > 0 {
		f.Problem += fmt.Sprintf("; %d rows behind that place can be read", n)
	}
	return nil
}
