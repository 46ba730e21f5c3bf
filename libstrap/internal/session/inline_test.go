//go:build cgo

package session

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// checkSums reads a capture and compares its checksums and, by step, its values.
func checkSums(t *testing.T, path string, want [][]byte) {
	t.Helper()
	rows, payloads := read(t, path)
	file, err := os.ReadFile(path)
	if err != nil || len(rows) != len(want) {
		t.Fatalf("%d packets of %d; %v", len(rows), len(want), err)
	}
	end := int64(0)
	for i, row := range rows {
		if row.Sequence != uint64(i) || row.Offset != end {
			t.Fatalf("packet %d is number %d at %d, not at %d", i, row.Sequence, row.Offset, end)
		}
		payload := file[end+int64(wire.HeaderSize+len(row.Layer)):][:int(row.Length)-wire.HeaderSize-len(row.Layer)]
		end += int64(row.Length)
		if got := crc32c.Checksum(payload); got != row.CRC {
			t.Fatalf("packet %d of %d bytes: checksum %#x, the index says %#x", i, row.Length, got, row.CRC)
		}
		if !bytes.Equal(payloads[i], want[row.Step]) {
			t.Fatalf("packet %d has other values", i)
		}
	}
}

// Packets of every size, some around the end of the ring that the stream is written from, and
// behind some that wait in the staging memory; half of them in a stream that is resumed.
func TestPacketsAreMadeWhereTheyAreWritten(t *testing.T) {
	alone := func(k codec.Kind) Options { return options(k) }
	dropping := func(k codec.Kind) Options {
		o := helped(k)
		o.DropOnFull = true
		return o
	}
	for name, how := range map[string]func(codec.Kind) Options{"helped": helped, "alone": alone, "dropping": dropping} {
		for _, k := range []codec.Kind{codec.None, codec.LZ4} {
			t.Run(name+"/"+k.String(), func(t *testing.T) {
				path := filepath.Join(t.TempDir(), "a.stream")
				o := how(k)
				o.MaxMemory = 256 << 20
				want := mixed(t, open(t, path, o), 0, 30)
				o.Resume, o.Cut = true, KeepAll
				want = append(want, mixed(t, open(t, path, o), 30, 60)...)
				checkSums(t, path, want)
			})
		}
	}
}

// mixed captures tensors of many sizes, the steps [from, to), and says what float16 they are.
func mixed(t *testing.T, s *Session, from, to int) (want [][]byte) {
	sizes := []int{1, 3, 768, 65_535, 65_536, 100_001, 2_500_000, 300_000, 5}
	noisy, plain := mustLayer(t, s, "noisy"), mustLayer(t, s, "plain")
	for i := from; i < to; i++ {
		layer, v := noisy, noise(sizes[i%len(sizes)], uint64(i))
		if i%7 == 3 { // which LZ4 compresses: it waits for the team
			layer, v = plain, make([]float32, 10_000)
		}
		x := tensorOf(layer, wire.Float32, v)
		x.Step = int64(i)
		if err := s.Enqueue(x, forever); err != nil {
			t.Fatal(err)
		}
		want = append(want, halves(v))
	}
	finish(t, s)
	return want
}

// A layer that LZ4 left raw is tried again after some packets.
func TestALayerThatBecomesCompressibleIsCompressed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, helped(codec.LZ4))
	layer := mustLayer(t, s, "a")
	for i := range 3 + 2*tryEvery {
		v := make([]float32, 1000)
		if i < 3 {
			v = noise(1000, uint64(i))
		}
		if err := s.Enqueue(tensorOf(layer, wire.Float32, v), forever); err != nil {
			t.Fatal(err)
		}
		if i == 0 { // as long as it waits, so do those behind it
			if err := flush(s, forever); err != nil {
				t.Fatal(err)
			}
		}
	}
	finish(t, s)
	rows, _ := read(t, path)
	if small := compressed(rows[3:]); small < tryEvery {
		t.Errorf("%d of %d packets of zeros are small", small, 2*tryEvery)
	}
}

func TestOneOfSoManyPacketsIsTried(t *testing.T) {
	l := &layer{}
	l.tried(true)
	for i := 1; i < tryEvery; i++ {
		if !l.takeRawTurn() {
			t.Fatalf("packet %d behind one that stayed raw is tried", i)
		}
	}
	if l.takeRawTurn() {
		t.Errorf("packet %d is not tried", tryEvery)
	}
	l.tried(false)
	if l.takeRawTurn() {
		t.Error("a packet behind one that was compressed is not tried")
	}
}

// compressed is how many packets of 1,000 float16 are smaller than those.
func compressed(rows []wire.Row) (n int) {
	for _, row := range rows {
		if row.Length < 2000 {
			n++
		}
	}
	return n
}

// A packet that goes through the staging memory is compressed, whatever the last one of its layer was.
func TestStagedPacketsAreCompressed(t *testing.T) {
	const behind = tryEvery / 2
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, helped(codec.LZ4))
	x := tensorOf(mustLayer(t, s, "a"), wire.Float32, noise(1000, 1))
	if err := errors.Join(s.Enqueue(x, forever), flush(s, forever)); err != nil {
		t.Fatal(err)
	}
	s.sink.mu.Lock() // so that all are staged
	for range behind {
		x := tensorOf(x.Layer, wire.Float32, make([]float32, 1000))
		if err := s.Enqueue(x, forever); err != nil {
			t.Error(err)
		}
	}
	s.sink.mu.Unlock()
	finish(t, s)
	rows, payloads := read(t, path)
	for i, payload := range payloads[1:] {
		if !bytes.Equal(payload, make([]byte, 2000)) {
			t.Errorf("packet %d has other values", 1+i)
		}
	}
	if small := compressed(rows[1:]); small != behind || len(rows) != 1+behind {
		t.Errorf("%d of %d packets of zeros are small", small, len(rows)-1)
	}
}

// A burst is written when the caller is through; all else goes to the disk as it comes.
func TestABurstIsStaged(t *testing.T) {
	for _, burst := range []int64{0, 8 << 20} {
		o := helped(codec.None)
		o.BurstBytes = burst
		s := open(t, filepath.Join(t.TempDir(), "a.stream"), o)
		fill(t, s, mustLayer(t, s, "a"), 3)
		if held := s.Stats().QueuedBytes; (held > 0) != (burst > 0) {
			t.Errorf("burst = %d: %d bytes are staged", burst, held)
		}
		finish(t, s)
	}
}
