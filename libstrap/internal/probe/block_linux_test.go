package probe

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/libstrap/strap/libstrap/internal/status"
)

// started returns a running collector. It skips the test if the machine cannot run one.
func started(t *testing.T, o BlockOptions) *Block {
	t.Helper()
	b, err := StartBlock(o)
	if errors.Is(err, status.Permission) || errors.Is(err, status.Unsupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.Close)
	return b
}

// loopDevice makes a loop device of `size` bytes for the test. It returns its path and name.
func loopDevice(t *testing.T, size int64) (path, name string) {
	t.Helper()
	if os.Getuid() != 0 {
		t.Skip("a loop device needs root")
	}
	file, err := os.Create(filepath.Join(t.TempDir(), "disk"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	if err := file.Truncate(size); err != nil {
		t.Fatal(err)
	}
	control, err := os.OpenFile("/dev/loop-control", os.O_RDWR, 0)
	if err != nil {
		t.Skip("no loop devices: ", err)
	}
	defer control.Close()
	for {
		number, err := unix.IoctlRetInt(int(control.Fd()), unix.LOOP_CTL_GET_FREE)
		if err != nil {
			t.Skip("no free loop device: ", err)
		}
		name = fmt.Sprintf("loop%d", number)
		path = "/dev/" + name
		device, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Skip("no loop device: ", err)
		}
		err = unix.IoctlSetInt(int(device.Fd()), unix.LOOP_SET_FD, int(file.Fd()))
		if err == unix.EBUSY { // another process took it first
			device.Close()
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			unix.IoctlSetInt(int(device.Fd()), unix.LOOP_CLR_FD, 0)
			device.Close()
		})
		return path, name
	}
}

// completed returns how many reads and writes of a device /proc/diskstats has counted.
func completed(t *testing.T, name string) (reads, writes uint64) {
	t.Helper()
	stats, err := os.ReadFile("/proc/diskstats")
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range strings.Split(string(stats), "\n") {
		if words := strings.Fields(line); len(words) > 10 && words[2] == name {
			reads, _ = strconv.ParseUint(words[3], 10, 64)
			writes, _ = strconv.ParseUint(words[7], 10, 64)
			return reads, writes
		}
	}
	t.Fatalf("%s is not in /proc/diskstats", name)
	return 0, 0
}

// direct makes `n` reads or writes of 4 KiB at random places, past the page cache.
func direct(t *testing.T, path string, size int64, n int, write bool) {
	f, err := os.OpenFile(path, os.O_RDWR|unix.O_DIRECT, 0)
	if err != nil {
		t.Error(err)
		return
	}
	defer f.Close()
	room := make([]byte, 8192)
	skip := -uintptr(unsafe.Pointer(unsafe.SliceData(room))) % 4096
	page := room[skip : skip+4096]
	for range n {
		at := rand.Int64N(size/4096) * 4096
		if write {
			_, err = f.WriteAt(page, at)
		} else {
			_, err = f.ReadAt(page, at)
		}
		if err != nil {
			t.Error(err)
			return
		}
	}
}

