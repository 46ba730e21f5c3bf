package reader_test

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/pierrec/lz4/v4"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const captureID = "00112233445566778899aabbccddeeff"

// capture builds a stream and its index, packet by packet.
type capture struct {
	stream []byte
	rows   []wire.Row
	values [][]byte // the decoded bytes of each packet
}

// add appends a packet of a vector of uint8 and its row.
func (c *capture) add(t testing.TB, layer, codec string, values []byte) {
	payload := compress(t, codec, values)
	at := len(c.stream)
	c.packet(layer, payload)
	c.rows = append(c.rows, wire.Row{
		Sequence: uint64(len(c.rows)), Offset: int64(at), Length: uint64(len(c.stream) - at), Parts: 1,
		Model: "m", Layer: layer, Step: 1, Token: 2, Shape: []int64{int64(len(values))},
		Source: wire.UInt8, Stored: wire.UInt8, Codec: codec,
		CRC: crc32.Checksum(payload, crc32.MakeTable(crc32.Castagnoli)), TimeNS: 1, MSE: math.NaN(), MeanSquare: math.NaN(),
	})
	c.values = append(c.values, values)
}

func (c *capture) packet(name string, payload []byte) {
	head := make([]byte, wire.HeaderSize)
	wire.PutHeader(head, len(name), uint32(len(payload)))
	c.stream = append(append(append(c.stream, head...), name...), payload...)
}

// note appends a row without a packet.
func (c *capture) note(layer, why string) {
	c.rows = append(c.rows, wire.Row{
		Sequence: uint64(len(c.rows)), Offset: -1, Parts: 1, Layer: layer, Step: 1, Token: 2,
		Codec: "none", MSE: math.NaN(), MeanSquare: math.NaN(), Error: why,
	})
	c.values = append(c.values, nil)
}

// encoders are kept, because making one takes longer than encoding a small payload.
var encoders = map[codec.Kind]*codec.Encoder{}

// compress makes a payload as a capture does, or an LZ4 frame as another writer does.
func compress(t testing.TB, name string, b []byte) []byte {
	t.Helper()
	if name == "lz4 without size" {
		var out bytes.Buffer
		w := lz4.NewWriter(&out)
		_, err := w.Write(b)
		check(t, errors.Join(err, w.Close()))
		return out.Bytes()
	}
	kind, err := codec.ParseKind(name)
	check(t, err)
	e := encoders[kind]
	if e == nil {
		e, err = codec.NewEncoder(kind, 0)
		check(t, err)
		encoders[kind] = e
	}
	buf := make([]byte, len(b)+codec.Headroom(kind, len(b)))
	from := codec.Front(kind, len(b))
	copy(buf[from:], b)
	n, err := e.EncodeInPlace(buf, from, len(b))
	check(t, err)
	return buf[:n]
}

// ramp returns n values that compress somewhat.
func ramp(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i / 7)
	}
	return b
}

// sample returns a capture with every codec, an empty tensor and a note.
func sample(t testing.TB) *capture {
	c := &capture{}
	c.add(t, "embed", "lz4", ramp(1000))
	c.add(t, "layer.0", "zstd", ramp(2000))
	c.note("layer.1", "no room")
	c.add(t, "", "none", ramp(100))
	c.add(t, "layer.2", "lz4 without size", ramp(100_000))
	c.rows[4].Codec = "lz4"
	c.add(t, "layer.3", "none", []byte{})
	return c
}

// save writes the stream and the index of rows beside it, in two batches.
func save(t testing.TB, stream []byte, rows []wire.Row) (path string) {
	t.Helper()
	path = saveStream(t, stream)
	w, err := index.Create(index.PathOf(path), captureID)
	check(t, err)
	for i := range rows {
		check(t, w.Append(&rows[i]))
		if i == len(rows)/2 {
			check(t, w.Flush())
		}
	}
	check(t, w.Close())
	return path
}

func saveStream(t testing.TB, stream []byte) (path string) {
	t.Helper()
	path = filepath.Join(t.TempDir(), "a.stream")
	check(t, os.WriteFile(path, stream, 0o666))
	return path
}

