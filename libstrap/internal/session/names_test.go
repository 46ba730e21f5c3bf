package session

import (
	"errors"
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/libstrap/strap/libstrap/internal/codec"
	"github.com/libstrap/strap/libstrap/internal/status"
)

// manyNames registers requests until all ids from before are forgotten, or an error comes. It returns
// the number of the last turn.
func manyNames(s *Session, turns int, prefix string) error {
	long := strings.Repeat("x", 60000)
	for i := range turns * (maxNames/2/len(long) + 1) {
		if _, err := s.Request(fmt.Sprint(prefix, i, long)); err != nil {
			return err
		}
	}
	return nil
}

func request(t *testing.T, s *Session, name string) uint32 {
	t.Helper()
	id, err := s.Request(name)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

// A server names requests without end: the old names give way to the new ones.
func TestTheOldestRequestsAreForgotten(t *testing.T) {
	path := filepath.Join(t.TempDir(), "a.stream")
	s := open(t, path, options(codec.LZ4))
	layer := mustLayer(t, s, "layer")
	x := numbered(layer, 0, 10)

	first := request(t, s, "first")
	if again := request(t, s, "first"); first != 1 || again != first {
		t.Fatalf("the same request is %d and then %d", first, again)
	}
	if err := manyNames(s, 1, "a"); err != nil {
		t.Fatal(err)
	}
	x.Request = first
	enqueue(t, s, x) // one turn later it is still valid
	renewed := request(t, s, "first")
	if renewed == first {
		t.Fatalf("the request is still %d after half of all names", first)
	}
	if err := manyNames(s, 1, "b"); err != nil {
		t.Fatal(err)
	}
	if err := s.Enqueue(x, forever); !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "is forgotten") {
		t.Fatalf("a forgotten request: %v", err)
	}
	x.Request = renewed
	enqueue(t, s, x)
	x.Request = renewed + 1e6
	if err := s.Enqueue(x, forever); !errors.Is(err, status.InvalidArgument) || !strings.Contains(err.Error(), "was not registered") {
		t.Fatalf("a request that never was: %v", err)
	}
	finish(t, s)
	rows, _ := read(t, path)
	for _, row := range rows {
		if row.Request != "first" {
			t.Errorf("a row of request %.40q", row.Request)
		}
	}
	if len(rows) != 2 {
		t.Errorf("%d rows", len(rows))
	}
}

// The names of all requests take what maxNames says, however many there are and however short.
func TestNamesOfRequestsTakeBoundedMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("registers many names one after the other")
	}
	s := open(t, filepath.Join(t.TempDir(), "a.stream"), options(codec.LZ4))
	before := heap()
	for i := range 800_000 { // three times what is kept
		request(t, s, fmt.Sprint(i))
	}
	if grown := heap() - before; grown > maxNames {
		t.Errorf("800,000 names take %d MiB", grown>>20)
	}
	finish(t, s)
}

func heap() int64 {
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// A small tensor that waits keeps the name of its request, however many others are registered.
func TestTensorsThatWaitKeepTheirRequest(t *testing.T) {
	o := options(codec.Zstd)
	o.MaxMemory = 1 << 20
	o.Workers = 1
	s, path, f, _ := shelved(t, o)
	step := fillMemory(t, s)
	release := sync.OnceFunc(s.sink.mu.Unlock)
	defer release()
	x := numbered(0, 0, 4000)
	x.Request = request(t, s, "waits")
	for range 20 { // more than the memory that is left
		x.Step = int64(step)
		if !f.put(x) {
			t.Fatal("the tensor was not taken")
		}
		step++
	}
	if err := s.Enqueue(numbered(0, step, 50000), time.Millisecond); !errors.Is(err, status.Timeout) {
		t.Fatalf("there is memory: %v", err)
	}
	if err := manyNames(s, 1, "a"); err != nil {
		t.Fatal(err)
	}
	if f.put(x) {
		t.Fatal("a tensor of an old request was taken")
	}
	if err := manyNames(s, 1, "b"); !errors.Is(err, status.NoMemory) {
		t.Fatalf("the name of a tensor that waits was forgotten: %v", err)
	}
	release()
	if err := flush(s, forever); err != nil {
		t.Fatal(err)
	}
	if err := manyNames(s, 2, "c"); err != nil {
		t.Fatal(err)
	}
	finish(t, s)
	rows, _ := read(t, path)
	found := ""
	for _, row := range rows {
		if row.Step == int64(step-1) {
			found = row.Request
		}
	}
	if found != "waits" {
		t.Errorf("the tensor is of request %.40q", found)
	}
}
