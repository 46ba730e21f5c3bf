// Tests of files of others at the path of a stream.

package stream

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/index"
	"github.com/libstrap/strap/libstrap/internal/status"
	"github.com/libstrap/strap/libstrap/internal/wire"
)

const captureID = "0123456789abcdef0123456789abcdef"

// safetensors returns a file whose first bytes happen to be the header of a packet.
func safetensors() []byte {
	header := append([]byte(`{"w":{"dtype":"F32","shape":[1024],"data_offsets":[0,4096]}}`), make([]byte, 0x1008)...)
	file := binary.LittleEndian.AppendUint64(nil, 0x1008)
	file = append(file, bytes.ReplaceAll(header[:0x1008], []byte{0}, []byte(" "))...)
	return append(file, make([]byte, 4096)...)
}

func TestAFileThatIsNoStreamStays(t *testing.T) {
	path := filepath.Join(t.TempDir(), "weights.safetensors")
	whole := packet("x", []byte("payload"))
	for name, content := range map[string][]byte{
		"text":                   []byte("not a stream\n"),
		"one byte":               {0},
		"begins as a packet":     safetensors(),
		"zeros":                  make([]byte, 100),
		"a packet and more":      append(bytes.Clone(whole), "more"...),
		"half a packet":          whole[:10],
		"a packet of other rows": packet("y", []byte("another payload")[:6]),
	} {
		must(t, os.WriteFile(path, content, 0o666))
		if name == "a packet of other rows" { // the index has another packet, and no packet ends at the end of the file
			must(t, os.WriteFile(path, append(content, 1), 0o666))
			writeIndex(t, path, "x")
		}
		before, err := os.ReadFile(path)
		must(t, err)
		_, err = Create(path, Options{}, func() error { return errors.New("it was taken for a stream") })
		if !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "overwrite") ||
			!strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
		if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, before) {
			t.Errorf("%s: it has %d bytes of %d, %v", name, len(after), len(before), err)
		}
		os.Remove(index.PathOf(path))
	}

	must(t, os.WriteFile(path, []byte("not a stream\n"), 0o666))
	w, err := Create(path, Options{Overwrite: true}, nil)
	must(t, err)
	must(t, w.Append(whole))
	must(t, w.Close())
	if after, err := os.ReadFile(path); err != nil || !bytes.Equal(after, whole) {
		t.Errorf("overwritten it is %q, %v", after, err)
	}
}

// Resume moves bytes that are no packet to a tail file. It refuses a file without any packet.
func TestAFileThatIsNoStreamIsNotResumed(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notes.txt")
	must(t, os.WriteFile(path, []byte("my notes"), 0o666))
	if _, _, err := Resume(path, KeepAll, Options{}, nil); !errors.Is(err, status.Corrupt) {
		t.Errorf("it was: %v", err)
	}
	if after, err := os.ReadFile(path); err != nil || string(after) != "my notes" {
		t.Errorf("it became %q, %v", after, err)
	}
	writeIndex(t, path) // with an index, the bytes are the first packet of a killed capture
	w, tail, err := Resume(path, KeepAll, Options{}, nil)
	must(t, err)
	must(t, w.Close())
	if moved, err := os.ReadFile(tail); err != nil || string(moved) != "my notes" {
		t.Errorf("the tail is %q, %v", moved, err)
	}
}

// writeIndex makes the index of a stream whose first packets belong to these layers.
func writeIndex(t *testing.T, path string, layers ...string) {
	t.Helper()
	idx, err := index.Create(index.PathOf(path), captureID)
	must(t, err)
	for _, layer := range layers {
		must(t, idx.Append(&wire.Row{Layer: layer, Length: uint64(len(packet(layer, []byte("payload"))))}))
	}
	must(t, idx.Close())
}

// A killed capture leaves a stream, even if its end is torn.
func TestATornStreamIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	unfinished := make([]byte, wire.HeaderSize, 100)
	wire.PutHeader(unfinished, 1, wire.Unfinished)
	for name, c := range map[string]struct {
		content []byte
		layers  []string // in the index; nil: there is no index
	}{
		"of 1.3.1":              {content: packet("x", []byte("payload"))},
		"listed, and torn":      {append(packet("x", []byte("payload")), 1, 2, 3), []string{"x"}},
		"cut within the first":  {packet("x", []byte("payload"))[:9], []string{"x"}},
		"nothing is listed yet": {append(unfinished, "x and a part of its payload"...), []string{}},
	} {
		must(t, os.WriteFile(path, c.content, 0o666))
		if c.layers != nil {
			writeIndex(t, path, c.layers...)
		}
		w, err := Create(path, Options{}, nil)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		must(t, w.Close())
		os.Remove(index.PathOf(path))
	}
}

