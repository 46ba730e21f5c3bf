package reader_test

import (
	"bytes"
	"errors"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/reader"
	"github.com/libstrap/strap/libstrap/internal/status"
)

func salvage(t *testing.T, src string) (*reader.Reader, reader.SalvageReport) {
	t.Helper()
	dst := filepath.Join(t.TempDir(), "b.stream")
	report, err := reader.Salvage(src, dst)
	check(t, err)
	r := open(t, dst, reader.Options{})
	if info := r.Info(); !info.Indexed || info.Scanned != 0 || info.Problem != "" || info.Packets != report.Packets {
		t.Errorf("the salvaged stream is not whole: %+v", info)
	}
	return r, report
}

// The header of the second packet is gone: no scan finds what follows, the
// index does.
func TestSalvageFindsPacketsBehindATear(t *testing.T) {
	c := sample(t)
	at := c.rows[1].Offset
	copy(c.stream[at:], make([]byte, 6))
	src := save(t, c.stream, c.rows)
	before, err := os.ReadFile(src)
	check(t, err)

	r, report := salvage(t, src)
	want := reader.SalvageReport{Packets: 4, Verified: 4, Lost: 1, SkippedBytes: int64(c.rows[1].Length)}
	if report != want {
		t.Errorf("%+v, want %+v", report, want)
	}
	for i, row := range c.rows {
		got, err := r.Row(i)
		check(t, err)
		if got.Layer != row.Layer || got.Sequence != row.Sequence {
			t.Errorf("row %d is %+v, want %+v", i, got, row)
		}
		switch i {
		case 1:
			if got.Offset >= 0 || !strings.Contains(got.Error, "lost in the damaged stream") {
				t.Errorf("the lost packet is noted as %+v", got)
			}
		case 2:
			if got.Error != "no room" {
				t.Errorf("the note is %+v", got)
			}
		default:
			if !bytes.Equal(read(t, r, i), c.values[i]) {
				t.Errorf("row %d reads back otherwise", i)
			}
		}
	}
	after, err := os.ReadFile(src)
	check(t, err)
	if !bytes.Equal(before, after) {
		t.Error("the source was changed")
	}
}

func TestSalvageLeavesOutWhatFailsItsChecksum(t *testing.T) {
	c := sample(t)
	c.stream[c.rows[0].Offset+100] ^= 4 // the first packet, by which an index is told
	r, report := salvage(t, save(t, c.stream, c.rows))
	if report.Packets != 4 || report.Lost != 1 || report.Problem != "" {
		t.Errorf("%+v", report)
	}
	if row, err := r.Row(0); err != nil || !strings.Contains(row.Error, "checksum") {
		t.Errorf("row %+v, %v", row, err)
	}
}

func TestSalvageWithoutIndexStopsAtTheTear(t *testing.T) {
	c := sample(t)
	cut := c.rows[3].Offset
	copy(c.stream[cut:], make([]byte, 6))
	r, report := salvage(t, saveStream(t, c.stream))
	want := reader.SalvageReport{Packets: 2, SkippedBytes: int64(len(c.stream)) - cut}
	if report != want {
		t.Errorf("%+v, want %+v", report, want)
	}
	if !bytes.Equal(read(t, r, 1), c.values[1]) {
		t.Error("row 1 reads back otherwise")
	}
}

func TestSalvageKeepsWhatTheIndexHasNotReached(t *testing.T) {
	c := sample(t)
	rows := c.rows[:4]
	c.stream = append(c.stream, 1, 2, 3)
	r, report := salvage(t, save(t, c.stream, rows))
	want := reader.SalvageReport{Packets: 5, Verified: 3, SkippedBytes: 3}
	if report != want {
		t.Errorf("%+v, want %+v", report, want)
	}
	if row, err := r.Row(4); err != nil || row.Layer != "layer.2" || row.Shape != nil || row.Sequence != 4 {
		t.Errorf("%+v, %v", row, err)
	}
}