// folder makes a folder, in memory if the system has /dev/shm: the fuzzer writes two files for each
// input.
func folder(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("/dev/shm", "strap-reader-*")
	if err != nil {
		return t.TempDir()
	}
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	return dir
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func open(t testing.TB, path string, o reader.Options) *reader.Reader {
	t.Helper()
	r, err := reader.Open(path, o)
	check(t, err)
	t.Cleanup(func() { r.Close() })
	return r
}

func read(t testing.TB, r *reader.Reader, i int) []byte {
	t.Helper()
	n, err := r.DecodedLen(i)
	check(t, err)
	b := make([]byte, n)
	check(t, r.ReadInto(i, b))
	return b
}

func sameInfo(t *testing.T, got, want reader.Info, says string) {
	t.Helper()
	problem := got.Problem
	got.Problem = ""
	if got != want {
		t.Errorf("info\n%+v, want\n%+v", got, want)
	}
	if says == "" && problem != "" || !strings.Contains(problem, says) {
		t.Errorf("problem %q, want it to say %q", problem, says)
	}
}

func TestACaptureReadsBackWithItsIndex(t *testing.T) {
	c := sample(t)
	r := open(t, save(t, c.stream, c.rows), reader.Options{})
	size := int64(len(c.stream))
	sameInfo(t, r.Info(), reader.Info{Indexed: true, Rows: 6, Packets: 5, FileBytes: size, ValidBytes: size}, "")
	for i, want := range c.rows {
		got, err := r.Row(i)
		check(t, err)
		if fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("row %d is %+v, want %+v", i, got, want)
		}
		if want.Offset >= 0 && !bytes.Equal(read(t, r, i), c.values[i]) {
			t.Errorf("row %d reads back otherwise", i)
		}
	}
}

func TestAStreamWithoutIndexIsScanned(t *testing.T) {
	c := sample(t)
	path := save(t, c.stream, c.rows)
	ignored := open(t, path, reader.Options{IgnoreIndex: true})
	check(t, os.Remove(index.PathOf(path)))
	missing := open(t, path, reader.Options{})
	size := int64(len(c.stream))
	for _, r := range []*reader.Reader{ignored, missing} {
		sameInfo(t, r.Info(), reader.Info{Rows: 5, Packets: 5, Scanned: 5, FileBytes: size, ValidBytes: size}, "")
		packet := 0
		for i, want := range c.rows {
			if want.Offset < 0 {
				continue
			}
			got, err := r.Row(packet)
			check(t, err)
			if got.Layer != want.Layer || got.Offset != want.Offset || got.Length != want.Length ||
				got.Codec != want.Codec || got.Sequence != uint64(packet) || got.Shape != nil || got.Source != 0 || got.Step != -1 {
				t.Errorf("row %d is %+v, want %+v", packet, got, want)
			}
			if !bytes.Equal(read(t, r, packet), c.values[i]) {
				t.Errorf("row %d reads back otherwise", packet)
			}
			packet++
		}
	}
}

func TestAnEmptyStreamHasNoPackets(t *testing.T) {
	r := open(t, saveStream(t, nil), reader.Options{})
	sameInfo(t, r.Info(), reader.Info{}, "")
	if _, err := r.Row(0); !errors.Is(err, status.NotFound) {
		t.Errorf("row 0: %v", err)
	}
	if records := recordsOf(t, r); records.Next() {
		t.Errorf("the record %v", records.Record())
	}
}

func TestWhatIsNoStreamIsRefused(t *testing.T) {
	dir := t.TempDir()
	for path, want := range map[string]status.Code{
		filepath.Join(dir, "none"): status.NotFound,
		dir:                        status.InvalidArgument,
		saveStream(t, []byte("#!/bin/sh\necho hello")): status.Corrupt,
		saveStream(t, make([]byte, 4096)):              status.Corrupt,
		saveStream(t, []byte{0}):                       status.Corrupt,
	} {
		_, err := reader.Open(path, reader.Options{})
		if status.CodeOf(err) != want || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: error %v, want %v", path, err, want)
		}
	}
}

