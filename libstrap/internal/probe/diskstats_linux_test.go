package probe

import (
	"os"
	"path/filepath"
	"reflect"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// discard discards 64 KiB of a block device `n` times, each time with a flush.
func discard(t *testing.T, path string, n int) {
	t.Helper()
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	for i := range n {
		place := [2]uint64{uint64(i) << 16, 1 << 16}
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), unix.BLKDISCARD, uintptr(unsafe.Pointer(&place)))
		if errno == unix.EOPNOTSUPP {
			t.Skip("this device knows no discard")
		}
		if errno != 0 {
			t.Fatal(errno)
		}
		if err := f.Sync(); err != nil {
			t.Fatal(err)
		}
	}
}

// summed adds up the rows of two snapshots: only the second counts ends that were missed.
func summed(t *testing.T, b *Block) map[string]DiskCounts {
	t.Helper()
	out := map[string]DiskCounts{}
	for range 2 {
		s, err := b.Read()
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range s.Diskstats {
			all := out[row.Operation]
			all.Completed += row.Completed
			all.Bytes += row.Bytes
			all.Followed += row.Followed
			all.Lost += row.Lost
			all.Difference += row.Difference
			all.Device = row.Device
			out[row.Operation] = all
		}
	}
	return out
}

func TestBlockAgreesWithDiskstats(t *testing.T) {
	const size, n = 16 << 20, 300
	path, name := loopDevice(t, size)
	b := started(t, BlockOptions{Devices: []string{name}})
	direct(t, path, size, n, false)
	direct(t, path, size, n, true)
	discard(t, path, 20)
	rows := summed(t, b)
	for operation, least := range map[string]uint64{"read": n, "write": n, "discard": 20} {
		row := rows[operation]
		if row.Name != name || row.Completed < least {
			t.Errorf("%s: %+v", operation, row)
		}
		// /proc/diskstats counts an fsync as a write too. If the end of its flush was missed, the
		// end of that write was missed too, and no counter shows it.
		hidden := uint64(0)
		if operation == "write" {
			hidden = rows["flush"].Lost
		}
		if row.Difference < 0 || uint64(row.Difference) > hidden ||
			row.Completed != row.Followed+row.Lost+uint64(row.Difference) {
			t.Errorf("%s: %+v", operation, row)
		}
	}
	if rows["read"].Bytes < n*4096 || rows["discard"].Bytes < 20<<16 {
		t.Errorf("%+v", rows)
	}
}

// A collector without chosen devices compares the counts of every device.
func TestDiskstatsOfAllDevices(t *testing.T) {
	const size, n = 8 << 20, 50
	path, name := loopDevice(t, size)
	b := started(t, BlockOptions{})
	direct(t, path, size, n, false)
	found := uint64(0)
	for range 2 {
		s, err := b.Read()
		if err != nil {
			t.Fatal(err)
		}
		for _, row := range s.Diskstats {
			if row.Name != name {
				continue // a device of other programs
			}
			found += row.Followed + row.Lost
			if row.Difference != 0 {
				t.Errorf("%+v", row)
			}
		}
	}
	if found < n {
		t.Errorf("%d requests of %d", found, n)
	}
}

func TestDiskstatsOfAFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "diskstats")
	text := "   8       1 sda1 10 1 200 5 30 2 400 7 0 9 12 50 3 600 11 70 13\n8 2 short 1 2 3\n"
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	got, err := readDiskstats(path)
	want := map[uint64]diskCounts{8<<20 | 1: {
		name: "sda1", requests: [4]uint64{10, 30, 70, 50}, sectors: [4]uint64{200, 400, 0, 600},
	}}
	if err != nil || !reflect.DeepEqual(got, want) {
		t.Errorf("%+v, %v", got, err)
	}
}

// hasRead returns the counts of a device that has completed `n` reads.
func hasRead(n uint64) map[uint64]diskCounts {
	return map[uint64]diskCounts{1: {name: "disk", requests: [4]uint64{n}}}
}

func TestReconciling(t *testing.T) {
	type step struct {
		early, late           uint64 // reads that /proc/diskstats counts
		followed, lost, ended uint64
		difference            int64
	}
	for name, steps := range map[string][]step{
		"at rest":                         {{100, 100, 0, 0, 0, 0}, {130, 130, 30, 0, 0, 0}},
		"all lost are known":              {{0, 0, 0, 0, 0, 0}, {30, 30, 25, 5, 0, 0}},
		"ended, and not yet known":        {{0, 0, 0, 0, 0, 0}, {30, 30, 28, 0, 2, 0}, {30, 30, 28, 2, 0, 0}},
		"ended, and counted after all":    {{0, 0, 0, 0, 0, 0}, {30, 30, 28, 0, 2, 0}, {30, 30, 30, 0, 0, 0}},
		"missing":                         {{0, 0, 0, 0, 0, 0}, {30, 30, 27, 0, 0, 3}, {40, 40, 37, 0, 0, 0}},
		"too many":                        {{0, 0, 0, 0, 0, 0}, {30, 30, 32, 0, 0, -2}, {40, 40, 40, 0, 0, 2}},
		"while it works":                  {{90, 110, 5, 0, 0, 0}, {200, 220, 110, 0, 0, 0}, {300, 300, 205, 0, 0, 0}},
		"no more than can be explained":   {{0, 0, 0, 0, 0, 0}, {100, 110, 96, 0, 0, 4}, {200, 200, 190, 0, 0, 6}},
		"another device with that number": {{500, 500, 0, 0, 0, 0}, {20, 20, 20, 0, 0, 0}, {30, 30, 30, 0, 0, 0}},
	} {
		t.Run(name, func(t *testing.T) {
			r := newReconciler(false)
			for i, s := range steps {
				tallies := map[diskKey]tally{{1, 0}: {s.followed, s.lost, s.ended}}
				got := int64(0)
				for _, row := range r.next(hasRead(s.early), hasRead(s.late), tallies) {
					got += row.Difference
				}
				if got != s.difference {
					t.Errorf("step %d: a difference of %d, not %d", i, got, s.difference)
				}
			}
		})
	}
	r := newReconciler(false)
	r.next(hasRead(7), hasRead(7), map[diskKey]tally{{1, 0}: {}})
	fresh := map[uint64]diskCounts{1: hasRead(7)[1], 2: {name: "new", requests: [4]uint64{5}}}
	rows := r.next(fresh, fresh, map[diskKey]tally{{2, 0}: {followed: 4}})
	if len(rows) != 1 || rows[0].Completed != 5 || rows[0].Difference != 1 || rows[0].Name != "new" {
		t.Errorf("a new device: %+v", rows)
	}
}
