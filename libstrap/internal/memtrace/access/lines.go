// Finds the source line of an address in DWARF.

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

// lineTable finds the source line of an address. It reads the lines of a compilation unit on the
// first call for an address in that unit.
type lineTable struct {
	data  *dwarf.Data
	units []unitRange                 // sorted by start
	read  map[dwarf.Offset]*unitLines // the units read so far
}

type unitRange struct {
	start, end uint64
	unit       *dwarf.Entry
}

// unitLines are the lines of a compilation unit.
type unitLines struct {
	starts    []lineStart  // sorted by address
	files     []string     // by their numbers in DWARF
	calls     []inlineCall // read when they are first needed
	callsRead bool
}

// lineStart is the address at which the code of a line begins, up to the next lineStart. source is
// "FILE:LINE", or "" for code without a line.
type lineStart struct {
	address uint64
	source  string
}

// inlineCall is a call in the program's source that the compiler expanded in place.
type inlineCall struct {
	start, end uint64 // addresses of the expanded code
	depth      int    // of its DWARF entry in the tree of the unit
	source     string // "FILE:LINE" of the call
}

// newLineTable returns nil, nil if the file has no line table in DWARF.
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
		// Tag 0 is a null entry: the last unit is damaged. debug/dwarf would return null entries
		// without end.
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

// find returns "FILE:LINE", or "" if the address has no line. Code from a header of the compiler or
// the system, such as intrinsics and templates, gets the line of the program's own source that
// called it, of the innermost call.
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

// ofSystem reports whether a file belongs to the compiler or the system.
func ofSystem(source string) bool {
	for _, folder := range []string{"/usr/include/", "/include/c++/", "/lib/gcc/", "/lib/clang/"} {
		if strings.Contains(source, folder) {
			return true
		}
	}
	return false
}

// lines reads the line table of a unit. A damaged table gives no lines.
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
				source = last // share one copy of the string
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

// inlineCalls reads the inlined calls of a unit, except calls in headers of the system. It stops at
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

// absolute returns the absolute name of a file of a unit. unit is the name of the unit's main file,
// and folder is the folder that the unit was compiled in.
//
// It corrects what debug/dwarf (LineReader.readLNCT) does with tables of DWARF version 5: names in
// a relative folder stay relative, and absolute names get the folder of the compilation before
// them.
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