// A killed capture: the index lags behind, and the last packet is half written.
func TestPacketsBehindTheIndexAreFound(t *testing.T) {
	c := sample(t)
	known := len(c.rows)
	c.add(t, "layer.4", "zstd", ramp(300))
	whole := int64(len(c.stream))
	c.add(t, "layer.5", "lz4", ramp(300))
	torn := c.stream[:len(c.stream)-10]

	r := open(t, save(t, torn, c.rows[:known]), reader.Options{})
	sameInfo(t, r.Info(), reader.Info{
		Indexed: true, Rows: 7, Packets: 6, Scanned: 1, FileBytes: int64(len(torn)), ValidBytes: whole,
	}, fmt.Sprintf("no complete packet at byte %d", whole))
	row, err := r.Row(known)
	check(t, err)
	if row.Layer != "layer.4" || row.Codec != "zstd" || row.Sequence != uint64(known) {
		t.Errorf("row %+v", row)
	}
	if !bytes.Equal(read(t, r, known), ramp(300)) {
		t.Error("the scanned packet reads back otherwise")
	}
}

// A resumed stream of an older version: the first packets are missing in the index.
func TestPacketsBeforeAndBetweenAreFound(t *testing.T) {
	c := sample(t)
	for name, without := range map[string]map[int]bool{
		"before":  {0: true, 1: true},
		"between": {1: true, 3: true},
	} {
		t.Run(name, func(t *testing.T) {
			var rows []wire.Row
			for i, row := range c.rows {
				if !without[i] {
					rows = append(rows, row)
				}
			}
			r := open(t, save(t, c.stream, rows), reader.Options{})
			size := int64(len(c.stream))
			sameInfo(t, r.Info(), reader.Info{
				Indexed: true, Rows: 6, Packets: 5, Scanned: 2, FileBytes: size, ValidBytes: size,
			}, "")
			pos := int64(0)
			for i := range r.NumRows() {
				row, err := r.Row(i)
				check(t, err)
				if row.Offset < 0 {
					continue
				}
				if row.Offset != pos {
					t.Errorf("row %d is at %d, want the stream's order", i, row.Offset)
				}
				pos += int64(row.Length)
				var want []byte
				for k, known := range c.rows {
					if known.Offset == row.Offset {
						want = c.values[k]
					}
				}
				if !bytes.Equal(read(t, r, i), want) {
					t.Errorf("row %d reads back otherwise", i)
				}
			}
		})
	}
}

// After a power failure: the index reached the disk, and the end of the stream did not.
func TestTheIndexMayBeAheadOfTheStream(t *testing.T) {
	c := sample(t)
	cut := c.rows[4].Offset + 50
	r := open(t, save(t, c.stream[:cut], c.rows), reader.Options{})
	sameInfo(t, r.Info(), reader.Info{
		Indexed: true, Rows: 4, Packets: 3, FileBytes: cut, ValidBytes: c.rows[4].Offset,
	}, "the stream ends before 2 packets that the index lists")
	if !bytes.Equal(read(t, r, 1), c.values[1]) {
		t.Error("row 1 reads back otherwise")
	}
}

// A capture killed within its first packet: only the index shows that the file is a stream.
func TestACaptureKilledEarlyHasNoPackets(t *testing.T) {
	c := sample(t)
	path := saveStream(t, c.stream[:20])
	check(t, os.WriteFile(index.PathOf(path), nil, 0o666))
	r := open(t, path, reader.Options{})
	sameInfo(t, r.Info(), reader.Info{FileBytes: 20}, "nothing was written yet")

	r = open(t, save(t, c.stream[:20], c.rows), reader.Options{})
	sameInfo(t, r.Info(), reader.Info{Indexed: true, FileBytes: 20}, "no complete packet at byte 0")
}

