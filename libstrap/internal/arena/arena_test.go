package arena

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/pages"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func mustAlloc(t *testing.T, a *Arena, n int) Region {
	t.Helper()
	r, ok, err := a.TryAlloc(n, 0, 0)
	if err != nil || !ok {
		t.Fatalf("TryAlloc(%d): ok %v, err %v", n, ok, err)
	}
	return r
}

func TestTakesNoMoreThanPacketsNeedTogether(t *testing.T) {
	a, err := New(64 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	for range 10_000 {
		a.Free(mustAlloc(t, a, 100_000))
	}
	if taken, _, held := a.Usage(); taken > 104_000 || held != 0 {
		t.Fatalf("one packet at a time took %d bytes, holds %d", taken, held)
	}
}

func TestNeverPassesTheLimit(t *testing.T) {
	const limit = 16 << 20
	a, err := New(limit)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	rng := rand.New(rand.NewPCG(1, 2))
	var live []Region
	for i := range 20_000 {
		n := 1 << rng.IntN(22)
		n += rng.IntN(n)
		r, ok, err := a.TryAlloc(min(n, a.MaxRegion()), 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if ok {
			r.Buf[0], r.Buf[len(r.Buf)-1] = byte(i), byte(i)
			live = append(live, r)
		}
		for !ok && len(live) > 0 || len(live) > 500 {
			a.Free(live[0]) // the oldest first, as the writer does
			live = live[1:]
			ok = true
		}
		if taken, _, _ := a.Usage(); taken > limit {
			t.Fatalf("took %d of %d bytes", taken, limit)
		}
	}
	for _, r := range live {
		a.Free(r)
	}
	if r := mustAlloc(t, a, a.MaxRegion()); r.Zero() {
		t.Fatal("the largest region does not fit an empty arena")
	}
}

func TestRegionsDoNotOverlap(t *testing.T) {
	a, err := New(4 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var live []Region
	for i := 0; ; i++ {
		r, ok, err := a.TryAlloc(1+i*37%5000, 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		for j := range r.Buf {
			r.Buf[j] = byte(i)
		}
		live = append(live, r)
	}
	for i, r := range live {
		for _, b := range r.Buf {
			if b != byte(i) {
				t.Fatalf("region %d was overwritten", i)
			}
		}
	}
}

func TestWakesTheWaiter(t *testing.T) {
	a, err := New(MinLimit)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var live []Region
	for {
		r, ok, err := a.TryAlloc(a.MaxRegion(), 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		live = append(live, r)
	}
	go a.Free(live[0])
	<-a.Freed()
	mustAlloc(t, a, a.MaxRegion())
}

func TestRefusesWhatCanNeverFit(t *testing.T) {
	if _, err := New(1000); !errors.Is(err, status.InvalidArgument) {
		t.Fatalf("a limit of 1000 bytes: %v", err)
	}
	a, err := New(MinLimit)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	if _, _, err := a.TryAlloc(int(a.Limit())+1, 0, 0); !errors.Is(err, status.InvalidArgument) {
		t.Fatalf("an oversized region: %v", err)
	}
}

// Freed regions join to one gap again, in whatever order they are freed.
func TestFreedRegionsGrowTogether(t *testing.T) {
	a, err := New(8 << 20)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	rng := rand.New(rand.NewPCG(3, 4))
	for range 200 {
		var live []Region
		for {
			r, ok, err := a.TryAlloc(rng.IntN(200_000), 0, 0)
			if err != nil {
				t.Fatal(err)
			}
			if !ok {
				break
			}
			live = append(live, r)
		}
		rng.Shuffle(len(live), func(i, j int) { live[i], live[j] = live[j], live[i] })
		for _, r := range live {
			a.Free(r)
		}
		if len(a.free) != 1 || a.free[0] != (gap{0, 8 << 20}) || a.held != 0 || a.live != 0 {
			t.Fatalf("all was freed, but there are %v, %d bytes, %d regions", a.free, a.held, a.live)
		}
	}
}

func TestMemoryOutlivesCloseAsLongAsItsRegions(t *testing.T) {
	a, err := New(MinLimit)
	if err != nil {
		t.Fatal(err)
	}
	r := mustAlloc(t, a, 1000)
	a.Close()
	a.Close()
	r.Buf[999] = 1
	if _, _, err := a.TryAlloc(1, 0, 0); !errors.Is(err, status.InvalidState) {
		t.Fatalf("a closed arena gives memory: %v", err)
	}
	if taken, _, _ := a.Usage(); taken == 0 {
		t.Fatal("the memory is gone")
	}
	a.Free(r)
	if taken, peak, held := a.Usage(); taken != 0 || peak == 0 || held != 0 {
		t.Fatalf("closed and freed, but %d bytes are taken, %d held, the peak is %d", taken, held, peak)
	}
}

func TestRoomThatIsReservedStays(t *testing.T) {
	const n = 64 << 10
	a, err := New(MinLimit)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var taken []Region
	for {
		r, ok, err := a.TryAlloc(n, 0, 4*n)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		taken = append(taken, r)
	}
	if want := MinLimit/n - 4; len(taken) != want {
		t.Errorf("%d regions beside the reserved room, not %d", len(taken), want)
	}
	if _, ok, _ := a.TryAlloc(4*n, 0, 0); !ok {
		t.Error("the reserved room is taken")
	}
	// The region must go into the small gap, so that the large one keeps the reserved room.
	a.Free(taken[0])
	a.Free(taken[2])
	a.Free(taken[3])
	if r, ok, _ := a.TryAlloc(n, 0, 2*n); !ok || r.at != taken[0].at {
		t.Errorf("taken at %d: %v", r.at, ok)
	}
	if _, ok, _ := a.TryAlloc(n, 0, 2*n); ok {
		t.Error("the reserved room is taken in part")
	}
}

// The memory of a caller is used from a place on, and is taken from the first.
func TestAnArenaInMemoryOfTheCaller(t *testing.T) {
	m, err := pages.Map(1 << 20)
	if err != nil {
		t.Fatal(err)
	}
	m.Touch(1 << 20)
	m.Bytes[4095] = 7
	a := On(m, 4096)
	a.Touch(a.Limit())
	if taken, _, _ := a.Usage(); a.Limit() != 1<<20-4096 || taken != a.Limit() {
		t.Errorf("%d bytes of %d are taken", taken, a.Limit())
	}
	r, ok, err := a.TryAlloc(int(a.Limit()), 0, 0)
	if !ok || err != nil {
		t.Fatalf("the whole memory: %v", err)
	}
	clear(r.Buf)
	if r.Offset() != 0 || &r.Buf[0] != &m.Bytes[4096] || m.Bytes[4095] != 7 {
		t.Error("the region is elsewhere")
	}
	a.Free(r)
	a.Close()
}

func TestBytesBesideARegionCount(t *testing.T) {
	a, err := New(MinLimit)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	var live []Region
	for {
		r, ok, err := a.TryAlloc(1000, 3000, 0)
		if err != nil {
			t.Fatal(err)
		}
		if !ok {
			break
		}
		live = append(live, r)
	}
	taken, _, held := a.Usage()
	if want := MinLimit / 4000; len(live) != want || held != int64(4000*want) || taken > 1100*int64(want) {
		t.Errorf("%d regions of %d bytes count %d, and take %d", len(live), 1000, held, taken)
	}
	if _, ok, _ := a.TryAlloc(2000, 0, 0); ok {
		t.Error("the bytes beside the regions are given to another one")
	}
	a.Free(live[0])
	if _, ok, _ := a.TryAlloc(4000, 0, 0); !ok {
		t.Error("the bytes beside a freed region still count")
	}
	if _, _, err := a.TryAlloc(1000, MinLimit-999, 0); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a region that never fits: %v", err)
	}
}

func TestMemoryThatNoRegionUsedIsGivenBack(t *testing.T) {
	const mib = 1 << 20
	a, err := New(16 * mib)
	if err != nil {
		t.Fatal(err)
	}
	defer a.Close()
	a.Touch(a.Limit())
	r := mustAlloc(t, a, 3*mib)
	for i := range r.Buf {
		r.Buf[i] = 7
	}
	a.GiveBack()
	if taken, most, _ := a.Usage(); taken != 4*mib || most != 16*mib { // whole huge pages
		t.Errorf("%d bytes are taken, and %d were", taken, most)
	}
	if bytes.Count(r.Buf, []byte{7}) != len(r.Buf) {
		t.Error("bytes of a region have changed")
	}
	large := mustAlloc(t, a, 12*mib)
	clear(large.Buf)
	if taken, _, _ := a.Usage(); taken != 15*mib {
		t.Errorf("%d bytes are taken, not those of the regions", taken)
	}
}

// The bytes beside regions take the place of memory at the end, which is there again when they are gone. Also
// that of a file, whose room on the disk shrinks and grows.
func TestBytesBesideRegionsAreNotTakenTwice(t *testing.T) {
	const mib = 1 << 20
	f, err := os.Create(filepath.Join(t.TempDir(), "ring"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := f.Truncate(33 * mib); err != nil {
		t.Fatal(err)
	}
	memory := map[string]func() (*pages.Memory, error){
		"memory": func() (*pages.Memory, error) { return pages.Map(33 * mib) },
		"a file": func() (*pages.Memory, error) { return pages.MapFile(f, 33*mib) },
	}
	for name, get := range memory {
		t.Run(name, func(t *testing.T) {
			m, err := get()
			if errors.Is(err, errors.ErrUnsupported) {
				t.Skip(err)
			} else if err != nil {
				t.Fatal(err)
			}
			m.Touch(len(m.Bytes))
			a := On(m, mib)
			defer a.Close()
			var live []Region
			for ok := true; ok; {
				var r Region
				if r, ok, err = a.TryAlloc(1000, 3000, 0); err != nil {
					t.Fatal(err)
				}
				live = append(live, r)
				for i := range r.Buf {
					r.Buf[i] = byte(len(live))
				}
				if taken, _, _ := a.Usage(); taken+a.beside > 32*mib+2*trimBytes {
					t.Fatalf("%d bytes are taken, and %d beside them", taken, a.beside)
				}
			}
			if taken, _, _ := a.Usage(); taken > 12*mib {
				t.Errorf("%d bytes are taken", taken)
			}
			var of syscall.Stat_t
			if err := syscall.Fstat(int(f.Fd()), &of); err != nil {
				t.Fatal(err)
			}
			if name == "a file" && of.Blocks*512 > 13*mib {
				t.Errorf("the file takes %d bytes on the disk", of.Blocks*512)
			}
			for i, r := range live {
				if bytes.Count(r.Buf, []byte{byte(i + 1)}) != len(r.Buf) {
					t.Fatalf("region %d has other bytes", i)
				}
				a.Free(r)
			}
			clear(mustAlloc(t, a, 32*mib).Buf)
		})
	}
}
