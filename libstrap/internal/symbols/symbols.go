// Package symbols finds names of functions by address. It reads ELF files, and the lines of
// /proc/PID/maps that tell where a process has mapped them.
package symbols

import (
	"debug/elf"
	"sort"
	"strconv"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// maxTable is the most bytes of a symbol table that Read accepts. The file may be anyone's.
const maxTable = 1 << 30

// Mapping is a line of /proc/PID/maps.
type Mapping struct {
	Start, End uint64
	Offset     uint64 // in the file
	Inode      uint64
	Path       string // of the file; or a name like [vdso], or ""
}

// ParseMapping reads "START-END PERMS OFFSET DEVICE INODE   PATH".
func ParseMapping(line string) (m Mapping, ok bool) {
	var words [5]string
	rest := line
	for i := range words {
		words[i], rest, _ = strings.Cut(strings.TrimLeft(rest, " "), " ")
	}
	start, end, _ := strings.Cut(words[0], "-")
	var errs [4]error
	m.Start, errs[0] = strconv.ParseUint(start, 16, 64)
	m.End, errs[1] = strconv.ParseUint(end, 16, 64)
	m.Offset, errs[2] = strconv.ParseUint(words[2], 16, 64)
	m.Inode, errs[3] = strconv.ParseUint(words[4], 10, 64)
	for _, err := range errs {
		if err != nil {
			return m, false
		}
	}
	m.Path = strings.ToValidUTF8(strings.TrimLeft(rest, " "), "\uFFFD")
	return m, m.Start < m.End
}

// Table holds the functions of an ELF file.
type Table struct {
	loads []elf.ProgHeader // the loadable segments
	funcs []function       // by address
}

type function struct {
	start, end uint64
	name       string
}

// Read returns the functions of a file.
//
// Errors: Corrupt; Unsupported if the symbol table is larger than maxTable.
func Read(file *elf.File) (t *Table, err error) {
	// debug/elf returns errors for most damaged files, but can panic.
	defer func() {
		if p := recover(); p != nil {
			err = status.New(status.Corrupt, "it is damaged: %v", p)
		}
	}()
	t = &Table{}
	for _, p := range file.Progs {
		if p.Type == elf.PT_LOAD {
			t.loads = append(t.loads, p.ProgHeader)
		}
	}
	t.funcs, err = functions(file)
	return t, err
}

// functions returns the functions of the symbol table, or of the dynamic one if the file is
// stripped.
func functions(file *elf.File) ([]function, error) {
	for _, kind := range []elf.SectionType{elf.SHT_SYMTAB, elf.SHT_DYNSYM} {
		table := file.SectionByType(kind)
		if table == nil {
			continue
		}
		if table.Size > maxTable {
			return nil, status.New(status.Unsupported, "a symbol table of %d bytes", table.Size)
		}
		read := file.Symbols
		if kind == elf.SHT_DYNSYM {
			read = file.DynamicSymbols
		}
		symbols, err := read()
		if err != nil {
			return nil, err
		}
		if out := sortFunctions(symbols); len(out) > 0 {
			return out, nil
		}
	}
	return nil, nil
}

// sortFunctions sorts functions by address. If several names have one address, it keeps a global
// one before a weak one before a local one, and then the first in the alphabet.
func sortFunctions(symbols []elf.Symbol) []function {
	code := symbols[:0]
	for _, s := range symbols {
		kind := elf.ST_TYPE(s.Info)
		if (kind == elf.STT_FUNC || kind == elf.STT_GNU_IFUNC) && s.Section != elf.SHN_UNDEF && s.Name != "" {
			code = append(code, s)
		}
	}
	rank := func(s *elf.Symbol) int {
		switch elf.ST_BIND(s.Info) {
		case elf.STB_GLOBAL:
			return 0
		case elf.STB_WEAK:
			return 1
		default:
			return 2
		}
	}
	sort.Slice(code, func(i, j int) bool {
		a, b := &code[i], &code[j]
		if a.Value != b.Value {
			return a.Value < b.Value
		}
		if ra, rb := rank(a), rank(b); ra != rb {
			return ra < rb
		}
		return a.Name < b.Name
	})
	var out []function
	for i := range code {
		s := &code[i]
		if n := len(out); n > 0 && out[n-1].start == s.Value {
			out[n-1].end = max(out[n-1].end, s.Value+s.Size)
			continue
		}
		name := strings.ToValidUTF8(s.Name, "\uFFFD")
		out = append(out, function{start: s.Value, end: s.Value + s.Size, name: name})
	}
	for i := range out {
		// Hand-written assembly may have no size: let it reach to the next function.
		if out[i].end <= out[i].start && i+1 < len(out) {
			out[i].end = out[i+1].start
		}
	}
	return out
}

// Address converts an offset in the file to an address of the ELF file. It returns false if no
// segment has the offset.
func (t *Table) Address(offset uint64) (uint64, bool) {
	for _, p := range t.loads {
		if p.Off <= offset && offset-p.Off < p.Filesz {
			return offset - p.Off + p.Vaddr, true
		}
	}
	return 0, false
}

// Function returns the name of the function at an address of the ELF file, or "".
func (t *Table) Function(address uint64) string {
	i := sort.Search(len(t.funcs), func(i int) bool { return t.funcs[i].start > address }) - 1
	if i < 0 || address >= t.funcs[i].end {
		return ""
	}
	return t.funcs[i].name
}
