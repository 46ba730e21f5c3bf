//go:build cgo

package session

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// checkSums checks that a capture has no gaps, that its checksums fit its payloads, and that the
// packet of step i has the values want[i].
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

// Packets that are made in the stream's own blocks are whole and in order. Their sizes vary, some
// meet the end of a block, some come after staged packets, and half of them come after a resume.
func TestPacketsAreMadeInTheStreamsBlocks(t *testing.T) {
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

// mixed captures tensors of many sizes with the steps [from, to), closes the session, and returns
// their float16 bytes.
func mixed(t *testing.T, s *Session, from, to int) (want [][]byte) {
	sizes := []int{1, 3, 768, 65_535, 65_536, 100_001, 2_500_000, 300_000, 5}
	noisy, plain := mustLayer(t, s, "noisy"), mustLayer(t, s, "plain")
	values, words := noises()
	for i := from; i < to; i++ {
		n := sizes[i%len(sizes)]
		layer, v, half := noisy, values[i:i+n], words[2*i:2*(i+n)]
		if i%7 == 3 { // LZ4 compresses these values, so the packet waits for the team
			layer, v, half = plain, make([]float32, 10_000), make([]byte, 20_000)
		}
		x := tensorOf(layer, wire.Float32, v)
		x.Step = int64(i)
		if err := s.Enqueue(x, forever); err != nil {
			t.Fatal(err)
		}
		want = append(want, half)
	}
	finish(t, s)
	return want
}

// noises returns noise for mixed, and its bytes as float16. Each tensor is another part of it.
var noises = sync.OnceValues(func() ([]float32, []byte) {
	v := noise(2_500_060, 1)
	return v, halves(v)
})

// If LZ4 did not shrink a layer's packets, it is tried again after tryEvery packets.
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
		if i == 0 { // while this packet waits, the next ones wait too instead of being made inline
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

// After a packet that LZ4 did not shrink, the layer's next tryEvery-1 packets are stored raw. After
// a compressed packet, the next one is compressed too.
func TestOneOfTryEveryPacketsIsTried(t *testing.T) {
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

// compressed returns how many packets of 1,000 float16 values are smaller than their values.
func compressed(rows []wire.Row) (n int) {
	for _, row := range rows {
		if row.Length < 2000 {
			n++
		}
	}
	return n
}

// A staged packet is compressed, even if LZ4 did not shrink the layer's last packet.
func TestStagedPacketsAreCompressed(t *testing.T) {
	const behind = tryEvery / 2
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, helped(codec.LZ4))
	x := tensorOf(mustLayer(t, s, "a"), wire.Float32, noise(1000, 1))
	if err := errors.Join(s.Enqueue(x, forever), flush(s, forever)); err != nil {
		t.Fatal(err)
	}
	s.sink.mu.Lock() // without this lock no packet can be made inline, so all are staged
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

// With BurstBytes, packets stay in the staging memory while the caller goes on. Without it, they go
// to the stream at once.
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
