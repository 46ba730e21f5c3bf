package crc32c

import (
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"testing"
)

// check compares Update, with and without the kernel, and the kernel alone, with hash/crc32.
func check(t *testing.T, crc uint32, data []byte) {
	t.Helper()
	want := crc32.Update(crc, castagnoli, data)
	for _, use := range []bool{false, true} {
		UseKernel(use)
		if got := Update(crc, data); got != want {
			t.Errorf("%d bytes after %#x: %#x, not %#x (with the kernel: %v)", len(data), crc, got, want, use)
		}
	}
	if !hasKernel || len(data) < 256 {
		return
	}
	if got := kernel(crc, data); got != want {
		t.Errorf("%d bytes after %#x: the kernel says %#x, not %#x", len(data), crc, got, want)
	}
}

func TestEveryLength(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	data := make([]byte, 3000)
	for i := range data {
		data[i] = byte(rng.Uint32())
	}
	for n := range data {
		from := rng.IntN(min(64, len(data)-n)) // at any alignment
		check(t, rng.Uint32(), data[from:from+n])
	}
}

func TestChecksumIsThatOfThePublishedExample(t *testing.T) {
	if got := Checksum(make([]byte, 32)); got != 0x8A9136AA { // RFC 3720, B.4
		t.Errorf("32 zeros: %#x", got)
	}
	if got := Checksum([]byte("123456789")); got != 0xE3069283 {
		t.Errorf("the digits: %#x", got)
	}
}

func TestCombinedIsThatOfBoth(t *testing.T) {
	data := []byte("the first piece and the second")
	for at := range len(data) + 1 {
		if got := After(len(data)-at).Combine(Checksum(data[:at]), Checksum(data[at:])); got != Checksum(data) {
			t.Errorf("cut at %d: %#x, not %#x", at, got, Checksum(data))
		}
	}
}

func FuzzUpdate(f *testing.F) {
	f.Add(uint32(0), []byte("activations"), uint16(100))
	f.Add(^uint32(0), []byte{0}, uint16(5000))
	f.Fuzz(func(t *testing.T, crc uint32, piece []byte, repeat uint16) {
		data := make([]byte, 0, len(piece)*int(repeat%512))
		for range repeat % 512 {
			data = append(data, piece...)
		}
		check(t, crc, data)
		at := len(data) / 3
		if Update(Update(crc, data[:at]), data[at:]) != Update(crc, data) {
			t.Error("in two pieces it is another one")
		}
		if After(len(data)-at).Combine(Update(crc, data[:at]), Checksum(data[at:])) != Update(crc, data) {
			t.Error("combined it is another one")
		}
	})
}

func BenchmarkUpdate(b *testing.B) {
	for _, n := range []int{1 << 10, 1 << 20, 32 << 20, 256 << 20} {
		data := make([]byte, n)
		for i := range data {
			data[i] = 1 // touch the pages: all untouched ones would be the same page of zeros
		}
		b.Run(fmt.Sprintf("%d/this", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				Update(0, data)
			}
		})
		b.Run(fmt.Sprintf("%d/hash", n), func(b *testing.B) {
			b.SetBytes(int64(n))
			for b.Loop() {
				crc32.Update(0, castagnoli, data)
			}
		})
	}
}