func TestSalvageOfAStreamCutShort(t *testing.T) {
	c := sample(t)
	cut := c.rows[4].Offset + 20
	_, report := salvage(t, save(t, c.stream[:cut], c.rows))
	want := reader.SalvageReport{Packets: 3, Verified: 3, Lost: 2, SkippedBytes: 20}
	if report != want {
		t.Errorf("%+v, want %+v", report, want)
	}
}

func TestSalvageDoesNotTrustAForeignIndex(t *testing.T) {
	c, other := sample(t), &capture{}
	other.add(t, "x", "none", ramp(500))
	other.add(t, "y", "zstd", ramp(500))
	_, report := salvage(t, save(t, other.stream, c.rows))
	if report.Packets != 2 || report.Lost != 0 || !strings.Contains(report.Problem, "agrees with the index") {
		t.Errorf("%+v", report)
	}
}

// However a stream is damaged, what is kept is what was written.
func TestSalvageKeepsNoDamagedPacket(t *testing.T) {
	c := sample(t)
	for seed := range uint64(40) {
		rng := rand.New(rand.NewPCG(seed, 3))
		b := bytes.Clone(c.stream)
		for range 1 + rng.IntN(3) {
			at := rng.IntN(len(b))
			switch rng.IntN(3) {
			case 0:
				b[at] ^= 1 << rng.IntN(8)
			case 1:
				clear(b[at:min(len(b), at+rng.IntN(3000))])
			case 2:
				b = b[:len(b)-rng.IntN(len(b)/4)]
			}
		}
		dst := filepath.Join(t.TempDir(), "b.stream")
		report, err := reader.Salvage(save(t, b, c.rows), dst)
		if errors.Is(err, status.Corrupt) {
			continue // nothing intact
		}
		check(t, err)
		if report.Problem != "" {
			// All listed packets are damaged: the index cannot be told from a
			// foreign one, nothing can be verified.
			if report.Verified != 0 {
				t.Fatalf("seed %d: %+v", seed, report)
			}
			continue
		}
		if report.Packets+report.Lost != 5 || report.Verified != report.Packets {
			t.Fatalf("seed %d: %+v", seed, report)
		}
		r := open(t, dst, reader.Options{})
		for i := range c.rows {
			if row, err := r.Row(i); err == nil && row.Offset >= 0 && !bytes.Equal(read(t, r, i), c.values[i]) {
				t.Fatalf("seed %d: row %d reads back otherwise", seed, i)
			}
		}
	}
}

func TestSalvageWritesNothingWhereItCannot(t *testing.T) {
	c := sample(t)
	src := save(t, c.stream, c.rows)
	dir := t.TempDir()
	taken, indexed, dst := filepath.Join(dir, "taken"), filepath.Join(dir, "indexed"), filepath.Join(dir, "dst")
	check(t, os.WriteFile(taken, nil, 0o666))
	check(t, os.WriteFile(index.PathOf(indexed), nil, 0o666))
	for name, test := range map[string]struct {
		src, dst string
		want     status.Code
	}{
		"a stream is there":   {src, taken, status.InvalidArgument},
		"an index is there":   {src, indexed, status.InvalidArgument},
		"itself":              {src, src, status.InvalidArgument},
		"no source":           {filepath.Join(dir, "none"), dst, status.NotFound},
		"no directory":        {src, filepath.Join(dir, "no", "b"), status.NotFound},
		"nothing intact":      {saveStream(t, make([]byte, 100)), dst, status.Corrupt},
		"the source is a dir": {dir, dst, status.InvalidArgument},
	} {
		if _, err := reader.Salvage(test.src, test.dst); status.CodeOf(err) != test.want {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
	}
	left, err := os.ReadDir(dir)
	check(t, err)
	if len(left) != 2 {
		t.Errorf("%v, want only the two files from before", left)
	}
	if _, err := os.Stat(dst); !errors.Is(err, os.ErrNotExist) {
		t.Error("a failed salvage left its file")
	}
}
