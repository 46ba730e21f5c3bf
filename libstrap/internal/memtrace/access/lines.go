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
	read  map[dwarf.Offset][]lineStart
}

type unitRange struct {
	start, end uint64
	unit       *dwarf.Entry
}

// lineStart is where the code of a line begins; source is "" in the gaps.
type lineStart struct {
	address uint64
	source  string
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
	t := &lineTable{data: data, read: map[dwarf.Offset][]lineStart{}}
	for r := data.Reader(); ; {
		unit, err := r.Next()
		if err != nil {
			return nil, err
		}
		if unit == nil {
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

// find gives "FILE:LINE", or "" where the address has none.
func (t *lineTable) find(address uint64) string {
	i := sort.Search(len(t.units), func(i int) bool { return t.units[i].start > address }) - 1
	if i < 0 || address >= t.units[i].end {
		return ""
	}
	unit := t.units[i].unit
	lines, ok := t.read[unit.Offset]
	if !ok {
		// A damaged table gives what stands before the damage.
		lines = t.lines(unit)
		t.read[unit.Offset] = lines
	}
	j := sort.Search(len(lines), func(j int) bool { return lines[j].address > address }) - 1
	if j < 0 {
		return ""
	}
	return lines[j].source
}

func (t *lineTable) lines(unit *dwarf.Entry) (out []lineStart) {
	defer func() {
		if recover() != nil {
			out = nil
		}
	}()
	r, err := t.data.LineReader(unit)
	if err != nil || r == nil {
		return nil
	}
	name, _ := unit.Val(dwarf.AttrName).(string)
	folder, _ := unit.Val(dwarf.AttrCompDir).(string)
	var last string
	for {
		var e dwarf.LineEntry
		if err := r.Next(&e); err != nil {
			if !errors.Is(err, io.EOF) {
				return nil
			}
			break
		}
		source := ""
		if !e.EndSequence && e.File != nil && e.Line > 0 {
			source = strings.ToValidUTF8(fmt.Sprintf("%s:%d", absolute(e.File.Name, folder, name), e.Line), "\uFFFD")
			if source == last {
				source = last // one copy
			}
			last = source
		}
		if n := len(out); n > 0 && out[n-1].address == e.Address && out[n-1].source != "" && source == "" {
			continue
		}
		out = append(out, lineStart{e.Address, source})
	}
	sort.SliceStable(out, func(i, j int) bool { return out[i].address < out[j].address })
	return out
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
