package index

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"path/filepath"
	"reflect"
	"runtime/metrics"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/apache/arrow/go/v17/arrow"
	"github.com/apache/arrow/go/v17/arrow/array"
	"github.com/apache/arrow/go/v17/arrow/ipc"

	"github.com/libstrap/strap/libstrap/internal/crc32c"
	"github.com/libstrap/strap/libstrap/internal/filelimit"
	"github.com/libstrap/strap/libstrap/internal/memory"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const captureID = "0123456789abcdef0123456789abcdef"

// sample returns the rows of five packets and a note: a plain tensor, a scalar, a tensor without a
// packet, the two packets of an overflow, and a packet found by scanning. streamOf makes their
// stream.
func sample() []wire.Row {
	rows := []wire.Row{
		{
			Sequence: 0, Offset: 0, Length: 100, Parts: 1, Model: "llama", Layer: "embed", Step: 0, Token: 0,
			Rank: -1, Thread: 4711, Shape: []int64{2, 3}, Source: wire.Float32, Stored: wire.Float16,
			Codec: "lz4", TimeNS: 1e9, MSE: 1e-9, MeanSquare: 2, Mantissa: 5,
		},
		{
			Sequence: 1, Offset: 100, Length: 30, Parts: 1, Layer: "", Path: "['loss']", Call: 2, Step: 0, Token: 0, Request: "chat-17",
			Shape: []int64{}, Source: wire.BFloat16, Stored: wire.BFloat16, Codec: "none", CRC: 0,
			TimeNS: 2e9, MSE: math.NaN(), MeanSquare: math.NaN(), Transform: "round", Parameters: `{"bits": 5}`,
		},
		{
			Sequence: 2, Offset: -1, Parts: 1, Layer: "couche.é", Step: 1, Token: 7, Codec: "none",
			TimeNS: 3e9, MSE: math.NaN(), MeanSquare: math.NaN(), Error: "no room",
		},
		{
			Sequence: 3, Offset: 130, Length: 50, Parts: 2, Layer: "mlp", Step: -1, Token: -1,
			Shape: []int64{0, 7}, Source: wire.Float32, Stored: wire.Float16, Codec: "zstd", CRC: 1, TimeNS: 4, MSE: 0,
		},
		{
			Sequence: 3, Offset: 180, Length: 80, Part: 1, Parts: 2, Layer: "mlp", Step: -1, Token: -1,
			Shape: []int64{0, 7}, Source: wire.Float32, Stored: wire.Float32, Codec: "zstd", CRC: math.MaxUint32,
			TimeNS: 4, MSE: math.NaN(), MeanSquare: math.NaN(), Transform: wire.TransformOverflow,
		},
		{
			Sequence: 4, Offset: 260, Length: 20, Parts: 1, Layer: "found", Step: -1, Token: -1, Codec: "lz4",
			MSE: math.NaN(), MeanSquare: math.NaN(),
		},
	}
	rows[0].CRC = crc32c.Update(0, payloadOf(&rows[0]))
	return rows
}

// payloadOf returns the payload of a row's packet in streamOf.
func payloadOf(r *wire.Row) []byte { return bytes.Repeat([]byte{7}, int(r.PayloadLen())) }

// streamOf returns a stream with the packets of rows.
func streamOf(rows ...wire.Row) *bytes.Reader {
	var b []byte
	for i := range rows {
		if r := &rows[i]; r.Offset >= 0 {
			name, payload := r.Name(), payloadOf(r)
			b = binary.BigEndian.AppendUint16(b, uint16(len(name)))
			b = binary.BigEndian.AppendUint32(b, uint32(len(payload)))
			b = append(append(b, name...), payload...)
		}
	}
	return bytes.NewReader(b)
}

// equal compares rows. NaN equals itself; a missing shape differs from an empty one.
func equal(a, b wire.Row) bool {
	if math.IsNaN(a.MeanSquare) && math.IsNaN(b.MeanSquare) {
		a.MeanSquare, b.MeanSquare = 0, 0
	}
	if math.IsNaN(a.MSE) && math.IsNaN(b.MSE) {
		a.MSE, b.MSE = 0, 0
	}
	return reflect.DeepEqual(a, b)
}

func rowsOf(f *File) []wire.Row {
	rows := make([]wire.Row, f.NumRows())
	for i := range rows {
		rows[i] = f.Row(i)
	}
	return rows
}