func TestATornTailIsNoProblemWhileItIsWritten(t *testing.T) {
	c := sample(t)
	half := func(path string) {
		b, err := os.ReadFile(index.PathOf(path))
		check(t, err)
		check(t, os.WriteFile(index.PathOf(path), b[:len(b)-8], 0o666))
		f, err := os.OpenFile(path, os.O_APPEND|os.O_WRONLY, 0)
		check(t, err)
		_, err = f.Write([]byte{0, 1, 0xff, 0xff, 0xff, 0xff, 'x'})
		check(t, errors.Join(err, f.Close()))
	}
	path := save(t, c.stream, c.rows)
	half(path)
	writer, err := os.Open(path)
	check(t, err)
	check(t, syscall.Flock(int(writer.Fd()), syscall.LOCK_EX))
	live := open(t, path, reader.Options{})
	if info := live.Info(); !info.Live || info.Problem != "" || info.Packets != 5 {
		t.Errorf("while it is written: %+v", info)
	}
	check(t, writer.Close())
	check(t, os.WriteFile(path, c.stream[:c.rows[1].Offset], 0o666))
	if info := open(t, path, reader.Options{}).Info(); info.Live || !strings.Contains(info.Problem, "end mark") {
		t.Errorf("of a killed capture: %+v", info)
	}
}

func TestAnIndexOfAnotherStreamIsIgnored(t *testing.T) {
	c := sample(t)
	other := &capture{}
	other.add(t, "embed", "lz4", bytes.Repeat([]byte{1, 2, 3}, 400))
	other.add(t, "layer.0", "none", ramp(77))
	size := int64(len(other.stream))

	sameStart := &capture{}
	sameStart.add(t, "embed", "lz4", ramp(1000))
	sameStart.packet("something else", ramp(len(c.stream)))

	overlap := append([]wire.Row{}, c.rows...)
	overlap[1].Offset--

	for name, test := range map[string]struct {
		stream []byte
		rows   []wire.Row
		says   string
	}{
		"first packet": {other.stream, c.rows, "its first packet has checksum"},
		"last packet":  {sameStart.stream, c.rows, "row 5: "},
		"overlap":      {c.stream, overlap, "inside the packet before it"},
	} {
		t.Run(name, func(t *testing.T) {
			r := open(t, save(t, test.stream, test.rows), reader.Options{})
			if info := r.Info(); info.Indexed || info.Scanned != info.Packets || info.Packets == 0 ||
				!strings.Contains(info.Problem, "the index is ignored") || !strings.Contains(info.Problem, test.says) {
				t.Errorf("%+v, want it to say %q", info, test.says)
			}
		})
	}

	path := saveStream(t, other.stream)
	check(t, os.WriteFile(index.PathOf(path), []byte("no index at all"), 0o666))
	r := open(t, path, reader.Options{})
	sameInfo(t, r.Info(), reader.Info{Rows: 2, Packets: 2, Scanned: 2, FileBytes: size, ValidBytes: size},
		"is no index of a stream")
}

func TestDamagedPacketsAreToldByName(t *testing.T) {
	c := sample(t)
	payload := int(c.rows[1].Offset) + wire.HeaderSize + len("layer.0") + 20
	c.stream[payload] ^= 1
	head := int(c.rows[3].Offset) + 1
	copy(c.stream[head-1:], "\xff\xff") // the packet of the root module claims a name longer than the stream
	r := open(t, save(t, c.stream, c.rows), reader.Options{})

	err := r.ReadInto(1, make([]byte, 2000))
	at := fmt.Sprintf(`"layer.0" at byte %d`, c.rows[1].Offset)
	if !errors.Is(err, status.Corrupt) || !strings.Contains(err.Error(), at) || !strings.Contains(err.Error(), "checksum") {
		t.Errorf("damaged payload: %v", err)
	}
	at = fmt.Sprintf(`"" at byte %d`, c.rows[3].Offset)
	if err := r.ReadInto(3, make([]byte, 100)); !errors.Is(err, status.Corrupt) || !strings.Contains(err.Error(), at) {
		t.Errorf("damaged header: %v", err)
	}
	if !bytes.Equal(read(t, r, 4), c.values[4]) {
		t.Error("an intact packet reads back otherwise")
	}
}

