// Makes the ten tables from the partial analyses of all parts of a trace.

package analyse

import (
	"bufio"
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"slices"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/memtrace/trace"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// Merger makes the ten tables of the partial analyses of all parts of a trace. One goroutine calls
// its methods.
//
// It first checks all files, and then adds one after the other, in the order of their rows, to the
// stages of an analysis. Its memory grows with the regions, addresses and pages of the trace, as
// that of an Analyser. Strides, gaps and kept rows spill in the same way.
type Merger struct {
	options Options
	paths   []string // files that are not checked yet
	parts   []partFile
	added   int // parts that were added to the stages

	a      *Analyser // nil until all files are checked
	latest *partFile // the part before, with rows; nil without one
	rows   uint64
}

// partFile is the file of a partial analysis. It stays open while its records may be read.
type partFile struct {
	path        string
	head        partHead
	tables, end int64 // the offsets of the first stream and behind the last one
	file        *os.File
}

func (p *partFile) name() string { return p.path }

func (p *partFile) read(b []byte, at int64) error {
	if at > p.tables-int64(len(b)) {
		return status.New(status.Corrupt, "%q has no %d bytes of records at byte %d", p.path, len(b), at)
	}
	if _, err := p.file.ReadAt(b, at); err != nil {
		return status.FromOS(err, "cannot read %d bytes of %q", len(b), p.path)
	}
	return nil
}

// NewMerger starts to merge files that WritePart wrote, in any order. Options.Kind, Tables and Ordered
// have no effect. The caller must Close the merger.
//
// Errors: InvalidArgument; the message names the option.
func NewMerger(o Options, paths []string) (*Merger, error) {
	o.Kind, o.Tables, o.Ordered = trace.Accesses, nil, true
	if err := o.complete(); err != nil {
		return nil, err
	}
	if len(paths) == 0 {
		return nil, status.New(status.InvalidArgument, "no partial analysis is given")
	}
	return &Merger{options: o, paths: slices.Clone(paths)}, nil
}

// Step does a piece of the work: it checks or adds one file. It reports whether all are added.
//
// Errors: InvalidArgument if the files are not the parts of one trace; the message names the files and
// rows that are missing, doubled or overlap. Unsupported for a file of another version. Corrupt,
// NotFound, Permission, IO. After an error only Close has an effect.
func (m *Merger) Step() (done bool, err error) {
	err = guarded(func() error {
		switch {
		case len(m.paths) > 0:
			part, err := checkPart(m.paths[0])
			m.parts = append(m.parts, part)
			m.paths = m.paths[1:]
			if err != nil || len(m.paths) > 0 {
				return err
			}
			return m.start()
		case m.added < len(m.parts):
			m.added++
			return m.add(&m.parts[m.added-1])
		}
		return nil
	})
	return err == nil && m.a != nil && m.added == len(m.parts), err
}

// Rows returns the number of rows of the parts that were added.
func (m *Merger) Rows() uint64 { return m.rows }

// Kind returns the kind of the trace, once Step has added all files.
func (m *Merger) Kind() trace.Kind { return m.options.Kind }

// Finish returns the tables, once Step has added all files. The caller releases their records.
// Errors: NoSpace and IO of the spill.
func (m *Merger) Finish() ([]Table, error) {
	var tables []Table
	err := guarded(func() error {
		if m.a.journal != nil {
			if err := m.a.replay(); err != nil {
				return err
			}
		}
		r, err := m.a.results()
		if err != nil {
			return err
		}
		tables = r.tables(Ten)
		return nil
	})
	return tables, err
}

// Close frees the memory and the temporary file. Tables that Finish returned stay valid.
func (m *Merger) Close() {
	if m.a != nil {
		m.a.Close()
	}
	for _, p := range m.parts {
		if p.file != nil {
			_ = p.file.Close() // it was only read
		}
	}
}

// checkPart compares the checksum of a file and reads its head.
func checkPart(path string) (partFile, error) {
	p := partFile{path: path}
	f, err := os.Open(path)
	if err != nil {
		return p, status.FromOS(err, "cannot open %q", path)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return p, status.FromOS(err, "cannot stat %q", path)
	}
	r := partReader{path: path}
	p.end = info.Size() - sha256.Size - offsetBytes
	if p.end < 0 {
		return p, r.corrupt("it has %d bytes", info.Size())
	}
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(f, 0, p.end+offsetBytes)); err != nil {
		return p, status.FromOS(err, "cannot read %q", path)
	}
	var tail [offsetBytes + sha256.Size]byte
	if _, err := f.ReadAt(tail[:], p.end); err != nil {
		return p, status.FromOS(err, "cannot read %q", path)
	}
	if !bytes.Equal(sum.Sum(nil), tail[offsetBytes:]) {
		return p, r.corrupt("its checksum is wrong")
	}
	offset := binary.LittleEndian.Uint64(tail[:])
	if offset > uint64(p.end) {
		return p, r.corrupt("its tables are at byte %d", offset)
	}
	p.tables = int64(offset)
	r.from = bufio.NewReader(io.NewSectionReader(f, p.tables, p.end-p.tables))
	_, metadata, err := r.types()
	if err != nil {
		return p, err
	}
	text, ok := metadata.GetValue(partKey)
	if !ok {
		return p, r.corrupt("the schema lacks %s", partKey)
	}
	if err := json.Unmarshal([]byte(text), &p.head); err != nil {
		return p, r.corrupt("%s: %v", partKey, err)
	}
	if p.head.Version != partVersion {
		return p, status.New(status.Unsupported,
			"%q is a partial analysis of version %d, and this release reads version %d: make it again with this release", path, p.head.Version, partVersion)
	}
	return p, nil
}