// recordsOf returns all rows as record batches.
func recordsOf(f *File) []arrow.Record {
	var all []arrow.Record
	for _, rows := range f.Slice(0, f.NumRows()) {
		all = append(all, NewRecorder(f.Schema()).Record(rows))
	}
	return all
}

func sameRows(t *testing.T, got, want []wire.Row) {
	t.Helper()
	if len(got) != len(want) {
		t.Fatalf("%d rows, want %d", len(got), len(want))
	}
	for i := range got {
		if !equal(got[i], want[i]) {
			t.Fatalf("row %d is\n%+v, want\n%+v", i, got[i], want[i])
		}
	}
}

func check(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func create(t testing.TB) *Writer {
	t.Helper()
	w, err := Create(filepath.Join(t.TempDir(), "a.stream.index"), captureID)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { w.f.Close() })
	return w
}

// add appends rows and flushes them as one batch.
func add(t testing.TB, w *Writer, rows ...wire.Row) {
	t.Helper()
	for i := range rows {
		if err := w.Append(&rows[i]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
}

func TestAnIndexComesBackAsItWasWritten(t *testing.T) {
	w, rows := create(t), sample()
	add(t, w, rows[:2]...)
	add(t, w, rows[2:]...)
	check(t, w.Close())

	f, err := Open(w.path)
	check(t, err)
	if f.Torn {
		t.Errorf("torn: %s", f.Problem)
	}
	if want := (Metadata{CaptureID: captureID}); f.Metadata() != want {
		t.Errorf("metadata %+v, want %+v", f.Metadata(), want)
	}
	sameRows(t, rowsOf(f), rows)
	if crc, ok := f.CRC(1); crc != 0 || !ok {
		t.Errorf("the checksum 0 of a packet reads as %d, %v", crc, ok)
	}
	for _, i := range []int{2, 5} {
		if crc, ok := f.CRC(i); ok {
			t.Errorf("row %d has the checksum %d, want none", i, crc)
		}
	}
}

func TestNullsStandForWhatIsNotKnown(t *testing.T) {
	w, rows := create(t), sample()
	add(t, w, rows...)
	f, err := Open(w.path)
	check(t, err)
	rec := recordsOf(f)[0]
	nulls := map[string][]bool{
		"offset":        {false, false, true, false, false, false},
		"step":          {false, false, false, true, true, true},
		"token":         {false, false, false, true, true, true},
		"shape":         {false, false, true, false, false, true},
		"source_dtype":  {false, false, true, false, false, true},
		"stored_dtype":  {false, false, true, false, false, true},
		"transform":     {true, false, true, true, false, true},
		"parameters":    {true, false, true, true, true, true},
		"crc32c":        {false, false, true, false, false, true},
		"time_ns":       {false, false, false, false, false, true},
		"mse":           {false, true, true, false, true, true},
		"mean_square":   {false, true, true, false, true, true},
		"mantissa_bits": {false, true, true, true, true, true},
		"request":       {true, false, true, true, true, true},
		"error":         {true, true, false, true, true, true},
	}
	for k, field := range rec.Schema().Fields() {
		for i := range rows {
			want := nulls[field.Name] != nil && nulls[field.Name][i]
			if got := rec.Column(k).IsNull(i); got != want {
				t.Errorf("%s of row %d: null is %v, want %v", field.Name, i, got, want)
			}
		}
	}
}

// The arrow module's reader must read the same as parse.
func TestArrowReadsTheSame(t *testing.T) {
	w, rows := create(t), sample()
	add(t, w, rows[:1]...)
	add(t, w, rows[1:4]...)
	add(t, w, rows[4:]...)
	check(t, w.Close())
	compareWithArrow(t, w.path)
}

func compareWithArrow(t *testing.T, path string) {
	t.Helper()
	f, err := Open(path)
	check(t, err)
	b, err := os.ReadFile(path)
	check(t, err)
	r, err := ipc.NewReader(bytes.NewReader(b))
	check(t, err)
	defer r.Release()
	if !r.Schema().Equal(f.Schema()) || !reflect.DeepEqual(r.Schema().Metadata(), f.Schema().Metadata()) {
		t.Fatalf("schema\n%s\nwant\n%s", f.Schema(), r.Schema())
	}
	for k, rec := range recordsOf(f) {
		if !r.Next() {
			t.Fatalf("arrow sees %d batches, %d are there: %v", k, len(f.batches), r.Err())
		}
		if !array.RecordEqual(r.Record(), rec) {
			t.Fatalf("batch %d is\n%v, want\n%v", k, rec, r.Record())
		}
	}
	if r.Next() {
		t.Fatal("arrow sees more batches")
	}
}

func TestAnEmptyCaptureHasAnEmptyIndex(t *testing.T) {
	w := create(t)
	check(t, w.Close())
	f, err := Open(w.path)
	check(t, err)
	if f.Torn || f.NumRows() != 0 || f.Metadata() != (Metadata{CaptureID: captureID}) {
		t.Fatalf("%+v", f)
	}
	compareWithArrow(t, w.path)
}

func TestAppendCopies(t *testing.T) {
	w, row := create(t), sample()[0]
	check(t, w.Append(&row))
	row.Shape[0], row.Layer = 99, "other"
	check(t, w.Flush())
	f, err := Open(w.path)
	check(t, err)
	sameRows(t, rowsOf(f), sample()[:1])
}

func TestTextThatIsNotUTF8IsMadeSo(t *testing.T) {
	w, row := create(t), sample()[2]
	row.Error = "bad \xff byte"
	add(t, w, row)
	f, err := Open(w.path)
	check(t, err)
	if got := f.Row(0).Error; got != "bad \ufffd byte" {
		t.Fatalf("%q", got)
	}
}

func TestAppendFlushesBeforeMemoryGrows(t *testing.T) {
	if testing.Short() {
		t.Skip("as many rows as a batch may have, and no goroutines")
	}
	w, row := create(t), sample()[0]
	for range maxPending + 1 {
		check(t, w.Append(&row))
	}
	if w.Pending() != 1 {
		t.Errorf("%d rows pending, want 1", w.Pending())
	}
	row.Parameters = strings.Repeat("x", maxPendingText-100)
	check(t, w.Append(&row))
	check(t, w.Append(&row))
	if w.Pending() != 1 {
		t.Errorf("%d rows pending, want 1", w.Pending())
	}
	row.Parameters = strings.Repeat("x", maxText+1)
	if err := w.Append(&row); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a row with too much text: %v", err)
	}
}

func TestSyncMakesRowsReadable(t *testing.T) {
	w, rows := create(t), sample()
	check(t, w.Sync())
	for i := range rows {
		check(t, w.Append(&rows[i]))
		check(t, w.Sync())
		f, err := Open(w.path)
		check(t, err)
		if !f.Torn || !strings.Contains(f.Problem, "end mark") {
			t.Errorf("an unfinished index is not marked as torn: %q", f.Problem)
		}
		sameRows(t, rowsOf(f), rows[:i+1])
	}
}

// A limit on file size acts as a full disk: the write stops in the middle.
func TestAFailedWriteLeavesCompleteBatches(t *testing.T) {
	if !filelimit.Alone(t) {
		return
	}
	w, rows := create(t), sample()
	add(t, w, rows[:2]...)
	before, err := os.ReadFile(w.path)
	check(t, err)

	lift := filelimit.Set(t, uint64(len(before))+1000)
	for i := range rows[2:] {
		check(t, w.Append(&rows[2+i]))
	}
	err = w.Flush()
	lift()

	if status.CodeOf(err) != status.IO || status.Errno(err) != int32(syscall.EFBIG) {
		t.Fatalf("error %v, want the system's", err)
	}
	after, err := os.ReadFile(w.path)
	check(t, err)
	if !bytes.Equal(before, after) || w.Pending() != len(rows)-2 {
		t.Fatalf("%d bytes, want the %d before; %d rows pending", len(after), len(before), w.Pending())
	}
	check(t, w.Close()) // now there is room
	f, err := Open(w.path)
	check(t, err)
	sameRows(t, rowsOf(f), rows)
}

func TestWhatIsNoIndexIsRefused(t *testing.T) {
	foreign := arrow.NewSchema([]arrow.Field{{Name: "a", Type: arrow.PrimitiveTypes.Int64}}, nil)
	withKeys := func(kv ...string) *arrow.Schema {

		keys, values := []string{}, []string{}
		for i := 0; i < len(kv); i += 2 {
			keys, values = append(keys, kv[i]), append(values, kv[i+1])
		}
		md := arrow.NewMetadata(keys, values)
		return arrow.NewSchema(Schema(Metadata{}).Fields(), &md)
	}
	fields := Schema(Metadata{}).Fields()
	fields[3].Type = arrow.PrimitiveTypes.Int64
	md := Schema(Metadata{}).Metadata()
	otherColumn := arrow.NewSchema(fields, &md)
	for name, c := range map[string]struct {
		bytes []byte
		says  string
	}{
		"text":         {[]byte("this is a text file"), "0x73696874 stands where a message begins"},
		"other schema": {encoded(t, foreign), `its format is "", not "libstrap.index"`},
		"other format": {encoded(t, withKeys("format", "other")), `its format is "other"`},
		"version":      {encoded(t, withKeys("format", format, "version", strconv.Itoa(version+1))), fmt.Sprintf("version %q", strconv.Itoa(version+1))},
		"checksum":     {encoded(t, withKeys("format", format, "version", strconv.Itoa(version), "first_crc32c", "x")), `first_crc32c is "x"`},
		"column":       {encoded(t, otherColumn), `column 3 is "part: int64", not "part: uint32"`},
		"only the end": {endMark, "without a schema"},
	} {
		t.Run(name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "x.index")
			check(t, os.WriteFile(path, c.bytes, 0o666))
			_, err := Open(path)
			if !errors.Is(err, status.Corrupt) || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), path) {
				t.Errorf("error %v, want it to say %q", err, c.says)
			}
			if _, _, err := Resume(path, streamOf(), 0); !errors.Is(err, status.Corrupt) {
				t.Errorf("resumed with error %v", err)
			}
			if b, _ := os.ReadFile(path); !bytes.Equal(b, c.bytes) {
				t.Error("a refused file was changed")
			}
		})
	}
	dir := t.TempDir()
	if _, err := Open(filepath.Join(dir, "none")); !errors.Is(err, status.NotFound) {
		t.Errorf("a missing index: %v", err)
	}
	if _, err := Open(dir); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a directory: %v", err)
	}
	if _, err := Create(filepath.Join(dir, "x"), "me"); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a capture id: %v", err)
	}
	if _, err := Create(filepath.Join(dir, "no", "x"), captureID); !errors.Is(err, status.NotFound) {
		t.Errorf("a missing directory: %v", err)
	}
}