// stream makes a stream of one packet, and returns its path and bytes.
func stream(t *testing.T) (path string, content []byte) {
	t.Helper()
	w, path := create(t)
	must(t, w.Append(packet("x", []byte("payload"))))
	must(t, w.Close())
	content, err := os.ReadFile(path)
	must(t, err)
	return path, content
}

// replace begins a new stream at path, and checks that the old one is gone and the path is locked.
func replace(t *testing.T, path string, files Files) {
	t.Helper()
	w, err := Create(path, Options{Files: files}, nil)
	must(t, err)
	if info, err := os.Stat(path); err != nil || info.Size() != 0 {
		t.Errorf("the old stream is still there: %v", err)
	}
	if _, err := Create(path, Options{}, nil); !errors.Is(err, status.Busy) {
		t.Errorf("a second writer: %v", err)
	}
	must(t, w.Append(packet("new", []byte("payload"))))
	must(t, w.Close())
	left, err := filepath.Glob(filepath.Join(filepath.Dir(path), "*.partial"))
	if must(t, err); len(left) > 0 {
		t.Errorf("%q are left", left)
	}
}

func TestWhoReadsAnOldStreamReadsOn(t *testing.T) {
	path, old := stream(t)
	must(t, os.Chmod(path, 0o600))
	f, err := os.Open(path)
	must(t, err)
	defer f.Close()
	mapped, err := syscall.Mmap(int(f.Fd()), 0, len(old), syscall.PROT_READ, syscall.MAP_SHARED)
	must(t, err)
	linked := path + ".link"
	must(t, os.Link(path, linked))

	replace(t, path, nil)
	if read, err := io.ReadAll(f); err != nil || !bytes.Equal(read, old) || !bytes.Equal(mapped, old) {
		t.Errorf("its reader has %d bytes of %d, %v", len(read), len(old), err)
	}
	if read, err := os.ReadFile(linked); err != nil || !bytes.Equal(read, old) {
		t.Errorf("under its other name are %d bytes of %d, %v", len(read), len(old), err)
	}
	if info, err := os.Stat(path); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the permissions were not kept: %v, %v", info.Mode(), err)
	}
	must(t, syscall.Munmap(mapped))
}

func TestALinkToAStreamStays(t *testing.T) {
	path, _ := stream(t)
	link := filepath.Join(t.TempDir(), "link.stream")
	must(t, os.Symlink(path, link))
	replace(t, link, nil)
	if to, err := os.Readlink(link); err != nil || to != path {
		t.Errorf("the link leads to %q, %v", to, err)
	}
	if info, err := os.Stat(path); err != nil || info.Size() != int64(len(packet("new", []byte("payload")))) {
		t.Errorf("the new stream is not where the link leads: %v", err)
	}
}

// refusing opens files as in a folder where no new file can be made.
type refusing struct{}

func (refusing) Open(path string, flags int) (*os.File, error) {
	if strings.HasSuffix(path, ".partial") {
		return nil, &os.PathError{Op: "open", Path: path, Err: syscall.EACCES}
	}
	return os.OpenFile(path, flags, 0o666)
}

func (refusing) Close(f *os.File) error { return f.Close() }

func TestAStreamInAReadOnlyFolderIsEmptied(t *testing.T) {
	path, _ := stream(t)
	before, err := os.Stat(path)
	must(t, err)
	replace(t, path, refusing{})
	if after, err := os.Stat(path); err != nil || !os.SameFile(before, after) {
		t.Errorf("another file is there, %v", err)
	}
}

func TestAStreamThatWasMovedIsFound(t *testing.T) {
	w, path := create(t)
	at := func(want bool, place string) {
		t.Helper()
		stands, now, err := w.Stands(path)
		if must(t, err); stands != want || now != place {
			t.Errorf("stands %t, now at %q; want %t, %q", stands, now, want, place)
		}
	}
	at(true, "")
	moved := filepath.Join(t.TempDir(), "b.stream")
	must(t, os.Rename(path, moved))
	at(false, moved)
	must(t, os.WriteFile(path, nil, 0o666)) // another file with the old name
	at(false, moved)
	must(t, os.Remove(moved))
	at(false, "")
	must(t, w.Close())
}
