// Tests that the work of a search grows no faster than the stream.

package salvage_test

import (
	"bytes"
	"encoding/binary"
	"math"
	"math/rand/v2"
	"reflect"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/salvage"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// header returns the header and name of a packet.
func header(name string, payload int) []byte {
	b := make([]byte, wire.HeaderSize)
	wire.PutHeader(b, len(name), uint32(payload))
	return append(b, name...)
}

// lz4Head is the header of a frame with blocks of 4 MiB that does not state its content size.
const lz4Head = "\x04\x22\x4d\x18\x60\x70\x73"

// hostile makes streams of n bytes. Every few bytes, each of them claims that a packet begins there
// which takes the rest of the stream.
var hostile = map[string]func(n int) []byte{
	"frames with a block that ends nowhere": func(n int) []byte {
		b := make([]byte, 0, n)
		for len(b)+32 < n {
			left := n - len(b) - 8
			b = append(append(b, header("a", left)...), lz4Head...)
			b = binary.LittleEndian.AppendUint32(b, uint32(left-11)|1<<31)
		}
		return append(b, bytes.Repeat([]byte{1}, n-len(b))...)
	},
	"whole frames inside each other": func(n int) []byte {
		const around = 7 + 7 + 4 + 4 // header and name, frame, block, end mark
		// After the innermost packet come the end marks of all frames, and one more byte that no
		// packet claims.
		depth := (n - 1) / around
		b := make([]byte, 0, n)
		for i := range depth {
			content := (depth - i - 1) * around
			b = append(append(b, header("a", content+15)...), lz4Head...)
			b = binary.LittleEndian.AppendUint32(b, uint32(content)|1<<31)
		}
		return append(b, make([]byte, n-len(b))...)
	},
	"zstd frames that share their blocks": func(n int) []byte {
		// Each frame has a raw block, and this block is the header of the next packet and the
		// beginning of its frame.
		const each = 7 + 6 + 3
		b := make([]byte, 0, n)
		for len(b)+2*each < n {
			left := n - len(b) - 8
			b = append(append(b, header("a", left)...), "\x28\xb5\x2f\xfd\x00\x88"...)
			raw := (7 + 6) << 3
			b = append(b, byte(raw), byte(raw>>8), byte(raw>>16))
		}
		return append(b, bytes.Repeat([]byte{7}, n-len(b))...)
	},
	"packets with a byte between": func(n int) []byte {
		return bytes.Repeat(append(header("ab", 4), 1, 2, 3, 4, 0xff), n/13+1)[:n]
	},
	"names that end badly": func(n int) []byte {
		name := strings.Repeat("a", 1000)
		b := make([]byte, 0, n)
		for len(b)+3000 < n {
			b = append(b, header(name[:20], 0)...)
			b = append(b, header(name[:999]+"\xff", 0)...)
		}
		return append(b, make([]byte, n-len(b))...)
	},
	"letters": func(n int) []byte { return bytes.Repeat([]byte("\x00\x01\x00\x00\x00"), n/5+1)[:n] },
}

// The search reads no byte again and again, whatever the stream claims.
func TestTheWorkIsLinear(t *testing.T) {
	const allowed, most = 16, 128
	sizes := []int{1 << 16, 1 << 18, 1 << 20}
	if testing.Short() {
		sizes = []int{1 << 16}
	}
	for name, stream := range hostile {
		for _, n := range sizes {
			_, read, err := salvage.Search(save(t, stream(n), nil), allowed*int64(n))
			check(t, err)
			if read > int64(most*n) {
				t.Errorf("%s: %d bytes of stream are read %.0f times", name, n, float64(read)/float64(n))
			}
		}
	}
}

// Every row of the index claims the same large range of bytes, each with another checksum.
func TestTheWorkIsLinearForAHostileIndex(t *testing.T) {
	const n, rows = 1 << 18, 2000
	c := &capture{}
	c.add(t, "intact", codec.None, 0, noise(1, 100))
	at := len(c.stream)
	c.stream = append(c.stream, bytes.Repeat([]byte{1}, n)...)
	for i := range rows {
		c.rows = append(c.rows, wire.Row{
			Sequence: uint64(i + 1), Offset: int64(at + i), Length: n / 2, Parts: 1, Layer: "a", Codec: "none",
			Stored: wire.UInt8, Source: wire.UInt8, CRC: uint32(i), MSE: math.NaN(),
		})
	}
	_, read, err := salvage.Search(save(t, c.stream, c.rows), 16*n)
	check(t, err)
	if read > 64*n {
		t.Errorf("%d bytes of stream are read %.0f times", n, float64(read)/n)
	}
}

// Without a bound, the search is simple and never gives up. In streams with random damage, the
// bounded search finds the same. Only streams made to be hostile reach the bound.
func TestASearchWithoutBoundFindsTheSame(t *testing.T) {
	seeds := uint64(300)
	if testing.Short() {
		seeds = 18
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 11))
		c := random(t, rng)
		if seed%3 == 0 {
			c = one(t, kinds[rng.IntN(len(kinds))])
		}
		b, _ := damaged(rng, c.stream)
		rows := c.rows
		if seed%2 == 0 {
			rows = nil
		}
		path := save(t, b, rows)
		want, _, err := salvage.Search(path, math.MaxInt64/2)
		check(t, err)
		got, _, err := salvage.Search(path, 16*int64(len(b)))
		check(t, err)
		if !reflect.DeepEqual(got, want) {
			t.Fatalf("seed %d: found %v, without bound %v", seed, got, want)
		}
	}
}
