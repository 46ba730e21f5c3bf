package scan_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/scan"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

// packet returns the bytes of a packet.
func packet(name, payload string) []byte {
	b := make([]byte, wire.HeaderSize)
	wire.PutHeader(b, len(name), uint32(len(payload)))
	return append(append(b, name...), payload...)
}

func stream(packets ...[]byte) []byte { return bytes.Join(packets, nil) }

func walk(b []byte) (found []scan.Packet, end int64, err error) {
	end, err = scan.Packets(bytes.NewReader(b), 0, int64(len(b)), func(p scan.Packet) error {
		found = append(found, p)
		return nil
	})
	return found, end, err
}

func TestPacketsAreFoundInOrder(t *testing.T) {
	b := stream(packet("embed", "12345678"), packet("", "root"), packet("layer.0", ""), packet("é", "ab"))
	found, end, err := walk(b)
	if err != nil || end != int64(len(b)) {
		t.Fatalf("end %d, error %v", end, err)
	}
	want := []scan.Packet{
		{Offset: 0, Name: "embed", PayloadOffset: 11, PayloadLen: 8, Magic: [4]byte{'1', '2', '3', '4'}},
		{Offset: 19, Name: "", PayloadOffset: 25, PayloadLen: 4, Magic: [4]byte{'r', 'o', 'o', 't'}},
		{Offset: 29, Name: "layer.0", PayloadOffset: 42},
		{Offset: 42, Name: "é", PayloadOffset: 50, PayloadLen: 2, Magic: [4]byte{'a', 'b'}},
	}
	for i, p := range found {
		if p != want[i] {
			t.Errorf("packet %d is %+v, want %+v", i, p, want[i])
		}
	}
	if len(found) != len(want) {
		t.Fatalf("%d packets, want %d", len(found), len(want))
	}
	if got := string(found[3].Head()); got != "ab" {
		t.Errorf("head %q, want the whole short payload", got)
	}
}

func TestAnEmptyStreamHasNoPackets(t *testing.T) {
	if found, end, err := walk(nil); len(found) != 0 || end != 0 || err != nil {
		t.Fatalf("%v, %d, %v", found, end, err)
	}
}

func TestTears(t *testing.T) {
	good := packet("layer", "payload")
	unfinished := packet("layer", "payload")
	wire.PutHeader(unfinished, 5, wire.Unfinished)
	for name, c := range map[string]struct {
		tail []byte
		says string
	}{
		"header":     {good[:4], "header is cut off, 4 of 6"},
		"name":       {good[:8], "name is cut off, 2 of 5"},
		"payload":    {good[:len(good)-1], "claims 18 bytes, 17 are there"},
		"hole":       {make([]byte, 4096), "six zero bytes"},
		"not UTF-8":  {packet("\xff\xfe", "payload"), `"\xff\xfe" is not UTF-8`},
		"unfinished": {unfinished, "not finished"},
	} {
		t.Run(name, func(t *testing.T) {
			found, end, err := walk(stream(good, c.tail))
			var tear *scan.Tear
			if !errors.As(err, &tear) || !errors.Is(err, status.Corrupt) || status.CodeOf(err) != status.Corrupt {
				t.Fatalf("error %v, want a tear", err)
			}
			if len(found) != 1 || end != int64(len(good)) || tear.Offset != end {
				t.Errorf("%d packets up to %d, tear at %d; want the first packet", len(found), end, tear.Offset)
			}
			if !strings.Contains(err.Error(), c.says) {
				t.Errorf("%q does not say %q", err, c.says)
			}
		})
	}
}

func TestTheCallersErrorEndsTheWalk(t *testing.T) {
	stop := errors.New("enough")
	b := stream(packet("a", "1"), packet("b", "2"))
	end, err := scan.Packets(bytes.NewReader(b), 0, int64(len(b)), func(p scan.Packet) error {
		if p.Name == "b" {
			return stop
		}
		return nil
	})
	if !errors.Is(err, stop) || end != 8 {
		t.Fatalf("end %d, error %v", end, err)
	}
}

func TestAFileThatShrinksIsAnIOError(t *testing.T) {
	b := packet("a", "1")
	_, err := scan.Packets(bytes.NewReader(b[:3]), 0, int64(len(b)), nil)
	if status.CodeOf(err) != status.IO || !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Fatalf("error %v, want an I/O error", err)
	}
}

// The large payloads are holes in the file, 40 GB in all. The scan must not read them.
func TestLargePayloadsAreSkipped(t *testing.T) {
	f, err := os.Create(t.TempDir() + "/sparse.stream")
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	const each = 4 << 30
	at, count := int64(0), 10
	for i := range count {
		head := packet(fmt.Sprint("layer.", i), "")
		wire.PutHeader(head, len(head)-wire.HeaderSize, each-64)
		if _, err := f.WriteAt(head, at); err != nil {
			t.Fatal(err)
		}
		at += int64(len(head)) + each - 64
	}
	if err := f.Truncate(at); err != nil {
		t.Skip("no sparse files here: ", err)
	}
	read := &counting{r: f}
	n := 0
	end, err := scan.Packets(read, 0, at, func(scan.Packet) error { n++; return nil })
	if err != nil || end != at || n != count {
		t.Fatalf("%d packets up to %d of %d, error %v", n, end, at, err)
	}
	if read.bytes > 10*4096 {
		t.Errorf("read %d bytes for %d headers", read.bytes, count)
	}
}

