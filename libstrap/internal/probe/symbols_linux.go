// Finds the names of functions in stacks.

package probe

import (
	"bytes"
	"cmp"
	"debug/elf"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sort"
	"strconv"
	"strings"

	"github.com/libstrap/strap/libstrap/internal/symbols"
)

// stackSymbols finds the names of functions in the stacks of one process. A frame without a name
// shows as its address.
type stackSymbols struct {
	pid    int
	maps   []symbols.Mapping         // executable, by address
	tables map[string]*symbols.Table // by path and inode; nil: the file cannot be read
	jit    *nameList                 // functions compiled at run time
	core   *nameList                 // functions of the kernel; nil until it is needed
}

func newStackSymbols(pid int) *stackSymbols {
	s := &stackSymbols{pid: pid, tables: map[string]*symbols.Table{}}
	s.refresh()
	return s
}

// refresh reads where the process's code lies now. After the process has ended it keeps what it
// read before.
func (s *stackSymbols) refresh() {
	s.jit = nil
	text, err := os.ReadFile(s.proc("maps"))
	if err != nil || len(text) == 0 {
		return
	}
	s.maps = s.maps[:0]
	for line := range strings.Lines(string(text)) {
		m, ok := symbols.ParseMapping(strings.TrimSuffix(line, "\n"))
		if ok && strings.Contains(strings.Fields(line)[1], "x") {
			s.maps = append(s.maps, m)
		}
	}
}

func (s *stackSymbols) proc(name ...string) string {
	return filepath.Join(append([]string{"/proc", strconv.Itoa(s.pid)}, name...)...)
}

// kernel returns the names of frames of the kernel, innermost first. It leaves out the frames up to
// and including __schedule: they are the scheduler and the program itself.
func (s *stackSymbols) kernel(frames []uint64) []string {
	if len(frames) > 0 && s.core == nil {
		s.core = readNames("/proc/kallsyms", parseKernelSymbol)
	}
	out := []string{}
	for i, address := range frames {
		name := s.core.find(behind(address, i))
		if name == "__schedule" {
			out = out[:0]
			continue
		}
		if name == "" {
			name = fmt.Sprintf("%#x", address)
		}
		out = append(out, name)
	}
	return out
}

// user returns the names of frames of the process, innermost first.
func (s *stackSymbols) user(frames []uint64) []string {
	out := []string{}
	for i, address := range frames {
		out = append(out, s.userFrame(behind(address, i)))
	}
	return out
}

// behind returns an address inside the call instruction of a frame. A frame other than the
// innermost holds the return address, which may already belong to the next function.
func behind(address uint64, depth int) uint64 {
	if depth == 0 {
		return address
	}
	return address - 1
}

func (s *stackSymbols) userFrame(address uint64) string {
	i := sort.Search(len(s.maps), func(i int) bool { return s.maps[i].End > address })
	if i == len(s.maps) || address < s.maps[i].Start {
		return fmt.Sprintf("%#x", address)
	}
	m := s.maps[i]
	if !strings.HasPrefix(m.Path, "/") {
		return s.anonymousFrame(m, address)
	}
	offset := address - m.Start + m.Offset
	if table := s.table(m); table != nil {
		if at, ok := table.Address(offset); ok {
			if name := table.Function(at); name != "" {
				return name
			}
		}
	}
	return fmt.Sprintf("%s+%#x", filepath.Base(strings.TrimSuffix(m.Path, " (deleted)")), offset)
}

// anonymousFrame names a frame in memory that no file backs.
func (s *stackSymbols) anonymousFrame(m symbols.Mapping, address uint64) string {
	if s.jit == nil {
		s.jit = readNames(s.proc("root", "tmp", fmt.Sprintf("perf-%d.map", s.innerPID())), parsePerfMap)
	}
	if name := s.jit.find(address); name != "" {
		return name
	}
	if m.Path != "" {
		return m.Path // [vdso]
	}
	return fmt.Sprintf("%#x", address)
}

