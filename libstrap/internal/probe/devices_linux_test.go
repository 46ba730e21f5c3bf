package probe

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// partition makes a partition of a loop device. start and size are in bytes. It returns the path of
// its device node, in a directory of the test, and the kernel's name for it.
func partition(t *testing.T, disk, name string, number int, start, size int64) (path, part string) {
	t.Helper()
	for _, tool := range []string{"addpart", "delpart"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip(err)
		}
	}
	add := exec.Command("addpart", disk, fmt.Sprint(number), fmt.Sprint(start/512), fmt.Sprint(size/512))
	if out, err := add.CombinedOutput(); err != nil {
		t.Skipf("no partitions of a loop device: %v, %s", err, out)
	}
	t.Cleanup(func() { exec.Command("delpart", disk, fmt.Sprint(number)).Run() })
	part = fmt.Sprintf("%sp%d", name, number)
	id, err := deviceNumber("/sys/class/block/" + part)
	if err != nil {
		t.Fatal(err)
	}
	path = filepath.Join(t.TempDir(), "part")
	if err := unix.Mknod(path, unix.S_IFBLK|0o600, int(unix.Mkdev(uint32(id>>20), uint32(id&(1<<20-1))))); err != nil {
		t.Skip("no node of a device: ", err)
	}
	if f, err := os.Open(path); err != nil {
		t.Skip("no devices in the directory of temporary files: ", err)
	} else {
		f.Close()
	}
	return path, part
}

func TestBlockFollowsAPartition(t *testing.T) {
	const size, n = 8 << 20, 100
	disk, name := loopDevice(t, 4*size)
	one, part := partition(t, disk, name, 1, size, size)
	other, _ := partition(t, disk, name, 2, 2*size, size)
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(one, link); err != nil {
		t.Fatal(err)
	}
	for _, given := range []string{part, "/dev/" + part, link} {
		b := started(t, BlockOptions{Devices: []string{given}})
		direct(t, one, size, n, true)
		direct(t, other, size, 2*n, true)
		direct(t, disk, size, 3*n, false)
		row := summed(t, b)["write"]
		if row.Name != part || row.Completed != n || row.Followed+row.Lost != n || row.Difference != 0 {
			t.Errorf("%s: %+v", given, row)
		}
		b.Close()
	}
	b := started(t, BlockOptions{Devices: []string{disk}})
	direct(t, one, size, n, true)
	if row := summed(t, b)["write"]; row.Name != name || row.Completed != n || row.Difference != 0 {
		t.Errorf("the whole disk: %+v", row)
	}
	_, err := StartBlock(BlockOptions{Devices: []string{name, part}})
	if !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "is a part of") {
		t.Error(err)
	}
}

// stacked returns the files of a machine with two disks, a volume (dm-0) over a partition and a
// disk, a volume (dm-1) over dm-0, and a device in memory (zram0).
func stacked(t *testing.T) machine {
	t.Helper()
	root := t.TempDir()
	devices := map[string]string{
		"sda": "8:0", "sda/sda2": "8:2", "nvme0n1": "259:0",
		"dm-0": "253:0", "dm-1": "253:1", "zram0": "254:0",
	}
	lines := ""
	for path, number := range devices {
		directory := filepath.Join(root, "sys/devices", path)
		writeFile(t, filepath.Join(directory, "dev"), number+"\n")
		name := filepath.Base(path)
		lines += strings.Replace(number, ":", " ", 1) + " " + name + strings.Repeat(" 0", 17) + "\n"
		symlink(t, directory, filepath.Join(root, "sys/dev/block", number))
		symlink(t, directory, filepath.Join(root, "sys/block", name))
	}
	writeFile(t, filepath.Join(root, "proc/diskstats"), lines)
	all := filepath.Join(root, "sys/devices")
	writeFile(t, filepath.Join(all, "sda/sda2/partition"), "2\n")
	for _, disk := range []string{"sda", "nvme0n1"} {
		writeFile(t, filepath.Join(all, disk, "mq/0/nr_tags"), "64\n")
	}
	writeFile(t, filepath.Join(all, "sda/queue/iostats"), "0\n")
	writeFile(t, filepath.Join(all, "dm-0/dm/name"), "vg-data\n")
	writeFile(t, filepath.Join(all, "dm-1/dm/name"), "secret\n")
	symlink(t, filepath.Join(all, "sda/sda2"), filepath.Join(all, "dm-0/slaves/sda2"))
	symlink(t, filepath.Join(all, "nvme0n1"), filepath.Join(all, "dm-0/slaves/nvme0n1"))
	symlink(t, filepath.Join(all, "dm-0"), filepath.Join(all, "dm-1/slaves/dm-0"))
	return machine(root)
}

func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}

func symlink(t *testing.T, old, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(old, path); err != nil {
		t.Fatal(err)
	}
}

func TestNamesOfDevices(t *testing.T) {
	m := stacked(t)
	const sda, sda2, nvme = 8 << 20, 8<<20 | 2, 259 << 20
	got, err := resolveDevices(m, []string{"/dev/sda2", "nvme0n1", "sda2"})
	want := wantedDevices{{Device{sda2, "sda2"}, sda}, {Device{nvme, "nvme0n1"}, nvme}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
	for name, says := range map[string]string{
		"dm-0":                    `"dm-0" makes no requests, those beneath it do: give nvme0n1, sda2`,
		"/dev/mapper/vg-data":     "give nvme0n1, sda2",
		"secret":                  "give nvme0n1, sda2",
		"zram0":                   `"zram0" makes no requests: its driver does without`,
		"/proc/self/status":       "is no block device",
		"/dev/mapper/vg-gone":     `no block device "/dev/mapper/vg-gone"`,
		"/dev/disk/by-id/nothing": `no block device "/dev/disk/by-id/nothing"`,
	} {
		if got, err := resolveDevices(m, []string{name}); err == nil || !strings.Contains(err.Error(), says) {
			t.Errorf("%s: %+v, %v", name, got, err)
		}
	}
	if err := os.RemoveAll(filepath.Join(string(m), "sys/dev")); err != nil {
		t.Fatal(err)
	}
	if got, err := resolveDevices(m, []string{"sda2"}); err != nil || got.only() != 2 {
		t.Errorf("without sysfs: %+v, %v", got, err)
	}
}

func TestCountsOfDevices(t *testing.T) {
	m := stacked(t)
	const sda, sda2, nvme = 8 << 20, 8<<20 | 2, 259 << 20
	if m.counts(sda) || m.counts(sda2) || !m.counts(nvme) {
		t.Error("whose requests the kernel counts")
	}
	if !m.hasRequests(sda) || m.hasRequests(sda2) || m.hasRequests(253<<20) {
		t.Error("which devices are disks with requests")
	}
}
