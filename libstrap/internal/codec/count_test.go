package codec

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math"
	"runtime"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func TestCountTellsWholePayloads(t *testing.T) {
	values := bytes.Repeat([]byte("abcdefgh"), 40_000)
	for _, kind := range []Kind{None, LZ4, Zstd} {
		e, err := NewEncoder(kind, 0)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		w, err := e.NewFrame(&out, int64(len(values)))
		if err == nil {
			err = writeAll(w, values)
		}
		if err != nil {
			t.Fatal(err)
		}
		payload := out.Bytes()
		if n, err := Count(kind, bytes.NewReader(payload), int64(len(payload))); err != nil || n != int64(len(values)) {
			t.Errorf("%v: %d bytes, %v", kind, n, err)
		}
		if kind == None {
			continue
		}
		for name, bad := range map[string][]byte{
			"cut":         payload[:len(payload)-1],
			"too long":    append(bytes.Clone(payload), 0),
			"another one": append(bytes.Clone(payload), payload...),
			"nothing":     {},
		} {
			if _, err := Count(kind, bytes.NewReader(bad), int64(len(bad))); !errors.Is(err, status.Corrupt) {
				t.Errorf("%v, %s: %v", kind, name, err)
			}
		}
	}
}

// unsized returns a zstd frame with a window of 128 MiB and without a content size. Each of its
// blocks repeats one byte 128 KiB long.
func unsized(blocks int) []byte {
	b := append(binary.LittleEndian.AppendUint32(nil, zstdMagic), 0, (27-10)<<3)
	for i := range blocks {
		header := uint32(128<<10)<<3 | 1<<1
		if i == blocks-1 {
			header |= 1
		}
		b = append(b, byte(header), byte(header>>8), byte(header>>16), 'x')
	}
	return b
}

// allocated returns how many bytes work allocates on the heap.
func allocated(work func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	work()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// 8 kB of a frame decode to 256 MiB. Finding the length takes the memory of a window, not of the
// content.
func TestTheLengthOfAFrameThatDoesNotStateItTakesAWindow(t *testing.T) {
	if testing.Short() {
		t.Skip("256 MiB, and no goroutines")
	}
	const blocks = 2048
	payload := unsized(blocks)
	used := allocated(func() {
		if n, err := DecodedLen(Zstd, payload); err != nil || n != blocks*128<<10 {
			t.Errorf("%d bytes, %v", n, err)
		}
	})
	if used > zstdMaxWindow+4<<20 {
		t.Errorf("%d bytes were allocated", used)
	}
}

// The length of dst bounds the window, because content cannot refer to bytes before its beginning.
func TestAClaimedWindowIsNotTakenForLittleContent(t *testing.T) {
	payload := unsized(2)
	dst := make([]byte, 256<<10)
	used := allocated(func() {
		if err := Decode(dst, Zstd, bytes.NewReader(payload)); err != nil {
			t.Error(err)
		}
	})
	if used > 4<<20 {
		t.Errorf("%d bytes were allocated", used)
	}
	if !bytes.Equal(dst, bytes.Repeat([]byte("x"), len(dst))) {
		t.Error("it decodes to other bytes")
	}
}

func TestMoreThanAPacketHasIsNotCounted(t *testing.T) {
	const most = 1 << 20
	for blocks, code := range map[int]error{most / (128 << 10): nil, most/(128<<10) + 1: status.Unsupported} {
		payload := unsized(blocks)
		if _, err := countUpTo(most, Zstd, bytes.NewReader(payload), int64(len(payload))); !errors.Is(err, code) {
			t.Errorf("%d blocks: %v", blocks, err)
		}
	}
}

func TestALengthThatNoPayloadCanHaveIsRefused(t *testing.T) {
	frame := unsized(1)
	frame[4] = 3 << 6 // the content size has 8 bytes
	payload := bytes.Join([][]byte{frame[:6], binary.LittleEndian.AppendUint64(nil, 1<<50), frame[6:]}, nil)
	if n, err := DecodedLen(Zstd, payload); !errors.Is(err, status.Corrupt) {
		t.Errorf("%d, %v", n, err)
	}
	if _, err := Count(Zstd, bytes.NewReader(payload), int64(len(payload))); !errors.Is(err, status.Corrupt) {
		t.Errorf("%v", err)
	}
	if MaxDecoded(Zstd, math.MaxInt64) != math.MaxInt64 || MaxDecoded(None, 7) != 7 || MaxDecoded(LZ4, 2) != 510 {
		t.Error("MaxDecoded is wrong")
	}
}