func encoded(t testing.TB, schema *arrow.Schema) []byte {
	t.Helper()
	b, err := encode(schema, nil)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// Compression by other writers is read if the format allows it: zstd, in an index of this version.
func TestOnlyZstdOfThisVersionIsRead(t *testing.T) {
	by := func(version int, o ...ipc.Option) []byte {
		schema := Schema(Metadata{CaptureID: captureID})
		md := schema.Metadata()
		md = arrow.NewMetadata(md.Keys(), append([]string{format, strconv.Itoa(version)}, md.Values()[2:]...))
		schema = arrow.NewSchema(schema.Fields(), &md)
		var b bytes.Buffer
		w := ipc.NewWriter(&b, append(o, ipc.WithSchema(schema))...)
		check(t, w.Write(Record(schema, sample())))
		return b.Bytes()
	}
	f, bad := parse(held(by(version, ipc.WithZstd())), &memory.Budget{})
	if bad != nil || f.Damaged {
		t.Fatalf("%v, %+v", bad, f)
	}
	sameRows(t, rowsOf(f), sample())
	f, bad = parse(held(by(3)), &memory.Budget{})
	if bad != nil || f.Damaged {
		t.Fatalf("%v, %+v", bad, f)
	}
	sameRows(t, rowsOf(f), sample()) // version 3 has all columns
	for name, b := range map[string][]byte{"lz4": by(version, ipc.WithLZ4()), "version 3": by(3, ipc.WithZstd())} {
		f, bad := parse(held(b), &memory.Budget{})
		if bad != nil || !f.Torn || !strings.Contains(f.Problem, "compressed") || f.NumRows() != 0 {
			t.Errorf("%s: %+v, %v", name, f, bad)
		}
	}
}

func TestDictionariesAreRefused(t *testing.T) {
	schema := Schema(Metadata{CaptureID: captureID})
	fields := schema.Fields()
	dict := &arrow.DictionaryType{IndexType: arrow.PrimitiveTypes.Int32, ValueType: arrow.BinaryTypes.String}
	fields[6].Type = dict
	md := schema.Metadata()
	if _, bad := parse(held(encoded(t, arrow.NewSchema(fields, &md))), &memory.Budget{}); bad == nil ||
		!strings.Contains(bad.reason, `"layer: utf8 (dictionary)"`) {
		t.Errorf("a dictionary: %v", bad)
	}
}

func TestResumeGoesOnWhereTheStreamWasCut(t *testing.T) {
	rows := sample()
	for name, c := range map[string]struct {
		cut  int64
		rows []int
		kept Kept
	}{
		"nothing cut":         {280, []int{0, 1, 2, 3, 4, 5}, Kept{Rows: 6, NextSequence: 5, End: 280}},
		"beyond the index":    {999, []int{0, 1, 2, 3, 4, 5}, Kept{Rows: 6, NextSequence: 5, End: 280}},
		"the last packet":     {260, []int{0, 1, 2, 3, 4}, Kept{Rows: 5, NextSequence: 4, End: 260}},
		"between two parts":   {180, []int{0, 1, 2, 3}, Kept{Rows: 4, NextSequence: 4, End: 180}},
		"inside a packet":     {179, []int{0, 1, 2}, Kept{Rows: 3, NextSequence: 3, End: 130}},
		"before the note":     {100, []int{0}, Kept{Rows: 1, NextSequence: 1, End: 100}},
		"the whole stream":    {0, nil, Kept{}},
		"in the first packet": {99, nil, Kept{}},
	} {
		t.Run(name, func(t *testing.T) {
			w := create(t)
			add(t, w, rows[:3]...)
			add(t, w, rows[3:]...)
			check(t, w.Close())
			w, kept, err := Resume(w.path, streamOf(rows...), c.cut)
			check(t, err)
			c.kept.CaptureID = captureID
			if kept != c.kept {
				t.Errorf("kept %+v, want %+v", kept, c.kept)
			}
			more := sample()[0]
			more.Sequence, more.Offset, more.CRC = kept.NextSequence, kept.End, 77
			add(t, w, more)
			check(t, w.Close())
			f, err := Open(w.path)
			check(t, err)
			var want []wire.Row
			for _, i := range c.rows {
				want = append(want, rows[i])
			}
			sameRows(t, rowsOf(f), append(want, more))
			if f.Torn || f.Metadata() != (Metadata{CaptureID: captureID}) {
				t.Errorf("torn %v, metadata %+v", f.Torn, f.Metadata())
			}
			compareWithArrow(t, w.path)
		})
	}
}

func TestNotesBeforeTheFirstPacketSurvive(t *testing.T) {
	note, packet := sample()[2], sample()[0]
	note.Sequence, packet.Sequence = 0, 1
	w := create(t)
	add(t, w, note)
	add(t, w, packet)
	check(t, w.Close())
	w, kept, err := Resume(w.path, streamOf(), 0)
	check(t, err)
	if kept.Rows != 1 || kept.NextSequence != 1 || kept.End != 0 {
		t.Errorf("kept %+v", kept)
	}
	packet.CRC = 5
	add(t, w, packet)
	check(t, w.Close())
	f, err := Open(w.path)
	check(t, err)
	sameRows(t, rowsOf(f), []wire.Row{note, packet})
	// The schema is written before the first packet is known, so its row has the checksum.
	if crc, ok := f.CRC(1); crc != 5 || !ok || f.Metadata().HasFirst {
		t.Errorf("checksum %d, %v; metadata %+v", crc, ok, f.Metadata())
	}
}

func TestResumeNeedsAnIndex(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream.index")
	if _, _, err := Resume(path, streamOf(), 0); !errors.Is(err, status.NotFound) {
		t.Errorf("a missing index: %v", err)
	}
	w, err := Create(path, captureID)
	check(t, err)
	check(t, w.f.Truncate(0)) // as if killed before the schema was written
	check(t, w.f.Close())
	if _, _, err := Resume(path, streamOf(), 0); !errors.Is(err, status.NotFound) {
		t.Errorf("an index without a schema: %v", err)
	}
	if _, _, err := Resume(path, streamOf(), -1); !errors.Is(err, status.InvalidArgument) {
		t.Errorf("a cut at -1: %v", err)
	}
}

func TestDamageInTheMiddleIsNotResumed(t *testing.T) {
	rows := sample()
	w := create(t)
	add(t, w, rows[:1]...)
	at := w.end
	add(t, w, rows[1:2]...)
	add(t, w, rows[2:]...)
	check(t, w.Close())
	b, err := os.ReadFile(w.path)
	check(t, err)
	b[at] = 0
	check(t, os.WriteFile(w.path, b, 0o666))
	f, err := Open(w.path)
	check(t, err)
	if !f.Torn || !strings.Contains(f.Problem, "stands where a message begins") {
		t.Errorf("problem %q", f.Problem)
	}
	sameRows(t, rowsOf(f), rows[:1])
	if _, _, err := Resume(w.path, streamOf(rows...), 1000); !errors.Is(err, status.Corrupt) {
		t.Errorf("resumed with error %v", err)
	}
}

func TestZerosBehindTheLastBatchAreATornTail(t *testing.T) {
	rows := sample()
	w := create(t)
	add(t, w, rows...)
	check(t, w.f.Truncate(w.end+4096))
	f, err := Open(w.path)
	check(t, err)
	if !f.Torn {
		t.Error("not torn")
	}
	sameRows(t, rowsOf(f), rows)
	if _, kept, err := Resume(w.path, streamOf(rows...), 1000); err != nil || kept.Rows != uint64(len(rows)) {
		t.Errorf("kept %+v, error %v", kept, err)
	}
}

// Whenever a capture is killed and wherever its stream is cut, Resume keeps exactly the rows before
// the cut, and the index stays one Arrow stream.
func TestKillAndResumeAnywhere(t *testing.T) {
	seeds := uint64(60)
	if testing.Short() {
		seeds = 10
	}
	for seed := range seeds {
		rng := rand.New(rand.NewPCG(seed, 1))
		path := filepath.Join(t.TempDir(), "a.stream.index")
		w, err := Create(path, captureID)
		check(t, err)
		var written []wire.Row // all rows of the capture, in order
		var durable []int      // number of rows up to each batch's end
		var ends []int64       // file length at each batch's end
		next, at := uint64(0), int64(0)
		for life := range 4 {
			for range rng.IntN(6) {
				for range 1 + rng.IntN(5) {
					r := randomRow(rng, next, &at)
					next++
					check(t, w.Append(&r))
					written = append(written, r)
				}
				check(t, w.Flush())
				durable, ends = append(durable, len(written)), append(ends, w.end)
			}
			if rng.IntN(2) == 0 {
				check(t, w.Close())
			} else {
				check(t, w.f.Close())
			}
			if life == 3 {
				break
			}
			info, err := os.Stat(path)
			check(t, err)
			size := info.Size()
			if rng.IntN(2) == 0 && size > 0 {
				size = rng.Int64N(size + 1)
				check(t, os.Truncate(path, size))
			}
			readable := 0
			for i, end := range ends {
				if end <= size {
					readable = durable[i]
				}
			}
			cut := int64(0)
			if at > 0 {
				cut = rng.Int64N(at + 1)
			}
			want, end := keptRows(written[:readable], cut)
			var kept Kept
			w, kept, err = Resume(path, streamOf(written...), cut)
			if errors.Is(err, status.NotFound) && readable == 0 {
				w, err = Create(path, captureID)
				kept = Kept{CaptureID: captureID}
			}
			check(t, err)
			if kept.Rows != uint64(len(want)) || kept.End != end || kept.CaptureID != captureID {
				t.Fatalf("seed %d: kept %+v, want %d rows up to %d", seed, kept, len(want), end)
			}
			check(t, w.Flush())
			f, err := Open(path)
			check(t, err)
			sameRows(t, rowsOf(f), want)
			written, next, at = want, kept.NextSequence, kept.End
			durable, ends = nil, nil
			for i := range f.batches {
				durable, ends = append(durable, f.ends[i]), append(ends, f.messages[i+1].end)
			}
		}
		f, err := Open(path)
		check(t, err)
		sameRows(t, rowsOf(f), written)
		if f.Begun() {
			compareWithArrow(t, path)
		}
	}
}

// keptRows computes in another way which rows Resume must keep, and where the last packet ends.
func keptRows(rows []wire.Row, cut int64) (kept []wire.Row, end int64) {
	for _, r := range rows {
		if r.Offset >= 0 && r.Offset+int64(r.Length) > cut {
			break // packets and notes have one order, so all later rows go too
		}
		kept = append(kept, r)
		if r.Offset >= 0 {
			end = r.Offset + int64(r.Length)
		}
	}
	return kept, end
}

func randomRow(rng *rand.Rand, sequence uint64, at *int64) wire.Row {
	r := sample()[rng.IntN(6)]
	r.Sequence = sequence
	r.Layer = strings.Repeat("l", rng.IntN(40))
	if r.Offset >= 0 {
		r.Offset, r.Length = *at, uint64(7+len(r.Name())+rng.IntN(100))
		*at += int64(r.Length)
		if r.Offset == 0 && hasCRC(&r) {
			r.CRC = crc32c.Update(0, payloadOf(&r))
		}
	}
	return r
}

// With any one byte wrong, the index is refused, torn, or has other values. All rows that it then
// has can be read.
func TestAnyByteMayBeWrong(t *testing.T) {
	w, rows := create(t), sample()
	add(t, w, rows[:3]...)
	add(t, w, rows[3:]...)
	check(t, w.Close())
	whole, err := os.ReadFile(w.path)
	check(t, err)
	step := 1
	if testing.Short() {
		step = 61
	}
	for at := 0; at < len(whole); at += step {
		for _, wrong := range []byte{0x01, 0x04, 0x80, 0xff} {
			b := bytes.Clone(whole)
			b[at] ^= wrong
			f, bad := parse(held(b), &memory.Budget{})
			if all, worse := parseAll(held(b), &memory.Budget{}); worse == nil && all.NumRows() < 3 {
				t.Fatalf("byte %d: one wrong byte costs more than one batch, %d rows are left", at, all.NumRows())
			}
			if bad != nil {
				continue
			}
			if n := len(rowsOf(f)); n > len(rows) {
				t.Fatalf("byte %d: %d rows", at, n)
			}
			for _, rec := range recordsOf(f) {
				if _, err := rec.MarshalJSON(); err != nil {
					t.Fatalf("byte %d: %v", at, err)
				}
			}
		}
	}
	for size := 0; size < len(whole); size += step {
		f, bad := parse(held(whole[:size]), &memory.Budget{})
		if bad != nil || !f.Torn {
			t.Fatalf("cut to %d bytes: %v, %+v", size, bad, f)
		}
		sameRows(t, rowsOf(f), rows[:f.NumRows()])
	}
}

// FuzzOpen parses any bytes. It must not crash, nor allocate more than a small multiple of the
// input and of the budget. All rows that it finds can be read.
func FuzzOpen(f *testing.F) {
	rows := sample()
	w := create(f)
	add(f, w, rows[:2]...)
	add(f, w, rows[2:]...)
	seed := func() []byte {
		b, err := os.ReadFile(w.path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
		return b
	}
	seed()
	if err := w.Close(); err != nil {
		f.Fatal(err)
	}
	whole := seed()
	w, _, err := Resume(w.path, streamOf(rows...), 180)
	if err != nil {
		f.Fatal(err)
	}
	add(f, w, rows[5])
	seed()
	if w, err = Create(w.path, captureID); err != nil {
		f.Fatal(err)
	}
	add(f, w, slices.Repeat(rows, 40)...) // compressed
	add(f, w, rows...)
	seed()
	f.Add([]byte{})
	f.Add(endMark)
	f.Add(sharedText(64))
	f.Add(whole[:len(whole)/2])
	f.Fuzz(func(t *testing.T, b []byte) {
		before := heapAllocs()
		const budget = 16 << 20
		file, bad := parse(held(b), memory.Limit(budget))
		grew := heapAllocs() - before
		if all, worse := parseAll(held(b), memory.Limit(budget)); worse == nil {
			if n := all.NumRows(); bad == nil && n < file.NumRows() {
				t.Fatalf("%d rows of %d", n, file.NumRows())
			}
			_ = rowsOf(all)
		}
		if grew > 4*budget+32*uint64(len(b)) {
			t.Fatalf("%d bytes allocated for %d", grew, len(b))
		}
		if bad != nil {
			return
		}
		rows := rowsOf(file)
		for i := range rows {
			file.CRC(i)
		}
		// The rows can be written, and read again.
		rec := Record(file.Schema(), rows)
		again, err := encode(file.Schema(), rec)
		if err != nil {
			t.Fatal(err)
		}
		begin := messageIn(again, 0).end
		short := append(bytes.Clone(again[:begin]), compressed(messageIn(again, begin))...)
		for _, b := range [][]byte{again, short} {
			twin, bad := parse(held(b), &memory.Budget{})
			if bad != nil || twin.NumRows() != len(rows) {
				t.Fatalf("%v, %+v", bad, twin)
			}
		}
	})
}

// heapAllocs returns how many bytes were allocated on the heap so far, to within a few pages.
// Unlike runtime.ReadMemStats, it stops no goroutine.
func heapAllocs() uint64 {
	sample := []metrics.Sample{{Name: "/gc/heap/allocs:bytes"}}
	metrics.Read(sample)
	return sample[0].Value.Uint64()
}

func BenchmarkAppend(b *testing.B) {
	w, row := create(b), sample()[0]
	b.ReportAllocs()
	for i := 0; b.Loop(); i++ {
		row.Sequence = uint64(i)
		if err := w.Append(&row); err != nil {
			b.Fatal(err)
		}
	}
}

// decoded returns row i of a capture of many small packets: 200 layers in each step.
func decoded(random *rand.Rand, i int) wire.Row {
	row := sample()[0]
	row.Sequence, row.Layer, row.Step, row.Token = uint64(i), "model.layers."+strconv.Itoa(i%200), int64(i/200), int64(i/200)
	row.Offset, row.Length = int64(170*i)+random.Int64N(8), 160+random.Uint64N(8)
	row.CRC, row.TimeNS = random.Uint32(), 1e15+int64(900*i)+random.Int64N(200)
	row.MSE, row.MeanSquare = 1e-8*(1+random.Float64()), 0.5+random.Float64()
	return row
}

func BenchmarkOpen(b *testing.B) {
	w, random := create(b), rand.New(rand.NewPCG(1, 2))
	const count = 1_000_000
	for i := range count {
		row := decoded(random, i)
		if err := w.Append(&row); err != nil {
			b.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		b.Fatal(err)
	}
	info, _ := os.Stat(w.path)
	b.SetBytes(info.Size())
	for b.Loop() {
		f, err := Open(w.path)
		if err != nil || f.NumRows() != count {
			b.Fatal(err)
		}
	}
}

func BenchmarkRow(b *testing.B) {
	w := create(b)
	rows := sample()
	add(b, w, rows...)
	f, err := Open(w.path)
	if err != nil {
		b.Fatal(err)
	}
	for i := 0; b.Loop(); i++ {
		if r := f.Row(i % len(rows)); r.Parts == 0 {
			b.Fatal(r)
		}
	}
}

// An index of version 1, from a stored capture, is read with nulls for the columns that it lacks.
// Resume writes it anew.
func TestVersion1(t *testing.T) {
	golden := filepath.Join("..", "..", "..", "tests", "golden", "capture-1-none.packets")
	packets, err := os.ReadFile(golden)
	check(t, err)
	stream, size := bytes.NewReader(packets), int64(len(packets))
	b, err := os.ReadFile(golden + ".index")
	check(t, err)
	path := filepath.Join(t.TempDir(), "x.index")
	check(t, os.WriteFile(path, b, 0o666))
	old, err := Open(path)
	check(t, err)
	if old.version != 1 || old.Torn || old.NumRows() < 20 {
		t.Fatalf("version %d, %d rows, %q", old.version, old.NumRows(), old.Problem)
	}
	w, kept, err := Resume(path, stream, size)
	check(t, err)
	if kept.End != size || kept.CaptureID != old.md.CaptureID {
		t.Errorf("kept %+v", kept)
	}
	if killed, err := Open(path); err != nil || killed.NumRows() != old.NumRows() {
		t.Errorf("a process that is killed behind Resume leaves %d rows of %d, %v", killed.NumRows(), old.NumRows(), err)
	}
	check(t, w.Close())
	now, err := Open(path)
	check(t, err)
	want := Metadata{CaptureID: old.md.CaptureID}
	if now.version != version || now.md != want || now.NumRows() != old.NumRows() {
		t.Fatalf("version %d, %+v, %d rows; want %+v, %d rows", now.version, now.md, now.NumRows(), want, old.NumRows())
	}
	for i := range old.NumRows() {
		row := old.Row(i)
		if !math.IsNaN(row.MeanSquare) || row.Mantissa != 0 {
			t.Errorf("row %d of version 1 has %g, %d", i, row.MeanSquare, row.Mantissa)
		}
		if !equal(row, now.Row(i)) {
			t.Errorf("row %d became %+v, was %+v", i, now.Row(i), row)
		}
	}
	compareWithArrow(t, path)
}