func TestReadIntoErrors(t *testing.T) {
	c := sample(t)
	r := open(t, save(t, c.stream, c.rows), reader.Options{})
	for name, test := range map[string]struct {
		row, size int
		want      status.Code
	}{
		"too short":   {0, 999, status.InvalidArgument},
		"too long":    {0, 1001, status.InvalidArgument},
		"a note":      {2, 0, status.NotFound},
		"beyond":      {6, 0, status.NotFound},
		"before":      {-1, 0, status.NotFound},
		"just right":  {0, 1000, status.OK},
		"empty right": {5, 0, status.OK},
	} {
		if err := r.ReadInto(test.row, make([]byte, test.size)); status.CodeOf(err) != test.want {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}
	if _, err := r.DecodedLen(2); !errors.Is(err, status.NotFound) || !strings.Contains(err.Error(), "no room") {
		t.Errorf("the length of a note: %v", err)
	}
	check(t, r.Close())
	if err := r.ReadInto(0, make([]byte, 1000)); !errors.Is(err, status.InvalidState) {
		t.Errorf("after Close: %v", err)
	}
}

// A frame or a row may claim more than its payload can hold. Nothing is allocated for such a claim.
func TestClaimsAreNotBelieved(t *testing.T) {
	c := sample(t)
	binary.LittleEndian.PutUint64(c.stream[6+len("embed")+6:], 1<<40) // content size of the LZ4 frame
	path := save(t, c.stream, c.rows)
	r := open(t, path, reader.Options{IgnoreIndex: true})
	if n, err := r.DecodedLen(0); !errors.Is(err, status.Corrupt) {
		t.Errorf("the frame's claim: %d, %v", n, err)
	}

	c = sample(t)
	c.rows[4].Shape = []int64{1 << 40, 1 << 40}
	r = open(t, save(t, c.stream, c.rows), reader.Options{})
	if n, err := r.DecodedLen(4); !errors.Is(err, status.Corrupt) {
		t.Errorf("the row's claim: %d, %v", n, err)
	}
	c.rows[4].Shape = []int64{1000}
	r = open(t, save(t, c.stream, c.rows), reader.Options{})
	if err := r.ReadInto(4, make([]byte, 1000)); !errors.Is(err, status.Corrupt) {
		t.Errorf("a frame with more than the row says: %v", err)
	}
}

// 1 kB of a frame without a content size decode to 32 MiB. Finding that length takes only the
// memory of a window.
func TestAskingForALengthTakesNoRoomForTheContent(t *testing.T) {
	const blocks = 256
	frame := []byte("\x28\xb5\x2f\xfd\x00\x38") // a frame with a window of 128 KiB
	for i := range blocks {
		frame = append(frame, 2, 0, 0x10, 'x') // a block that repeats one byte 128 KiB long
		if i == blocks-1 {
			frame[len(frame)-4] |= 1
		}
	}
	c := &capture{}
	c.packet("layer", frame)
	r := open(t, saveStream(t, c.stream), reader.Options{})
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	n, err := r.DecodedLen(0)
	runtime.ReadMemStats(&after)
	if err != nil || n != blocks*128<<10 || after.TotalAlloc-before.TotalAlloc > 8<<20 {
		t.Errorf("%d bytes, %v, and %d allocated", n, err, after.TotalAlloc-before.TotalAlloc)
	}
}

func TestRecordsAreTheRows(t *testing.T) {
	c := sample(t)
	rows := append([]wire.Row{}, c.rows...)
	rows = append(rows[:1], rows[2:5]...) // gaps in the middle and at the end
	r := open(t, save(t, c.stream, rows), reader.Options{})
	i := 0
	for records := recordsOf(t, r); records.Next(); {
		rec := records.Record()
		if !rec.Schema().Equal(records.Schema()) || rec.Schema().NumFields() < 26 {
			t.Errorf("schema %v", rec.Schema())
		}
		sequence := rec.Column(0).(*array.Uint64)
		offset := rec.Column(1).(*array.Uint64)
		layer := rec.Column(6).(*array.String)
		shape := rec.Column(13)
		for k := range int(rec.NumRows()) {
			row, err := r.Row(i)
			check(t, err)
			if sequence.Value(k) != row.Sequence || layer.Value(k) != row.Layer ||
				offset.IsNull(k) != (row.Offset < 0) || shape.IsNull(k) != (row.Shape == nil) {
				t.Errorf("row %d of the records is not %+v", i, row)
			}
			i++
		}
	}
	if i != r.NumRows() || i != 6 {
		t.Errorf("%d rows in the records, %d in the reader", i, r.NumRows())
	}
}

func TestSomeColumnsAreThoseOfTheRecords(t *testing.T) {
	c := sample(t)
	r := open(t, save(t, c.stream, c.rows), reader.Options{})
	some, all := recordsOf(t, r, "step", "layer"), recordsOf(t, r)
	if schema := some.Schema(); schema.NumFields() != 2 || schema.Field(1).Name != "layer" {
		t.Fatalf("%v", schema)
	}
	for all.Next() {
		if !some.Next() || some.Record().NumRows() != all.Record().NumRows() {
			t.Fatalf("%v is not %v", some.Record(), all.Record())
		}
		layers := all.Record().Column(all.Schema().FieldIndices("layer")[0])
		texts := some.Record().Column(1).(*array.Dictionary)
		for i := range layers.Len() {
			if got, want := texts.Dictionary().ValueStr(texts.GetValueIndex(i)), layers.ValueStr(i); got != want {
				t.Errorf("row %d is %q, not %q", i, got, want)
			}
		}
	}
	if some.Next() {
		t.Error("more batches")
	}
	if _, err := r.Records("step", "stepp"); status.CodeOf(err) != status.InvalidArgument {
		t.Errorf("no such column: %v", err)
	}
}

func recordsOf(t *testing.T, r *reader.Reader, names ...string) array.RecordReader {
	t.Helper()
	records, err := r.Records(names...)
	check(t, err)
	return records
}

func TestManyReadersAtOnce(t *testing.T) {
	c := sample(t)
	r := open(t, save(t, c.stream, c.rows), reader.Options{})
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for i := range c.rows {
				if c.rows[i].Offset < 0 {
					continue
				}
				dst := make([]byte, len(c.values[i]))
				if err := r.ReadInto(i, dst); err != nil || !bytes.Equal(dst, c.values[i]) {
					t.Errorf("row %d: %v", i, err)
				}
				if records, err := r.Records(); err != nil || !records.Next() {
					t.Errorf("no records: %v", err)
				}
			}
		})
	}
	wg.Wait()
}

