// Tells how much memory the process can still use, by /proc, control groups and RLIMIT_AS.

package memory

import (
	"bufio"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// Available returns how many bytes this process can still use. It is the least of MemAvailable in
// /proc/meminfo, limit minus usage of each control group that the process is in (v2, or the v1
// memory controller), and what RLIMIT_AS (ulimit -v) leaves. ok is false if none of them is known.
func Available() (bytes int64, ok bool) {
	left, ok := memAvailable("/proc/meminfo")
	limit := func(room int64, limited bool) {
		if limited && (!ok || room < left) {
			left, ok = max(room, 0), true
		}
	}
	for _, group := range memoryGroups("/proc/self/cgroup", "/sys/fs/cgroup") {
		limit(group.room())
	}
	limit(addressSpace("/proc/self/statm"))
	return left, ok
}

func memAvailable(path string) (int64, bool) {
	f, err := os.Open(path)
	if err != nil {
		return 0, false
	}
	defer f.Close()
	for lines := bufio.NewScanner(f); lines.Scan(); {
		if rest, found := strings.CutPrefix(lines.Text(), "MemAvailable:"); found {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			return kib << 10, err == nil
		}
	}
	return 0, false
}

// addressSpace returns how many bytes RLIMIT_AS leaves.
func addressSpace(path string) (bytes int64, limited bool) {
	var most syscall.Rlimit
	if err := syscall.Getrlimit(syscall.RLIMIT_AS, &most); err != nil || most.Cur >= 1<<62 {
		return 0, false
	}
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, false
	}
	pages, _, _ := strings.Cut(string(b), " ") // the first field is the size of the address space
	used, err := strconv.ParseInt(pages, 10, 64)
	return int64(most.Cur) - used*int64(os.Getpagesize()), err == nil
}

type memoryGroup struct{ limit, usage string } // paths of files

func (g memoryGroup) room() (bytes int64, limited bool) {
	limit, err := readInt(g.limit)
	if err != nil || limit >= 1<<62 { // v1 writes "no limit" as a huge number
		return 0, false
	}
	usage, err := readInt(g.usage)
	return limit - usage, err == nil
}

func readInt(path string) (int64, error) {
	b, err := os.ReadFile(path)
	if err != nil {
		return 0, err
	}
	return strconv.ParseInt(strings.TrimSpace(string(b)), 10, 64) // "max" is an error: no limit
}

// memoryGroups returns the control group of the process and its ancestors. Each of them limits the
// process.
func memoryGroups(membership, root string) (groups []memoryGroup) {
	b, err := os.ReadFile(membership)
	if err != nil {
		return nil
	}
	for _, line := range strings.Split(strings.TrimSpace(string(b)), "\n") {
		// hierarchy-id:controllers:path, cgroups(7)
		fields := strings.SplitN(line, ":", 3)
		if len(fields) != 3 {
			continue
		}
		base, limit, usage := root, "memory.max", "memory.current"
		if fields[1] != "" {
			if fields[1] != "memory" {
				continue
			}
			base = filepath.Join(root, "memory")
			limit, usage = "memory.limit_in_bytes", "memory.usage_in_bytes"
		}
		for path := filepath.Clean(fields[2]); ; path = filepath.Dir(path) {
			dir := filepath.Join(base, path)
			groups = append(groups, memoryGroup{filepath.Join(dir, limit), filepath.Join(dir, usage)})
			if path == "/" || path == "." {
				break
			}
		}
	}
	return groups
}
