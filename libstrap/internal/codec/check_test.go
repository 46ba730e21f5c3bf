package codec

import (
	"bytes"
	"errors"
	"testing"

	"github.com/libstrap/strap/libstrap/internal/status"
)

func TestCheckTellsWholePayloads(t *testing.T) {
	values := bytes.Repeat([]byte("abcdefgh"), 40_000)
	for _, kind := range []Kind{None, LZ4, Zstd} {
		e, err := NewEncoder(kind, 0)
		if err != nil {
			t.Fatal(err)
		}
		var out bytes.Buffer
		w, err := e.NewFrame(&out, int64(len(values)))
		if err == nil {
			err = writeAll(w, values)
		}
		if err != nil {
			t.Fatal(err)
		}
		payload := out.Bytes()
		if err := Check(kind, bytes.NewReader(payload)); err != nil {
			t.Errorf("%v: %v", kind, err)
		}
		if kind == None {
			continue
		}
		for name, bad := range map[string][]byte{
			"cut":         payload[:len(payload)-1],
			"too long":    append(bytes.Clone(payload), 0),
			"another one": append(bytes.Clone(payload), payload...),
			"nothing":     {},
		} {
			if err := Check(kind, bytes.NewReader(bad)); !errors.Is(err, status.Corrupt) {
				t.Errorf("%v, %s: %v", kind, name, err)
			}
		}
	}
}