// FuzzReader reads any stream with any index. It must not crash, nor allocate more than the file
// justifies.
//
// Slow: each input is written to two files, which are opened twice.
func FuzzReader(f *testing.F) {
	c := sample(f)
	path := save(f, c.stream, c.rows)
	idx, err := os.ReadFile(index.PathOf(path))
	check(f, err)
	f.Add(c.stream, idx)
	f.Add(c.stream, []byte{})
	f.Add(c.stream[:len(c.stream)-5], idx)
	f.Add(c.stream[c.rows[1].Offset:], idx)
	f.Add([]byte{}, idx)
	dir := folder(f)
	f.Fuzz(func(t *testing.T, stream, idx []byte) {
		path := filepath.Join(dir, "a.stream")
		check(t, os.WriteFile(path, stream, 0o666))
		check(t, os.WriteFile(index.PathOf(path), idx, 0o666))
		for _, o := range []reader.Options{{}, {IgnoreIndex: true}} {
			r, err := reader.Open(path, o)
			if err != nil {
				if status.CodeOf(err) != status.Corrupt {
					t.Fatal(err)
				}
				continue
			}
			packets := 0
			for i := range r.NumRows() {
				row, err := r.Row(i)
				check(t, err)
				if row.Offset < 0 {
					continue
				}
				packets++
				n, err := r.DecodedLen(i)
				if err != nil {
					continue
				}
				if n > int64(len(stream))<<15 {
					t.Fatalf("row %d claims %d bytes in a stream of %d", i, n, len(stream))
				}
				if n > 1<<20 {
					continue
				}
				one, many, end := make([]byte, n), make([]byte, n), make([]uint64, 1)
				err = r.ReadInto(i, one)
				done, merr := r.ReadMany([]uint64{uint64(i)}, 1, many, end)
				if (err == nil) != (merr == nil) || err == nil && (done != 1 || !bytes.Equal(one, many)) {
					t.Fatalf("row %d alone: %v; as one of many: %d, %v", i, err, done, merr)
				}
				part := one[n/3 : n-n/3]
				done, rerr := r.ReadRanges([]reader.Range{{Row: uint64(i), First: uint64(n / 3), Bytes: uint64(len(part))}}, many)
				if err == nil && (rerr != nil || done != 1 || !bytes.Equal(many[:len(part)], part)) {
					t.Fatalf("row %d, %d bytes in the middle: %d, %v", i, len(part), done, rerr)
				}
				if code := status.CodeOf(err); code != status.OK && code != status.Corrupt && code != status.Unsupported {
					t.Fatalf("row %d: %v", i, err)
				}
			}
			if info := r.Info(); info.Packets != uint64(packets) || info.ValidBytes > info.FileBytes {
				t.Fatalf("%+v with %d packets", info, packets)
			}
			rows := int64(0)
			for records := recordsOf(t, r); records.Next(); {
				rows += records.Record().NumRows()
			}
			if rows != int64(r.NumRows()) {
				t.Fatalf("%d rows in the records, %d in the reader", rows, r.NumRows())
			}
			check(t, r.Close())
		}
	})
}

