package access

import (
	"debug/dwarf"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"path"
	"sort"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// lineTable gives source lines. The lines of a compilation unit are read when the first
// of its addresses is asked for.
type lineTable struct {
	data  *dwarf.Data
	units []unitRange // by start
	read  map[dwarf.Offset]*unitLines
}

type unitRange struct {
	start, end uint64
	unit       *dwarf.Entry
}

// unitLines is what is known of a compilation unit.
type unitLines struct {
	starts    []lineStart  // by address
	files     []string     // as DWARF numbers them
	calls     []inlineCall // read when the first is asked for
	callsRead bool
}

// lineStart is where the code of a line begins; source is "" in the gaps.
type lineStart struct {
	address uint64
	source  string
}

// inlineCall is a call by the program that the compiler expanded in place: its code, how
// deep it lies in other such code, and where it stands.
type inlineCall struct {
	start, end uint64
	depth      int
	source     string
}

// newLineTable is nil, nil where the file has no DWARF.
func newLineTable(file *elf.File) (*lineTable, error) {
	present := false
	for _, s := range file.Sections {
		name := strings.TrimPrefix(strings.TrimPrefix(s.Name, ".debug_"), ".zdebug_")
		if name == s.Name {
			continue
		}
		present = present || name == "line"
		if s.Size > maxTable {
			return nil, status.New(status.Unsupported, "no source lines: %s has %d bytes", s.Name, s.Size)
		}
	}
	if !present {
		return nil, nil
	}
	data, err := file.DWARF()
	if err != nil {
		return nil, err
	}
	t := &lineTable{data: data, read: map[dwarf.Offset]*unitLines{}}
	for r := data.Reader(); ; {
		unit, err := r.Next()
		if err != nil {
			return nil, err
		}
		// A null entry: the last unit is damaged, and debug/dwarf gives such without end.
		if unit == nil || unit.Tag == 0 {
			break
		}
		r.SkipChildren()
		if unit.Tag != dwarf.TagCompileUnit {
			continue
		}
		ranges, err := data.Ranges(unit)
		if err != nil {
			return nil, err
		}
		for _, one := range ranges {
			if one[0] < one[1] {
				t.units = append(t.units, unitRange{one[0], one[1], unit})
			}
		}
	}
	sort.SliceStable(t.units, func(i, j int) bool { return t.units[i].start < t.units[j].start })
	return t, nil
}

// find gives "FILE:LINE", or "" where the address has none. Code that comes out of a header
// of the compiler or the system, as intrinsics and templates do, has the line of the program
// that it was called from.
func (t *lineTable) find(address uint64) string {
	i := sort.Search(len(t.units), func(i int) bool { return t.units[i].start > address }) - 1
	if i < 0 || address >= t.units[i].end {
		return ""
	}
	entry := t.units[i].unit
	unit, ok := t.read[entry.Offset]
	if !ok {
		unit = t.lines(entry)
		t.read[entry.Offset] = unit
	}
	j := sort.Search(len(unit.starts), func(j int) bool { return unit.starts[j].address > address }) - 1
	if j < 0 {
		return ""
	}
	source := unit.starts[j].source
	if !ofSystem(source) {
		return source
	}
	if !unit.callsRead {
		unit.callsRead = true
		unit.calls = t.inlineCalls(entry, unit.files)
	}
	depth := 0
	for _, call := range unit.calls {
		if call.start <= address && address < call.end && call.depth > depth {
			source, depth = call.source, call.depth
		}
	}
	return source
}

// ofSystem tells whether a place is in a header that comes with the compiler or the system.
func ofSystem(source string) bool {
	for _, folder := range []string{"/usr/include/", "/include/c++/", "/lib/gcc/", "/lib/clang/"} {
		if strings.Contains(source, folder) {
			return true
		}
	}
	return false
}

// lines reads a unit's line table; a damaged one has no lines.
func (t *lineTable) lines(unit *dwarf.Entry) *unitLines {
	out := &unitLines{}
	defer func() {
		if recover() != nil {
			*out = unitLines{}
		}
	}()
	r, err := t.data.LineReader(unit)
	if err != nil || r == nil {
		return out
	}
	name, _ := unit.Val(dwarf.AttrName).(string)
	folder, _ := unit.Val(dwarf.AttrCompDir).(string)
	var last string
	for {
		var e dwarf.LineEntry
		if err := r.Next(&e); err != nil {
			if !errors.Is(err, io.EOF) {
				out.starts = nil
			}
			break
		}
		source := ""
		if !e.EndSequence && e.File != nil && e.Line > 0 {
			source = lineOf(absolute(e.File.Name, folder, name), int64(e.Line))
			if source == last {
				source = last // one copy
			}
			last = source
		}
		if n := len(out.starts); n > 0 && out.starts[n-1].address == e.Address && out.starts[n-1].source != "" && source == "" {
			continue
		}
		out.starts = append(out.starts, lineStart{e.Address, source})
	}
	sort.SliceStable(out.starts, func(i, j int) bool { return out.starts[i].address < out.starts[j].address })
	for _, f := range r.Files() {
		file := ""
		if f != nil {
			file = absolute(f.Name, folder, name)
		}
		out.files = append(out.files, file)
	}
	return out
}

func lineOf(file string, line int64) string {
	return strings.ToValidUTF8(fmt.Sprintf("%s:%d", file, line), "\uFFFD")
}

// inlineCalls reads those of a unit that do not stand in headers of the system, up to any
// damage.
func (t *lineTable) inlineCalls(unit *dwarf.Entry, files []string) (out []inlineCall) {
	defer func() { _ = recover() }()
	r := t.data.Reader()
	r.Seek(unit.Offset)
	depth := 0
	for {
		e, err := r.Next()
		if err != nil || e == nil {
			return out
		}
		switch {
		case e.Tag == 0:
			depth--
		case e.Tag == dwarf.TagInlinedSubroutine:
			file, _ := e.Val(dwarf.AttrCallFile).(int64)
			line, _ := e.Val(dwarf.AttrCallLine).(int64)
			if line <= 0 || file < 0 || file >= int64(len(files)) || files[file] == "" || ofSystem(files[file]) {
				break
			}
			ranges, err := t.data.Ranges(e)
			if err != nil {
				return out
			}
			for _, one := range ranges {
				out = append(out, inlineCall{one[0], one[1], depth, lineOf(files[file], line)})
			}
		}
		if e.Children {
			depth++
		}
		if depth == 0 {
			return out
		}
	}
}

// absolute gives a file of the unit UNIT, compiled in FOLDER, its whole name. Of tables of
// version 5 debug/dwarf (LineReader.readLNCT) leaves names in a relative folder relative, and
// puts the compilation's folder before absolute ones.
func absolute(file, folder, unit string) string {
	if !path.IsAbs(file) {
		return path.Join(folder, file)
	}
	rest, ok := strings.CutPrefix(file, folder)
	if ok && path.IsAbs(rest) && (rest == unit || strings.HasPrefix(rest, folder+"/")) {
		return rest
	}
	return file
}
