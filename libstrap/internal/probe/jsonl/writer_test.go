package jsonl

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/filelimit"
	"github.com/libstrap/strap/libstrap/internal/status"
)

const (
	workload = "STRAP_JSONL_WORKLOAD" // set to a path: the test binary writes lines to it until it is killed
	every    = 5
)

func TestMain(m *testing.M) {
	if path := os.Getenv(workload); path != "" {
		writeForever(path)
		return
	}
	os.Exit(m.Run())
}

// writeForever writes lines, and prints after each one how many it has written.
func writeForever(path string) {
	w, err := Open(path, Options{FlushEvery: every})
	if err != nil {
		panic(err)
	}
	for n := 1; ; n++ {
		w.Write(line(n))
		fmt.Println(n)
	}
}

func line(n int) []byte { return fmt.Appendf(nil, `{"timestamp":%d}`, n) }

// reports collects the messages of a Writer.
type reports []string

func (r *reports) add(message string) { *r = append(*r, message) }

func opened(t *testing.T, path string, o Options) (*Writer, *reports) {
	t.Helper()
	said := &reports{}
	o.Report = said.add
	w, err := Open(path, o)
	if err != nil {
		t.Fatal(err)
	}
	return w, said
}

func read(t *testing.T, path string) string {
	t.Helper()
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

func closes(t *testing.T, w *Writer) {
	t.Helper()
	if err := w.Close(); err != nil {
		t.Error(err)
	}
}

func TestWritesEveryNLinesAndTheRestAtTheEnd(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	w, _ := opened(t, path, Options{FlushEvery: 2, Fsync: true})
	w.Write([]byte("a"))
	if got := read(t, path); got != "" {
		t.Errorf("%q too early", got)
	}
	w.Write([]byte("b"))
	w.Write([]byte("c"))
	if got := read(t, path); got != "a\nb\n" {
		t.Errorf("%q", got)
	}
	closes(t, w)
	closes(t, w)
	if got := read(t, path); got != "a\nb\nc\n" {
		t.Errorf("%q", got)
	}
}

func TestEndsATornLine(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	for before, want := range map[string]string{"": "a\n", "whole\n": "whole\na\n", `{"ti`: "{\"ti\na\n"} {
		if err := os.WriteFile(path, []byte(before), 0o600); err != nil {
			t.Fatal(err)
		}
		w, _ := opened(t, path, Options{FlushEvery: 1})
		w.Write([]byte("a"))
		closes(t, w)
		if got := read(t, path); got != want {
			t.Errorf("after %q: %q", before, got)
		}
	}
}

func TestKilled(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	program := exec.Command(os.Args[0])
	program.Env = append(os.Environ(), workload+"="+path)
	out, err := program.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := program.Start(); err != nil {
		t.Fatal(err)
	}
	said := bufio.NewScanner(out)
	last := 0
	for last < 1003 && said.Scan() {
		if _, err := fmt.Sscan(said.Text(), &last); err != nil {
			t.Fatal(err)
		}
	}
	if err := program.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	for said.Scan() { // it went on until the kill reached it
		fmt.Sscan(said.Text(), &last)
	}
	program.Wait()
	lines := bytes.Split([]byte(strings.TrimSuffix(read(t, path), "\n")), []byte("\n"))
	for i, one := range lines {
		var snapshot struct{ Timestamp int }
		if err := json.Unmarshal(one, &snapshot); err != nil || snapshot.Timestamp != i+1 {
			t.Fatalf("line %d is %s", i+1, one)
		}
	}
	if len(lines) < last/every*every {
		t.Errorf("%d lines of %d", len(lines), last)
	}
}

func TestFullDiskIsReportedOnceAndKeepsTheLines(t *testing.T) {
	folder := t.TempDir()
	path := filepath.Join(folder, "x.jsonl")
	if err := os.Symlink("/dev/full", path); err != nil {
		t.Fatal(err)
	}
	w, said := opened(t, path, Options{FlushEvery: 1})
	for n := range Kept + 4 {
		w.Write(line(n))
	}
	if len(*said) != 1 || !strings.Contains((*said)[0], "no space left") || !strings.Contains((*said)[0], fmt.Sprint(Kept)) {
		t.Errorf("%q", *said)
	}
	// Now there is space: another file gets the path.
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	if err := w.Reopen(); err != nil {
		t.Fatal(err)
	}
	w.Write(line(Kept + 4))
	closes(t, w)
	want := ""
	for n := 4; n < Kept+5; n++ {
		want += string(line(n)) + "\n"
	}
	if got := read(t, path); got != want {
		t.Errorf("%d bytes, want %d: %.60s", len(got), len(want), got)
	}
	if len(*said) != 2 || !strings.Contains((*said)[1], "4 lines were dropped") {
		t.Errorf("%q", *said)
	}
}

func TestLinesThatAreLostAtTheEndAreAnError(t *testing.T) {
	w, said := opened(t, "/dev/full", Options{FlushEvery: 10})
	w.Write([]byte("a"))
	w.Write([]byte("b"))
	if err := w.Close(); !errors.Is(err, status.IO) || !strings.Contains(err.Error(), "2 lines were not written") {
		t.Error(err)
	}
	if len(*said) != 1 {
		t.Errorf("%q", *said)
	}
}

// A limit on file size cuts a write in the middle of a line, as a full disk does.
func TestLineThatIsCutIsContinued(t *testing.T) {
	if !filelimit.Alone(t) {
		return
	}
	path := filepath.Join(t.TempDir(), "x.jsonl")
	w, said := opened(t, path, Options{FlushEvery: 1})
	lift := filelimit.Set(t, 7)
	w.Write([]byte("first"))
	w.Write([]byte("second"))
	w.Write([]byte("third"))
	lift()
	if got := read(t, path); got != "first\ns" || len(*said) != 1 {
		t.Errorf("%q, %q", got, *said)
	}
	w.Write([]byte("fourth"))
	closes(t, w)
	if got := read(t, path); got != "first\nsecond\nthird\nfourth\n" {
		t.Errorf("%q", got)
	}
}

func TestCutLineThatIsDroppedIsEnded(t *testing.T) {
	if !filelimit.Alone(t) {
		return
	}
	path := filepath.Join(t.TempDir(), "x.jsonl")
	w, _ := opened(t, path, Options{FlushEvery: 1})
	lift := filelimit.Set(t, 1)
	for range Kept + 1 {
		w.Write([]byte("aa"))
	}
	lift()
	closes(t, w)
	if got, want := read(t, path), "a\n"+strings.Repeat("aa\n", Kept); got != want {
		t.Errorf("%.20q, %d bytes", got, len(got))
	}
}

func TestCutLineIsWholeInTheNextFile(t *testing.T) {
	if !filelimit.Alone(t) {
		return
	}
	path := filepath.Join(t.TempDir(), "x.jsonl")
	w, _ := opened(t, path, Options{FlushEvery: 1})
	lift := filelimit.Set(t, 2)
	w.Write([]byte("aaa"))
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	if err := w.Reopen(); err != nil {
		t.Fatal(err)
	}
	lift()
	closes(t, w)
	if old, now := read(t, path+".1"), read(t, path); old != "aa" || now != "aaa\n" {
		t.Errorf("%q, %q", old, now)
	}
}

func TestRotation(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.jsonl")
	w, _ := opened(t, path, Options{FlushEvery: 3})
	w.Write([]byte("a"))
	if err := os.Rename(path, path+".1"); err != nil {
		t.Fatal(err)
	}
	if err := w.Reopen(); err != nil {
		t.Fatal(err)
	}
	w.Write([]byte("b"))
	closes(t, w)
	if old, now := read(t, path+".1"), read(t, path); old != "a\n" || now != "b\n" {
		t.Errorf("%q, %q", old, now)
	}
}

func TestStaysWithTheOldFileWhereThereIsNoNewOne(t *testing.T) {
	folder := filepath.Join(t.TempDir(), "logs")
	if err := os.Mkdir(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	w, _ := opened(t, filepath.Join(folder, "x.jsonl"), Options{FlushEvery: 1})
	if err := os.Rename(folder, folder+".1"); err != nil {
		t.Fatal(err)
	}
	if err := w.Reopen(); !errors.Is(err, status.IO) {
		t.Error(err)
	}
	w.Write([]byte("a"))
	closes(t, w)
	if got := read(t, filepath.Join(folder+".1", "x.jsonl")); got != "a\n" {
		t.Errorf("%q", got)
	}
}

func TestRefuses(t *testing.T) {
	folder := t.TempDir()
	for path, says := range map[string]string{
		filepath.Join(folder, "missing", "x.jsonl"): "no such file or directory",
		folder:     "is a directory",
		os.Args[0]: "text file busy", // this program is running
	} {
		_, err := Open(path, Options{FlushEvery: 1})
		if !errors.Is(err, status.IO) || !strings.Contains(err.Error(), path+" cannot be written: "+says) {
			t.Errorf("%s: %v", path, err)
		}
	}
}