// crowd returns a capture of n packets of every codec, most of them small.
func crowd(t testing.TB, n int) *capture {
	c := &capture{}
	for i := range n {
		size := i % 300
		if i%1000 == 500 {
			size = 100_000 // more than ReadMany reads of the file at once
		}
		codec := []string{"none", "lz4", "zstd"}[i%3]
		if i%100 == 50 {
			codec = "lz4 without size"
		}
		c.add(t, fmt.Sprint("layer.", i%7), codec, ramp(size))
		c.rows[i].Codec = strings.TrimSuffix(codec, " without size")
	}
	return c
}

// many reads rows with ReadMany, and returns each row's bytes.
func many(t testing.TB, r *reader.Reader, rows []uint64, align, room int) [][]byte {
	t.Helper()
	var out [][]byte
	dst, ends := make([]byte, room), make([]uint64, len(rows))
	for len(rows) > 0 {
		done, err := r.ReadMany(rows, align, dst, ends)
		check(t, err)
		if done == 0 {
			t.Fatalf("no room for row %d", rows[0])
		}
		from := 0
		for _, end := range ends[:done] {
			from = (from + align - 1) / align * align
			out = append(out, bytes.Clone(dst[from:end]))
			from = int(end)
		}
		rows = rows[done:]
	}
	return out
}

func TestManyPacketsAtOnceAreThoseReadOneByOne(t *testing.T) {
	n := 2000
	if testing.Short() {
		n = 500
	}
	c := crowd(t, n)
	path := save(t, c.stream, c.rows)
	orders := map[string]func(i int) uint64{
		"in order":  func(i int) uint64 { return uint64(i) },
		"backwards": func(i int) uint64 { return uint64(len(c.rows) - 1 - i) },
		"scattered": func(i int) uint64 { return uint64(i * 7919 % len(c.rows)) },
		"one layer": func(i int) uint64 { return uint64(i * 7 % len(c.rows)) },
		"one again": func(int) uint64 { return 3 },
	}
	for _, o := range []reader.Options{{}, {IgnoreIndex: true}} {
		r := open(t, path, o)
		for name, order := range orders {
			rows := make([]uint64, len(c.rows))
			for i := range rows {
				rows[i] = order(i)
			}
			for _, align := range []int{1, 64} {
				for i, b := range many(t, r, rows, align, 200_000) {
					if !bytes.Equal(b, c.values[rows[i]]) {
						t.Fatalf("%s, %+v: row %d has %d bytes, not the %d it was written with", name, o, rows[i], len(b), len(c.values[rows[i]]))
					}
				}
			}
		}
	}
}

