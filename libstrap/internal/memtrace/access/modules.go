package access

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"sort"
	"strconv"
	"strings"
	"syscall"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// maxTable bounds the symbol and line tables of a module, whose path the trace names.
const maxTable = 1 << 30

// olderMaps is how many module maps before that of an access are searched for a module
// that was unloaded in between.
const olderMaps = 16

// moduleMap is the executable memory at one time.
type moduleMap struct {
	number   uint32
	text     []byte // until it is parsed
	mappings []mapping
}

// mapping is a line of /proc/self/maps.
type mapping struct {
	start, end, offset uint64
	module             *module
}

// module is an ELF file, or memory without one.
type module struct {
	path   string
	inode  uint64
	loaded bool
	loads  []elf.ProgHeader // the loadable segments
	funcs  []function       // by address
	lines  *lineTable       // nil without DWARF, or where none is asked for
}

type function struct {
	start, end uint64
	name       string
}

// site is where an access stands in the program; "" where that is not known.
type site struct{ symbol, dso, source string }

// symbolizer finds sites, and tells problem what it cannot read.
type symbolizer struct {
	maps    []moduleMap
	modules map[string]*module
	changed int64 // modules changed after this CLOCK_REALTIME are others; 0: unknown
	sources bool
	problem func(string, ...any)
}

// find gives the site of an access. The address is that behind the call of the hook.
func (s *symbolizer) find(pc uint64, number uint32) site {
	pc--
	at := sort.Search(len(s.maps), func(i int) bool { return s.maps[i].number > number })
	for i := at - 1; i >= max(0, at-1-olderMaps); i-- {
		s.parse(&s.maps[i])
		have := s.maps[i].mappings
		j := sort.Search(len(have), func(j int) bool { return have[j].end > pc })
		if j == len(have) || pc < have[j].start {
			continue
		}
		m := have[j].module
		s.load(m)
		found := site{dso: m.path}
		if address, ok := m.address(pc - have[j].start + have[j].offset); ok {
			found.symbol = m.function(address)
			if m.lines != nil {
				found.source = m.lines.find(address)
			}
		}
		return found
	}
	return site{}
}

func (s *symbolizer) parse(m *moduleMap) {
	text := m.text
	m.text = nil
	bad := 0
	for line := range bytes.Lines(text) {
		one, path, inode, ok := parseMapping(strings.TrimSuffix(string(line), "\n"))
		if !ok {
			bad++
			continue
		}
		one.module = s.module(path, inode)
		m.mappings = append(m.mappings, one)
	}
	if bad > 0 {
		s.problem("%d lines of module map %d are damaged", bad, m.number)
	}
	sort.SliceStable(m.mappings, func(i, j int) bool { return m.mappings[i].start < m.mappings[j].start })
}

// parseMapping reads "START-END PERMS OFFSET DEVICE INODE   PATH".
func parseMapping(line string) (m mapping, path string, inode uint64, ok bool) {
	var words [5]string
	rest := line
	for i := range words {
		words[i], rest, _ = strings.Cut(strings.TrimLeft(rest, " "), " ")
	}
	start, end, _ := strings.Cut(words[0], "-")
	var errs [4]error
	m.start, errs[0] = strconv.ParseUint(start, 16, 64)
	m.end, errs[1] = strconv.ParseUint(end, 16, 64)
	m.offset, errs[2] = strconv.ParseUint(words[2], 16, 64)
	inode, errs[3] = strconv.ParseUint(words[4], 10, 64)
	for _, err := range errs {
		if err != nil {
			return m, "", 0, false
		}
	}
	path = strings.ToValidUTF8(strings.TrimLeft(rest, " "), "\uFFFD")
	return m, path, inode, m.start < m.end
}

func (s *symbolizer) module(path string, inode uint64) *module {
	key := fmt.Sprintf("%d %s", inode, path)
	m := s.modules[key]
	if m == nil {
		m = &module{path: path, inode: inode}
		s.modules[key] = m
	}
	return m
}

// load reads a module's symbols, once.
func (s *symbolizer) load(m *module) {
	if m.loaded {
		return
	}
	m.loaded = true
	if !strings.HasPrefix(m.path, "/") { // [vdso], or code made at run time
		return
	}
	if err := s.read(m); err != nil {
		s.problem("no symbols of %s: %v", m.path, err)
	}
}

func (s *symbolizer) read(m *module) (err error) {
	// debug/elf and debug/dwarf answer damaged files with errors, mostly.
	defer func() {
		if p := recover(); p != nil {
			m.funcs, m.lines = nil, nil
			err = status.New(status.Corrupt, "it is damaged: %v", p)
		}
	}()
	path, deleted := strings.CutSuffix(m.path, " (deleted)")
	if deleted {
		return status.New(status.NotFound, "%s had been deleted while the program ran", path)
	}
	f, info, err := openRegular(path)
	if err != nil {
		return err
	}
	defer f.Close()
	if err := s.unchanged(m, info); err != nil {
		return err
	}
	file, err := elf.NewFile(f)
	if err != nil {
		return err
	}
	for _, p := range file.Progs {
		if p.Type == elf.PT_LOAD {
			m.loads = append(m.loads, p.ProgHeader)
		}
	}
	if m.funcs, err = functions(file); err != nil {
		return err
	}
	if s.sources {
		m.lines, err = newLineTable(file)
	}
	return err
}

// unchanged refuses a file that is not the one that ran.
func (s *symbolizer) unchanged(m *module, info os.FileInfo) error {
	if st, ok := info.Sys().(*syscall.Stat_t); ok && m.inode != 0 && uint64(st.Ino) != m.inode {
		return status.New(status.NotFound, "it has been replaced since the program ran")
	}
	if s.changed != 0 && info.ModTime().UnixNano() > s.changed {
		return status.New(status.NotFound, "it has been changed since the program ran")
	}
	return nil
}

// functions gives those of the symbol table, or of the dynamic one in a stripped file.
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

// sortFunctions orders functions by address; of several names for one place the global
// one stays, then the first in the alphabet.
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
		// Hand-written assembly has no sizes: it reaches to the next function.
		if out[i].end <= out[i].start && i+1 < len(out) {
			out[i].end = out[i+1].start
		}
	}
	return out
}

// address turns a place in the file into one of the ELF's own addresses.
func (m *module) address(offset uint64) (uint64, bool) {
	for _, p := range m.loads {
		if p.Off <= offset && offset-p.Off < p.Filesz {
			return offset - p.Off + p.Vaddr, true
		}
	}
	return 0, false
}

func (m *module) function(address uint64) string {
	i := sort.Search(len(m.funcs), func(i int) bool { return m.funcs[i].start > address }) - 1
	if i < 0 || address >= m.funcs[i].end {
		return ""
	}
	return m.funcs[i].name
}
