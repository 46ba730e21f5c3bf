// Tests of large packets that are decoded in shares.

package reader_test

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/procs"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// noise returns n bytes of which some are more frequent than others. zstd finds no matches in them, so its
// blocks do not need each other.
func noise(n int) []byte {
	rng := rand.New(rand.NewPCG(3, uint64(n)))
	b := make([]byte, n)
	for i := range b {
		u := rng.Uint32()
		b[i] = byte(u & (u >> 8))
	}
	return b
}

// encoded is the capture that large returns copies of: encoding it takes most of a test's time.
var encoded struct {
	sync.Once
	capture
}

// large is a capture of packets that are decoded in shares if they are the last ones of a call.
func large(t testing.TB) *capture {
	encoded.Do(func() {
		for i, codec := range []string{"lz4", "zstd", "none", "zstd"} {
			encoded.add(t, "large", codec, noise(5<<20+i))
		}
	})
	c := encoded.capture
	c.stream, c.rows = bytes.Clone(c.stream), slices.Clone(c.rows)
	return &c
}

// atLeast sets the least number of processors for a test.
func atLeast(t testing.TB, processors int) {
	before := procs.Count
	procs.Count = max(processors, before)
	t.Cleanup(func() { procs.Count = before })
}

func TestLargePacketsAreDecodedInShares(t *testing.T) {
	atLeast(t, 4)
	c := large(t)
	r := open(t, save(t, c.stream, c.rows), reader.Options{})
	for _, rows := range [][]uint64{{0, 1, 2, 3}, {3}, {1, 3, 1}} {
		for k, got := range many(t, r, rows, 16, 24<<20) {
			if !bytes.Equal(got, c.values[rows[k]]) {
				t.Errorf("%v: row %d has other bytes", rows, rows[k])
			}
		}
	}
	var padded []reader.Range // leave out every fourth line, and the ends
	for row := range 4 {
		for k, one := range lines(c, row, 4096) {
			if k > 100 && k < 1200 && k%4 != 0 {
				padded = append(padded, one)
			}
		}
	}
	ranges(t, r, c, padded, nil)
	ranges(t, r, c, padded, rand.New(rand.NewPCG(1, 2)).Perm(len(padded)))
}

// A large packet that is damaged has the same error in shares and as a whole, and ends the call before it.
func TestDamageInASharedPacketIsTold(t *testing.T) {
	atLeast(t, 4)
	for _, place := range []int{100, 3 << 20, -100} {
		t.Run(fmt.Sprint(place), func(t *testing.T) {
			c := large(t)
			at := c.rows[1].Offset + int64(place)
			if place < 0 {
				at += int64(c.rows[1].Length)
			}
			c.stream[at] ^= 4
			r := open(t, save(t, c.stream, c.rows), reader.Options{})
			dst, ends := make([]byte, 24<<20), make([]uint64, 4)
			if done, err := r.ReadMany([]uint64{0, 1, 2, 3}, 1, dst, ends); done != 1 || err != nil {
				t.Errorf("%d packets, %v", done, err)
			}
			_, err := r.ReadMany([]uint64{1, 3}, 1, dst, ends)
			if status.CodeOf(err) != status.Corrupt || !strings.Contains(err.Error(), "large") {
				t.Error(err)
			}
			if alone := r.ReadInto(1, dst[:len(c.values[1])]); fmt.Sprint(alone) != fmt.Sprint(err) {
				t.Errorf("%v, alone %v", err, alone)
			}
		})
	}
}