func TestManyPacketsEndBeforeTheOneThatCannotBeRead(t *testing.T) {
	c := crowd(t, 1000)
	const damaged = 700
	c.stream[c.rows[damaged+1].Offset-1] ^= 1 // the last byte of its payload
	c.note("layer.0", "no room")
	r := open(t, save(t, c.stream, c.rows), reader.Options{})
	rows := make([]uint64, 1000)
	for i := range rows {
		rows[i] = uint64(i)
	}
	dst, ends := make([]byte, 1<<20), make([]uint64, len(rows))
	if done, err := r.ReadMany(rows, 1, dst, ends); done != damaged || err != nil {
		t.Errorf("%d rows, %v", done, err)
	}
	for what, some := range map[string][]uint64{"damaged": {damaged, 0}, "note": {1000}, "none": {1001}} {
		want := map[string]status.Code{"damaged": status.Corrupt, "note": status.NotFound, "none": status.NotFound}[what]
		if done, err := r.ReadMany(some, 1, dst, ends); done != 0 || status.CodeOf(err) != want {
			t.Errorf("%s: %d rows, %v", what, done, err)
		}
	}
	if done, err := r.ReadMany([]uint64{299, 298}, 1, dst[:298], ends); done != 0 || err != nil {
		t.Errorf("no room: %d rows, %v", done, err)
	}
	if done, err := r.ReadMany([]uint64{298, 299}, 1, dst[:300], ends); done != 1 || err != nil || ends[0] != 298 {
		t.Errorf("room for one: %d rows, %v", done, err)
	}
	for _, align := range []int{0, -8, 3} {
		if _, err := r.ReadMany(rows, align, dst, ends); status.CodeOf(err) != status.InvalidArgument {
			t.Errorf("alignment %d: %v", align, err)
		}
	}
}

// A packet whose header or name is not the one that the index has ends the rows that are read at once.
func TestManyPacketsHaveTheHeadersOfTheIndex(t *testing.T) {
	const damaged = 7
	rows := []uint64{5, 6, 7, 8}
	for what, at := range map[string]int{"length of the name": 1, "length of the payload": 5, "name": wire.HeaderSize} {
		c := crowd(t, 20)
		c.stream[c.rows[damaged].Offset+int64(at)] ^= 1
		r := open(t, save(t, c.stream, c.rows), reader.Options{})
		dst, ends := make([]byte, 1<<10), make([]uint64, len(rows))
		if done, err := r.ReadMany(rows, 1, dst, ends); done != 2 || err != nil {
			t.Errorf("%s: %d rows, %v", what, done, err)
		}
		if done, err := r.ReadMany(rows[2:], 1, dst, ends); done != 0 || status.CodeOf(err) != status.Corrupt {
			t.Errorf("%s: %d rows, %v", what, done, err)
		}
	}
}

func BenchmarkReadMany(b *testing.B) {
	for _, codec := range []string{"none", "lz4", "zstd"} {
		b.Run(codec, func(b *testing.B) {
			c, rows := &capture{}, make([]uint64, 4096)
			for i := range rows {
				c.add(b, fmt.Sprint("layer.", i%200), codec, ramp(128))
				rows[i] = uint64(i)
			}
			r := open(b, save(b, c.stream, c.rows), reader.Options{})
			dst, ends := make([]byte, 128*len(rows)), make([]uint64, len(rows))
			b.ReportAllocs()
			for b.Loop() {
				if done, err := r.ReadMany(rows, 1, dst, ends); done != len(rows) {
					b.Fatal(done, err)
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*len(rows)), "ns/packet")
		})
	}
}

func BenchmarkReadInto(b *testing.B) {
	for _, codec := range []string{"none", "lz4", "zstd"} {
		for _, size := range []int{1 << 10, 1 << 20} {
			b.Run(fmt.Sprint(codec, "/", size), func(b *testing.B) {
				c := &capture{}
				c.add(b, "layer", codec, ramp(size))
				r := open(b, save(b, c.stream, c.rows), reader.Options{})
				dst := make([]byte, size)
				b.SetBytes(int64(size))
				b.ReportAllocs()
				for b.Loop() {
					check(b, r.ReadInto(0, dst))
				}
			})
		}
	}
}