func TestBlockCountsEveryRequest(t *testing.T) {
	const size, threads, each = 64 << 20, 4, 500
	path, name := loopDevice(t, size)
	b := started(t, BlockOptions{Devices: []string{name}})
	reads, writes := completed(t, name)
	var group sync.WaitGroup
	for i := range threads {
		group.Add(1)
		go func() {
			defer group.Done()
			direct(t, path, size, each, i%2 == 0)
		}()
	}
	group.Wait()
	readsAfter, writesAfter := completed(t, name)
	s, err := b.Read()
	if err != nil {
		t.Fatal(err)
	}
	// The second snapshot gives up requests whose end was missed.
	later, err := b.Read()
	if err != nil || len(later.LatencyHistogram) != 0 || len(later.InFlight) != 1 || later.InFlight[0].Count != 0 {
		t.Errorf("a second time: %+v, %v", later, err)
	}
	unseen := s.Losses.UnseenEnd + later.Losses.UnseenEnd
	s.Losses.UnseenEnd, s.Losses.Missed = 0, 0
	if s.Losses != (Losses{}) {
		t.Errorf("losses: %+v", s.Losses)
	}
	want := map[string]uint64{"read": readsAfter - reads, "write": writesAfter - writes}
	counted, followed := want["read"]+want["write"], unseen
	for _, one := range s.Operations {
		if one.Name != name || one.InFlight != 0 || one.Errors != 0 {
			t.Errorf("%+v", one)
		}
		n := want[one.Operation]
		if one.Completed > n || n < threads/2*each || one.Bytes != 4096*one.Completed {
			t.Errorf("%s: %d requests, %d bytes; the kernel counted %d", one.Operation, one.Completed, one.Bytes, n)
		}
		followed += one.Completed
		for _, histogram := range [][]Bucket{one.Latency, one.Size} {
			total := uint64(0)
			for _, bucket := range histogram {
				total += bucket.Count
			}
			if total != one.Completed {
				t.Errorf("%s: a histogram of %d for %d requests", one.Operation, total, one.Completed)
			}
		}
		delete(want, one.Operation)
	}
	if len(want) > 0 {
		t.Errorf("not seen: %v", want)
	}
	// Each request completed, or is counted as one whose end was missed: some micro virtual
	// machines hide what happens while process 1 runs.
	if followed != counted || unseen > counted/20 {
		t.Errorf("%d requests were followed, %d made; %d ends were not seen", followed, counted, unseen)
	}
	if len(s.InFlight) != 1 || s.InFlight[0].Count != 0 || s.InFlight[0].Name != name {
		t.Errorf("in flight: %+v", s.InFlight)
	}
}

func TestBlockFollowsOnlyItsDevices(t *testing.T) {
	const size = 8 << 20
	path, _ := loopDevice(t, size)
	_, other := loopDevice(t, size)
	b := started(t, BlockOptions{Devices: []string{"/dev/" + other}})
	direct(t, path, size, 50, true)
	s, err := b.Read()
	if err != nil {
		t.Fatal(err)
	}
	if len(s.Operations) != 0 || s.Losses.UnseenStart != 0 {
		t.Errorf("%+v", s)
	}
}

// fio counts its requests and measures their latencies itself.
func TestBlockAgreesWithFio(t *testing.T) {
	fio, err := exec.LookPath("fio")
	if err != nil {
		t.Skip("fio is not installed")
	}
	const size = 64 << 20
	for _, c := range []struct {
		rw    string
		depth int
		block string
	}{{"randread", 1, "4k"}, {"randwrite", 8, "4k"}, {"randrw", 32, "16k"}, {"read", 4, "64k"}, {"write", 16, "4k"}} {
		t.Run(fmt.Sprintf("%s at depth %d of %s", c.rw, c.depth, c.block), func(t *testing.T) {
			path, name := loopDevice(t, size)
			b := started(t, BlockOptions{Devices: []string{name}})
			reads, writes := completed(t, name)
			out, err := exec.Command(fio, "--name=test", "--filename="+path, "--direct=1", "--rw="+c.rw,
				"--bs="+c.block, fmt.Sprint("--iodepth=", c.depth), "--ioengine=libaio", "--size=16M",
				"--allow_mounted_write=0", "--output-format=json").Output()
			if err != nil {
				t.Fatal(err)
			}
			readsAfter, writesAfter := completed(t, name)
			s, err := b.Read()
			if err != nil {
				t.Fatal(err)
			}
			later, err := b.Read()
			if err != nil {
				t.Fatal(err)
			}
			lost := s.Losses.UnseenEnd + later.Losses.UnseenEnd
			var report struct {
				Jobs []map[string]json.RawMessage `json:"jobs"`
			}
			if err := json.Unmarshal(out[bytes.IndexByte(out, '{'):], &report); err != nil {
				t.Fatal(err)
			}
			seen := map[string]OperationCounts{}
			for _, one := range s.Operations {
				seen[one.Operation] = one
			}
			for operation, counted := range map[string]uint64{"read": readsAfter - reads, "write": writesAfter - writes} {
				var job struct {
					Total   uint64 `json:"total_ios"`
					Latency struct {
						Mean float64 `json:"mean"`
					} `json:"lat_ns"`
				}
				if err := json.Unmarshal(report.Jobs[0][operation], &job); err != nil {
					t.Fatal(err)
				}
				one := seen[operation]
				if counted < job.Total {
					t.Errorf("%s: fio made %d requests, the kernel counted %d", operation, job.Total, counted)
				}
				if diff := counted - one.Completed; diff > lost {
					t.Errorf("%s: %d requests of %d, and losses %+v", operation, one.Completed, counted, s.Losses)
				}
				if one.InFlight != 0 {
					t.Errorf("%s: %d in flight at the end", operation, one.InFlight)
				}
				// fio's latency includes its own time besides the device's.
				if mean := float64(one.LatencyNS) / float64(max(one.Completed, 1)); mean > job.Latency.Mean {
					t.Errorf("%s: %.0f ns on the device, of %.0f in all", operation, mean, job.Latency.Mean)
				}
			}
		})
	}
}

