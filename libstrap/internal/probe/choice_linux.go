// Finds the process and the cgroup that the options of a collector name.

package probe

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// chosenProcess returns the kernel's numbers of a process. It returns the zero process for nil.
func chosenProcess(pid *int) (process, error) {
	if pid == nil {
		return process{}, nil
	}
	p, err := openProcess(*pid)
	if err != nil {
		return process{}, err
	}
	p.close()
	return *p, nil
}

// How the programs find the cgroup of a request.
const (
	allCgroups = iota
	byTask     // the cgroup of the task that issues it
	byBio      // the cgroup that its bio is accounted to
)

// cgroup is the chosen cgroup, in the form that the programs need.
type cgroup struct {
	by        uint32
	id        uint64
	directory *os.File // stays open until the programs are loaded
}

func (c cgroup) close() {
	if c.directory != nil {
		c.directory.Close()
	}
}

// openCgroup finds a cgroup by its directory. If the controller for I/O accounts requests to the
// cgroup, the bio of a request names its cgroup (byBio); this covers write-back too. Otherwise the
// cgroup of the issuing task decides (byTask).
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