// start checks that the files are all parts of one trace, and starts the stages.
func (m *Merger) start() error {
	slices.SortStableFunc(m.parts, func(a, b partFile) int {
		return cmp.Or(cmp.Compare(a.head.FirstRow, b.head.FirstRow), cmp.Compare(a.head.EndRow, b.head.EndRow))
	})
	if err := together(m.parts); err != nil {
		return err
	}
	head := m.parts[0].head
	m.options.Kind = head.Kind
	var err error
	m.a, err = start(m.options, &head.Part, true)
	return err
}

// together returns an error if files, in the order of their rows, are not the parts of one trace.
func together(parts []partFile) error {
	first := parts[0]
	for _, p := range parts[1:] {
		a, b := first.head, p.head
		if a.Trace != b.Trace || a.Kind != b.Kind {
			return status.New(status.InvalidArgument,
				"%q and %q are parts of different traces: one of %d rows, %d bytes and fingerprint %s, and one of %d rows, %d bytes and fingerprint %s",
				first.path, p.path, a.Trace.Rows, a.Trace.Bytes, a.Trace.Fingerprint, b.Trace.Rows, b.Trace.Bytes, b.Trace.Fingerprint)
		}
		if a.RowsKept != b.RowsKept {
			return status.New(status.InvalidArgument,
				"%q and %q have different options: only one of them has kept its rows; make one of them again", first.path, p.path)
		}
	}
	var faults []string
	covered, last := uint64(0), &partFile{}
	for i := range parts {
		p := &parts[i]
		from, to := p.head.FirstRow, p.head.EndRow
		switch {
		case from == to:
			continue
		case from > covered:
			faults = append(faults, fmt.Sprintf("rows %d to %d are missing, before %q", covered, from-1, p.path))
		case from < covered && from == last.head.FirstRow && to == last.head.EndRow:
			faults = append(faults, fmt.Sprintf("%q and %q are the same part, rows %d to %d", last.path, p.path, from, to-1))
		case from < covered:
			faults = append(faults, fmt.Sprintf("%q and %q overlap: both have the rows %d to %d", last.path, p.path, from, min(covered, to)-1))
		}
		if to > covered {
			covered, last = to, p
		}
	}
	if rows := first.head.Trace.Rows; covered < rows {
		faults = append(faults, fmt.Sprintf("rows %d to %d are missing, the last ones", covered, rows-1))
	}
	if faults != nil {
		return status.New(status.InvalidArgument, "these are not all parts of the trace, each once: %s", strings.Join(faults, "; "))
	}
	return nil
}

// add adds a part to the stages.
func (m *Merger) add(p *partFile) error {
	if p.head.FirstRow == p.head.EndRow {
		return nil
	}
	if m.a.needs&inOrder != 0 && !p.head.RowsKept {
		if l := m.latest; l != nil && p.head.Earliest < l.head.Latest {
			return status.New(status.InvalidArgument,
				"%q begins at %d ns, before the last row of %q at %d ns: parts that overlap in time need rows_kept",
				p.path, p.head.Earliest, l.path, l.head.Latest)
		}
	}
	var err error
	if p.file, err = os.Open(p.path); err != nil {
		return status.FromOS(err, "cannot open %q", p.path)
	}
	tables := io.NewSectionReader(p.file, p.tables, p.end-p.tables)
	r := &partReader{path: p.path, from: bufio.NewReaderSize(tables, 1<<18), records: p}
	if err := m.a.addPart(r); err != nil {
		return err
	}
	m.latest = p
	m.rows += p.head.EndRow - p.head.FirstRow
	return nil
}