func TestTinyPacketsCostFewReads(t *testing.T) {
	const count = 100_000
	b := bytes.Repeat(packet("transformer.h.0", "12345678"), count)
	read := &counting{r: bytes.NewReader(b)}
	n := 0
	if _, err := scan.Packets(read, 0, int64(len(b)), func(scan.Packet) error { n++; return nil }); err != nil {
		t.Fatal(err)
	}
	if n != count || read.calls > 50 {
		t.Errorf("%d packets in %d reads", n, read.calls)
	}
}

// Every packet is found, whatever its size, also where it crosses the end of a window that the scan
// reads.
func TestPacketsOfAllSizes(t *testing.T) {
	rng := rand.New(rand.NewPCG(1, 2))
	for range 50 {
		var b []byte
		var ends []int64
		for range rng.IntN(60) {
			name := strings.Repeat("n", rng.IntN(1<<rng.IntN(17))%wire.MaxName)
			payload := strings.Repeat("p", 1+rng.IntN(1<<rng.IntN(18)))
			b = append(b, packet(name, payload)...)
			ends = append(ends, int64(len(b)))
		}
		found, end, err := walk(b)
		if err != nil || end != int64(len(b)) || len(found) != len(ends) {
			t.Fatalf("%d of %d packets up to %d, error %v", len(found), len(ends), end, err)
		}
		for i, p := range found {
			if p.End() != ends[i] || strings.Trim(p.Name, "n") != "" {
				t.Fatalf("packet %d is %+v, want its end at %d", i, p, ends[i])
			}
			if again, err := scan.ReadAt(bytes.NewReader(b), p.Offset, int64(len(b))); err != nil || again != p {
				t.Fatalf("read alone the packet is %+v, error %v", again, err)
			}
		}
	}
}

func FuzzPackets(f *testing.F) {
	f.Add([]byte{})
	f.Add(packet("layer", "payload"))
	f.Add(stream(packet("", "x"), packet("a", ""), make([]byte, 6)))
	f.Add(stream(packet("layer", "payload"), packet("layer", "payload")[:9]))
	f.Fuzz(func(t *testing.T, b []byte) {
		var rebuilt []byte
		end, err := scan.Packets(bytes.NewReader(b), 0, int64(len(b)), func(p scan.Packet) error {
			if p.Offset != int64(len(rebuilt)) {
				t.Fatalf("packet at %d, want it at %d", p.Offset, len(rebuilt))
			}
			rebuilt = append(rebuilt, packet(p.Name, string(b[p.PayloadOffset:p.End()]))...)
			return nil
		})
		if !bytes.Equal(rebuilt, b[:end]) {
			t.Fatal("the packets do not add up to the bytes before the end")
		}
		var tear *scan.Tear
		if complete := end == int64(len(b)); complete != (err == nil) || !complete && !errors.As(err, &tear) {
			t.Fatalf("end %d of %d, error %v", end, len(b), err)
		}
	})
}

type counting struct {
	r     io.ReaderAt
	calls int
	bytes int
}

func (c *counting) ReadAt(b []byte, at int64) (int, error) {
	c.calls++
	c.bytes += len(b)
	return c.r.ReadAt(b, at)
}

func BenchmarkTinyPackets(b *testing.B) {
	data := bytes.Repeat(packet("transformer.h.0.mlp", strings.Repeat("x", 100)), 100_000)
	b.SetBytes(int64(len(data)))
	for b.Loop() {
		if _, err := scan.Packets(bytes.NewReader(data), 0, int64(len(data)), func(scan.Packet) error { return nil }); err != nil {
			b.Fatal(err)
		}
	}
}

// No byte is read more than a few times, whatever lengths the headers claim.
func TestTheWorkIsLinear(t *testing.T) {
	name := strings.Repeat("n", 5000)
	crowd := bytes.Repeat(packet("", "x"), 20)
	for what, b := range map[string][]byte{
		"tiny packets":       bytes.Repeat(packet("", "x"), 100_000),
		"long names":         bytes.Repeat(packet(name, ""), 200),
		"names between":      bytes.Repeat(stream(packet(name, ""), crowd), 100),
		"payloads between":   bytes.Repeat(stream(packet("", name), crowd), 100),
		"a name cut off":     stream(bytes.Repeat(crowd, 1000), packet(name, "")[:3000]),
		"a name of no UTF-8": stream(bytes.Repeat(crowd, 1000), packet(name[1:]+"\xff", "")),
	} {
		read := &counting{r: bytes.NewReader(b)}
		_, _ = scan.Packets(read, 0, int64(len(b)), func(scan.Packet) error { return nil })
		if read.bytes > 3*len(b) {
			t.Errorf("%s: %d bytes are read %.1f times", what, len(b), float64(read.bytes)/float64(len(b)))
		}
	}
}
