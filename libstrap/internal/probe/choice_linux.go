package probe

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// process is one as the kernel finds it: by its number in its own PID namespace.
type process struct {
	number        uint32 // 0: none
	device, inode uint64 // of the namespace
}

// findProcess looks a process up in /proc, by its number there.
func findProcess(given *int) (process, error) {
	if given == nil {
		return process{}, nil
	}
	pid := *given
	if pid <= 0 {
		return process{}, status.New(status.InvalidArgument, "process = %d: give the number of a process", pid)
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
		return process{}, status.New(status.NotFound, "there is no process %d", pid)
	}
	if err != nil {
		return process{}, status.Wrap(status.Permission, err, "process %d cannot be looked at", pid)
	}
	// The numbers in each namespace, from that of /proc inwards; kernels without namespaces
	// leave them out.
	own := strconv.Itoa(pid)
	for line := range strings.Lines(string(text)) {
		switch words := strings.Fields(line); {
		case len(words) > 1 && words[0] == "Tgid:" && words[1] != own:
			return process{}, status.New(status.InvalidArgument, "process = %d: this is a thread, of process %s", pid, words[1])
		case len(words) > 1 && words[0] == "NStgid:":
			own = words[len(words)-1]
		}
	}
	number, err := strconv.ParseUint(own, 10, 32)
	if err != nil {
		return process{}, status.Wrap(status.Internal, err, "the status of process %d", pid)
	}
	var namespace unix.Stat_t
	if err := unix.Stat(fmt.Sprintf("/proc/%d/ns/pid", pid), &namespace); err != nil {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			return process{}, status.New(status.NotFound, "process %d has ended", pid)
		}
		return process{}, status.Wrap(status.Permission, err, "the PID namespace of process %d cannot be looked at", pid)
	}
	// The kernel's own numbers of devices have 20 bits for the minor.
	device := uint64(unix.Major(namespace.Dev))<<20 | uint64(unix.Minor(namespace.Dev))
	return process{uint32(number), device, namespace.Ino}, nil
}

// How the programs tell the cgroup of a request.
const (
	allCgroups = iota
	byTask     // that of the task that issues it
	byBio      // that it is accounted to
)

// cgroup is one as the programs find it.
type cgroup struct {
	by        uint32
	id        uint64
	directory *os.File // open while they are loaded
}

func (c cgroup) close() {
	if c.directory != nil {
		c.directory.Close()
	}
}

// openCgroup looks a cgroup up by its directory. Where the controller for I/O accounts
// requests to it, bios say whose they are, also those of write-back; else the task that issues
// them does.
func openCgroup(given *string) (cgroup, error) {
	if given == nil {
		return cgroup{}, nil
	}
	path := *given
	directory, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return cgroup{}, status.New(status.NotFound, "there is no cgroup %q", path)
	}
	if err != nil {
		return cgroup{}, status.Wrap(status.Permission, err, "cgroup %q cannot be opened", path)
	}
	c := cgroup{by: byTask, directory: directory}
	var stat unix.Stat_t
	var files unix.Statfs_t
	fd := int(directory.Fd())
	if err := errors.Join(unix.Fstat(fd, &stat), unix.Fstatfs(fd, &files)); err != nil {
		c.close()
		return cgroup{}, status.Wrap(status.IO, err, "cgroup %q cannot be looked at", path)
	}
	c.id = stat.Ino
	version2 := files.Type == unix.CGROUP2_SUPER_MAGIC && stat.Mode&unix.S_IFMT == unix.S_IFDIR
	controllers, _ := os.ReadFile(filepath.Join(path, "cgroup.controllers"))
	blkio := files.Type == unix.CGROUP_SUPER_MAGIC && exists(path, "blkio.reset_stats")
	if blkio || version2 && slices.Contains(strings.Fields(string(controllers)), "io") {
		c.by = byBio
	} else if !version2 {
		c.close()
		return cgroup{}, status.New(status.InvalidArgument, "cgroup = %q: give a directory of cgroup v2, or of the controller blkio of v1", path)
	}
	return c, nil
}