// innerPID returns the process's number in its own PID namespace. The process names its perf map
// with that number.
func (s *stackSymbols) innerPID() int {
	text, err := os.ReadFile(s.proc("status"))
	if err != nil {
		return s.pid
	}
	for line := range strings.Lines(string(text)) {
		if words := strings.Fields(line); len(words) > 1 && words[0] == "NSpid:" {
			if pid, err := strconv.Atoi(words[len(words)-1]); err == nil {
				return pid
			}
		}
	}
	return s.pid
}

// table returns the functions of a mapping's file, or nil.
func (s *stackSymbols) table(m symbols.Mapping) *symbols.Table {
	key := fmt.Sprintf("%d %s", m.Inode, m.Path)
	table, known := s.tables[key]
	if !known {
		// map_files leads to the mapped file itself, even if it was deleted or lies in a container.
		// Then try the path, inside the process's root and outside.
		for _, path := range []string{s.proc("map_files", fmt.Sprintf("%x-%x", m.Start, m.End)), s.proc("root", m.Path), m.Path} {
			if table = readTable(path); table != nil {
				break
			}
		}
		s.tables[key] = table
	}
	return table
}

// isRegular reports whether a path is a regular file. The process may have made the path: reading a
// device may never end, and opening a pipe waits for a writer.
func isRegular(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular()
}

// readTable returns the functions of an ELF file. It returns nil if the file does not exist or is
// no ELF file.
func readTable(path string) *symbols.Table {
	if !isRegular(path) {
		return nil
	}
	file, err := elf.Open(path)
	if err != nil {
		return nil
	}
	defer file.Close()
	table, err := symbols.Read(file)
	if err != nil {
		return nil
	}
	return table
}

// nameList holds names sorted by start address.
type nameList struct{ names []named }

type named struct {
	start, end uint64 // end 0: it reaches to the start of the next
	name       string
}

// find returns the name at an address, or "".
func (l *nameList) find(address uint64) string {
	i := sort.Search(len(l.names), func(i int) bool { return l.names[i].start > address }) - 1
	if i < 0 || l.names[i].end != 0 && address >= l.names[i].end {
		return ""
	}
	return l.names[i].name
}

// readNames reads a file with one name in each line. It returns an empty list if there is no such
// file.
func readNames(path string, parse func(line string) (named, bool)) *nameList {
	l := &nameList{}
	if !isRegular(path) {
		return l
	}
	text, err := os.ReadFile(path)
	if err != nil {
		return l
	}
	for line := range bytes.Lines(text) {
		if n, ok := parse(string(line)); ok {
			l.names = append(l.names, n)
		}
	}
	slices.SortStableFunc(l.names, func(a, b named) int { return cmp.Compare(a.start, b.start) })
	return l
}

// parseKernelSymbol reads a line of /proc/kallsyms, "ADDRESS TYPE NAME [MODULE]", if it is a
// function's. The kernel shows address 0 to users who may not see addresses; such a line is
// refused.
func parseKernelSymbol(line string) (n named, ok bool) {
	words := strings.Fields(line)
	if len(words) < 3 || !strings.Contains("tTwW", words[1]) {
		return n, false
	}
	start, err := strconv.ParseUint(words[0], 16, 64)
	return named{start: start, name: words[2]}, err == nil && start != 0
}

// parsePerfMap reads a line "START SIZE NAME" of a perf map, START and SIZE in hexadecimal.
// Programs that compile code at run time write such files for perf.
func parsePerfMap(line string) (n named, ok bool) {
	first, rest, _ := strings.Cut(strings.TrimSpace(line), " ")
	second, name, _ := strings.Cut(rest, " ")
	start, err1 := strconv.ParseUint(strings.TrimPrefix(first, "0x"), 16, 64)
	size, err2 := strconv.ParseUint(strings.TrimPrefix(second, "0x"), 16, 64)
	if err1 != nil || err2 != nil || name == "" {
		return n, false
	}
	return named{start, start + size, strings.ToValidUTF8(name, "\uFFFD")}, true
}