func TestRequestThatIsNeverIssuedExpires(t *testing.T) {
	_, name := loopDevice(t, 1<<20)
	b := started(t, BlockOptions{Devices: []string{name}, ExpireS: 60})
	now := stamp(time.Now(), 0).MonotonicNS
	b.entries[5].QueuedNs = uint64(now - time.Hour.Nanoseconds())
	b.entries[5].Request = 1 << 40
	b.entries[6].QueuedNs = uint64(now)
	b.entries[6].Request = 2 << 40
	s, err := b.Read()
	if err != nil {
		t.Fatal(err)
	}
	if s.Losses.Expired != 1 || b.entries[5].Request != 0 || b.entries[6].Request == 0 {
		t.Errorf("%+v, %+v, %+v", s.Losses, b.entries[5], b.entries[6])
	}
	b.entries[6].Request = 0
}

// A request that is not in flight in the kernel has ended, even if its completion was missed.
func TestRequestThatEndedUnseen(t *testing.T) {
	_, name := loopDevice(t, 1<<20)
	b := started(t, BlockOptions{Devices: []string{name}})
	if b.list == nil {
		t.Skip("this kernel has no iterators over maps")
	}
	b.entries[7].IssuedNs = uint64(stamp(time.Now(), 0).MonotonicNS)
	b.entries[7].Request = 1 << 40 // no request has this address
	for unseen := range uint64(2) {
		s, err := b.Read()
		if err != nil {
			t.Fatal(err)
		}
		if len(s.Operations) != 0 || s.Losses.UnseenEnd != unseen {
			t.Errorf("%+v, %+v", s.Operations, s.Losses)
		}
	}
	if b.entries[7].Request != 0 {
		t.Errorf("%+v", b.entries[7])
	}
}

// The kernel's iterator stops after a million entries without output, and must be read again.
func TestBlockWithRoomForAMillion(t *testing.T) {
	if _, err := started(t, BlockOptions{Requests: 1 << 20}).Read(); err != nil {
		t.Error(err)
	}
}

func TestBlockRefusesBadOptions(t *testing.T) {
	for _, c := range []struct {
		options BlockOptions
		code    status.Code
		says    string
	}{
		{BlockOptions{Requests: 100}, status.InvalidArgument, "requests = 100"},
		{BlockOptions{ExpireS: -1}, status.InvalidArgument, "expire_s"},
		{BlockOptions{Devices: []string{"nosuch"}}, status.NotFound, `"nosuch"`},
	} {
		b, err := StartBlock(c.options)
		if err == nil {
			b.Close()
		}
		if !errors.Is(err, c.code) || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%+v gave %v", c.options, err)
		}
	}
}

func TestClosedCollector(t *testing.T) {
	b := started(t, BlockOptions{})
	b.Close()
	b.Close()
	if _, err := b.Read(); !errors.Is(err, status.InvalidState) {
		t.Error(err)
	}
}
