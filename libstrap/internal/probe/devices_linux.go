// Finds block devices in /proc and /sys.

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

// machine is the folder that holds /proc and /sys. It is "" except in tests.
type machine string

const system machine = ""

func (m machine) diskstats() string { return string(m) + "/proc/diskstats" }

// directory returns the directory of a device in sysfs.
func (m machine) directory(id uint64) string {
	return fmt.Sprintf("%s/sys/dev/block/%d:%d", m, id>>20, id&(1<<20-1))
}

// wantedDevices lists the devices to follow. The position of a device is its place in the programs'
// table.
type wantedDevices []wantedDevice

type wantedDevice struct {
	Device
	disk uint64 // the whole disk of a partition, or its own id; 0: not known
}

// only returns the value for the programs' variable only_devices.
func (w wantedDevices) only() uint32 {
	const allDevices, wholeDisks, partitions = 0, 1, 2
	switch {
	case len(w) == 0:
		return allDevices
	case slices.ContainsFunc(w, func(d wantedDevice) bool { return d.disk != d.ID }):
		return partitions
	}
	return wholeDisks
}

const maxDevices = 64 // MAX_DEVICES in block.bpf.c

// resolveDevices finds devices by their names or paths.
func resolveDevices(m machine, names []string) (wantedDevices, error) {
	if len(names) == 0 {
		return nil, nil
	}
	known, err := readDiskstats(m.diskstats())
	if err != nil {
		return nil, err
	}
	var out wantedDevices
	for _, name := range names {
		id, err := m.number(name, known)
		if err != nil {
			return nil, err
		}
		if slices.ContainsFunc(out, func(d wantedDevice) bool { return d.ID == id }) {
			continue
		}
		disk, err := m.disk(name, id)
		if err != nil {
			return nil, err
		}
		out = append(out, wantedDevice{Device{id, known[id].name}, disk})
	}
	if len(out) > maxDevices {
		return nil, status.New(status.InvalidArgument, "%d devices: give %d at most", len(out), maxDevices)
	}
	for _, part := range out {
		for _, d := range out {
			if part.disk == d.ID && part.ID != d.ID {
				return nil, status.New(status.InvalidArgument, "device %q is a part of %q: give one of them", part.Name, d.Name)
			}
		}
	}
	return out, nil
}

// number returns the id of a device. name is the kernel's name, which needs no node in /dev, or a
// path, or the name of a device-mapper volume.
func (m machine) number(name string, known map[uint64]diskCounts) (uint64, error) {
	kernel := strings.TrimPrefix(name, "/dev/")
	for id, d := range known {
		if d.name == kernel {
			return id, nil
		}
	}
	var stat unix.Stat_t
	if err := unix.Stat(name, &stat); err == nil && strings.Contains(name, "/") {
		if stat.Mode&unix.S_IFMT != unix.S_IFBLK {
			return 0, status.New(status.InvalidArgument, "%q is no block device", name)
		}
		return uint64(unix.Major(stat.Rdev))<<20 | uint64(unix.Minor(stat.Rdev)), nil
	}
	volumes, _ := filepath.Glob(string(m) + "/sys/block/dm-*/dm/name")
	for _, path := range volumes {
		if text, _ := os.ReadFile(path); strings.TrimSpace(string(text)) == filepath.Base(name) {
			return deviceNumber(filepath.Dir(filepath.Dir(path)))
		}
	}
	return 0, status.New(status.NotFound, "there is no block device %q: /proc/diskstats lists them", name)
}

// disk returns the id of the whole disk that a device is or is part of, or 0 if sysfs does not have
// the device. It is an error if the disk has no queue of requests that can be followed.
func (m machine) disk(name string, id uint64) (uint64, error) {
	directory, err := filepath.EvalSymlinks(m.directory(id))
	if err != nil {
		return 0, nil // without sysfs
	}
	whole, disk := directory, id
	if exists(directory, "partition") {
		whole = filepath.Dir(directory)
		if disk, err = deviceNumber(whole); err != nil {
			return 0, err
		}
	}
	if exists(whole, "mq") {
		return disk, nil
	}
	lower := beneath(whole)
	if len(lower) == 0 {
		return 0, status.New(status.InvalidArgument, "device %q makes no requests: its driver does without a queue", name)
	}
	return 0, status.New(status.InvalidArgument, "device %q makes no requests, those beneath it do: give %s", name, strings.Join(lower, ", "))
}

// beneath returns the names of the devices that a stacked device passes its requests on to.
func beneath(directory string) []string {
	paths, _ := filepath.Glob(filepath.Join(directory, "slaves", "*"))
	var out []string
	for _, path := range paths {
		lower, err := filepath.EvalSymlinks(path)
		if err != nil {
			continue
		}
		if exists(lower, "mq") || exists(lower, "partition") && exists(filepath.Dir(lower), "mq") {
			out = append(out, filepath.Base(lower))
		} else {
			out = append(out, beneath(lower)...)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// hasRequests reports whether a device is a whole disk with a queue of requests.
func (m machine) hasRequests(id uint64) bool { return exists(m.directory(id), "mq") }

// counts reports whether /proc/diskstats counts the requests of a device.
func (m machine) counts(id uint64) bool {
	for _, queue := range []string{"queue", "../queue"} { // of a disk, of a partition
		text, err := os.ReadFile(m.directory(id) + "/" + queue + "/iostats")
		if err == nil {
			return strings.TrimSpace(string(text)) != "0"
		}
	}
	return true
}

func exists(directory, name string) bool {
	_, err := os.Stat(filepath.Join(directory, name))
	return !errors.Is(err, fs.ErrNotExist)
}

// deviceNumber reads the id of a device from its directory in sysfs.
func deviceNumber(directory string) (uint64, error) {
	path := filepath.Join(directory, "dev")
	text, err := os.ReadFile(path)
	if err != nil {
		return 0, status.Wrap(status.IO, err, "a device's number cannot be read")
	}
	major, minor, _ := strings.Cut(strings.TrimSpace(string(text)), ":")
	high, err1 := strconv.ParseUint(major, 10, 32)
	low, err2 := strconv.ParseUint(minor, 10, 32)
	if err := errors.Join(err1, err2); err != nil {
		return 0, status.Wrap(status.IO, err, "%s holds no number of a device", path)
	}
	return high<<20 | low, nil
}
