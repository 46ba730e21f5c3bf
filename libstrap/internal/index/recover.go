// Reads what can be read behind damaged bytes of an index.

package index

import (
	"bytes"
	"fmt"
	"os"

	"github.com/libstrap/strap/libstrap/internal/memory"
)

// Recover reads the index at path as Open does. Behind wrong bytes it goes on with the next batch that can be
// read, and sets Torn and Problem. The rows of a batch are together and in order. Between batches rows may be
// missing. If nothing can be read, there are no rows.
//
// Errors: those of Open. Corrupt only for an index of another version.
func Recover(path string) (*File, error) {
	f, err := openRegular(path, os.O_RDONLY)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return read(f, path, parseAll)
}

// parseAll works like parse, but goes on behind wrong bytes. For this it takes memory for the whole file.
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

// mostTries is the most bytes that may be tried as batches in vain, as a multiple of the file. In a hostile
// file each byte can claim to begin a batch of all the bytes behind it.
const mostTries = 4

// recover adds the batches behind the tear of f.
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
