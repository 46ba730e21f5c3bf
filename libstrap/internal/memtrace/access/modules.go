// Finds the symbol, module and source line of the code that made an access.

package access

import (
	"bytes"
	"debug/elf"
	"fmt"
	"os"
	"sort"
	"strings"
	"syscall"

	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/symbols"
)

// maxTable is the largest size in bytes of a DWARF section of a module. The trace names the file of
// the module, so that file is untrusted.
const maxTable = 1 << 30

// olderMaps is how many module maps are searched before the map of an access. The module may have
// been unloaded between the access and that map.
const olderMaps = 16

// moduleMap is the executable memory at one time.
type moduleMap struct {
	number   uint32
	text     []byte // nil after it is parsed
	mappings []mapping
}

// mapping is a line of /proc/self/maps.
type mapping struct {
	start, end, offset uint64
	module             *module
}

// module is an ELF file, or memory without one, as [vdso].
type module struct {
	path   string
	inode  uint64
	loaded bool
	table  *symbols.Table
	lines  *lineTable // nil if the file has no DWARF or source lines are not wanted
}

// site is a place in the program's code. An unknown field is "".
type site struct{ symbol, dso, source string }

// symbolizer finds the site of an access. It calls problem for modules that it cannot read.
type symbolizer struct {
	maps    []moduleMap
	modules map[string]*module // by inode and path
	// changed is the CLOCK_REALTIME in ns at the start of the recording. A file changed later is not
	// the module that ran. 0: unknown.
	changed int64
	sources bool // find source lines
	problem func(string, ...any)
}

// find returns the site of an access. pc is the return address of the hook, and number is that of
// the module map.
func (s *symbolizer) find(pc uint64, number uint32) site {
	pc-- // into the call instruction
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
		if address, ok := m.table.Address(pc - have[j].start + have[j].offset); ok {
			found.symbol = m.table.Function(address)
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
		one, ok := symbols.ParseMapping(strings.TrimSuffix(string(line), "\n"))
		if !ok {
			bad++
			continue
		}
		m.mappings = append(m.mappings, mapping{one.Start, one.End, one.Offset, s.module(one.Path, one.Inode)})
	}
	if bad > 0 {
		s.problem("%d lines of module map %d are damaged", bad, m.number)
	}
	sort.SliceStable(m.mappings, func(i, j int) bool { return m.mappings[i].start < m.mappings[j].start })
}

func (s *symbolizer) module(path string, inode uint64) *module {
	key := fmt.Sprintf("%d %s", inode, path)
	m := s.modules[key]
	if m == nil {
		m = &module{path: path, inode: inode, table: &symbols.Table{}}
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
	// debug/elf and debug/dwarf return errors for most damaged files, but may panic.
	defer func() {
		if p := recover(); p != nil {
			m.table, m.lines = &symbols.Table{}, nil
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
	table, err := symbols.Read(file)
	if err != nil {
		return err
	}
	m.table = table
	if s.sources {
		m.lines, err = newLineTable(file)
	}
	return err
}

// unchanged returns an error if the file is not the module that ran: it has another inode, or was
// changed since.
func (s *symbolizer) unchanged(m *module, info os.FileInfo) error {
	if st, ok := info.Sys().(*syscall.Stat_t); ok && m.inode != 0 && uint64(st.Ino) != m.inode {
		return status.New(status.NotFound, "it has been replaced since the program ran")
	}
	if s.changed != 0 && info.ModTime().UnixNano() > s.changed {
		return status.New(status.NotFound, "it has been changed since the program ran")
	}
	return nil
}
